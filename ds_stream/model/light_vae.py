"""Streaming light VAE: TAEHV's encoder and decoder for Wan 2.1 latents, each as a layer of its own.

Source: ``taehv.py`` of github.com/madebyollin/taehv; parameters are named as in its ``taew2_1.pth``. All convolutions
are over single frames; time passes through memory blocks alone, which see their own input of the previous frame, so
that a session needs no more state than that. Latents are the DiT's normalised ones, without mean and deviation.

A latent is the unit of work: the frames of a level that belong to it share convolution calls, and no call spans two
latents. PyTorch's fp32 convolutions on CPUs round differently for other batch sizes; with shapes that do not depend on
how a clip is cut into calls, every cut gives the same bits.

Shapes: T frames (pixel frames, or those of the level at hand), N latent frames, C channels; H, W in pixels, h, w in
latents, or of the level at hand.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from ds_stream.core import PIXEL_FRAMES_PER_LATENT_FRAME
from ds_stream.model.vae import latent_statistics
from ds_stream.settings import LightVaeConfig, VaeConfig

POOLED_FRAMES = (2, 2, 1)
"""Frames that each level of the encoder joins into one: 4 frames a latent."""

GROWN_FRAMES = (1, 2, 2)
"""Frames that each level of the decoder makes of one."""


@dataclass(slots=True)
class LightVaeState:
    """What one session remembers in one half of the light VAE."""

    previous_inputs: list[Tensor | None]
    """Per memory block its input of the frame before, ``[1, C, h, w]``; None, read as zeros, at the start."""
    num_latent_frames: int = 0
    """Latent frames that have passed."""


class MemoryBlock(nn.Module):
    """Residual block over a frame and the one before it."""

    def __init__(self, width: int):
        super().__init__()
        self.conv = nn.Sequential(
            _conv(2 * width, width), nn.ReLU(), _conv(width, width), nn.ReLU(), _conv(width, width)
        )

    def forward(self, frames_TChw: Tensor, previous_1Chw: Tensor) -> Tensor:
        """``[T, C, h, w]``; ``previous_1Chw`` is the input frame before the first of these."""
        past_TChw = torch.cat([previous_1Chw, frames_TChw[:-1]])
        return torch.relu(self.conv(torch.cat([frames_TChw, past_TChw], dim=1)) + frames_TChw)


class TimePool(nn.Module):
    """Joins every ``num_frames`` frames into one, ``[T, C, h, w]`` to ``[T / num_frames, C, h, w]``."""

    def __init__(self, width: int, num_frames: int):
        super().__init__()
        self.num_frames = num_frames
        self.conv = nn.Conv2d(num_frames * width, width, 1, bias=False)

    def forward(self, frames_TChw: Tensor) -> Tensor:
        _, C, h, w = frames_TChw.shape
        return self.conv(frames_TChw.reshape(-1, self.num_frames * C, h, w))


class TimeGrow(nn.Module):
    """Makes ``num_frames`` frames of each one, ``[T, C, h, w]`` to ``[T * num_frames, C, h, w]``."""

    def __init__(self, width: int, num_frames: int):
        super().__init__()
        self.conv = nn.Conv2d(width, num_frames * width, 1, bias=False)

    def forward(self, frames_TChw: Tensor) -> Tensor:
        _, C, h, w = frames_TChw.shape
        return self.conv(frames_TChw).reshape(-1, C, h, w)


class SoftClamp(nn.Module):
    """Bounds latents smoothly to -3 to 3."""

    def forward(self, latents: Tensor) -> Tensor:
        return torch.tanh(latents / 3) * 3


class LightEncodeLayer(nn.Module):
    """First layer of the model: pixels to latents. Runs once per chunk, outside the ring."""

    latent_mean: Tensor
    latent_std: Tensor

    def __init__(self, config: LightVaeConfig, vae: VaeConfig):
        super().__init__()
        width = config.encoder_width
        layers: list[nn.Module] = [_conv(3, width), nn.ReLU()]
        for num_frames in POOLED_FRAMES:
            layers += [TimePool(width, num_frames), _conv(width, width, stride=2, bias=False)]
            layers += [MemoryBlock(width) for _ in range(config.num_memory_blocks)]
        self.encoder = nn.Sequential(*layers, _conv(width, vae.z_dim))
        self._normalize = vae.normalize_input_latents
        for name, values in latent_statistics(vae).items():
            self.register_buffer(name, values, persistent=False)

    def new_state(self) -> LightVaeState:
        """State of a session that has seen nothing."""
        return _new_state(self.encoder)

    def forward(self, frames_THW3: Tensor, state: LightVaeState) -> Tensor:
        """The next frames of a session as latents ``[C, N, h, w]``, fp32.

        Args:
            frames_THW3: uint8 pixels; ``1 + 4(N - 1)`` frames at the start of a session, ``4N`` later.

        Three copies of a session's first frame go in front of it, so that each latent sees the frames that it decodes
        to; TAEHV's own one-shot call pads the end of the clip instead.
        """
        frames_T3HW = frames_THW3.permute(0, 3, 1, 2)
        if state.num_latent_frames == 0:
            copies = frames_T3HW[:1].expand(PIXEL_FRAMES_PER_LATENT_FRAME - 1, -1, -1, -1)
            frames_T3HW = torch.cat([copies, frames_T3HW])
        assert frames_T3HW.shape[0] % PIXEL_FRAMES_PER_LATENT_FRAME == 0, "frames do not fill the last latent"
        latents = []
        for four_T3HW in frames_T3HW.split(PIXEL_FRAMES_PER_LATENT_FRAME):
            pixels_T3HW = four_T3HW.to(torch.float32) / 255
            latents.append(_run(self.encoder, pixels_T3HW, state))
        latents_CNhw = torch.cat(latents).transpose(0, 1).float().contiguous()
        # They are normalised as they come; a checkpoint that wants raw ones gets what the Wan encoder would give.
        return latents_CNhw if self._normalize else latents_CNhw * self.latent_std + self.latent_mean


class LightDecodeLayer(nn.Module):
    """Last layer of the model: latents to pixels. Runs once per chunk, outside the ring."""

    def __init__(self, config: LightVaeConfig, vae: VaeConfig):
        super().__init__()
        widths = config.decoder_widths
        layers: list[nn.Module] = [SoftClamp(), _conv(vae.z_dim, widths[0]), nn.ReLU()]
        for (width, next_width), num_frames in zip(pairwise(widths), GROWN_FRAMES, strict=True):
            layers += [MemoryBlock(width) for _ in range(config.num_memory_blocks)]
            layers += [nn.Upsample(scale_factor=2), TimeGrow(width, num_frames)]
            layers += [_conv(width, next_width, bias=False)]
        self.decoder = nn.Sequential(*layers, nn.ReLU(), _conv(widths[-1], 3))

    def new_state(self) -> LightVaeState:
        """State of a session that has seen nothing."""
        return _new_state(self.decoder)

    def forward(self, latents_CNhw: Tensor, state: LightVaeState) -> Tensor:
        """The next latents of a session as uint8 pixels ``[T, H, W, 3]``: one frame for the first, four for others."""
        pixels_3THW = self.decode(latents_CNhw, state)
        return (pixels_3THW * 255).round().to(torch.uint8).permute(1, 2, 3, 0).contiguous()

    def decode(self, latents_CNhw: Tensor, state: LightVaeState) -> Tensor:
        """The same before rounding: ``[3, T, H, W]`` in 0 to 1, fp32."""
        pieces = []
        for latent_1Chw in latents_CNhw.transpose(0, 1).split(1):
            is_first = state.num_latent_frames == 0
            pixels_T3HW = _run(self.decoder, latent_1Chw, state)
            # The encoder put three copies in front of the first frame; a session's first latent gives them back.
            pieces.append(pixels_T3HW[PIXEL_FRAMES_PER_LATENT_FRAME - 1 :] if is_first else pixels_T3HW)
        return torch.cat(pieces).transpose(0, 1).float().clamp(0, 1)


def _conv(in_width: int, out_width: int, stride: int = 1, bias: bool = True) -> nn.Conv2d:
    return nn.Conv2d(in_width, out_width, 3, stride=stride, padding=1, bias=bias)


def _new_state(layers: Iterable[nn.Module]) -> LightVaeState:
    return LightVaeState([None for layer in layers if isinstance(layer, MemoryBlock)])


def _run(layers: nn.Sequential, frames_TChw: Tensor, state: LightVaeState) -> Tensor:
    """One latent's worth of frames through a half of the VAE, in the parameters' type."""
    hidden = frames_TChw.to(next(layers.parameters()).dtype).contiguous()
    block = 0
    for layer in layers:
        if isinstance(layer, MemoryBlock):
            previous = state.previous_inputs[block]
            # A clone, because a slice would keep the frames beside it alive until the next chunk.
            state.previous_inputs[block] = hidden[-1:].clone()
            hidden = layer(hidden, torch.zeros_like(hidden[:1]) if previous is None else previous)
            block += 1
        else:
            hidden = layer(hidden)
    state.num_latent_frames += 1
    return hidden
