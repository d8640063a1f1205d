"""How much noise a video chunk starts with: fixed, or less where the input moves more.

The rule is StreamDiffusionV2's motion-aware noise controller (arXiv 2511.07399, section on motion-aware noise).
"""

from collections.abc import Callable

import numpy as np

from ds_stream.core import Frames
from ds_stream.settings import NoiseConfig

StrengthRule = Callable[[Frames], float]
"""Strength of the next chunk of a stream, given its frames ``[T, H, W, 3]`` without padding."""


def strength_rule(config: NoiseConfig) -> StrengthRule:
    """The rule that ``config`` asks for, for one new stream."""
    return MotionAwareStrength(config) if config.motion_aware else lambda _frames: config.strength


class MotionAwareStrength:
    """Follows the motion of one stream.

    ``d = clamp(m / motion_full_scale, 0, 1)``, where ``m`` is the largest RMS difference of two successive frames in
    the chunk, the last frame of the chunk before it included, in pixels of -1 to 1. Then
    ``s = (1 - motion_smoothing) (strength - motion_range d) + motion_smoothing s_previous``.
    """

    def __init__(self, config: NoiseConfig):
        self._config = config
        self._strength = config.strength
        self._last_frame: Frames | None = None

    def __call__(self, frames: Frames) -> float:
        config = self._config
        motion = min(self._largest_difference(frames) / config.motion_full_scale, 1.0)
        wanted = config.strength - config.motion_range * motion
        self._strength = (1 - config.motion_smoothing) * wanted + config.motion_smoothing * self._strength
        return self._strength

    def _largest_difference(self, frames: Frames) -> float:
        largest = 0.0
        for frame in frames:
            if self._last_frame is not None:
                difference = (frame.astype(np.float32) - self._last_frame) / 127.5
                largest = max(largest, float(np.sqrt(np.mean(np.square(difference)))))
            self._last_frame = frame
        return largest
