"""Streaming encode and decode equal diffusers' one-shot autoencoder, bit for bit in fp32."""

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan

from ds_stream.core import ChunkGeometry
from ds_stream.model.pipeline import build_all_layers
from ds_stream.model.vae import TEMPORAL_DOWNSAMPLE, DecodeLayer, EncodeLayer
from rings import CPU, random_clip, tiny_config

CONFIG = tiny_config().stream
VAE = CONFIG.vae


def layers() -> tuple[EncodeLayer, DecodeLayer]:
    built = build_all_layers(CONFIG, CPU)
    assert built.encode is not None
    assert built.decode is not None
    return built.encode, built.decode


@pytest.fixture(scope="module")
def halves() -> tuple[EncodeLayer, DecodeLayer]:
    return layers()


@pytest.fixture(scope="module")
def one_shot(halves: tuple[EncodeLayer, DecodeLayer]) -> AutoencoderKLWan:
    vae = AutoencoderKLWan(
        base_dim=VAE.base_dim,
        z_dim=VAE.z_dim,
        dim_mult=list(VAE.dim_mult),
        num_res_blocks=VAE.num_res_blocks,
        temperal_downsample=list(TEMPORAL_DOWNSAMPLE),
    ).eval()
    encoder, decoder = (half.state_dict() for half in halves)
    vae.load_state_dict({**encoder, **decoder}, strict=True)
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
def encode_at_once(vae: AutoencoderKLWan, frames: np.ndarray) -> torch.Tensor:
    pixels = torch.from_numpy(frames).permute(3, 0, 1, 2)[None].float() / 127.5 - 1
    latents = vae.encode(pixels).latent_dist.mode()[0]
    mean, std = (torch.tensor(values).view(-1, 1, 1, 1) for values in (VAE.latent_mean, VAE.latent_std))
    return (latents - mean) / std


@pytest.mark.parametrize("num_frames", [1, 5, 17, 81])
@pytest.mark.parametrize("size", [(32, 32), (48, 80)])
@torch.no_grad()
def test_chunk_by_chunk_equals_one_shot(halves, one_shot, num_frames: int, size: tuple[int, int]):
    frames = random_clip(num_frames, size=size)
    encoder, decoder = halves
    latents = encode_chunks(encoder, frames)
    assert latents.shape == (VAE.z_dim, 1 + (num_frames - 1) // 4, size[0] // 8, size[1] // 8)
    assert torch.equal(latents, encode_at_once(one_shot, frames))

    state = decoder.new_state()
    pieces = [decoder.decode(latents[:, i : i + 1], state) for i in range(latents.shape[1])]
    assert [piece.shape[1] for piece in pieces] == [1, *[4] * (latents.shape[1] - 1)]
    mean, std = (torch.tensor(values).view(-1, 1, 1, 1) for values in (VAE.latent_mean, VAE.latent_std))
    assert torch.equal(torch.cat(pieces, dim=1), one_shot.decode((latents * std + mean)[None]).sample[0])


@pytest.mark.parametrize("num_frames", [2, 4, 6, 121])
@pytest.mark.parametrize("num_latent_frames", [1, 3])
@torch.no_grad()
def test_any_frame_count_gives_its_frames_back(halves, one_shot, num_frames: int, num_latent_frames: int):
    """The tail is padded by its last frame, which equals the one-shot run on the padded clip, and then trimmed."""
    geometry = ChunkGeometry(num_latent_frames)
    num_chunks = geometry.num_chunks(num_frames)
    padded_to = geometry.first_frame(num_chunks)
    assert num_frames <= padded_to < num_frames + geometry.num_frames(1)
    frames = random_clip(num_frames)
    padded = np.concatenate((frames, np.repeat(frames[-1:], padded_to - num_frames, axis=0)))
    encoder, decoder = halves
    latents = encode_chunks(encoder, padded, num_latent_frames)
    assert torch.equal(latents, encode_at_once(one_shot, padded))
    state = decoder.new_state()
    pixels = torch.cat([decoder(part, state) for part in latents.split(num_latent_frames, dim=1)])
    assert len(pixels) == padded_to


@torch.no_grad()
def test_interleaved_sessions_do_not_mix(halves):
    encoder, decoder = halves
    clips = [random_clip(17, seed) for seed in (1, 2)]
    states = [encoder.new_state() for _ in clips]
    both: list[list[torch.Tensor]] = [[], []]
    for pair in zip(*(chunks_of(clip, 1) for clip in clips), strict=True):
        for session, chunk in enumerate(pair):
            both[session].append(encoder(chunk, states[session]))
    for clip, parts in zip(clips, both, strict=True):
        assert torch.equal(torch.cat(parts, dim=1), encode_chunks(encoder, clip))

    states = [decoder.new_state() for _ in clips]
    mixed: list[list[torch.Tensor]] = [[], []]
    for pair in zip(*both, strict=True):
        for session, latents in enumerate(pair):
            mixed[session].append(decoder(latents, states[session]))
    for session in range(2):
        state = decoder.new_state()
        assert torch.equal(
            torch.cat(mixed[session]), torch.cat([decoder(latents, state) for latents in both[session]])
        )


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
    full = build_all_layers(tiny_config(vae=wide).stream, CPU)
    low = build_all_layers(tiny_config(vae=wide, device={"dtype": "bfloat16"}).stream, CPU)
    frames = random_clip(9)
    exact, rounded = encode_chunks(full.encode, frames), encode_chunks(low.encode, frames)
    assert low.encode.latent_mean.dtype == torch.float32
    assert (exact - rounded).norm() / exact.norm() < 0.02
    with torch.no_grad():
        pixels = [half.decode(exact, half.new_state()) for half in (full.decode, low.decode)]
    assert torch.isfinite(pixels[1]).all()
    assert (pixels[0] - pixels[1]).norm() / pixels[0].norm() < 0.03
