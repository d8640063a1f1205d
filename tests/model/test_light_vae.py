"""The light VAE gives the same bits for every cut of a clip, and what TAEHV's layers by hand give."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d

from ds_stream.model.light_vae import LightDecodeLayer, LightEncodeLayer
from ds_stream.settings import LightVaeConfig, VaeConfig
from rings import random_clip

Z_DIM, NUM_BLOCKS = 4, 2
LIGHT = LightVaeConfig(encoder_width=6, decoder_widths=(10, 8, 6, 5), num_memory_blocks=NUM_BLOCKS)
VAE = VaeConfig(z_dim=Z_DIM, latent_mean=(0.5, -1.0, 0.25, 2.0), latent_std=(0.5, 1.5, 2.0, 3.0))
SIZE = (32, 48)
NUM_FRAMES = (1, 5, 17)
CUTS = {1: ([1],), 2: ([1, 1], [2]), 5: ([1] * 5, [2, 2, 1], [3, 2], [1, 3, 1], [5])}
"""Latent frames of a clip, and of each call in some ways to cut it."""


def randomize(layer: nn.Module) -> None:
    """Weights that keep activations near one, so that a wrong frame shows far above the tolerance."""
    generator = torch.Generator().manual_seed(5)
    for parameter in layer.parameters():
        deviation = (1.5 / parameter[0].numel()) ** 0.5 if parameter.dim() == 4 else 0.1
        parameter.data.normal_(0, deviation, generator=generator)


@pytest.fixture(scope="module")
def encoder() -> LightEncodeLayer:
    layer = LightEncodeLayer(LIGHT, VAE).eval()
    randomize(layer)
    return layer


@pytest.fixture(scope="module")
def decoder() -> LightDecodeLayer:
    layer = LightDecodeLayer(LIGHT, VAE).eval()
    randomize(layer)
    layer.decoder[-1].weight.data.mul_(0.2)
    layer.decoder[-1].bias.data.fill_(0.5)  # between the bounds at which pixels are clipped
    return layer


def clip(num_frames: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(random_clip(num_frames, size=SIZE, seed=seed))


def some_latents(num_latent_frames: int, seed: int = 0) -> Tensor:
    shape = (Z_DIM, num_latent_frames, SIZE[0] // 8, SIZE[1] // 8)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def frames_of_calls(frames: Tensor, cut: list[int]) -> list[Tensor]:
    counts = [4 * latents for latents in cut]
    counts[0] -= 3
    return list(frames.split(counts))


@torch.no_grad()
def encode(encoder: LightEncodeLayer, frames: Tensor, cut: list[int]) -> Tensor:
    state = encoder.new_state()
    return torch.cat([encoder(piece, state) for piece in frames_of_calls(frames, cut)], dim=1)


@torch.no_grad()
def decode(decoder: LightDecodeLayer, latents: Tensor, cut: list[int]) -> Tensor:
    state = decoder.new_state()
    return torch.cat([decoder.decode(piece, state) for piece in latents.split(cut, dim=1)], dim=1)


class ByHand:
    """TAEHV over a whole clip at once, each convolution called with weights straight from a state dict."""

    def __init__(self, layer: nn.Module, half: str, remember: bool = True):
        self.weights = layer.state_dict()
        self.half = half
        self.remember = remember

    def conv(self, x: Tensor, name: str, stride: int = 1) -> Tensor:
        weight = self.weights[f"{self.half}.{name}.weight"]
        bias = self.weights.get(f"{self.half}.{name}.bias")
        return conv2d(x, weight, bias, stride=stride, padding=weight.shape[-1] // 2)

    def memory_block(self, x: Tensor, index: int) -> Tensor:
        past = torch.zeros_like(x)
        if self.remember:
            past[1:] = x[:-1]
        y = self.conv(torch.cat([x, past], 1), f"{index}.conv.0").relu()
        y = self.conv(y, f"{index}.conv.2").relu()
        return (self.conv(y, f"{index}.conv.4") + x).relu()

    def encode(self, frames: Tensor) -> Tensor:
        x = torch.cat([frames[:1]] * 3 + [frames]).permute(0, 3, 1, 2) / 255.0
        x = self.conv(x, "0").relu()
        index = 2
        for s in (2, 2, 1):
            x = torch.stack([torch.cat(list(x[i : i + s])) for i in range(0, len(x), s)])
            x = self.conv(x, f"{index}.conv")
            x = self.conv(x, f"{index + 1}", stride=2)
            for block in range(NUM_BLOCKS):
                x = self.memory_block(x, index + 2 + block)
            index += 2 + NUM_BLOCKS
        return self.conv(x, f"{index}").transpose(0, 1)

    def decode(self, latents: Tensor) -> Tensor:
        x = 3 * torch.tanh(latents.transpose(0, 1) / 3)
        x = self.conv(x, "1").relu()
        index = 3
        for s in (1, 2, 2):
            for block in range(NUM_BLOCKS):
                x = self.memory_block(x, index + block)
            index += NUM_BLOCKS
            x = x.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
            grown = self.conv(x, f"{index + 1}.conv")
            x = torch.cat([torch.stack(frame.chunk(s)) for frame in grown])
            x = self.conv(x, f"{index + 2}")
            index += 3
        x = self.conv(x.relu(), f"{index + 1}")
        return x[3:].transpose(0, 1).clamp(0, 1)


@pytest.mark.parametrize("num_frames", NUM_FRAMES)
@torch.no_grad()
def test_encoder_equals_layers_by_hand_for_every_cut(encoder: LightEncodeLayer, num_frames: int):
    frames = clip(num_frames)
    num_latents = 1 + (num_frames - 1) // 4
    whole, *others = [encode(encoder, frames, cut) for cut in CUTS[num_latents]]
    assert whole.shape == (Z_DIM, num_latents, SIZE[0] // 8, SIZE[1] // 8)
    assert whole.dtype == torch.float32
    assert all(torch.equal(whole, other) for other in others)
    torch.testing.assert_close(whole, ByHand(encoder, "encoder").encode(frames), rtol=0, atol=1e-5)
    # The same without memory is far away: the comparison would show a wrong frame.
    assert (whole - ByHand(encoder, "encoder", remember=False).encode(frames)).abs().max() > 1e-2


@pytest.mark.parametrize("num_frames", NUM_FRAMES)
@torch.no_grad()
def test_decoder_equals_layers_by_hand_for_every_cut(decoder: LightDecodeLayer, num_frames: int):
    num_latents = 1 + (num_frames - 1) // 4
    latents = some_latents(num_latents)
    whole, *others = [decode(decoder, latents, cut) for cut in CUTS[num_latents]]
    assert whole.shape == (3, num_frames, *SIZE)
    assert whole.dtype == torch.float32
    assert all(torch.equal(whole, other) for other in others)
    assert ((whole > 0) & (whole < 1)).float().mean() > 0.5
    torch.testing.assert_close(whole, ByHand(decoder, "decoder").decode(latents), rtol=0, atol=1e-5)
    assert (whole - ByHand(decoder, "decoder", remember=False).decode(latents)).abs().max() > 1e-2


@torch.no_grad()
def test_first_latent_decodes_to_one_frame_and_others_to_four(decoder: LightDecodeLayer):
    latents = some_latents(3)
    state = decoder.new_state()
    pieces = [decoder(latents[:, i : i + 1], state) for i in range(3)]
    assert [tuple(piece.shape) for piece in pieces] == [(1, *SIZE, 3), (4, *SIZE, 3), (4, *SIZE, 3)]
    assert state.num_latent_frames == 3
    pixels = decode(decoder, latents, [3])
    expected = (pixels * 255).round().to(torch.uint8).permute(1, 2, 3, 0)
    assert torch.equal(torch.cat(pieces), expected)


@pytest.mark.parametrize("frame", [0, 1, 4, 5, 8])
def test_a_latent_sees_the_frames_that_it_decodes_to_and_earlier_ones(encoder: LightEncodeLayer, frame: int):
    frames = clip(9)
    changed = frames.clone()
    changed[frame] = 255 - changed[frame]
    differences = (encode(encoder, frames, [3]) - encode(encoder, changed, [3])).abs().amax(dim=(0, 2, 3))
    first_to_see = (frame + 3) // 4
    assert [bool(difference > 0) for difference in differences[: first_to_see + 1]] == [False] * first_to_see + [True]


@torch.no_grad()
def test_latents_that_a_checkpoint_wants_raw_get_mean_and_deviation(encoder: LightEncodeLayer):
    raw = LightEncodeLayer(LIGHT, VAE.model_copy(update={"normalize_input_latents": False}))
    raw.load_state_dict(encoder.state_dict())
    normalized = encode(encoder, clip(5), [2])
    mean, std = (torch.tensor(values).view(-1, 1, 1, 1) for values in (VAE.latent_mean, VAE.latent_std))
    torch.testing.assert_close((encode(raw, clip(5), [2]) - mean) / std, normalized, rtol=0, atol=1e-5)
    assert normalized.abs().max() > 0.1


@torch.no_grad()
def test_interleaved_sessions_equal_separate_ones(encoder: LightEncodeLayer, decoder: LightDecodeLayer):
    cuts = ([1, 2, 1], [2, 1, 1])
    clips = [clip(13, seed=seed) for seed in (1, 2)]
    pieces = [frames_of_calls(frames, cut) for frames, cut in zip(clips, cuts, strict=True)]
    states = [(encoder.new_state(), decoder.new_state()) for _ in clips]
    outputs: list[list[Tensor]] = [[], []]
    for turn in range(3):
        for session, (encoding, decoding) in enumerate(states):
            outputs[session].append(decoder.decode(encoder(pieces[session][turn], encoding), decoding))
    for frames, output in zip(clips, outputs, strict=True):
        alone = decode(decoder, encode(encoder, frames, [4]), [4])
        assert torch.equal(torch.cat(output, dim=1), alone)


@torch.no_grad()
def test_inputs_stay_as_they_are(encoder: LightEncodeLayer, decoder: LightDecodeLayer):
    frames, latents = clip(5), some_latents(1)
    frames_before, latents_before = frames.clone(), latents.clone()
    encoder(frames, encoder.new_state())
    decoder(latents, decoder.new_state())
    assert torch.equal(frames, frames_before)
    assert torch.equal(latents, latents_before)


def test_frames_that_do_not_fill_a_latent_are_refused(encoder: LightEncodeLayer):
    with pytest.raises(AssertionError, match="do not fill"):
        encoder(clip(2), encoder.new_state())


@torch.no_grad()
def test_bf16_is_near_fp32():
    encoder, decoder = LightEncodeLayer(LIGHT, VAE), LightDecodeLayer(LIGHT, VAE)
    frames, latents = clip(9), some_latents(3)
    exact = encode(encoder, frames, [1, 2]), decode(decoder, latents, [1, 2])
    encoder.to(torch.bfloat16)
    decoder.to(torch.bfloat16)
    rough = encode(encoder, frames, [1, 2]), decode(decoder, latents, [1, 2])
    for ours, theirs in zip(rough, exact, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0.02)
    state = encoder.new_state()
    encoder(frames, state)
    assert {previous.dtype for previous in state.previous_inputs if previous is not None} == {torch.bfloat16}


FULL_SIZE = LightVaeConfig(), VaeConfig()


def memory_block_shapes(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{name}.conv.0.weight": (width, 2 * width, 3, 3),
        f"{name}.conv.0.bias": (width,),
        f"{name}.conv.2.weight": (width, width, 3, 3),
        f"{name}.conv.2.bias": (width,),
        f"{name}.conv.4.weight": (width, width, 3, 3),
        f"{name}.conv.4.bias": (width,),
    }


ENCODER_SHAPES: dict[str, tuple[int, ...]] = {
    "encoder.0.weight": (64, 3, 3, 3),
    "encoder.0.bias": (64,),
    "encoder.2.conv.weight": (64, 128, 1, 1),
    "encoder.3.weight": (64, 64, 3, 3),
    "encoder.7.conv.weight": (64, 128, 1, 1),
    "encoder.8.weight": (64, 64, 3, 3),
    "encoder.12.conv.weight": (64, 64, 1, 1),
    "encoder.13.weight": (64, 64, 3, 3),
    "encoder.17.weight": (16, 64, 3, 3),
    "encoder.17.bias": (16,),
}
for index in (4, 5, 6, 9, 10, 11, 14, 15, 16):
    ENCODER_SHAPES |= memory_block_shapes(f"encoder.{index}", 64)

DECODER_SHAPES: dict[str, tuple[int, ...]] = {
    "decoder.1.weight": (256, 16, 3, 3),
    "decoder.1.bias": (256,),
    "decoder.7.conv.weight": (256, 256, 1, 1),
    "decoder.8.weight": (128, 256, 3, 3),
    "decoder.13.conv.weight": (256, 128, 1, 1),
    "decoder.14.weight": (64, 128, 3, 3),
    "decoder.19.conv.weight": (128, 64, 1, 1),
    "decoder.20.weight": (64, 64, 3, 3),
    "decoder.22.weight": (3, 64, 3, 3),
    "decoder.22.bias": (3,),
}
for index, width in {3: 256, 4: 256, 5: 256, 9: 128, 10: 128, 11: 128, 15: 64, 16: 64, 17: 64}.items():
    DECODER_SHAPES |= memory_block_shapes(f"decoder.{index}", width)


def test_parameters_of_the_full_size_are_those_of_the_published_file():
    with torch.device("meta"):
        halves: tuple[nn.Module, nn.Module] = LightEncodeLayer(*FULL_SIZE), LightDecodeLayer(*FULL_SIZE)
    shapes = [{name: tuple(value.shape) for name, value in half.state_dict().items()} for half in halves]
    assert shapes == [ENCODER_SHAPES, DECODER_SHAPES]
    encoder_size, decoder_size = (sum(value.numel() for value in half.parameters()) for half in halves)
    assert 1.45e6 < encoder_size < 1.55e6
    assert 11.25e6 < encoder_size + decoder_size < 11.35e6


@torch.no_grad()
def test_full_size_gives_the_same_bits_for_every_cut():
    torch.manual_seed(0)
    encoder, decoder = LightEncodeLayer(*FULL_SIZE), LightDecodeLayer(*FULL_SIZE)
    latents = encode(encoder, clip(9), [3])
    assert torch.equal(latents, encode(encoder, clip(9), [1, 2]))
    pixels = decode(decoder, latents, [3])
    assert pixels.shape == (3, 9, *SIZE)
    assert torch.equal(pixels, decode(decoder, latents, [1, 1, 1]))
