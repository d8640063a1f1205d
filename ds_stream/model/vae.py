"""Streaming Wan VAE: diffusers' encoder as one layer, its decoder as several, with per-session convolution caches.

Chunk by chunk equals diffusers' one-shot ``AutoencoderKLWan`` bit for bit in fp32. Shapes: T pixel frames, N latent
frames, C latent channels; H, W in pixels, h, w in latents.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d, WanDecoder3d, WanEncoder3d
from torch import Tensor, nn

from ds_stream.core import NUM_WAN_DECODE_LAYERS, PIXEL_FRAMES_PER_LATENT_FRAME
from ds_stream.settings import VaeConfig

TEMPORAL_DOWNSAMPLE = (False, True, True)
"""Which of the three halvings of the picture also halve time: 8 x 8 pixels and 4 frames a latent."""
# What a kernel of three frames needs of the past.
_KEPT_FRAMES = 2


@dataclass(slots=True)
class VaeState:
    """Convolution caches of one session in one layer of the VAE, as diffusers lays them out."""

    features: list[Any] = field(default_factory=list)
    num_latent_frames: int = 0
    """Latent frames that have passed."""


class EncodeLayer(nn.Module):
    """First layer of the model: pixels to latents. Runs once per chunk, outside the ring."""

    latent_mean: Tensor
    latent_std: Tensor

    def __init__(self, config: VaeConfig):
        super().__init__()
        self.encoder = WanEncoder3d(
            dim=config.base_dim,
            z_dim=2 * config.z_dim,
            dim_mult=list(config.dim_mult),
            num_res_blocks=config.num_res_blocks,
            temperal_downsample=list(TEMPORAL_DOWNSAMPLE),
        )
        self.quant_conv = WanCausalConv3d(2 * config.z_dim, 2 * config.z_dim, 1)
        self._normalize = config.normalize_input_latents
        for name, values in latent_statistics(config).items():
            self.register_buffer(name, values, persistent=False)

    def new_state(self) -> VaeState:
        """State of a session that has seen nothing."""
        return _new_state(self.encoder)

    def forward(self, frames_THW3: Tensor, state: VaeState) -> Tensor:
        """The next frames of a session as latents ``[C, N, h, w]``, fp32.

        Args:
            frames_THW3: uint8 pixels; ``1 + 4(N - 1)`` frames at the start of a session, ``4N`` later.

        The mean of the posterior is taken, not a sample.
        """
        dtype = self.quant_conv.weight.dtype
        pixels_3THW = frames_THW3.permute(3, 0, 1, 2).to(torch.float32) / 127.5 - 1
        latents = []
        start = 0
        while start < pixels_3THW.shape[1]:
            stop = start + (PIXEL_FRAMES_PER_LATENT_FRAME if state.num_latent_frames else 1)
            piece = pixels_3THW[None, :, start:stop].to(dtype)
            hidden = self.encoder(piece, feat_cache=state.features, feat_idx=[0])
            latents.append(self.quant_conv(hidden)[0].chunk(2)[0])
            state.num_latent_frames += 1
            start = stop
        latents_CNhw = torch.cat(latents, dim=1).float()
        return (latents_CNhw - self.latent_mean) / self.latent_std if self._normalize else latents_CNhw


class DecodeLayer(nn.Module):
    """One of the last layers of the model, which together turn latents into pixels. Run once per chunk, outside the
    ring.

    Part 0 is the decoder's middle, each other part works at one size of picture; the last one gives pixels. Between
    parts go features ``[C, T, h, w]`` of all latent frames of a chunk. Tensor names are those of diffusers'
    ``AutoencoderKLWan``.
    """

    latent_mean: Tensor
    latent_std: Tensor

    def __init__(self, config: VaeConfig, part: int):
        super().__init__()
        self.part = part
        self.is_last = part == NUM_WAN_DECODE_LAYERS - 1
        self.decoder = _DecoderPart(config, part)
        if part == 0:
            self.post_quant_conv = WanCausalConv3d(config.z_dim, config.z_dim, 1)
            for name, values in latent_statistics(config).items():
                self.register_buffer(name, values, persistent=False)

    def new_state(self) -> VaeState:
        """State of a session that has seen nothing."""
        return _new_state(self.decoder)

    def forward(self, hidden: Tensor, state: VaeState) -> Tensor:
        """The next chunk of a session, one part further.

        Args:
            hidden: fp32 latents ``[C, N, h, w]`` for part 0, else the features that the part before gave.

        Returns:
            Features; of the last part uint8 pixels ``[T, H, W, 3]``: one frame for a session's first latent, four for
            others.
        """
        if not self.is_last:
            return self._run(hidden, state)
        pixels_3THW = self.decode(hidden, state)
        return ((pixels_3THW + 1) * 127.5).round().to(torch.uint8).permute(1, 2, 3, 0).contiguous()

    def decode(self, hidden: Tensor, state: VaeState) -> Tensor:
        """What the last part gives, before rounding: ``[3, T, H, W]`` in -1 to 1, fp32."""
        return self._run(hidden, state).float().clamp(-1, 1)

    def _run(self, hidden: Tensor, state: VaeState) -> Tensor:
        if self.part == 0:
            latents_1CNhw = (hidden * self.latent_std + self.latent_mean)[None]
            hidden = self.post_quant_conv(latents_1CNhw.to(self.post_quant_conv.weight.dtype))[0]
        pieces = []
        start = 0
        while start < hidden.shape[1]:
            stop = start + frames_per_latent(self.part, is_first=state.num_latent_frames == 0)
            pieces.append(self.decoder(hidden[None, :, start:stop], state.features)[0])
            state.num_latent_frames += 1
            start = stop
        return torch.cat(pieces, dim=1)


class _DecoderPart(nn.Module):
    """What one part runs of ``WanDecoder3d``, under the names that it has there."""

    def __init__(self, config: VaeConfig, part: int):
        super().__init__()
        whole = WanDecoder3d(
            dim=config.base_dim,
            z_dim=config.z_dim,
            dim_mult=list(config.dim_mult),
            num_res_blocks=config.num_res_blocks,
            temperal_upsample=list(TEMPORAL_DOWNSAMPLE[::-1]),
        )
        self._part = part
        if part == 0:
            self.conv_in, self.mid_block = whole.conv_in, whole.mid_block
        else:
            self.up_blocks = nn.ModuleDict({str(part - 1): whole.up_blocks[part - 1]})
        if part == NUM_WAN_DECODE_LAYERS - 1:
            self.norm_out, self.nonlinearity, self.conv_out = whole.norm_out, whole.nonlinearity, whole.conv_out

    def forward(self, hidden: Tensor, caches: list[Any]) -> Tensor:
        """Features ``[1, C, T, h, w]`` of one latent frame.

        Args:
            caches: one for each convolution, in the order in which they run; replaced by what the next latent needs.
        """
        place = [0]
        if self._part == 0:
            hidden = self.mid_block(_convolve(self.conv_in, hidden, caches, place), caches, place)
        else:
            (block,) = self.up_blocks.values()
            hidden = block(hidden, caches, place)
        if self._part == NUM_WAN_DECODE_LAYERS - 1:
            hidden = _convolve(self.conv_out, self.nonlinearity(self.norm_out(hidden)), caches, place)
        return hidden


def frames_per_latent(part: int, is_first: bool) -> int:
    """Frames that enter a part of the decoder for one latent frame; a session's first one stays one frame."""
    # The first two sizes of picture double their frames.
    return 1 if is_first else 2 ** max(0, min(part - 1, 2))


