"""The oracle agrees with itself: cached chunks against one masked pass, and its layouts against plain loops."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import wan_by_hand as wan

HEADS = 2
CHANNELS = 3
TIMESTEP = 625.0
EXACT = {"atol": 1e-5, "rtol": 0.0}


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    return wan.random_weights(
        num_layers=2, dim=24, ffn_dim=32, freq_dim=8, text_dim=8, in_channels=CHANNELS, out_channels=CHANNELS + 1
    )


@pytest.fixture(scope="module")
def latents() -> Tensor:
    return torch.randn(CHANNELS, 6, 4, 6, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def text() -> Tensor:
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(2))


def chunk_by_chunk(
    weights: dict[str, Tensor], latents: Tensor, text: Tensor, size: int, start: int = 0
) -> tuple[Tensor, list[tuple[wan.KeyValues, list[int]]]]:
    flows, context = [], []
    for first in range(0, latents.shape[1], size):
        chunk = latents[:, first : first + size]
        positions = [start + first + i for i in range(chunk.shape[1])]
        flow, kv = wan.forward(weights, HEADS, chunk, TIMESTEP, text, positions, context)
        flows.append(flow)
        context.append((kv, positions))
    return torch.cat(flows, dim=1), context


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
def test_cached_chunks_equal_the_masked_pass(weights, latents, text, size):
    masked = wan.block_causal(weights, HEADS, latents, TIMESTEP, text, size)
    cached, _ = chunk_by_chunk(weights, latents, text, size)
    assert masked.shape == (CHANNELS + 1, *latents.shape[1:])
    assert masked.std() > 0.1
    torch.testing.assert_close(cached, masked, **EXACT)


def test_a_token_sees_its_chunk_and_earlier_ones_only(weights, latents, text):
    plain = wan.block_causal(weights, HEADS, latents, TIMESTEP, text, 2)
    changed = latents.clone()
    changed[:, 3] += 1
    difference = (wan.block_causal(weights, HEADS, changed, TIMESTEP, text, 2) - plain).abs().amax(dim=(0, 2, 3))
    assert (difference[:2] == 0).all()
    assert (difference[2:] > 1e-3).all()


def test_only_relative_positions_matter_and_they_do(weights, latents, text):
    plain, context = chunk_by_chunk(weights, latents, text, 2)
    moved, _ = chunk_by_chunk(weights, latents, text, 2, start=7)
    torch.testing.assert_close(moved, plain, **EXACT)
    args = (weights, HEADS, latents[:, 4:], TIMESTEP, text, [4, 5])
    elsewhere, _ = wan.forward(*args, [(context[0][0], [1, 2]), context[1]])
    assert (elsewhere - plain[:, 4:]).abs().max() > 1e-3


def test_context_may_be_cut_and_reordered(weights, latents, text):
    plain, context = chunk_by_chunk(weights, latents, text, 2)
    frames = [(wan.frames_of(kv, [i]), [at[i]]) for kv, at in context[:2] for i in (1, 0)]
    again, kv = wan.forward(weights, HEADS, latents[:, 4:], TIMESTEP, text, [4, 5], frames)
    torch.testing.assert_close(again, plain[:, 4:], **EXACT)
    whole = wan.frames_of(kv, [0, 1])
    assert whole.num_frames == 2
    assert all(
        torch.equal(a, b) for x, y in zip(whole.blocks, kv.blocks, strict=True) for a, b in zip(x, y, strict=True)
    )


def test_every_weight_matters(weights, latents, text):
    plain = wan.block_causal(weights, HEADS, latents, TIMESTEP, text, 2)
    generator = torch.Generator().manual_seed(3)
    for name, value in weights.items():
        other = weights | {name: value + torch.randn(value.shape, generator=generator)}
        difference = wan.block_causal(other, HEADS, latents, TIMESTEP, text, 2) - plain
        assert difference.abs().max() > 1e-3, name


def test_output_features_are_patch_row_column_channel(weights, latents, text):
    channels = CHANNELS + 1
    bias = torch.arange(4.0 * channels)
    constant = weights | {"head.head.weight": torch.zeros(4 * channels, 24), "head.head.bias": bias}
    flow = wan.block_causal(constant, HEADS, latents, TIMESTEP, text, 2)
    for c in range(channels):
        for row in range(latents.shape[2]):
            for column in range(latents.shape[3]):
                assert (flow[c, :, row, column] == ((row % 2) * 2 + column % 2) * channels + c).all()


def test_rotation_by_a_loop():
    x = torch.randn(2 * 2 * 3, 1, 128, generator=torch.Generator().manual_seed(4))
    rotated = wan.rotate(x, wan.rope_angles([5, 9], 2, 3, 128))
    for token, (time, row, column) in enumerate((t, r, c) for t in (5, 9) for r in range(2) for c in range(3)):
        for start, size, at in ((0, 44, time), (44, 42, row), (86, 42, column)):
            for i in range(size // 2):
                angle = at * 10000 ** (-2 * i / size)
                pair = complex(*x[token, 0, start + 2 * i : start + 2 * i + 2].tolist())
                expected = pair * complex(math.cos(angle), math.sin(angle))
                got = complex(*rotated[token, 0, start + 2 * i : start + 2 * i + 2].tolist())
                assert abs(got - expected) < 1e-6


def test_timesteps():
    table = wan.timestep_table(8.0)
    assert len(table) == 1000
    assert table[0] == 1000.0
    assert table[500] == pytest.approx(1000 * 4 / 4.5)
    assert table == sorted(table, reverse=True)
    assert wan.nearest(table, 1000.0) == 1.0
    assert wan.nearest(table, 0.0) == table[-1] / 1000
    assert wan.nearest(table, table[321] + 1e-3) == table[321] / 1000
