"""The DiT as pipeline layers: embed, blocks, head. Each takes a :class:`RowBatch` and hands it on.

Shapes: R rows, C latent channels, N latent frames, h, w in latents, L tokens, D model width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch
from diffusers.models.normalization import FP32LayerNorm
from diffusers.models.transformers.transformer_wan import WanTimeTextImageEmbedding, WanTransformerBlock
from torch import Tensor, nn

from ds_stream.core import PATCH_SIZE, PIXELS_PER_LATENT, PIXELS_PER_TOKEN, Row
from ds_stream.model.attention import (
    CachedCrossAttention,
    CachedSelfAttention,
    KeyValue,
    SelfAttentionRow,
    text_key_value,
)
from ds_stream.model.cache import CacheShape, RollingCache
from ds_stream.model.noise import NoiseSchedule
from ds_stream.model.rope import Angles, Rope
from ds_stream.model.window import ContextWindow
from ds_stream.settings import ModelConfig, StreamConfig


@dataclass(frozen=True, slots=True)
class RowContext:
    """What the layers need to know of one row, besides its tensors."""

    row: Row
    timestep: float
    angles: Angles
    sink_angles: Angles | None
    caches: Mapping[int, RollingCache]
    """The session's cache for each block of this stage."""
    texts: Mapping[int, KeyValue]
    """The prompt's cross-attention keys/values for each block of this stage."""
    source_CNhw: Tensor | None = None
    """Latents of the source chunk, fp32, where the model takes them and there is one; for the embed layer."""


@dataclass(frozen=True, slots=True)
class RowBatch:
    """The rows that one forward runs together. Only the fields up to a layer are set when that layer sees them."""

    rows: Sequence[RowContext]
    latents_RCNhw: Tensor
    """Noisy latents, fp32."""
    hidden_RLD: Tensor | None = None
    """Hidden states; after the embed layer."""
    temb_RD: Tensor | None = None
    """Time embedding; after the embed layer."""
    modulation_R6D: Tensor | None = None
    """Projected time embedding; after the embed layer."""
    sink_choice_R: Tensor | None = None
    """Which sink each row's chunk replaces, int64; after the first block of a model with adaptive sinks."""
    flow_RCNhw: Tensor | None = None
    """Predicted flow ``noise - x0``, fp32; after the head layer."""

    def split(self) -> "list[RowBatch]":
        """The same rows, each as a batch of its own."""
        parts = {name: tensor.split(1) for name, tensor in self._tensors().items()}
        return [
            RowBatch([row], **{name: tensors[index] for name, tensors in parts.items()})
            for index, row in enumerate(self.rows)
        ]

    @staticmethod
    def join(batches: "Sequence[RowBatch]") -> "RowBatch":
        """Undo :meth:`split`."""
        parts = [batch._tensors() for batch in batches]
        rows = [row for batch in batches for row in batch.rows]
        return RowBatch(rows, **{name: torch.cat([part[name] for part in parts]) for name in parts[0]})

    def _tensors(self) -> dict[str, Tensor]:
        names = [field.name for field in fields(self) if field.name != "rows"]
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


class RowContextFactory:
    """Makes row contexts: positions and timesteps from a row's integers, caches of the right shape.

    Args:
        device: where the caches live.
    """

    def __init__(self, config: StreamConfig, device: torch.device):
        self.cache_shape = cache_shape(config)
        self.noise_schedule = NoiseSchedule(config.noise)
        self._device = device
        self._dtype = torch_dtype(config)
        self._rope = Rope(config.model.head_dim, *_token_grid(config), device)

    def new_caches(self, blocks: Sequence[int]) -> dict[int, RollingCache]:
        """Empty caches of a session, one for each of these blocks."""
        return {block: RollingCache(self.cache_shape, self._dtype, self._device) for block in blocks}

    def make(
        self,
        row: Row,
        caches: Mapping[int, RollingCache],
        texts: Mapping[int, KeyValue],
        source_CNhw: Tensor | None = None,
    ) -> RowContext:
        """The context of ``row``, whose session has ``caches`` and whose prompt has ``texts``."""
        window = self.cache_shape.window
        own = window.frames(row.chunk)
        sink_angles = None
        if self.cache_shape.sliding_sinks:
            sink_angles = self._rope.angles(window.sliding_sink_position(row.chunk), window.num_sinks)
        return RowContext(
            row,
            self.noise_schedule.timestep(row.step, row.strength),
            self._rope.angles(own.start, len(own)),
            sink_angles,
            caches,
            texts,
            source_CNhw,
        )


