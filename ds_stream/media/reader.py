"""Reads video files through PyAV, frame after frame."""

import warnings
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Literal

import av
import av.error
import numpy as np
from av.container import InputContainer
from av.video.frame import VideoFrame
from av.video.reformatter import Interpolation
from av.video.stream import VideoStream

from ds_stream.core import Frames, StreamError, VideoInfo
from ds_stream.media.fit import Fit

FALLBACK_FRAME_RATE = Fraction(25)


class VideoReader:
    """A video file as RGB frames of the model's size. Every decoded frame is one frame, in presentation order.

    Args:
        path: anything that FFmpeg decodes.
        width, height: pixels of the frames that :meth:`read` returns.
        fit: how a picture of another shape is fitted.

    Raises:
        ValueError: the file is missing, not a file, cannot be opened, or holds no video.
    """

    def __init__(self, path: Path, width: int, height: int, fit: Literal["crop", "pad"] = "crop"):
        self._path = path
        self._size = (width, height)
        self._fit = fit
        self._container, self._stream = _open(path)
        self._stream.thread_type = "AUTO"
        self._frames = self._decode()
        self._error: StreamError | None = None
        rate = self._stream.average_rate or self._stream.guessed_rate
        if rate is None:
            warnings.warn(f"{path} does not say its frame rate; taking {FALLBACK_FRAME_RATE}", stacklevel=2)
            rate = FALLBACK_FRAME_RATE
        self.info = VideoInfo(width, height, Fraction(rate), self._estimate_num_frames(Fraction(rate)))

    def read(self, num_frames: int) -> Frames:
        """Up to ``num_frames`` frames ``[frames, height, width, 3]``, fewer only at the end.

        Raises:
            StreamError: the file is broken here; every frame before was returned.
        """
        if self._error is not None:
            raise self._error
        pictures: list[Frames] = []
        try:
            while len(pictures) < num_frames and (frame := next(self._frames, None)) is not None:
                pictures.append(self._picture(frame))
        except av.error.FFmpegError as error:
            self._error = StreamError(f"{self._path} cannot be decoded any further: {error.strerror or error}")
            if not pictures:
                raise self._error from error
        if not pictures:
            width, height = self._size
            return np.zeros((0, height, width, 3), np.uint8)
        return np.stack(pictures)

    def close(self) -> None:
        self._container.close()

    def _decode(self) -> Iterator[VideoFrame]:
        yield from self._container.decode(self._stream)

    def _picture(self, frame: VideoFrame) -> Frames:
        # Pixels need not be square, and a camera may have been held upright.
        aspect = self._stream.sample_aspect_ratio or Fraction(1)
        shown_width = max(round(frame.width * aspect), 1)
        turns = round(frame.rotation / 90) % 4
        size = (shown_width, frame.height) if turns % 2 == 0 else (frame.height, shown_width)
        fit = Fit(*size, *self._size, self._fit)
        scaled = fit.scaled_size if turns % 2 == 0 else fit.scaled_size[::-1]
        rgb = frame.reformat(scaled[0], scaled[1], "rgb24", interpolation=Interpolation.BICUBIC).to_ndarray()
        return fit.place(np.rot90(rgb, turns))

    def _estimate_num_frames(self, rate: Fraction) -> int | None:
        if self._stream.frames:
            return self._stream.frames
        if self._stream.duration is not None and self._stream.time_base is not None:
            return round(self._stream.duration * self._stream.time_base * rate)
        if self._container.duration is not None:
            return round(Fraction(self._container.duration, av.time_base) * rate)
        return None


def _open(path: Path) -> tuple[InputContainer, VideoStream]:
    if not path.exists():
        raise ValueError(f"input {path} does not exist; give an existing video file")
    if not path.is_file():
        raise ValueError(f"input {path} is not a file; give a video file")
    try:
        container = av.open(str(path))
    except PermissionError:
        raise ValueError(f"input {path} may not be read; change its permissions") from None
    except av.error.FFmpegError as error:
        raise ValueError(f"input {path} is not a video that can be opened: {error.strerror or error}") from None
    video = [stream for stream in container.streams.video if not stream.disposition & stream.disposition.attached_pic]
    if not video:
        container.close()
        raise ValueError(f"input {path} holds no video; give a file with pictures")
    return container, video[0]
