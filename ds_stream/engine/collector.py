"""Brings decoded frames from the last stage back to the controller's rank."""

import queue
import threading
from collections.abc import Callable

import torch

from ds_stream.core import Frames, Plan, Row
from ds_stream.engine.links import Link


class FrameCollector:
    """Receives finished chunks in a thread of its own, on the controller's rank.

    Args:
        link: from the last stage.
        num_passes: passes per chunk, which tell from a plan what will come back.
        frame_shape: ``(height, width)`` of the pixels.
        num_frames: frames of a chunk.
        deliver: takes ``(session, chunk, frames)``.
        on_error: told when the last stage is gone or its frames cannot be delivered.
    """

    def __init__(
        self,
        link: Link,
        num_passes: int,
        frame_shape: tuple[int, int],
        num_frames: Callable[[int], int],
        deliver: Callable[[int, int, Frames], None],
        on_error: Callable[[Exception], None],
    ):
        self._link = link
        self._num_passes = num_passes
        self._frame_shape = frame_shape
        self._num_frames = num_frames
        self._deliver = deliver
        self._on_error = on_error
        self._expected: queue.SimpleQueue[Row | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="frame collector", daemon=True)
        self._thread.start()

    def expect(self, plan: Plan) -> None:
        """Note which chunks ``plan`` finishes; to be called in order of launch."""
        for row in plan.rows:
            if row.step == self._num_passes - 1:
                self._expected.put(row)

    def close(self) -> None:
        """End the thread once everything expected has come."""
        self._expected.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (row := self._expected.get()) is not None:
            shape = (self._num_frames(row.chunk), *self._frame_shape, 3)
            try:
                (frames,) = self._link.recv([(shape, torch.uint8)])
                # The link's buffer is overwritten by the next chunk.
                self._deliver(row.session, row.chunk, frames.numpy().copy())
            except Exception as error:
                self._on_error(error)
                return
