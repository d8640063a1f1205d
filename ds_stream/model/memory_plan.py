"""What each stage will hold in memory, worked out from the config before anything is loaded.

Weights and caches are exact; activations and the VAE's working memory are estimates.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from torch import nn

from ds_stream.core import PIXEL_FRAMES_PER_LATENT_FRAME
from ds_stream.model.layers import BlockLayer, cache_shape, message_fields, torch_dtype
from ds_stream.model.light_vae import LightDecodeLayer, LightEncodeLayer
from ds_stream.model.pipeline import layer_specs
from ds_stream.model.vae import DecodeLayer, EncodeLayer
from ds_stream.model.weights.load import parameter_dtype
from ds_stream.settings import StreamConfig

MIB, GIB = 2**20, 2**30
# Four frames of full size and width that a half of the Wan VAE holds at its peak: measured at 480x832 on an H200, see
# tests/results. The light one: a level's input, the concatenation with its past, and its output.
_ENCODE_PICTURES, _DECODE_PICTURES, _LIGHT_PICTURES = 10.0, 17.0, 4.0


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of one stage, while one session streams."""

    weights: float
    cache: float
    """Rolling caches of one session."""
    activations: float
    """Of the largest batch, and the messages between stages. An estimate."""
    vae: float
    """Working memory of encoding or decoding, convolution caches included. An estimate."""
    text: float
    """Cross-attention keys/values of the prompts in the ring and of the one that follows."""

    @property
    def total(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))


def plan_memory(config: StreamConfig, exact_rows: bool, num_message_buffers: int) -> list[StageMemory]:
    """The memory of every stage.

    Args:
        config: with a resolved partition.
        exact_rows: whether a batch's rows run one after the other.
        num_message_buffers: message buffers of a link.
    """
    partition = config.stages.partition
    assert partition != "auto", "resolve the config first"
    specs = layer_specs(config)
    return [
        _plan_stage(config, specs[start:stop], stage, exact_rows, num_message_buffers)
        for stage, (start, stop) in enumerate(itertools.pairwise(partition))
    ]


def _plan_stage(
    config: StreamConfig, specs: Sequence, stage: int, exact_rows: bool, num_message_buffers: int
) -> StageMemory:
    dtype, model = torch_dtype(config), config.model
    layers = [spec.build() for spec in specs]
    num_stages = len(config.stages.partition) - 1
    num_blocks = sum(isinstance(layer, BlockLayer) for layer in layers)
    num_tokens = config.context.num_latent_frames_per_chunk * cache_shape(config).tokens_per_frame

    # A block's widest moment: its hidden states several times, some in fp32, and the feed-forward's hidden channels.
    rows_at_once = 1 if exact_rows else config.batch.max_rows
    block = rows_at_once * num_tokens * (10 * model.dim + 2 * model.ffn_dim) * dtype.itemsize
    fields_of_message = message_fields(config, config.batch.max_rows)
    message = sum(math.prod(shape) * of_type.itemsize for shape, of_type in fields_of_message)
    # While a prompt fades, every chunk in the ring may have one of its own.
    num_prompts = num_stages * config.batch.max_rows if config.text.blend_chunks else 1
    num_links = (stage > 0) + (stage < num_stages - 1)
    return StageMemory(
        weights=sum(
            parameter.numel() * parameter_dtype(layer, name, dtype).itemsize
            for layer in layers
            for name, parameter in layer.named_parameters()
        ),
        cache=num_blocks * cache_shape(config).num_elements() * dtype.itemsize,
        activations=block + num_links * num_message_buffers * message,
        vae=max((_vae_working_memory(config, layer) for layer in layers), default=0.0),
        text=(num_prompts + 1) * model.num_text_tokens * model.dim * (2 * num_blocks + 1) * dtype.itemsize,
    )


def _vae_working_memory(config: StreamConfig, layer: nn.Module) -> float:
    """Of one half of a VAE, which works while the other does not; 0 for any other layer."""
    pixels = PIXEL_FRAMES_PER_LATENT_FRAME * config.video.width * config.video.height
    light, wan_width = config.light_vae, config.vae.base_dim
    channels = {
        EncodeLayer: _ENCODE_PICTURES * wan_width,
        DecodeLayer: _DECODE_PICTURES * wan_width,
        LightEncodeLayer: _LIGHT_PICTURES * light.encoder_width,
        LightDecodeLayer: _LIGHT_PICTURES * light.decoder_widths[-1],
    }
    return channels.get(type(layer), 0.0) * pixels * torch_dtype(config).itemsize


def describe_plan(plan: Sequence[StageMemory], partition: Sequence[int]) -> str:
    """The plan as a table, in MiB."""
    names = [field.name for field in fields(StageMemory)]
    rows = [["stage", "layers", *names, "total"]]
    for stage, memory in enumerate(plan):
        amounts = [*(getattr(memory, name) for name in names), memory.total]
        layers = f"{partition[stage]}-{partition[stage + 1] - 1}"
        rows.append([str(stage), layers, *(f"{amount / MIB:,.1f}" for amount in amounts)])
    totals = [sum(getattr(memory, name) for memory in plan) for name in names]
    rows.append(["all", f"{partition[0]}-{partition[-1] - 1}", *(f"{x / MIB:,.1f}" for x in [*totals, sum(totals)])])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(["memory in MiB, one session (activations and vae are estimates):", *lines])


def check_fits(plan: Sequence[StageMemory], available: float, where: str) -> None:
    """Raise :class:`ValueError` if the stages that share one memory do not fit, naming what to lower.

    Args:
        plan: of those stages.
        available: bytes.
        where: that memory, in words.
    """
    needed = sum(memory.total for memory in plan)
    if needed <= available:
        return
    remedies = {
        "weights": "more GPUs, a smaller model or device.dtype bfloat16",
        "cache": "context.num_window_latent_frames, num_sink_latent_frames or the video's size",
        "activations": "batch.max_rows, context.num_latent_frames_per_chunk or the video's size",
        "vae": 'the video\'s size, or light_vae.use "both"',
        "text": "model.num_text_tokens",
    }
    largest = max(remedies, key=lambda name: sum(getattr(memory, name) for memory in plan))
    raise ValueError(
        f"{where} has {available / GIB:.1f} GiB free, but the stages on it need {needed / GIB:.1f} GiB, most of it "
        f"{largest}; change stream settings: {remedies[largest]}"
    )
