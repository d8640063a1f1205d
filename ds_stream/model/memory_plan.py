"""What each stage will hold in memory, worked out from the config before anything is loaded.

Weights and caches are exact; activations and the VAE's working memory are estimates.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from ds_stream.core import NUM_WAN_DECODE_LAYERS, PIXEL_FRAMES_PER_LATENT_FRAME
from ds_stream.model.layers import BlockLayer, cache_shape, latent_shape, message_fields, torch_dtype
from ds_stream.model.light_vae import LightDecodeLayer, LightEncodeLayer
from ds_stream.model.pipeline import decoder_input_field, layer_specs
from ds_stream.model.vae import DecodeLayer, EncodeLayer, decoder_input_shape
from ds_stream.model.weights.load import parameter_dtype
from ds_stream.partition import Ring
from ds_stream.settings import StreamConfig

MIB, GIB = 2**20, 2**30
# Four frames of full size and width that a half of the VAE holds at its peak. Wan's encoder: measured at 480x832 on an
# H200, see tests/results. The light VAE: a level's input, the concatenation with its past, and its output.
_ENCODE_PICTURES, _LIGHT_PICTURES = 10.0, 4.0
# What a part of the Wan decoder holds at its peak besides its caches and a chunk's features before and after it, in
# pictures that it makes of one latent frame. With it a whole decoder holds the 17 of full size and width that were
# measured for one latent frame a chunk, of which 6.2 are caches.
_DECODE_PICTURES = 9.34


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
    specs, ring = layer_specs(config), config.layers.ring_of(partition)
    return [
        _plan_stage(config, specs[start:stop], stage, ring, exact_rows, num_message_buffers)
        for stage, (start, stop) in enumerate(itertools.pairwise(partition))
    ]


def _plan_stage(
    config: StreamConfig, specs: Sequence, stage: int, ring: Ring, exact_rows: bool, num_message_buffers: int
) -> StageMemory:
    dtype, model = torch_dtype(config), config.model
    layers = [spec.build() for spec in specs]
    num_blocks = sum(isinstance(layer, BlockLayer) for layer in layers)
    num_tokens = config.context.num_latent_frames_per_chunk * cache_shape(config).tokens_per_frame

    # A block's widest moment: its hidden states several times, some in fp32, and the feed-forward's hidden channels.
    rows_at_once = 1 if exact_rows else config.batch.max_rows
    block = rows_at_once * num_tokens * (10 * model.dim + 2 * model.ffn_dim) * dtype.itemsize
    message = sum(_num_bytes(field) for field in message_fields(config, config.batch.max_rows))
    # While a prompt fades, every chunk in the ring may have one of its own.
    num_prompts = ring.num_stages * config.batch.max_rows if config.text.blend_chunks else 1
    num_links = (ring.first < stage <= ring.last) + (ring.first <= stage < ring.last)
    is_in_ring = ring.first <= stage <= ring.last
    return StageMemory(
        weights=sum(_weight_bytes(layer, dtype) for layer in layers),
        cache=num_blocks * cache_shape(config).num_elements() * dtype.itemsize,
        activations=is_in_ring * block + num_links * num_message_buffers * message,
        vae=max(_single_layer_memory(config, layers), _decoder_memory(config, layers)),
        text=is_in_ring
        * (num_prompts + 1)
        * (model.num_text_tokens * model.dim * (2 * num_blocks + 1) * dtype.itemsize),
    )


def _single_layer_memory(config: StreamConfig, layers: Sequence[nn.Module]) -> float:
    """Of the larger half of a VAE that is one layer: they do not work at the same time. 0 without one."""
    pixels = PIXEL_FRAMES_PER_LATENT_FRAME * config.video.width * config.video.height
    channels = {
        EncodeLayer: _ENCODE_PICTURES * config.vae.base_dim,
        LightEncodeLayer: _LIGHT_PICTURES * config.light_vae.encoder_width,
        LightDecodeLayer: _LIGHT_PICTURES * config.light_vae.decoder_widths[-1],
    }
    return max(channels.get(type(layer), 0.0) for layer in layers) * pixels * torch_dtype(config).itemsize


def _decoder_memory(config: StreamConfig, layers: Sequence[nn.Module]) -> float:
    """Of the Wan decoder's parts among ``layers``: they work one after the other, but each keeps its caches."""
    parts = [layer for layer in layers if isinstance(layer, DecodeLayer)]
    working = max((_decoder_working_memory(config, layer.part) for layer in parts), default=0.0)
    return working + sum(_decoder_cache_bytes(config, layer) for layer in parts)


def _decoder_working_memory(config: StreamConfig, part: int) -> float:
    # The last part gives pixels, which are small beside the features that it works on.
    last = NUM_WAN_DECODE_LAYERS - 1
    channels, _, height, width = latent_shape(config)
    picture = decoder_input_shape(config.vae, min(part + 1, last), (channels, 1, height, width), is_first_chunk=False)
    ends = range(part, min(part + 1, last) + 1)
    features = sum(_num_bytes(decoder_input_field(config, end, is_first_chunk=False)) for end in ends)
    return _DECODE_PICTURES * math.prod(picture) * torch_dtype(config).itemsize + features


@torch.no_grad()
def _decoder_cache_bytes(config: StreamConfig, layer: DecodeLayer) -> int:
    """Of one session's convolution caches, as two chunks of tensors without memory leave them."""
    meta = torch.device("meta")
    layer = layer.to(device=meta, dtype=torch_dtype(config))
    state = layer.new_state()
    for is_first_chunk in (True, False):
        shape, dtype = decoder_input_field(config, layer.part, is_first_chunk)
        layer(torch.empty(shape, dtype=dtype, device=meta), state)
    return sum(cache.nbytes for cache in state.features if isinstance(cache, Tensor))


def _num_bytes(field: tuple[tuple[int, ...], torch.dtype]) -> int:
    shape, dtype = field
    return math.prod(shape) * dtype.itemsize


def layer_bytes(config: StreamConfig) -> tuple[float, ...]:
    """What each layer takes while one session streams: its weights, and of a block the cache and the text's keys and
    values."""
    dtype, model = torch_dtype(config), config.model
    block = cache_shape(config).num_elements() + 4 * model.num_text_tokens * model.dim
    layers = [spec.build() for spec in layer_specs(config)]
    return tuple(
        _weight_bytes(layer, dtype) + isinstance(layer, BlockLayer) * block * dtype.itemsize for layer in layers
    )


def _weight_bytes(layer: nn.Module, dtype: torch.dtype) -> int:
    return sum(
        parameter.numel() * parameter_dtype(layer, name, dtype).itemsize
        for name, parameter in layer.named_parameters()
    )


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
