"""Attention processors for diffusers' ``WanAttention``: self-attention over the rolling cache, cached cross-attention.

Shapes: R rows, L tokens of a chunk, H heads, D head channels, S tokens attended to.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from diffusers.models.transformers.transformer_wan import WanAttention
from torch import Tensor
from torch.nn import functional

from ds_stream.model.cache import RollingCache
from ds_stream.model.rope import Angles, apply_rope

KeyValue = tuple[Tensor, Tensor]
"""Keys and values, each ``[S, H, D]``."""


@dataclass(frozen=True, slots=True)
class SelfAttentionRow:
    """What one row's self-attention in one block needs besides its hidden states."""

    chunk: int
    step: int
    angles: Angles
    sink_angles: Angles | None
    cache: RollingCache
    sink_choice: Tensor | None
    """Which sink the chunk replaces, where another block has decided."""


class CachedSelfAttention:
    """Stands in for diffusers' processor; takes the rows where that takes rotary embeddings."""

    def __call__(
        self,
        attn: WanAttention,
        hidden_RLC: Tensor,
        _encoder_hidden_states: None,
        _attention_mask: None,
        rows: Sequence[SelfAttentionRow],
    ) -> Tensor:
        query_RLHD = attn.norm_q(attn.to_q(hidden_RLC)).unflatten(2, (attn.heads, -1))
        key_RLHD = attn.norm_k(attn.to_k(hidden_RLC)).unflatten(2, (attn.heads, -1))
        value_RLHD = attn.to_v(hidden_RLC).unflatten(2, (attn.heads, -1))
        attended = []
        for index, row in enumerate(rows):
            key_SHD, value_SHD = row.cache.update(
                row.chunk,
                row.step,
                key_RLHD[index],
                value_RLHD[index],
                row.angles,
                row.sink_angles,
                row.sink_choice,
            )
            attended.append(_attend(apply_rope(query_RLHD[index], row.angles), key_SHD, value_SHD))
        return attn.to_out[0](torch.stack(attended).flatten(2))


class CachedCrossAttention:
    """Stands in for diffusers' processor; takes each row's text keys/values where that takes the text itself."""

    def __call__(
        self,
        attn: WanAttention,
        hidden_RLC: Tensor,
        texts: Sequence[KeyValue],
        _attention_mask: None,
        _rotary_emb: None,
    ) -> Tensor:
        query_RLHD = attn.norm_q(attn.to_q(hidden_RLC)).unflatten(2, (attn.heads, -1))
        attended = [_attend(query_RLHD[index], *text) for index, text in enumerate(texts)]
        return attn.to_out[0](torch.stack(attended).flatten(2))


def text_key_value(attn: WanAttention, context_SC: Tensor) -> KeyValue:
    """Cross-attention keys/values of a projected text ``[S, H * D]``, computed once per prompt and block."""
    key_SHD = attn.norm_k(attn.to_k(context_SC)).unflatten(1, (attn.heads, -1))
    return key_SHD, attn.to_v(context_SC).unflatten(1, (attn.heads, -1))


def _attend(query_LHD: Tensor, key_SHD: Tensor, value_SHD: Tensor) -> Tensor:
    query_1HLD, key_1HSD, value_1HSD = (x.transpose(0, 1)[None] for x in (query_LHD, key_SHD, value_SHD))
    return functional.scaled_dot_product_attention(query_1HLD, key_1HSD, value_1HSD)[0].transpose(0, 1)
