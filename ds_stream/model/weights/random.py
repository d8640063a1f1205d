"""Random weights that depend on a seed and a layer's place in the model, not on who builds it."""

import hashlib

import torch
from torch import Tensor


def draw_random_weight(name: str, shape: torch.Size, seed: int, layer_index: int) -> Tensor:
    """A parameter's fp32 weights: Gaussian of variance ``1 / fan_in``; biases are zero and norm gains one.

    The same layer of the same model gets the same weights on whichever rank it is built.
    """
    if len(shape) < 2 or name.endswith("gamma"):
        return torch.full(shape, 0.0 if name.endswith("bias") else 1.0)
    digest = hashlib.blake2b(f"{seed}/{layer_index}/{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    fan_in = shape[-1] if name.endswith("scale_shift_table") else shape[1:].numel()
    return torch.randn(shape, generator=generator) * fan_in**-0.5
