"""The Wan 2.1 video DiT written from its formulas, as the oracle that other code is compared with.

Plain functions over a dictionary of weights with the names of the original checkpoints; fp32, angles in float64.
One clip at a time, so no tensor has a batch axis. Suffixes and shapes: L tokens (frame, row, column; column
fastest), S tokens attended to, T text positions, D hidden size, H heads, d head dim, C channels, F latent frames,
h and w latent size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

Weights = Mapping[str, Tensor]
# (block index, q_LHd, k_LHd, v_LHd), q and k normed but not rotated -> attended values [L, H, d].
SelfAttention = Callable[[int, Tensor, Tensor, Tensor], Tensor]

EPS = 1e-6
THETA = 10000.0
PATCH = 2  # rows and columns of a patch; one frame deep


class KeyValues(NamedTuple):
    """One chunk's keys (normed, not rotated) and values: for each block a pair of [L, H, d]."""

    blocks: list[tuple[Tensor, Tensor]]
    num_frames: int


def frames_of(kv: KeyValues, indices: Sequence[int]) -> KeyValues:
    """Selects frames, in the order of `indices`: [L, H, d] -> [len(indices) * L / num_frames, H, d]."""

    def cut(x_LHd: Tensor) -> Tensor:
        return x_LHd.unflatten(0, (kv.num_frames, -1))[list(indices)].flatten(0, 1)

    return KeyValues([(cut(k_LHd), cut(v_LHd)) for k_LHd, v_LHd in kv.blocks], len(indices))


def forward(
    weights: Weights,
    num_heads: int,
    latents: Tensor,
    timestep: float,
    text: Tensor,
    positions: Sequence[int],
    context: Sequence[tuple[KeyValues, Sequence[int]]] = (),
) -> tuple[Tensor, KeyValues]:
    """One chunk: latents [C, F, h, w], text [T, text_dim] -> flow [C_out, F, h, w] and the chunk's keys and values.

    `positions` has the temporal position of each of the F frames. `context` has earlier chunks and the positions at
    which their frames are rotated; the chunk sees all of them and the whole of itself.
    """
    if len(positions) != latents.shape[1] or any(len(at) != kv.num_frames for kv, at in context):
        raise ValueError("one position for each frame")
    grid = _grid(latents)
    all_positions = [p for _, at in context for p in at] + list(positions)
    angles_q = rope_angles(positions, *grid, _head_dim(weights, num_heads), latents.device)
    angles_k = rope_angles(all_positions, *grid, _head_dim(weights, num_heads), latents.device)
    own: list[tuple[Tensor, Tensor]] = []

    def attend(index: int, q_LHd: Tensor, k_LHd: Tensor, v_LHd: Tensor) -> Tensor:
        own.append((k_LHd, v_LHd))
        k_SHd = torch.cat([*(kv.blocks[index][0].float() for kv, _ in context), k_LHd])
        v_SHd = torch.cat([*(kv.blocks[index][1].float() for kv, _ in context), v_LHd])
        return attention(rotate(q_LHd, angles_q), rotate(k_SHd, angles_k), v_SHd)

    flow = _model(weights, num_heads, latents, timestep, text, attend)
    return flow, KeyValues(own, len(positions))


def block_causal(
    weights: Weights, num_heads: int, latents: Tensor, timestep: float, text: Tensor, frames_per_chunk: int
) -> Tensor:
    """A whole clip at once, frame f at position f; a token sees its own chunk and all earlier ones.

    latents [C, F, h, w], text [T, text_dim] -> flow [C_out, F, h, w].
    """
    num_frames, (rows, columns) = latents.shape[1], _grid(latents)
    angles = rope_angles(range(num_frames), rows, columns, _head_dim(weights, num_heads), latents.device)
    chunk_L = torch.arange(num_frames, device=latents.device).repeat_interleave(rows * columns) // frames_per_chunk
    visible_LL = chunk_L[:, None] >= chunk_L[None, :]

    def attend(index: int, q_LHd: Tensor, k_LHd: Tensor, v_LHd: Tensor) -> Tensor:
        return attention(rotate(q_LHd, angles), rotate(k_LHd, angles), v_LHd, visible_LL)

    return _model(weights, num_heads, latents, timestep, text, attend)


def timestep_table(shift: float) -> list[float]:
    """The 1000 timesteps 1000 * sigma, from 1000 downwards."""
    table = []
    for i in range(1000):
        s = 1 - i / 1000
        table.append(1000 * shift * s / (1 + (shift - 1) * s))
    return table


def nearest(table: Sequence[float], t: float) -> float:
    """The sigma, in 0..1, of the table's timestep that is nearest to t."""
    return min(table, key=lambda entry: abs(entry - t)) / 1000


