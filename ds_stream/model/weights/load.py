"""Weights for layers that were built without any: read, merged, cast and put on the device, layer by layer.

A rank maps the files and reads only what its own layers need.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor, nn

from ds_stream.model.layers import BlockLayer, torch_dtype
from ds_stream.model.light_vae import LightDecodeLayer, LightEncodeLayer
from ds_stream.model.vae import DecodeLayer, EncodeLayer
from ds_stream.model.weights.checkpoint import Checkpoint, Part, check_names
from ds_stream.model.weights.locate import locate_weights
from ds_stream.model.weights.lora import Lora
from ds_stream.model.weights.random import draw_random_weight
from ds_stream.settings import StreamConfig

Shapes = Mapping[str, tuple[int, ...]]
"""Shape of each tensor, by diffusers' names."""


class ModelWeights:
    """Where all weights of a model come from. Opening them reads no tensor.

    Args:
        wanted: what a part has to have; asked only of parts that come from files.

    Raises:
        ValueError: a file is missing, damaged, or does not fit ``config``.
    """

    def __init__(self, config: StreamConfig, wanted: Callable[[Part], Shapes]):
        self.seed = config.model.weights_seed
        self.checkpoints: dict[Part, Checkpoint | None] = {}
        """``None``: random weights."""
        for part, path in locate_weights(config).items():
            checkpoint = None
            if path is not None:
                checkpoint = Checkpoint.open(path, config.model.weights_entry if part is Part.DIT else "auto")
                if checkpoint.part is not part:
                    raise ValueError(f"{path} holds a {checkpoint.part.value}, where a {part.value} is wanted")
                check_names(f"{path}", wanted(part), checkpoint.tensors)
            self.checkpoints[part] = checkpoint
        loras = config.model.loras
        targets = wanted(Part.DIT) if loras else {}
        self.loras = [Lora(Path(lora.path).expanduser(), lora.scale, targets) for lora in loras]
        self._dtype = torch_dtype(config)

    @property
    def random_parts(self) -> list[str]:
        """Names of the parts that have no file."""
        return [part.value for part, checkpoint in self.checkpoints.items() if checkpoint is None]

    @torch.no_grad()
    def fill(self, layer: nn.Module, layer_index: int, device: torch.device) -> None:
        """Give a layer on the meta device its weights on ``device``, and freeze it.

        One tensor at a time, so that no more than the layer and one tensor are in memory.

        Args:
            layer_index: the layer's place in the model.
        """
        state = {}
        for name, weight in self._weights_of(layer, layer_index):
            # A copy: what is read is mapped from a file that may change or go away.
            state[name] = weight.to(device=device, dtype=parameter_dtype(layer, name, self._dtype), copy=True)
        layer.load_state_dict(state, assign=True)
        layer.to(device).eval().requires_grad_(False)

    def _weights_of(self, layer: nn.Module, layer_index: int) -> Iterator[tuple[str, Tensor]]:
        part = part_of(layer)
        checkpoint = self.checkpoints[part]
        own = {published_name(layer, name): name for name, _ in layer.named_parameters()}
        weights = self._draw(layer, layer_index) if checkpoint is None else checkpoint.read(own)
        for name, weight in weights:
            for lora in self.loras if part is Part.DIT else []:
                weight = lora.merge(name, weight)
            yield own[name], weight

    def _draw(self, layer: nn.Module, layer_index: int) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in layer.named_parameters():
            weight = draw_random_weight(name, parameter.shape, self.seed, layer_index)
            yield published_name(layer, name), weight


def fill_moved(layer: nn.Module, parameters: Mapping[str, Tensor], device: torch.device) -> None:
    """Give a layer on the meta device the parameters that it had on another stage, types included, and freeze it."""
    layer.load_state_dict({name: weight.to(device) for name, weight in parameters.items()}, assign=True)
    layer.to(device).eval().requires_grad_(False)


def part_of(layer: nn.Module) -> Part:
    """The part of the model whose checkpoint holds a layer."""
    if isinstance(layer, EncodeLayer | DecodeLayer):
        return Part.VAE
    return Part.LIGHT_VAE if isinstance(layer, LightEncodeLayer | LightDecodeLayer) else Part.DIT


def published_name(layer: nn.Module, name: str) -> str:
    """A layer's own parameter by the name that it has in the whole model."""
    return f"blocks.{layer.index}.{name.removeprefix('block.')}" if isinstance(layer, BlockLayer) else name


def parameter_dtype(layer: nn.Module, name: str, dtype: torch.dtype) -> torch.dtype:
    """``dtype``, or fp32 for the few parameters of the DiT that diffusers keeps in it."""
    if part_of(layer) is not Part.DIT:
        return dtype
    is_kept = any(part in WanTransformer3DModel._keep_in_fp32_modules for part in name.split("."))
    return torch.float32 if is_kept else dtype


def shapes_of(layers: list[nn.Module]) -> Shapes:
    """Shapes of all parameters of ``layers``, by their names in the whole model."""
    return {
        published_name(layer, name): tuple(parameter.shape)
        for layer in layers
        for name, parameter in layer.named_parameters()
    }
