"""Fits frames of any shape to the model's, keeping their aspect."""

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np

from ds_stream.core import Frames


@dataclass(frozen=True, slots=True)
class Fit:
    """How a picture of ``source_width x source_height`` square pixels becomes one of ``width x height``.

    ``crop`` scales it to cover and cuts the rest off; ``pad`` scales it to fit inside and adds black.
    """

    source_width: int
    source_height: int
    width: int
    height: int
    mode: Literal["crop", "pad"]

    @property
    def scaled_size(self) -> tuple[int, int]:
        """``(width, height)`` to scale the source to."""
        ratios = Fraction(self.width, self.source_width), Fraction(self.height, self.source_height)
        scale = max(ratios) if self.mode == "crop" else min(ratios)
        width, height = round(self.source_width * scale), round(self.source_height * scale)
        if self.mode == "crop":
            return max(width, self.width), max(height, self.height)
        return min(max(width, 1), self.width), min(max(height, 1), self.height)

    def place(self, picture: Frames) -> Frames:
        """A picture ``[height, width, 3]`` of ``scaled_size``, cut or padded around its centre."""
        height, width = picture.shape[:2]
        if self.mode == "crop":
            top, left = (height - self.height) // 2, (width - self.width) // 2
            return picture[top : top + self.height, left : left + self.width]
        top, left = (self.height - height) // 2, (self.width - width) // 2
        placed = np.zeros((self.height, self.width, 3), np.uint8)
        placed[top : top + height, left : left + width] = picture
        return placed
