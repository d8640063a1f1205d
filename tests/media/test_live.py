"""A file played by the clock: on time, in bounded memory, with every dropped frame counted."""

import threading
import time
from fractions import Fraction

import numpy as np
import pytest

from ds_stream.core import StreamError, VideoInfo
from ds_stream.media.live import RealtimeReader
from ds_stream.settings import LiveConfig

RATE = 100


class Numbered:
    """Frames that hold their number; it may break off after the last."""

    def __init__(self, num_frames: int, error: Exception | None = None):
        self.info = VideoInfo(2, 2, Fraction(RATE), num_frames)
        self.num_read = 0
        self.is_closed = False
        self._num_frames = num_frames
        self._error = error

    def read(self, num_frames: int) -> np.ndarray:
        if self.num_read == self._num_frames and self._error is not None:
            raise self._error
        count = min(num_frames, self._num_frames - self.num_read)
        numbers = np.arange(self.num_read, self.num_read + count, dtype=np.uint8)
        self.num_read += count
        return np.broadcast_to(numbers[:, None, None, None], (count, 2, 2, 3))

    def close(self) -> None:
        self.is_closed = True


def numbers(frames: np.ndarray) -> list[int]:
    return frames[:, 0, 0, 0].tolist()


def live(source: Numbered, when_full: str, max_queued_frames: int) -> RealtimeReader:
    return RealtimeReader(source, LiveConfig(when_full=when_full, max_queued_frames=max_queued_frames))


def test_frames_come_at_their_rate():
    began = time.monotonic()
    reader = live(Numbered(21), "drop_oldest", 30)
    assert reader.info.is_live
    assert numbers(reader.read(1)) == [0]
    assert numbers(reader.read(20)) == list(range(1, 21))
    assert reader.last_arrived_at - began == pytest.approx(20 / RATE, abs=0.1)
    assert reader.last_arrived_at - began >= 20 / RATE - 1e-3
    assert reader.read(3).shape == (0, 2, 2, 3)
    assert reader.num_dropped == 0


def test_the_oldest_are_dropped_and_counted():
    source = Numbered(30)
    reader = live(source, "drop_oldest", 4)
    time.sleep(0.6)
    assert source.num_read == 30, "a camera does not wait"
    assert numbers(reader.read(9)) == [26, 27, 28, 29]
    assert reader.num_dropped == 26
    # They had been there for a while: that counts as latency.
    assert time.monotonic() - reader.last_arrived_at > 0.1


def test_a_camera_that_blocks_loses_nothing():
    source = Numbered(12)
    reader = live(source, "block", 4)
    time.sleep(0.3)
    assert source.num_read == 5, "4 in the queue, and the one that waits"
    since = time.monotonic()
    assert numbers(reader.read(12)) == list(range(12))
    # The clock stood still: what comes after the queue is not crowded together.
    assert time.monotonic() - since >= 6 / RATE
    assert reader.num_dropped == 0


def test_what_broke_off_is_told_after_what_arrived():
    reader = live(Numbered(3, StreamError("the cable is out")), "block", 9)
    assert numbers(reader.read(5)) == [0, 1, 2]
    with pytest.raises(StreamError, match="the cable is out"):
        reader.read(5)
    reader = live(Numbered(0, RuntimeError("a bug")), "block", 9)
    with pytest.raises(StreamError, match="reading failed: RuntimeError: a bug"):
        reader.read(1)


@pytest.mark.parametrize("when_full", ["block", "drop_oldest"])
def test_closing_ends_the_thread_wherever_it_is(when_full: str):
    source = Numbered(250)
    reader = live(source, when_full, 2)
    time.sleep(0.05)
    reader.close()
    assert source.is_closed
    assert not any(thread.name == "camera" for thread in threading.enumerate())
