"""The DiT as pipeline layers: embed, blocks, head. Each takes a :class:`RowBatch` and hands it on.

Shapes: R rows, C latent channels, N latent frames, h, w in latents, L tokens, D model width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch
from diffusers.models.normalization import FP32LayerNorm
from diffusers.models.transformers.transformer_wan import WanTimeTextImageEmbedding, WanTransformerBlock
from torch import Tensor, nn

from ds_stream.config import ModelConfig, StreamConfig
from ds_stream.core import PATCH_SIZE, PIXELS_PER_LATENT, PIXELS_PER_TOKEN, Row
from ds_stream.model.attention import (
    CachedCrossAttention,
    CachedSelfAttention,
    KeyValue,
    SelfAttentionRow,
    text_key_value,
)
from ds_stream.model.cache import RollingCache
from ds_stream.model.noise import NoiseSchedule
from ds_stream.model.rope import Angles, Rope
from ds_stream.model.window import ContextWindow


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
        from_video: whether chunks start from encoded video.
        blocks: indices of the blocks on this stage.
        device: where the caches live.
    """

    def __init__(self, config: StreamConfig, from_video: bool, blocks: Sequence[int], device: torch.device):
        context, video = config.context, config.video
        self.window = context_window(config)
        self.noise_schedule = NoiseSchedule(config.noise, from_video)
        self._model = config.model
        self._blocks = blocks
        self._device = device
        self._dtype = torch_dtype(config)
        self._sliding_sinks = context.sink_positions == "sliding" and context.num_sink_latent_frames > 0
        grid = (video.height // PIXELS_PER_TOKEN, video.width // PIXELS_PER_TOKEN)
        self._tokens_per_frame = grid[0] * grid[1]
        self._rope = Rope(config.model.head_dim, *grid, device)

    def new_caches(self) -> dict[int, RollingCache]:
        """Empty caches of a session, one for each block of this stage."""
        return {
            block: RollingCache(
                self.window,
                self._tokens_per_frame,
                self._model.num_heads,
                self._model.head_dim,
                self._sliding_sinks,
                self._dtype,
                self._device,
            )
            for block in self._blocks
        }

    def make(self, row: Row, caches: Mapping[int, RollingCache], texts: Mapping[int, KeyValue]) -> RowContext:
        """The context of ``row``, whose session has ``caches`` and whose prompt has ``texts``."""
        window = self.window
        own = window.frames(row.chunk)
        sink_angles = None
        if self._sliding_sinks:
            sink_angles = self._rope.angles(window.sliding_sink_position(row.chunk), window.num_sinks)
        return RowContext(
            row,
            self.noise_schedule.timesteps[row.step],
            self._rope.angles(own.start, len(own)),
            sink_angles,
            caches,
            texts,
        )


class EmbedLayer(nn.Module):
    """Patches, time embedding and text projection. Tensor names as in diffusers' ``WanTransformer3DModel``."""

    def __init__(self, config: ModelConfig):
        super().__init__()
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
        hidden_RLD = self.patch_embedding(batch.latents_RCNhw.to(weight.dtype)).flatten(2).transpose(1, 2).contiguous()
        timesteps = torch.tensor([row.timestep for row in batch.rows], device=weight.device)
        temb_RD = embedder.time_embedder(embedder.timesteps_proj(timesteps).to(weight.dtype))
        modulation_R6D = embedder.time_proj(embedder.act_fn(temb_RD)).unflatten(1, (6, -1))
        return replace(batch, hidden_RLD=hidden_RLD, temb_RD=temb_RD, modulation_R6D=modulation_R6D)

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
        rows = [
            SelfAttentionRow(row.row.chunk, row.row.step, row.angles, row.sink_angles, row.caches[self.index])
            for row in batch.rows
        ]
        texts = [row.texts[self.index] for row in batch.rows]
        return replace(batch, hidden_RLD=self.block(batch.hidden_RLD, texts, batch.modulation_R6D, rows))

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


def latent_shape(config: StreamConfig) -> tuple[int, int, int, int]:
    """Shape ``[C, N, h, w]`` of one chunk's latents."""
    return (
        config.vae.z_dim,
        config.context.num_latent_frames_per_chunk,
        config.video.height // PIXELS_PER_LATENT,
        config.video.width // PIXELS_PER_LATENT,
    )


def torch_dtype(config: StreamConfig) -> torch.dtype:
    """Type of weights and activations."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.device.dtype]
