"""Rotary position embedding, computed from integer positions: no table, so no longest stream.

RoFormer (arXiv 2104.09864), eq. 34, in the three-axis split of Wan 2.1. Shapes: L tokens, H heads, D head channels.
"""

import functools

import torch
from torch import Tensor

Angles = tuple[Tensor, Tensor]
"""Cosine and sine, each ``[L, D / 2]``, fp32."""

THETA = 10000.0
# The passes of a chunk ask for the same; about as many chunks are in a ring at once.
_KEPT_ANGLES = 32


class Rope:
    """Angles of the tokens of consecutive latent frames.

    Args:
        head_dim: channels of one head; time gets what height and width leave (128 = 44 + 42 + 42).
        grid_height: token rows of a latent frame.
        grid_width: token columns of a latent frame.
        device: where the angles are needed.
    """

    def __init__(self, head_dim: int, grid_height: int, grid_width: int, device: torch.device):
        space_dim = 2 * (head_dim // 6)
        self._time_freqs = _frequencies(head_dim - 2 * space_dim).to(device)
        freqs = _frequencies(space_dim).to(device)
        rows = torch.outer(_positions(0, grid_height, device), freqs)
        columns = torch.outer(_positions(0, grid_width, device), freqs)
        shape = (grid_height, grid_width, -1)
        space = torch.cat((rows[:, None].expand(shape), columns[None].expand(shape)), dim=-1).flatten(0, 1)
        self._space = self._waves(space)
        self._kept = functools.lru_cache(maxsize=_KEPT_ANGLES)(self._compute)

    def angles(self, first_position: int, num_latent_frames: int) -> Angles:
        """Angles for the tokens of latent frames at positions ``first_position``, ``first_position + 1``, ...; shared.

        The products are taken in float64, so that positions far past any table keep their precision. Only those of
        time are computed, on the device, which nothing has to be copied to; those of height and width never change.
        """
        return self._kept(first_position, num_latent_frames)

    def _compute(self, first_position: int, num_latent_frames: int) -> Angles:
        positions = _positions(first_position, num_latent_frames, self._time_freqs.device)
        time = self._waves(torch.outer(positions, self._time_freqs))
        cos, sin = (self._join(of_time, of_space) for of_time, of_space in zip(time, self._space, strict=True))
        return cos, sin

    @staticmethod
    def _waves(angles: Tensor) -> Angles:
        return angles.cos().float(), angles.sin().float()

    @staticmethod
    def _join(time_NC: Tensor, space_TC: Tensor) -> Tensor:
        shape = (time_NC.shape[0], space_TC.shape[0], -1)
        return torch.cat((time_NC[:, None].expand(shape), space_TC[None].expand(shape)), dim=-1).flatten(0, 1)


def apply_rope(x_LHD: Tensor, angles: Angles) -> Tensor:
    """Rotate neighbouring channel pairs of queries or keys ``[L, H, D]``; the result has the same type."""
    cos, sin = angles[0][:, None], angles[1][:, None]
    real, imaginary = x_LHD.float().unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.stack((real * cos - imaginary * sin, real * sin + imaginary * cos), dim=-1)
    return rotated.flatten(-2).to(x_LHD.dtype)


def _positions(first: int, count: int, device: torch.device) -> Tensor:
    return torch.arange(first, first + count, dtype=torch.float64, device=device)


def _frequencies(dim: int) -> Tensor:
    return THETA ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
