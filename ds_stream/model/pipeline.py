"""The model as one list of ``LayerSpec``s, and the ``PipelineModule`` that builds a stage's share of it.

The list is ``[encode | embed, block x N, head | decode]``. Encode and decode run once per chunk; the layers between
them are the ring's and run once per pass.
"""

import contextlib
import io
from collections.abc import Sequence

import torch
from deepspeed.runtime.pipe.module import LayerSpec, PipelineModule
from torch import nn

from ds_stream.model.layers import BlockLayer, EmbedLayer, HeadLayer, RowBatch, torch_dtype
from ds_stream.model.vae import DecodeLayer, EncodeLayer
from ds_stream.model.weights import draw_random_weights
from ds_stream.settings import StreamConfig


def layer_specs(config: StreamConfig) -> list[LayerSpec]:
    """The whole model, not yet built."""
    return [
        LayerSpec(EncodeLayer, config.vae),
        LayerSpec(EmbedLayer, config.model),
        *(LayerSpec(BlockLayer, config.model, index) for index in range(config.model.num_layers)),
        LayerSpec(HeadLayer, config.model),
        LayerSpec(DecodeLayer, config.vae),
    ]


class StageLayers:
    """The layers of one stage, by what they are for."""

    def __init__(self, layers: Sequence[nn.Module]):
        self.encode = next((layer for layer in layers if isinstance(layer, EncodeLayer)), None)
        self.embed = next((layer for layer in layers if isinstance(layer, EmbedLayer)), None)
        self.blocks = [layer for layer in layers if isinstance(layer, BlockLayer)]
        self.decode = next((layer for layer in layers if isinstance(layer, DecodeLayer)), None)
        self.ring = [layer for layer in layers if not isinstance(layer, EncodeLayer | DecodeLayer)]

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


def finish_layer(layer: nn.Module, config: StreamConfig, layer_index: int) -> None:
    """Give a freshly built layer its weights, cast and freeze it."""
    draw_random_weights(layer, config.model.weights_seed, layer_index)
    layer.eval().requires_grad_(False)
    # Parameters alone: latents are fp32 whatever the weights are, and so are the buffers with their statistics.
    for parameter in layer.parameters():
        parameter.data = parameter.data.to(torch_dtype(config))


class StreamModule(PipelineModule):
    """One stage of the model, cut at explicit boundaries. Builds no layer of another stage.

    Args:
        config: with a resolved ``stages.partition``, whose number of stages is the world size.
    """

    def __init__(self, config: StreamConfig):
        assert config.stages.partition != "auto", "resolve the config first"
        # Set before the parent's __init__, which partitions and builds.
        self.partition = list(config.stages.partition)
        # The parent prints its layer table.
        with contextlib.redirect_stdout(io.StringIO()):
            super().__init__(layer_specs(config), num_stages=len(self.partition) - 1)
        for offset, layer in enumerate(self.forward_funcs):
            finish_layer(layer, config, self._local_start + offset)
        self.layers = StageLayers(self.forward_funcs)
        exact_rows = config.batch.exact_rows
        self.exact_rows = next(self.parameters()).device.type == "cpu" if exact_rows == "auto" else exact_rows

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
    layers = [spec.build() for spec in layer_specs(config)]
    for index, layer in enumerate(layers):
        finish_layer(layer, config, index)
        layer.to(device)
    return StageLayers(layers)
