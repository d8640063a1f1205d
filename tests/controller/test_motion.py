"""Numbers worked out by hand: less noise where the picture moves more."""

import numpy as np
import pytest

from ds_stream.controller.motion import strength_rule
from ds_stream.settings import NoiseConfig


def frames_of(*grey: float) -> np.ndarray:
    return np.stack([np.full((2, 4, 3), value, np.uint8) for value in grey])


def config(**values: object) -> NoiseConfig:
    return NoiseConfig.model_validate({"steps": [700, 500], "motion_aware": True, **values})


def test_still_pictures_keep_the_strength():
    rule = strength_rule(config())
    for _ in range(3):
        assert rule(frames_of(50, 50, 50, 50)) == pytest.approx(0.8)


def test_strength_follows_the_largest_difference_with_memory():
    rule = strength_rule(config())
    # 10 of 127.5 is 0.0784, over 0.2: d = 0.392; s = 0.9 (0.8 - 0.1 d) + 0.1 * 0.8
    first = 0.9 * (0.8 - 0.1 * 10 / 127.5 / 0.2) + 0.08
    assert rule(frames_of(100, 103, 113, 110)) == pytest.approx(first)
    # 55 of 127.5 is past full motion: d = 1; s = 0.9 * 0.7 + 0.1 * s'
    assert rule(frames_of(110, 165)) == pytest.approx(0.63 + 0.1 * first)
    # The boundary counts: from 165 to 175, then still.
    second = 0.63 + 0.1 * first
    third = 0.9 * (0.8 - 0.1 * 10 / 127.5 / 0.2) + 0.1 * second
    assert rule(frames_of(175, 175)) == pytest.approx(third)


def test_it_is_the_mean_over_pixels_and_channels_that_counts():
    rule = strength_rule(config())
    frames = frames_of(100, 100)
    # One of 24 numbers moves by 60: RMS = 60 / 127.5 / sqrt(24) = 0.0961, d = 0.480
    frames[1, 0, 0, 0] = 160
    assert rule(frames) == pytest.approx(0.9 * (0.8 - 0.1 * 60 / 127.5 / 24**0.5 / 0.2) + 0.08)


def test_every_constant_is_a_setting():
    rule = strength_rule(config(strength=0.5, motion_full_scale=0.4, motion_range=0.2, motion_smoothing=0.5))
    # 0.4 of -1 to 1 is 51: full motion. s = 0.5 * (0.5 - 0.2) + 0.5 * 0.5
    assert rule(frames_of(0, 51)) == pytest.approx(0.4)


def test_switched_off_nothing_changes():
    rule = strength_rule(config(motion_aware=False, strength=0.6))
    assert rule(frames_of(0, 255)) == 0.6
