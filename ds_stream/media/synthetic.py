"""Clips that need no file: a demonstration clip with sound, and cheap endless frames for tests and benchmarks."""

import sys
import tempfile
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from av.audio.frame import AudioFrame
from numpy.typing import NDArray

from ds_stream.core import DEFAULT_FRAME_RATE, Frames, VideoInfo
from ds_stream.media.writer import VideoWriter

_SAMPLE_RATE = 48_000

Image = NDArray[np.float32]


def make_demo_clip(path: Path, width: int = 448, height: int = 256, num_frames: int = 49) -> None:
    """Write a clip of boats on a lake under drifting clouds, with soft tones, at 16 frames a second.

    The same every time. At the default size it takes a few seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        sound = Path(folder) / "sound.m4a"
        _write_tones(sound, float(num_frames / DEFAULT_FRAME_RATE))
        writer = VideoWriter(path, DEFAULT_FRAME_RATE, width, height, audio_from=sound)
        scene = _Lake(width, height)
        for index in range(num_frames):
            writer.write(scene.frame(float(index / DEFAULT_FRAME_RATE))[None])
        writer.finish()


class SyntheticReader:
    """Moving stripes: every frame differs from the one before and costs next to nothing.

    Args:
        num_frames: ``None`` for no end.
    """

    def __init__(
        self, width: int, height: int, num_frames: int | None = None, frame_rate: Fraction = DEFAULT_FRAME_RATE
    ):
        self.info = VideoInfo(width, height, frame_rate, num_frames)
        self._next = 0
        y, x = np.mgrid[0:height, 0 : width + 256]
        self._stripes = np.stack((x, x + 2 * y, 255 - x), axis=-1).astype(np.uint8)

    def read(self, num_frames: int) -> Frames:
        if self.info.num_frames is not None:
            num_frames = min(num_frames, self.info.num_frames - self._next)
        shifts = [(3 * (self._next + index)) % 256 for index in range(num_frames)]
        self._next += num_frames
        width = self.info.width
        if not shifts:
            return np.zeros((0, *self._stripes[:, :width].shape), np.uint8)
        return np.stack([self._stripes[:, shift : shift + width] for shift in shifts])

    def close(self) -> None:
        pass


class _Lake:
    """A scene as a function of time."""

    def __init__(self, width: int, height: int):
        self.width, self.height = width, height
        chance = np.random.default_rng(7)
        self.horizon = int(0.45 * height)
        self.clouds = _fractal_noise(chance, self.horizon, 2 * width)
        self.water = _fractal_noise(chance, 2 * height, 2 * width)
        self.hills = _fractal_noise(chance, 1, 2 * width)[0]
        self.grain = _fractal_noise(chance, height, 2 * width)

    def frame(self, seconds: float) -> Frames:
        """The picture ``[height, width, 3]`` at ``seconds``."""
        picture = np.empty((self.height, self.width, 3), np.float32)
        picture[: self.horizon] = self._sky(seconds)
        picture[self.horizon :] = self._lake(seconds)
        self._draw_hills(picture, seconds)
        for lane, (speed, start, hull) in enumerate([(14, 0.1, (0.75, 0.2, 0.15)), (-22, 0.75, (0.95, 0.85, 0.4))]):
            self._draw_boat(picture, seconds, lane, speed, start, np.array(hull, np.float32))
        return (255 * picture.clip(0, 1)).round().astype(np.uint8)

    def _sky(self, seconds: float) -> Image:
        rows = np.linspace(0, 1, self.horizon, dtype=np.float32)[:, None, None]
        blue = (1 - rows) * np.array([0.2, 0.42, 0.78], np.float32) + rows * np.array([0.95, 0.8, 0.66], np.float32)
        cover = _shifted(self.clouds, 9 * seconds, self.width)[..., None]
        cover = ((cover - 0.5) * 3).clip(0, 1)
        return blue * (1 - cover) + cover * (0.9 + 0.1 * rows)

    def _lake(self, seconds: float) -> Image:
        depth = np.arange(self.height - self.horizon, dtype=np.float32)
        # Nearer water is larger: rows of the texture are taken further apart towards the horizon.
        far = (self.height / (depth + 8) * 14).astype(int)
        rows = (far + int(20 * seconds)) % self.water.shape[0]
        ripples = _shifted(self.water[rows], 5 * seconds, self.width)
        base = np.array([0.1, 0.32, 0.42], np.float32) + (depth / len(depth))[:, None, None] * 0.12
        glint = ((ripples - 0.62) * 5).clip(0, 1)[..., None] * np.array([0.9, 0.8, 0.6], np.float32)
        return base * (0.6 + 0.8 * ripples[..., None]) + glint

    def _draw_hills(self, picture: Image, seconds: float) -> None:
        for layer, (speed, tallest, colour) in enumerate([(2, 0.3, (0.35, 0.42, 0.5)), (5, 0.17, (0.16, 0.3, 0.2))]):
            ridge = _shifted(np.roll(self.hills, 97 * layer)[None], speed * seconds, self.width)[0]
            top = self.horizon - (tallest * self.height * ridge).astype(int)
            inside = (np.arange(self.height)[:, None] >= top) & (np.arange(self.height)[:, None] < self.horizon)
            texture = 0.75 + 0.5 * _shifted(self.grain, speed * seconds, self.width)
            picture[inside] = (np.array(colour, np.float32) * texture[..., None])[inside]

    def _draw_boat(self, picture: Image, seconds: float, lane: int, speed: float, start: float, hull: Image) -> None:
        y, x = np.mgrid[0 : self.height, 0 : self.width].astype(np.float32)
        size = self.height * (0.09 + 0.05 * lane)
        middle_x = (start * self.width + speed * seconds * self.width / 224) % (1.3 * self.width) - 0.15 * self.width
        middle_y = self.horizon + self.height * (0.14 + 0.2 * lane) + 0.1 * size * np.sin(2.5 * seconds + lane)
        u, v = (x - middle_x) / size, (y - middle_y) / size
        in_hull = (v > 0) & (v < 0.5) & (np.abs(u) < 1.1 - 0.6 * v)
        in_sail = (v < -0.05) & (v > -1.8) & (u > 0.05) & (u < 0.75 * (v + 1.8) / 1.75)
        in_mast = (np.abs(u) < 0.035) & (v < 0) & (v > -1.9)
        in_shadow = (v >= 0.5) & (v < 1.1) & (np.abs(u + 0.1 * np.sin(9 * v + 4 * seconds)) < 0.9 - 0.4 * v)
        picture[in_shadow] *= 0.55
        picture[in_hull] = (hull * (1.05 - 0.9 * v[..., None]))[in_hull]
        picture[in_sail] = (np.array([0.97, 0.95, 0.9], np.float32) * (0.75 + 0.35 * u[..., None]))[in_sail]
        picture[in_mast] = (0.25, 0.15, 0.1)


def _fractal_noise(chance: np.random.Generator, height: int, width: int) -> Image:
    """Smooth noise in 0 to 1 that repeats sideways, with detail at every scale."""
    total = np.zeros((height, width), np.float32)
    for octave in range(6):
        rows, columns = min(2 ** (octave + 1), height), min(3 * 2**octave, width)
        grid = chance.random((rows + 1, columns), dtype=np.float32)
        y = np.linspace(0, rows - 1e-3, height, dtype=np.float32)
        x = np.linspace(0, columns - 1e-3, width, dtype=np.float32)
        top, left = y.astype(int), x.astype(int)
        fy, fx = _smooth(y - top)[:, None], _smooth(x - left)[None]
        right, bottom = (left + 1) % columns, np.minimum(top + 1, rows)
        upper = grid[top][:, left] * (1 - fx) + grid[top][:, right] * fx
        lower = grid[bottom][:, left] * (1 - fx) + grid[bottom][:, right] * fx
        total += (upper * (1 - fy) + lower * fy) * 0.5**octave
    return (total - total.min()) / (total.max() - total.min())


def _smooth(x: Image) -> Image:
    return x * x * (3 - 2 * x)


def _shifted(texture: Image, pixels: float, width: int) -> Image:
    """``width`` columns of a texture that repeats sideways, moved by a fraction of a pixel if need be."""
    whole = int(np.floor(pixels))
    share = np.float32(pixels - whole)
    columns = (np.arange(width + 1) + whole) % texture.shape[1]
    taken = texture[:, columns]
    return taken[:, :-1] * (1 - share) + taken[:, 1:] * share


def _write_tones(path: Path, seconds: float) -> None:
    """A slow arpeggio, AAC, mono."""
    time = np.arange(int(seconds * _SAMPLE_RATE)) / _SAMPLE_RATE
    notes = np.array([220.0, 277.2, 329.6, 440.0])[(time / 0.5).astype(int) % 4]
    fade = np.exp(-3 * (time % 0.5)) * np.minimum(1, (time % 0.5) / 0.02)
    sound = (0.25 * fade * np.sin(2 * np.pi * notes * time)).astype(np.float32)
    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=_SAMPLE_RATE, layout="mono")
        for start in range(0, len(sound), 1024):
            frame = AudioFrame.from_ndarray(sound[None, start : start + 1024], format="fltp", layout="mono")
            frame.sample_rate, frame.pts, frame.time_base = _SAMPLE_RATE, start, Fraction(1, _SAMPLE_RATE)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m ds_stream.media.synthetic OUT.mp4")
    make_demo_clip(Path(sys.argv[1]))
