"""Streaming encode and decode, part by part, equal diffusers' one-shot autoencoder, bit for bit in fp32."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan

from ds_stream.config import Config
from ds_stream.core import NUM_WAN_DECODE_LAYERS, ChunkGeometry
from ds_stream.model.pipeline import StageLayers, build_all_layers, decoder_input_field
from ds_stream.model.vae import TEMPORAL_DOWNSAMPLE, DecodeLayer, EncodeLayer, VaeState
from rings import CPU, random_clip, tiny_config

CONFIG = tiny_config().stream
VAE = CONFIG.vae


@pytest.fixture(scope="module")
def layers() -> StageLayers:
    return build_all_layers(CONFIG, CPU)


@pytest.fixture(scope="module")
def one_shot(layers: StageLayers) -> AutoencoderKLWan:
    vae = AutoencoderKLWan(
        base_dim=VAE.base_dim,
        z_dim=VAE.z_dim,
        dim_mult=list(VAE.dim_mult),
        num_res_blocks=VAE.num_res_blocks,
        temperal_downsample=list(TEMPORAL_DOWNSAMPLE),
    ).eval()
    states = [layer.state_dict() for layer in (layers.encode, *layers.decode.values())]
    names = [name for state in states for name in state]
    assert len(names) == len(set(names))
    vae.load_state_dict({name: value for state in states for name, value in state.items()}, strict=True)
    return vae


def chunks_of(frames: np.ndarray, num_latent_frames: int) -> list[torch.Tensor]:
    geometry = ChunkGeometry(num_latent_frames)
    starts = range(geometry.num_chunks(len(frames)))
    return [torch.from_numpy(frames[geometry.first_frame(c) :][: geometry.num_frames(c)]) for c in starts]


@torch.no_grad()
def encode_chunks(encoder: EncodeLayer, frames: np.ndarray, num_latent_frames: int = 1) -> torch.Tensor:
    state = encoder.new_state()
    return torch.cat([encoder(chunk, state) for chunk in chunks_of(frames, num_latent_frames)], dim=1)


@torch.no_grad()
def decode_chunk(decoder: Sequence[DecodeLayer], latents: torch.Tensor, states: Sequence[VaeState]) -> torch.Tensor:
    """Through all parts, before rounding."""
    for part, state in zip(decoder[:-1], states[:-1], strict=True):
        latents = part(latents, state)
    return decoder[-1].decode(latents, states[-1])


@torch.no_grad()
def encode_at_once(vae: AutoencoderKLWan, frames: np.ndarray) -> torch.Tensor:
    pixels = torch.from_numpy(frames).permute(3, 0, 1, 2)[None].float() / 127.5 - 1
    latents = vae.encode(pixels).latent_dist.mode()[0]
    mean, std = (torch.tensor(values).view(-1, 1, 1, 1) for values in (VAE.latent_mean, VAE.latent_std))
    return (latents - mean) / std


@pytest.mark.parametrize("num_frames", [1, 5, 17, 81])
@pytest.mark.parametrize("size", [(32, 32), (48, 80)])
@torch.no_grad()
def test_chunk_by_chunk_equals_one_shot(layers, one_shot, num_frames: int, size: tuple[int, int]):
    frames = random_clip(num_frames, size=size)
    latents = encode_chunks(layers.encode, frames)
    assert latents.shape == (VAE.z_dim, 1 + (num_frames - 1) // 4, size[0] // 8, size[1] // 8)
    assert torch.equal(latents, encode_at_once(one_shot, frames))

    mean, std = (torch.tensor(values).view(-1, 1, 1, 1) for values in (VAE.latent_mean, VAE.latent_std))
    expected = one_shot.decode((latents * std + mean)[None]).sample[0]
    decoder = list(layers.decode.values())
    for num_latent_frames in (1, 3):
        states = [part.new_state() for part in decoder]
        pieces = [decode_chunk(decoder, part, states) for part in latents.split(num_latent_frames, dim=1)]
        assert pieces[0].shape[1] == 1 + 4 * (min(num_latent_frames, latents.shape[1]) - 1)
        assert torch.equal(torch.cat(pieces, dim=1), expected)


@pytest.mark.parametrize("num_latent_frames", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@torch.no_grad()
def test_what_enters_each_part_is_known_beforehand(num_latent_frames: int, dtype: str):
    # Channels of every size of picture differ.
    config = tiny_config(
        video={"width": 48},
        vae={"base_dim": 4, "dim_mult": [1, 2, 3, 5]},
        context={"num_latent_frames_per_chunk": num_latent_frames, "num_window_latent_frames": num_latent_frames},
        device={"dtype": dtype},
    ).stream
    decoder = list(build_all_layers(config, CPU).decode.values())
    states = [part.new_state() for part in decoder]
    for is_first_chunk in (True, False, False):
        hidden = torch.randn(config.vae.z_dim, num_latent_frames, 4, 6)
        for part, (layer, state) in enumerate(zip(decoder, states, strict=True)):
            assert decoder_input_field(config, part, is_first_chunk) == (tuple(hidden.shape), hidden.dtype)
            hidden = layer(hidden, state)
        num_frames = ChunkGeometry(num_latent_frames).num_frames(0 if is_first_chunk else 1)
        assert (tuple(hidden.shape), hidden.dtype) == ((num_frames, 32, 48, 3), torch.uint8)


def test_each_part_has_its_own_caches_and_statistics(layers):
    decoder = list(layers.decode.values())
    assert [layer.part for layer in decoder] == list(range(NUM_WAN_DECODE_LAYERS))
    states = layers.new_decoder_states()
    layers.decode_chunk(torch.randn(VAE.z_dim, 3, 4, 4), states)
    # Four in two residual blocks each; one more that comes first, doubles the frames, or gives pixels.
    num_kept = [sum(cache is not None for cache in state.features) for state in states.values()]
    assert num_kept == [5, 5, 5, 4, 5]
    assert [state.num_latent_frames for state in states.values()] == [3] * NUM_WAN_DECODE_LAYERS
    assert [sorted(dict(layer.named_buffers())) for layer in decoder] == [
        ["latent_mean", "latent_std"],
        [],
        [],
        [],
        [],
    ]


@torch.no_grad()
def test_a_part_keeps_no_more_than_its_caches(layers):
    """A cache that was a slice would hold on to all frames of its piece."""
    states = layers.new_decoder_states()
    for _ in range(2):
        layers.decode_chunk(torch.randn(VAE.z_dim, 3, 4, 4), states)
    caches = [cache for state in states.values() for cache in state.features if isinstance(cache, torch.Tensor)]
    assert caches
    assert all(cache.untyped_storage().nbytes() == cache.nbytes for cache in caches)


@pytest.mark.parametrize("num_frames", [2, 4, 6, 121])
@pytest.mark.parametrize("num_latent_frames", [1, 3])
@torch.no_grad()
def test_any_frame_count_gives_its_frames_back(layers, one_shot, num_frames: int, num_latent_frames: int):
    """The tail is padded by its last frame, which equals the one-shot run on the padded clip, and then trimmed."""
    geometry = ChunkGeometry(num_latent_frames)
    num_chunks = geometry.num_chunks(num_frames)
    padded_to = geometry.first_frame(num_chunks)
    assert num_frames <= padded_to < num_frames + geometry.num_frames(1)
    frames = random_clip(num_frames)
    padded = np.concatenate((frames, np.repeat(frames[-1:], padded_to - num_frames, axis=0)))
    latents = encode_chunks(layers.encode, padded, num_latent_frames)
    assert torch.equal(latents, encode_at_once(one_shot, padded))
    states = layers.new_decoder_states()
    pixels = torch.cat([layers.decode_chunk(part, states) for part in latents.split(num_latent_frames, dim=1)])
    assert len(pixels) == padded_to


@torch.no_grad()
def test_interleaved_sessions_do_not_mix(layers):
    encoder = layers.encode
    clips = [random_clip(17, seed) for seed in (1, 2)]
    states = [encoder.new_state() for _ in clips]
    both: list[list[torch.Tensor]] = [[], []]
    for pair in zip(*(chunks_of(clip, 1) for clip in clips), strict=True):
        for session, chunk in enumerate(pair):
            both[session].append(encoder(chunk, states[session]))
    for clip, parts in zip(clips, both, strict=True):
        assert torch.equal(torch.cat(parts, dim=1), encode_chunks(encoder, clip))

    decoder_states = [layers.new_decoder_states() for _ in clips]
    mixed: list[list[torch.Tensor]] = [[], []]
    for pair in zip(*both, strict=True):
        for session, latents in enumerate(pair):
            mixed[session].append(layers.decode_chunk(latents, decoder_states[session]))
    for session in range(2):
        alone = layers.new_decoder_states()
        expected = [layers.decode_chunk(latents, alone) for latents in both[session]]
        assert torch.equal(torch.cat(mixed[session]), torch.cat(expected))


def test_latents_can_be_left_unnormalised():
    """The StreamDiffusionV2 checkpoint wants them so."""
    raw = build_all_layers(tiny_config(vae={"normalize_input_latents": False}).stream, CPU).encode
    normal = build_all_layers(CONFIG, CPU).encode
    frames = random_clip(5)
    mean, std = (torch.tensor(values).view(-1, 1, 1, 1) for values in (VAE.latent_mean, VAE.latent_std))
    assert torch.equal((encode_chunks(raw, frames) - mean) / std, encode_chunks(normal, frames))


def test_a_bf16_vae_neither_overflows_nor_loses_its_statistics():
    # Wide enough for its norms to be well conditioned: with two channels rounding alone turns vectors round.
    wide = {"base_dim": 8, "num_res_blocks": 1}

    def built(config: Config) -> StageLayers:
        return build_all_layers(config.stream, CPU)

    full, low = built(tiny_config(vae=wide)), built(tiny_config(vae=wide, device={"dtype": "bfloat16"}))
    frames = random_clip(9)
    exact, rounded = encode_chunks(full.encode, frames), encode_chunks(low.encode, frames)
    assert low.encode.latent_mean.dtype == torch.float32
    assert (exact - rounded).norm() / exact.norm() < 0.02
    pixels = []
    for layers in (full, low):
        decoder = list(layers.decode.values())
        assert decoder[0].latent_mean.dtype == torch.float32
        pixels.append(decode_chunk(decoder, exact, [part.new_state() for part in decoder]))
    assert torch.isfinite(pixels[1]).all()
    assert (pixels[0] - pixels[1]).norm() / pixels[0].norm() < 0.03
