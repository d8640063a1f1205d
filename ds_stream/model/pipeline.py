"""The model as one list of ``LayerSpec``s, and the ``PipelineModule`` that builds a stage's share of it.

The list is ``[encode | embed, block x N, head | decode x D]``. Encode and decode run once per chunk; the layers
between them are the ring's and run once per pass.
"""

import contextlib
import functools
import io
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from accelerate import init_empty_weights
from deepspeed.runtime.pipe.module import LayerSpec, PipelineModule
from torch import Tensor, nn

from ds_stream.core import NUM_WAN_DECODE_LAYERS
from ds_stream.model.layers import BlockLayer, EmbedLayer, HeadLayer, RowBatch, latent_shape, torch_dtype
from ds_stream.model.light_vae import LightDecodeLayer, LightEncodeLayer
from ds_stream.model.vae import DecodeLayer, EncodeLayer, decoder_input_shape
from ds_stream.model.weights.checkpoint import Part
from ds_stream.model.weights.load import ModelWeights, Shapes, fill_moved, shapes_of
from ds_stream.partition import LayerList, stage_layers
from ds_stream.settings import StreamConfig

OnLayer = Callable[[int], None]
"""Told a layer's index in the model when it has run."""

CPU = torch.device("cpu")

_BUILDING = threading.Lock()


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
    encode, *decode = _vae_specs(config)
    light_encode, *light_decode = _light_specs(config)
    return [
        light_encode if light.use == "both" else encode,
        StreamLayerSpec(EmbedLayer, model),
        *(StreamLayerSpec(BlockLayer, model, index) for index in range(model.num_layers)),
        StreamLayerSpec(HeadLayer, model),
        *(decode if light.use == "no" else light_decode),
    ]


def open_weights(config: StreamConfig) -> ModelWeights:
    """Find and check the weights of every part, without reading them.

    Raises:
        ValueError: a file is missing, damaged, or does not fit ``config``.
    """
    return ModelWeights(config, functools.partial(part_shapes, config))


def part_shapes(config: StreamConfig, part: Part) -> Shapes:
    """What a part's checkpoint holds: for the VAEs both halves, even if one is not used."""
    specs = [layer_specs(config)[index] for index in config.layers.ring]
    if part is not Part.DIT:
        specs = _vae_specs(config) if part is Part.VAE else _light_specs(config)
    return shapes_of([spec.build() for spec in specs])


def decoder_input_field(config: StreamConfig, part: int, is_first_chunk: bool) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and type of what enters a layer of the decoder for one chunk.

    Args:
        part: which of the decoder's layers; the light one has part 0 alone.
        is_first_chunk: of its session.
    """
    shape = latent_shape(config)
    if part == 0:
        return shape, torch.float32
    return decoder_input_shape(config.vae, part, shape, is_first_chunk), torch_dtype(config)


def _mind_no_layer(_layer: int) -> None:
    pass


class StageLayers:
    """The layers of one stage, by what they are for.

    Args:
        model: the model's layers.
        by_index: this stage's, in order.
    """

    def __init__(self, model: LayerList, by_index: Mapping[int, nn.Module]):
        self.by_index = dict(by_index)
        layers = self.by_index.values()
        self.encode = next((layer for layer in layers if isinstance(layer, EncodeLayer | LightEncodeLayer)), None)
        self.embed = next((layer for layer in layers if isinstance(layer, EmbedLayer)), None)
        self.blocks = [layer for layer in layers if isinstance(layer, BlockLayer)]
        self.ring = {index: layer for index, layer in self.by_index.items() if index in model.ring}
        self.decode = {
            index: layer for index, layer in self.by_index.items() if isinstance(layer, DecodeLayer | LightDecodeLayer)
        }

    def forward(self, batch: RowBatch, exact_rows: bool, on_layer: OnLayer = _mind_no_layer) -> RowBatch:
        """Run the ring's layers of this stage.

        Args:
            exact_rows: run one row after the other, so that a row's result does not depend on the rows beside it.
            on_layer: told of each layer that has run, with exact rows once for each row.
        """
        if exact_rows and len(batch.rows) > 1:
            return RowBatch.join([self.forward(part, exact_rows, on_layer) for part in batch.split()])
        for index, layer in self.ring.items():
            batch = layer(batch)
            on_layer(index)
        return batch

    def new_decoder_states(self) -> dict[int, Any]:
        """State of a session that has decoded nothing, for each of the decoder's layers here."""
        return {index: layer.new_state() for index, layer in self.decode.items()}

    def decode_chunk(self, hidden: Tensor, states: Mapping[int, Any], on_layer: OnLayer = _mind_no_layer) -> Tensor:
        """Take a chunk through the decoder's layers here: from latents, or what the layer before gave."""
        for index, layer in self.decode.items():
            hidden = layer(hidden, states[index])
            on_layer(index)
        return hidden