class EmbedLayer(nn.Module):
    """Patches, time embedding and text projection. Tensor names as in diffusers' ``WanTransformer3DModel``."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self._takes_source = config.takes_source
        self.patch_embedding = nn.Conv3d(config.in_channels, config.dim, kernel_size=PATCH_SIZE, stride=PATCH_SIZE)
        self.condition_embedder = WanTimeTextImageEmbedding(
            dim=config.dim,
            time_freq_dim=config.freq_dim,
            time_proj_dim=6 * config.dim,
            text_embed_dim=config.text_dim,
        )

    def forward(self, batch: RowBatch) -> RowBatch:
        weight = self.patch_embedding.weight
        embedder = self.condition_embedder
        latents_RCNhw = self._with_source(batch) if self._takes_source else batch.latents_RCNhw
        hidden_RLD = self.patch_embedding(latents_RCNhw.to(weight.dtype)).flatten(2).transpose(1, 2).contiguous()
        # Filled on the device: copying them there would make the host wait for it.
        timesteps = torch.cat([torch.full((1,), row.timestep, device=weight.device) for row in batch.rows])
        # Diffusers keeps the time embedder in fp32, whatever the other weights are.
        sinusoids = embedder.timesteps_proj(timesteps).to(embedder.time_embedder.linear_1.weight.dtype)
        temb_RD = embedder.time_embedder(sinusoids).to(weight.dtype)
        modulation_R6D = embedder.time_proj(embedder.act_fn(temb_RD)).unflatten(1, (6, -1))
        return replace(batch, hidden_RLD=hidden_RLD, temb_RD=temb_RD, modulation_R6D=modulation_R6D)

    @staticmethod
    def _with_source(batch: RowBatch) -> Tensor:
        """The source chunk's latents after the noisy ones on the channel axis; zeros where there is none."""
        sources = [
            torch.zeros_like(latents) if row.source_CNhw is None else row.source_CNhw
            for row, latents in zip(batch.rows, batch.latents_RCNhw, strict=True)
        ]
        return torch.cat((batch.latents_RCNhw, torch.stack(sources)), dim=1)

    def project_text(self, embedding: Tensor) -> Tensor:
        """A text embedding ``[tokens, text_dim]`` as context ``[tokens, D]`` for the blocks' cross-attention."""
        weight = self.patch_embedding.weight
        return self.condition_embedder.text_embedder(embedding.to(device=weight.device, dtype=weight.dtype))


class BlockLayer(nn.Module):
    """Diffusers' transformer block, attending to the rolling cache.

    Args:
        index: which block of the model this is.
    """

    def __init__(self, config: ModelConfig, index: int):
        super().__init__()
        self.index = index
        self.block = WanTransformerBlock(
            config.dim, config.ffn_dim, config.num_heads, cross_attn_norm=True, eps=config.eps
        )
        self.block.attn1.set_processor(CachedSelfAttention())
        self.block.attn2.set_processor(CachedCrossAttention())

    def forward(self, batch: RowBatch) -> RowBatch:
        choices: Sequence[Tensor | None] = [None] * len(batch.rows)
        # The first block decides itself, whatever a stage before it may have filled in.
        if batch.sink_choice_R is not None and self.index > 0:
            choices = batch.sink_choice_R.unbind()
        rows = [
            SelfAttentionRow(
                row.row.chunk, row.row.step, row.angles, row.sink_angles, row.caches[self.index], sink_choice
            )
            for row, sink_choice in zip(batch.rows, choices, strict=True)
        ]
        texts = [row.texts[self.index] for row in batch.rows]
        hidden_RLD = self.block(batch.hidden_RLD, texts, batch.modulation_R6D, rows)
        if self.index == 0 and rows[0].cache.shape.adaptive_sink_threshold is not None:
            decided = torch.stack([row.cache.sink_choice(row.chunk, row.step) for row in rows])
            return replace(batch, hidden_RLD=hidden_RLD, sink_choice_R=decided)
        return replace(batch, hidden_RLD=hidden_RLD)

    def text_key_value(self, context: Tensor) -> KeyValue:
        """Cross-attention keys/values of a projected text ``[tokens, D]``."""
        return text_key_value(self.block.attn2, context)


