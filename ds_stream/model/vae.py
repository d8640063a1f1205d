"""Streaming Wan VAE: diffusers' encoder and decoder, each as a layer of its own, with per-session convolution caches.

Chunk by chunk equals diffusers' one-shot ``AutoencoderKLWan`` bit for bit in fp32. Shapes: T pixel frames, N latent
frames, C latent channels; H, W in pixels, h, w in latents.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d, WanDecoder3d, WanEncoder3d
from torch import Tensor, nn

from ds_stream.core import PIXEL_FRAMES_PER_LATENT_FRAME
from ds_stream.settings import VaeConfig

TEMPORAL_DOWNSAMPLE = (False, True, True)
"""Which of the three halvings of the picture also halve time: 8 x 8 pixels and 4 frames a latent."""


@dataclass(slots=True)
class VaeState:
    """Convolution caches of one session in one half of the VAE, as diffusers lays them out."""

    features: list[Any] = field(default_factory=list)
    num_latent_frames: int = 0
    """Latent frames that have passed."""


class _VaeHalf(nn.Module):
    """What encoder and decoder share: latent statistics, and a state per session."""

    latent_mean: Tensor
    latent_std: Tensor

    def __init__(self, config: VaeConfig):
        super().__init__()
        for name, values in latent_statistics(config).items():
            self.register_buffer(name, values, persistent=False)

    def _count_convolutions(self, half: nn.Module) -> None:
        self._num_convolutions = sum(isinstance(module, WanCausalConv3d) for module in half.modules())

    def new_state(self) -> VaeState:
        """State of a session that has seen nothing."""
        return VaeState([None] * self._num_convolutions)


class EncodeLayer(_VaeHalf):
    """First layer of the model: pixels to latents. Runs once per chunk, outside the ring."""

    def __init__(self, config: VaeConfig):
        super().__init__(config)
        self.encoder = WanEncoder3d(
            dim=config.base_dim,
            z_dim=2 * config.z_dim,
            dim_mult=list(config.dim_mult),
            num_res_blocks=config.num_res_blocks,
            temperal_downsample=list(TEMPORAL_DOWNSAMPLE),
        )
        self.quant_conv = WanCausalConv3d(2 * config.z_dim, 2 * config.z_dim, 1)
        self._normalize = config.normalize_input_latents
        self._count_convolutions(self.encoder)

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


class DecodeLayer(_VaeHalf):
    """Last layer of the model: latents to pixels. Runs once per chunk, outside the ring."""

    def __init__(self, config: VaeConfig):
        super().__init__(config)
        self.post_quant_conv = WanCausalConv3d(config.z_dim, config.z_dim, 1)
        self.decoder = WanDecoder3d(
            dim=config.base_dim,
            z_dim=config.z_dim,
            dim_mult=list(config.dim_mult),
            num_res_blocks=config.num_res_blocks,
            temperal_upsample=list(TEMPORAL_DOWNSAMPLE[::-1]),
        )
        self._count_convolutions(self.decoder)

    def forward(self, latents_CNhw: Tensor, state: VaeState) -> Tensor:
        """The next latents of a session as uint8 pixels ``[T, H, W, 3]``: one frame for the first, four for others."""
        pixels_3THW = self.decode(latents_CNhw, state)
        return ((pixels_3THW + 1) * 127.5).round().to(torch.uint8).permute(1, 2, 3, 0).contiguous()

    def decode(self, latents_CNhw: Tensor, state: VaeState) -> Tensor:
        """The same before rounding: ``[3, T, H, W]`` in -1 to 1, fp32."""
        dtype = self.post_quant_conv.weight.dtype
        hidden = self.post_quant_conv((latents_CNhw * self.latent_std + self.latent_mean)[None].to(dtype))
        pieces = []
        for index in range(hidden.shape[2]):
            piece = hidden[:, :, index : index + 1]
            pieces.append(
                self.decoder(piece, feat_cache=state.features, feat_idx=[0], first_chunk=state.num_latent_frames == 0)[
                    0
                ]
            )
            state.num_latent_frames += 1
        return torch.cat(pieces, dim=1).float().clamp(-1, 1)


def latent_statistics(config: VaeConfig) -> dict[str, Tensor]:
    """Mean and standard deviation of each latent channel, ``[C, 1, 1, 1]``, as buffers of a layer."""
    statistics = {"latent_mean": config.latent_mean, "latent_std": config.latent_std}
    return {name: torch.tensor(values).view(-1, 1, 1, 1) for name, values in statistics.items()}