def rope_angles(
    positions: Sequence[int], rows: int, columns: int, head_dim: int, device: torch.device | None = None
) -> Tensor:
    """Rotation angle of each channel pair of each token: [len(positions) * rows * columns, d / 2], float64."""
    space_dim = 2 * (head_dim // 6)
    time_dim = head_dim - 2 * space_dim
    times = torch.tensor(list(positions), dtype=torch.float64, device=device)
    shape = (len(times), rows, columns, -1)
    parts = [
        _axis_angles(times, time_dim)[:, None, None].expand(shape),
        _axis_angles(torch.arange(rows, device=device), space_dim)[None, :, None].expand(shape),
        _axis_angles(torch.arange(columns, device=device), space_dim)[None, None, :].expand(shape),
    ]
    return torch.cat(parts, dim=-1).flatten(0, 2)


def _axis_angles(at: Tensor, part_dim: int) -> Tensor:
    """Positions [n] -> angles [n, part_dim / 2]."""
    exponent = torch.arange(0, part_dim, 2, dtype=torch.float64, device=at.device) / part_dim
    return at.double()[:, None] * THETA**-exponent


def rotate(x_LHd: Tensor, angles: Tensor) -> Tensor:
    """Rotates the channel pairs (2i, 2i + 1) by angles [L, d / 2]."""
    even, odd = x_LHd.double().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2).float()


def attention(q_LHd: Tensor, k_SHd: Tensor, v_SHd: Tensor, visible_LS: Tensor | None = None) -> Tensor:
    """softmax(q k^T / sqrt(d)) v for each head -> [L, H, d]."""
    scores_HLS = torch.einsum("lhd,shd->hls", q_LHd, k_SHd) / math.sqrt(q_LHd.shape[-1])
    if visible_LS is not None:
        scores_HLS = scores_HLS.masked_fill(~visible_LS, -torch.inf)
    return torch.einsum("hls,shd->lhd", scores_HLS.softmax(dim=-1), v_SHd)


def _model(
    weights: Weights, num_heads: int, latents: Tensor, timestep: float, text: Tensor, attend: SelfAttention
) -> Tensor:
    """latents [C, F, h, w], text [T, text_dim] -> flow [C_out, F, h, w]."""
    x_LD = _patchify(weights, latents)
    e_D, e_6D = _embed_time(weights, timestep)
    text_TD = _embed_text(weights, text)
    for index in range(_num_blocks(weights)):
        x_LD = _block(weights, index, num_heads, x_LD, e_6D, text_TD, attend)
    return _unpatchify(_head(weights, x_LD, e_D), latents.shape[1], *_grid(latents))


def _block(
    weights: Weights, index: int, num_heads: int, x_LD: Tensor, e_6D: Tensor, text_TD: Tensor, attend: SelfAttention
) -> Tensor:
    """One block: [L, D] -> [L, D]."""
    name = f"blocks.{index}"
    modulation_6D = weights[f"{name}.modulation"].float()[0] + e_6D
    shift_sa, scale_sa, gate_sa, shift_ffn, scale_ffn, gate_ffn = modulation_6D.unbind(0)

    y_LD = _layer_norm(x_LD) * (1 + scale_sa) + shift_sa
    y_LHd = attend(index, *_qkv(weights, f"{name}.self_attn", num_heads, y_LD, y_LD))
    x_LD = x_LD + gate_sa * _linear(weights, f"{name}.self_attn.o", y_LHd.flatten(1))

    y_LD = _layer_norm(x_LD) * weights[f"{name}.norm3.weight"].float() + weights[f"{name}.norm3.bias"].float()
    y_LHd = attention(*_qkv(weights, f"{name}.cross_attn", num_heads, y_LD, text_TD))
    x_LD = x_LD + _linear(weights, f"{name}.cross_attn.o", y_LHd.flatten(1))

    y_LD = _layer_norm(x_LD) * (1 + scale_ffn) + shift_ffn
    return x_LD + gate_ffn * _mlp(weights, f"{name}.ffn", y_LD)


