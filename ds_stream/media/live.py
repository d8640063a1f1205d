"""Plays any reader as if it were a camera: frames come by the clock, whether somebody takes them or not."""

import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np

from ds_stream.core import FrameReader, Frames, StreamError, VideoInfo
from ds_stream.settings import LiveConfig


class RealtimeReader:
    """A reader whose frames arrive at its frame rate, in a queue of bounded length.

    Frame ``i`` arrives ``i`` frame times after the first, and not before ``reader`` has it. With ``block`` the clock
    stands still while the queue is full; with ``drop_oldest`` the frame that has waited longest makes room.

    Args:
        reader: where the frames come from; read in a thread of its own, from now on, and closed with this one.
        config: length of the queue, and what happens when it is full.
        now: a clock in seconds, the same as the one that latencies are measured by.
    """

    def __init__(self, reader: FrameReader, config: LiveConfig, now: Callable[[], float] = time.monotonic):
        info = reader.info
        self.info = VideoInfo(info.width, info.height, info.frame_rate, info.num_frames, is_live=True)
        self.num_dropped = 0
        self.last_arrived_at = 0.0
        self._reader = reader
        self._config = config
        self._now = now
        self._queue: deque[tuple[Frames, float]] = deque()
        self._changed = threading.Condition()
        self._has_ended = False
        self._is_closed = False
        self._error: StreamError | None = None
        self._thread = threading.Thread(target=self._run, name="camera", daemon=True)
        self._thread.start()

    def read(self, num_frames: int) -> Frames:
        """Up to ``num_frames`` frames ``[frames, height, width, 3]``, as soon as all have arrived.

        Fewer only at the end of the source, none after it.

        Raises:
            StreamError: the source broke off; what had arrived before was returned.
        """
        taken: list[Frames] = []
        with self._changed:
            while len(taken) < num_frames:
                self._changed.wait_for(lambda: self._queue or self._has_ended)
                if not self._queue:
                    break
                frame, self.last_arrived_at = self._queue.popleft()
                taken.append(frame)
                self._changed.notify_all()
            if not taken and self._error is not None:
                raise self._error
        return np.concatenate(taken) if taken else np.zeros((0, self.info.height, self.info.width, 3), np.uint8)

    def close(self) -> None:
        """End the clock, then close the source."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()
        self._reader.close()

    def _run(self) -> None:
        try:
            self._play()
        except StreamError as error:
            self._error = error
        except Exception as bug:
            self._error = StreamError(f"reading failed: {type(bug).__name__}: {bug}")
        finally:
            with self._changed:
                self._has_ended = True
                self._changed.notify_all()

    def _play(self) -> None:
        frame_s = float(1 / self.info.frame_rate)
        due = self._now()
        while not self._is_closed and len(frame := self._reader.read(1)):
            with self._changed:
                while (left := due - self._now()) > 0 and not self._is_closed:
                    self._changed.wait(left)
                waited_s = self._make_room()
                if self._is_closed:
                    return
                self._queue.append((frame, self._now()))
                self._changed.notify_all()
            # A camera that waited goes on from there, instead of catching up.
            due += waited_s + frame_s

    def _make_room(self) -> float:
        """Seconds that the clock stood still."""
        if len(self._queue) < self._config.max_queued_frames:
            return 0.0
        if self._config.when_full == "drop_oldest":
            self._queue.popleft()
            self.num_dropped += 1
            return 0.0
        since = self._now()
        self._changed.wait_for(lambda: len(self._queue) < self._config.max_queued_frames or self._is_closed)
        return self._now() - since
