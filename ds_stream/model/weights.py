"""Random weights that depend on a seed and a layer's place in the model, not on who builds it."""

import hashlib

import torch
from torch import nn


@torch.no_grad()
def draw_random_weights(layer: nn.Module, seed: int, layer_index: int) -> None:
    """Fill ``layer`` with Gaussian weights of variance ``1 / fan_in``, zero biases and unit norm gains.

    The same layer of the same model gets the same weights on whichever rank it is built.
    """
    for name, parameter in layer.named_parameters():
        if parameter.ndim < 2 or name.endswith("gamma"):
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        digest = hashlib.blake2b(f"{seed}/{layer_index}/{name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        fan_in = parameter.shape[-1] if name.endswith("scale_shift_table") else parameter[0].numel()
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * fan_in**-0.5)
