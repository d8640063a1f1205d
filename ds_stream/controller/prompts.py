"""Which prompt each chunk of a session has: changes at a chunk's start, at once or fading in."""

import math
from typing import Literal

import torch
from torch import Tensor

from ds_stream.core import ChunkGeometry

Blend = Literal["lerp", "slerp"]
_ALMOST_PARALLEL = 0.9995


class PromptTimeline:
    """The prompt embeddings of a session, chunk after chunk.

    Args:
        first: embedding ``[tokens, text_dim]`` of the first chunk.
        blend_chunks: chunks that lie between an old prompt and a new one; 0 changes it at once.
        blend: how they lie between.
    """

    def __init__(self, first: Tensor, blend_chunks: int = 0, blend: Blend = "lerp"):
        self._current = first
        self._blend_chunks = blend_chunks
        self._blend = blend
        self._changes: dict[int, Tensor] = {0: first}

    def change(self, chunk: int, embedding: Tensor) -> None:
        """From ``chunk`` on, move to ``embedding``, from whatever is in force just before; later plans are void."""
        self._changes = {at: value for at, value in self._changes.items() if at < chunk}
        old = self._changes[max(self._changes)] if self._changes else self._current
        for index in range(self._blend_chunks):
            share = (index + 1) / (self._blend_chunks + 1)
            self._changes[chunk + index] = blend_embeddings(old, embedding, share, self._blend)
        self._changes[chunk + self._blend_chunks] = embedding

    def take(self, chunk: int) -> Tensor | None:
        """The embedding that comes into force at ``chunk`` or did since the last call, or ``None``: no change."""
        due = [at for at in self._changes if at <= chunk]
        if not due:
            return None
        self._current = self._changes[max(due)]
        for at in due:
            del self._changes[at]
        return self._current


def blend_embeddings(old: Tensor, new: Tensor, share: float, blend: Blend) -> Tensor:
    """Between ``old`` (share 0) and ``new`` (share 1), token by token, on the last axis.

    ``slerp`` turns a token's direction along the arc and moves its length evenly (Shoemake 1985); where one of the two
    is zero (padding) or both point the same way, that is the line.
    """
    line = torch.lerp(old, new, share)
    if blend == "lerp":
        return line
    old_length, new_length = old.norm(dim=-1, keepdim=True), new.norm(dim=-1, keepdim=True)
    cosine = (old * new).sum(-1, keepdim=True) / (old_length * new_length).clamp_min(1e-12)
    on_line = (cosine.abs() > _ALMOST_PARALLEL) | (old_length == 0) | (new_length == 0)
    angle = torch.acos(cosine.clamp(-_ALMOST_PARALLEL, _ALMOST_PARALLEL))
    old_part = torch.sin((1 - share) * angle) / torch.sin(angle)
    new_part = torch.sin(share * angle) / torch.sin(angle)
    direction = old_part * old / old_length.clamp_min(1e-12) + new_part * new / new_length.clamp_min(1e-12)
    return torch.where(on_line, line, direction * torch.lerp(old_length, new_length, share))


def chunk_at(seconds: float, frame_rate: float, geometry: ChunkGeometry) -> int:
    """First chunk that begins at or after ``seconds`` of media time.

    Args:
        frame_rate: frames per second of the stream.
    """
    # The chunks that all earlier frames fill come before it; a hair past a boundary still counts as on it.
    return geometry.num_chunks(math.ceil(seconds * frame_rate - 1e-6))