def _qkv(weights: Weights, name: str, num_heads: int, x_LD: Tensor, y_SD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of x, keys and values of y, by head: [L, H, d], [S, H, d], [S, H, d]. The norms span all heads."""
    q_LD = _rms_norm(_linear(weights, f"{name}.q", x_LD), weights[f"{name}.norm_q.weight"])
    k_SD = _rms_norm(_linear(weights, f"{name}.k", y_SD), weights[f"{name}.norm_k.weight"])
    v_SD = _linear(weights, f"{name}.v", y_SD)
    return q_LD.unflatten(1, (num_heads, -1)), k_SD.unflatten(1, (num_heads, -1)), v_SD.unflatten(1, (num_heads, -1))


def _head(weights: Weights, x_LD: Tensor, e_D: Tensor) -> Tensor:
    """[L, D] -> [L, 4 * C_out]."""
    shift, scale = (weights["head.modulation"].float()[0] + e_D).unbind(0)
    return _linear(weights, "head.head", _layer_norm(x_LD) * (1 + scale) + shift)


def _embed_time(weights: Weights, timestep: float) -> tuple[Tensor, Tensor]:
    """The time embedding [D] and its projection for the blocks [6, D]."""
    weight = weights["time_embedding.0.weight"]
    half = weight.shape[1] // 2
    frequencies = THETA ** -(torch.arange(half, dtype=torch.float64, device=weight.device) / half)
    angles = timestep * frequencies
    hidden_D = _linear(weights, "time_embedding.0", torch.cat([angles.cos(), angles.sin()]).float())
    e_D = _linear(weights, "time_embedding.2", functional.silu(hidden_D))
    return e_D, _linear(weights, "time_projection.1", functional.silu(e_D)).unflatten(0, (6, -1))


def _embed_text(weights: Weights, text: Tensor) -> Tensor:
    """[T, text_dim] -> [T, D]."""
    return _mlp(weights, "text_embedding", text.float())


def _patchify(weights: Weights, latents: Tensor) -> Tensor:
    """[C, F, h, w] -> [L, D]."""
    weight, bias = weights["patch_embedding.weight"].float(), weights["patch_embedding.bias"].float()
    x_DFrc = functional.conv3d(latents.float()[None], weight, bias, stride=(1, PATCH, PATCH))[0]
    return x_DFrc.flatten(1).T


def _unpatchify(x: Tensor, num_frames: int, rows: int, columns: int) -> Tensor:
    """[L, 4 * C_out], features by patch row, patch column, channel -> [C_out, F, h, w]."""
    x = x.reshape(num_frames, rows, columns, PATCH, PATCH, -1)
    return x.permute(5, 0, 1, 3, 2, 4).reshape(-1, num_frames, rows * PATCH, columns * PATCH)


def _linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    """[..., in] -> [..., out]."""
    return functional.linear(x, weights[f"{name}.weight"].float(), weights[f"{name}.bias"].float())


def _mlp(weights: Weights, name: str, x: Tensor) -> Tensor:
    """Linear `.0`, GELU (tanh), linear `.2`: [..., in] -> [..., out]."""
    return _linear(weights, f"{name}.2", functional.gelu(_linear(weights, f"{name}.0", x), approximate="tanh"))


def _layer_norm(x_LD: Tensor) -> Tensor:
    """Without affine part: [L, D] -> [L, D]."""
    centred = x_LD - x_LD.mean(dim=-1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + EPS)


def _rms_norm(x_LD: Tensor, weight_D: Tensor) -> Tensor:
    """[L, D] -> [L, D]."""
    return x_LD * torch.rsqrt(x_LD.square().mean(dim=-1, keepdim=True) + EPS) * weight_D.float()


def _grid(latents: Tensor) -> tuple[int, int]:
    """Rows and columns of tokens of latents [C, F, h, w]."""
    if latents.shape[2] % PATCH or latents.shape[3] % PATCH:
        raise ValueError(f"latents of {tuple(latents.shape)} do not divide into patches")
    return latents.shape[2] // PATCH, latents.shape[3] // PATCH


def _head_dim(weights: Weights, num_heads: int) -> int:
    return weights["patch_embedding.bias"].shape[0] // num_heads


def _num_blocks(weights: Weights) -> int:
    return len({name.split(".")[1] for name in weights if name.startswith("blocks.")})


def random_weights(
    *,
    num_layers: int,
    dim: int,
    ffn_dim: int,
    freq_dim: int,
    text_dim: int,
    in_channels: int = 16,
    out_channels: int = 16,
    seed: int = 0,
) -> dict[str, Tensor]:
    """All weights of a model of these sizes, none of them trivial: matrices have variance 1 / fan-in."""
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}

    def normal(*shape: int, std: float, mean: float = 0.0) -> Tensor:
        return mean + std * torch.randn(shape, generator=generator)

    def affine(name: str, out_dim: int, *in_shape: int) -> None:
        weights[f"{name}.weight"] = normal(out_dim, *in_shape, std=math.prod(in_shape) ** -0.5)
        weights[f"{name}.bias"] = normal(out_dim, std=0.3)

    affine("patch_embedding", dim, in_channels, 1, PATCH, PATCH)
    affine("text_embedding.0", dim, text_dim)
    affine("text_embedding.2", dim, dim)
    affine("time_embedding.0", dim, freq_dim)
    affine("time_embedding.2", dim, dim)
    affine("time_projection.1", 6 * dim, dim)
    for index in range(num_layers):
        block = f"blocks.{index}"
        weights[f"{block}.modulation"] = normal(1, 6, dim, std=0.5)
        for attn in (f"{block}.self_attn", f"{block}.cross_attn"):
            for linear in "qkvo":
                affine(f"{attn}.{linear}", dim, dim)
            for norm in ("norm_q", "norm_k"):
                weights[f"{attn}.{norm}.weight"] = normal(dim, std=0.3, mean=1.0)
        weights[f"{block}.norm3.weight"] = normal(dim, std=0.3, mean=1.0)
        weights[f"{block}.norm3.bias"] = normal(dim, std=0.3)
        affine(f"{block}.ffn.0", ffn_dim, dim)
        affine(f"{block}.ffn.2", dim, ffn_dim)
    weights["head.modulation"] = normal(1, 2, dim, std=0.5)
    affine("head.head", PATCH * PATCH * out_channels, dim)
    return weights
