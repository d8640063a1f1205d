"""The model as one list of ``LayerSpec``s, and the ``PipelineModule`` that builds a stage's share of it.

The list is ``[encode | embed, block x N, head | decode]``. Encode and decode run once per chunk; the layers between
them are the ring's and run once per pass.
"""

import contextlib
import functools
import io
from collections.abc import Sequence

import torch
from accelerate import init_empty_weights
from deepspeed.runtime.pipe.module import LayerSpec, PipelineModule
from torch import nn

from ds_stream.model.layers import BlockLayer, EmbedLayer, HeadLayer, RowBatch
from ds_stream.model.light_vae import LightDecodeLayer, LightEncodeLayer
from ds_stream.model.vae import DecodeLayer, EncodeLayer
from ds_stream.model.weights.checkpoint import Part
from ds_stream.model.weights.load import ModelWeights, Shapes, shapes_of
from ds_stream.settings import StreamConfig

CPU = torch.device("cpu")


class StreamLayerSpec(LayerSpec):
    """A layer that is built without weights; :class:`FilledLayerSpec` gives it some."""

    def build(self, log: bool = False) -> nn.Module:
        with init_empty_weights(include_buffers=False):
            return super().build(log)


class FilledLayerSpec(LayerSpec):
    """A layer that gets its weights the moment it is built, so that a stage never holds more than its own.

    Args:
        spec: the layer.
        index: its place in the model.
    """

    def __init__(self, spec: StreamLayerSpec, index: int, weights: ModelWeights, device: torch.device):
        super().__init__(spec.typename, *spec.module_args, **spec.module_kwargs)
        self._spec = spec
        self._index = index
        self._weights = weights
        self._device = device

    def build(self, log: bool = False) -> nn.Module:
        layer = self._spec.build(log)
        self._weights.fill(layer, self._index, self._device)
        return layer


def layer_specs(config: StreamConfig) -> list[StreamLayerSpec]:
    """The whole model, not yet built."""
    light, model = config.light_vae, config.model
    vae, light_vae = _vae_specs(config), _light_specs(config)
    return [
        light_vae[0] if light.use == "both" else vae[0],
        StreamLayerSpec(EmbedLayer, model),
        *(StreamLayerSpec(BlockLayer, model, index) for index in range(model.num_layers)),
        StreamLayerSpec(HeadLayer, model),
        vae[1] if light.use == "no" else light_vae[1],
    ]


def open_weights(config: StreamConfig) -> ModelWeights:
    """Find and check the weights of every part, without reading them.

    Raises:
        ValueError: a file is missing, damaged, or does not fit ``config``.
    """
    return ModelWeights(config, functools.partial(part_shapes, config))


def part_shapes(config: StreamConfig, part: Part) -> Shapes:
    """What a part's checkpoint holds: for the VAEs both halves, even if one is not used."""
    specs: Sequence[StreamLayerSpec] = layer_specs(config)[1:-1]
    if part is not Part.DIT:
        specs = _vae_specs(config) if part is Part.VAE else _light_specs(config)
    return shapes_of([spec.build() for spec in specs])


class StageLayers:
    """The layers of one stage, by what they are for."""

    def __init__(self, layers: Sequence[nn.Module]):
        self.encode = next((layer for layer in layers if isinstance(layer, EncodeLayer | LightEncodeLayer)), None)
        self.embed = next((layer for layer in layers if isinstance(layer, EmbedLayer)), None)
        self.blocks = [layer for layer in layers if isinstance(layer, BlockLayer)]
        self.decode = next((layer for layer in layers if isinstance(layer, DecodeLayer | LightDecodeLayer)), None)
        self.ring = [layer for layer in layers if layer is not self.encode and layer is not self.decode]

    def forward(self, batch: RowBatch, exact_rows: bool) -> RowBatch:
        """Run the ring's layers of this stage.

        Args:
            exact_rows: run one row after the other, so that a row's result does not depend on the rows beside it.
        """
        if exact_rows and len(batch.rows) > 1:
            return RowBatch.join([self.forward(part, exact_rows) for part in batch.split()])
        for layer in self.ring:
            batch = layer(batch)
        return batch


class StreamModule(PipelineModule):
    """One stage of the model, cut at explicit boundaries. Builds and loads no layer of another stage.

    Args:
        config: with a resolved ``stages.partition``, whose number of stages is the world size.
        weights: as :func:`open_weights` found them for ``config``.
        device: where the layers go.
    """

    def __init__(self, config: StreamConfig, weights: ModelWeights, device: torch.device = CPU):
        assert config.stages.partition != "auto", "resolve the config first"
        # Set before the parent's __init__, which partitions and builds.
        self.partition = list(config.stages.partition)
        specs = [FilledLayerSpec(spec, index, weights, device) for index, spec in enumerate(layer_specs(config))]
        # The parent prints its layer table.
        with contextlib.redirect_stdout(io.StringIO()):
            super().__init__(specs, num_stages=len(self.partition) - 1)
        self.layers = StageLayers(self.forward_funcs)
        self.exact_rows = config.batch.runs_exact_rows(next(self.parameters()).device.type == "cpu")

    def _partition_layers(self, method: str = "explicit") -> None:
        self.parts = self.partition
        self._set_bounds(start=self.parts[self.stage_id], stop=self.parts[self.stage_id + 1])

    def forward(self, batch: RowBatch) -> RowBatch:
        """Run the ring's layers of this stage."""
        return self.layers.forward(batch, self.exact_rows)

    @property
    def num_parameters(self) -> int:
        """Parameters that this stage holds."""
        return sum(parameter.numel() for parameter in self.parameters())


def build_all_layers(config: StreamConfig, device: torch.device) -> StageLayers:
    """The whole model in one place, without DeepSpeed: for the oracle and for tests."""
    weights = open_weights(config)
    specs = layer_specs(config)
    return StageLayers([FilledLayerSpec(spec, index, weights, device).build() for index, spec in enumerate(specs)])


def _vae_specs(config: StreamConfig) -> tuple[StreamLayerSpec, StreamLayerSpec]:
    return StreamLayerSpec(EncodeLayer, config.vae), StreamLayerSpec(DecodeLayer, config.vae)


def _light_specs(config: StreamConfig) -> tuple[StreamLayerSpec, StreamLayerSpec]:
    sizes = (config.light_vae, config.vae)
    return StreamLayerSpec(LightEncodeLayer, *sizes), StreamLayerSpec(LightDecodeLayer, *sizes)