def decoder_input_shape(
    config: VaeConfig, part: int, latent_shape: tuple[int, int, int, int], is_first_chunk: bool
) -> tuple[int, int, int, int]:
    """Shape ``[C, T, h, w]`` of what enters a part of the decoder for one chunk.

    Args:
        latent_shape: ``[C, N, h, w]`` of the chunk's latents.
    """
    if part == 0:
        return latent_shape
    _, num_latent_frames, height, width = latent_shape
    num_later = num_latent_frames - 1
    num_frames = frames_per_latent(part, is_first_chunk) + num_later * frames_per_latent(part, is_first=False)
    # A size of picture halves its channels as it grows.
    widths = config.dim_mult[::-1]
    channels = config.base_dim * widths[0] if part == 1 else config.base_dim * widths[part - 2] // 2
    scale = 2 ** (part - 1)
    return (channels, num_frames, height * scale, width * scale)


def _new_state(half: nn.Module) -> VaeState:
    return VaeState([None for module in half.modules() if isinstance(module, WanCausalConv3d)])


def _convolve(convolution: nn.Module, hidden: Tensor, caches: list[Any], place: list[int]) -> Tensor:
    """A causal convolution over time that sees the last frames of the piece before, and keeps this one's."""
    past = caches[place[0]]
    kept = hidden[:, :, -_KEPT_FRAMES:]
    if past is not None and kept.shape[2] < _KEPT_FRAMES:
        kept = torch.cat([past[:, :, -1:], kept], dim=2)
    # A clone, because a slice would keep the frames beside it alive until the next piece.
    caches[place[0]] = kept.clone()
    place[0] += 1
    return convolution(hidden, past)


def latent_statistics(config: VaeConfig) -> dict[str, Tensor]:
    """Mean and standard deviation of each latent channel, ``[C, 1, 1, 1]``, as buffers of a layer."""
    statistics = {"latent_mean": config.latent_mean, "latent_std": config.latent_std}
    return {name: torch.tensor(values).view(-1, 1, 1, 1) for name, values in statistics.items()}