class HeadLayer(nn.Module):
    """Final norm, modulation and projection back to latents. Tensor names as in ``WanTransformer3DModel``."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.norm_out = FP32LayerNorm(config.dim, config.eps, elementwise_affine=False)
        self.proj_out = nn.Linear(config.dim, config.out_channels * PATCH_SIZE[0] * PATCH_SIZE[1] * PATCH_SIZE[2])
        self.scale_shift_table = nn.Parameter(torch.randn(1, 2, config.dim) / config.dim**0.5)

    def forward(self, batch: RowBatch) -> RowBatch:
        assert batch.hidden_RLD is not None and batch.temb_RD is not None
        shift, scale = (self.scale_shift_table + batch.temb_RD[:, None]).chunk(2, dim=1)
        hidden_RLD = (self.norm_out(batch.hidden_RLD.float()) * (1 + scale) + shift).type_as(batch.hidden_RLD)
        patches = self.proj_out(hidden_RLD)
        num_rows, _, num_frames, height, width = batch.latents_RCNhw.shape
        grid = (num_frames // PATCH_SIZE[0], height // PATCH_SIZE[1], width // PATCH_SIZE[2])
        flow = patches.reshape(num_rows, *grid, *PATCH_SIZE, -1).permute(0, 7, 1, 4, 2, 5, 3, 6)
        return replace(batch, flow_RCNhw=flow.reshape(num_rows, -1, num_frames, height, width).float())


def context_window(config: StreamConfig) -> ContextWindow:
    """The context rule that ``config`` asks for."""
    context = config.context
    return ContextWindow(
        num_latent_frames=context.num_latent_frames_per_chunk,
        num_window=context.num_window_latent_frames,
        num_sinks=context.num_sink_latent_frames,
        lead=context.lead,
        num_passes=config.noise.num_passes,
    )


def cache_shape(config: StreamConfig) -> CacheShape:
    """Shape of every block's cache of a session."""
    context, model = config.context, config.model
    height, width = _token_grid(config)
    return CacheShape(
        context_window(config),
        height * width,
        model.num_heads,
        model.head_dim,
        sliding_sinks=context.sink_positions == "sliding" and context.num_sink_latent_frames > 0,
        adaptive_sink_threshold=context.adaptive_sink_threshold if context.adaptive_sinks else None,
    )


def latent_shape(config: StreamConfig) -> tuple[int, int, int, int]:
    """Shape ``[C, N, h, w]`` of one chunk's latents."""
    return (
        config.vae.z_dim,
        config.context.num_latent_frames_per_chunk,
        config.video.height // PIXELS_PER_LATENT,
        config.video.width // PIXELS_PER_LATENT,
    )


def message_fields(config: StreamConfig, num_rows: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shape and type of what a stage hands on: latents, hidden, time embedding, modulation, perhaps sink choices.

    In the order of :class:`RowBatch`.
    """
    shape, dim, dtype = latent_shape(config), config.model.dim, torch_dtype(config)
    num_tokens = shape[1] * cache_shape(config).tokens_per_frame
    fields = [
        ((num_rows, *shape), torch.float32),
        ((num_rows, num_tokens, dim), dtype),
        ((num_rows, dim), dtype),
        ((num_rows, 6, dim), dtype),
    ]
    return [*fields, ((num_rows,), torch.int64)] if config.context.adaptive_sinks else fields


def torch_dtype(config: StreamConfig) -> torch.dtype:
    """Type of weights and activations."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.device.dtype]


def _token_grid(config: StreamConfig) -> tuple[int, int]:
    """Token rows and columns of a latent frame."""
    return config.video.height // PIXELS_PER_TOKEN, config.video.width // PIXELS_PER_TOKEN