class StreamModule(PipelineModule):
    """One stage of the model, cut at explicit boundaries. Builds and loads no layer of another stage.

    Args:
        config: with a resolved ``stages.partition``, whose number of stages is the world size.
        weights: as :func:`open_weights` found them for ``config``.
        device: where the layers go.
    """

    _layer_specs: list[LayerSpec | nn.Module]

    def __init__(self, config: StreamConfig, weights: ModelWeights, device: torch.device = CPU):
        assert config.stages.partition != "auto", "resolve the config first"
        # Set before the parent's __init__, which partitions and builds.
        self.partition: tuple[int, ...] = config.stages.partition
        self._model = config.layers
        self._empty_specs = layer_specs(config)
        specs = [FilledLayerSpec(spec, index, weights, device) for index, spec in enumerate(self._empty_specs)]
        # The parent prints its layer table.
        with contextlib.redirect_stdout(io.StringIO()):
            super().__init__(specs, num_stages=len(self.partition) - 1)
        self.layers = StageLayers(self._model, dict(zip(self._own_layers, self.forward_funcs, strict=True)))
        self.exact_rows = config.batch.runs_exact_rows(device.type == "cpu")

    @property
    def _own_layers(self) -> range:
        return stage_layers(self.partition, self.stage_id)

    def _partition_layers(self, method: str = "explicit") -> None:
        self.parts = list(self.partition)
        self._set_bounds(start=self._own_layers.start, stop=self._own_layers.stop)

    def forward(self, batch: RowBatch, on_layer: OnLayer = _mind_no_layer) -> RowBatch:
        """Run the ring's layers of this stage."""
        return self.layers.forward(batch, self.exact_rows, on_layer)

    def build_moved(self, index: int, parameters: Mapping[str, Tensor], device: torch.device) -> nn.Module:
        """A layer of the model with the parameters that it had on another stage."""
        # Building without weights changes how every thread registers parameters.
        with _BUILDING:
            layer = self._empty_specs[index].build()
            fill_moved(layer, parameters, device)
        return layer

    def repartition(self, partition: tuple[int, ...], arrived: Mapping[int, nn.Module]) -> None:
        """Hold this stage's layers of another partition.

        Args:
            arrived: those that it did not hold; those that it holds no more go.
        """
        layers = {**self.layers.by_index, **arrived}
        for index in self.layers.by_index:
            delattr(self, str(index))
        self.partition = partition
        self._partition_layers()
        own = {index: layers[index] for index in self._own_layers}
        self.forward_funcs: list[nn.Module] = []
        self.fwd_map: dict[str, int] = {}
        # The parent takes in a layer that stands in its spec's place as it is.
        specs = self._layer_specs
        self._layer_specs = [own.get(index, spec) for index, spec in enumerate(specs)]
        self._build()
        self._layer_specs = specs
        self.layers = StageLayers(self._model, own)

    @property
    def num_parameters(self) -> int:
        """Parameters that this stage holds."""
        return sum(parameter.numel() for parameter in self.parameters())


def build_all_layers(config: StreamConfig, device: torch.device) -> StageLayers:
    """The whole model in one place, without DeepSpeed: for the oracle and for tests."""
    weights = open_weights(config)
    specs = enumerate(layer_specs(config))
    return StageLayers(
        config.layers, {index: FilledLayerSpec(spec, index, weights, device).build() for index, spec in specs}
    )


def _vae_specs(config: StreamConfig) -> list[StreamLayerSpec]:
    """Encode, then the decoder's layers."""
    decode = [StreamLayerSpec(DecodeLayer, config.vae, part) for part in range(NUM_WAN_DECODE_LAYERS)]
    return [StreamLayerSpec(EncodeLayer, config.vae), *decode]


def _light_specs(config: StreamConfig) -> list[StreamLayerSpec]:
    sizes = (config.light_vae, config.vae)
    return [StreamLayerSpec(LightEncodeLayer, *sizes), StreamLayerSpec(LightDecodeLayer, *sizes)]
