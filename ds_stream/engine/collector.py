"""Brings what the last stage hands back to the controller's rank: decoded frames, and what stages have timed."""

import queue
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ds_stream.core import Row
from ds_stream.engine.links import Field, Link

OnError = Callable[[Exception], None]


class Collector:
    """Receives messages in a thread of its own, on the controller's rank.

    Args:
        link: from the last stage.
        on_error: told when the last stage is gone or a message cannot be taken in.
    """

    def __init__(self, what: str, link: Link, on_error: OnError):
        self._link = link
        self._on_error = on_error
        self._expected: queue.SimpleQueue[tuple[Sequence[Field], Callable[[list[Tensor]], None]] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._run, name=f"{what} collector", daemon=True)
        self._thread.start()

    def expect(self, fields: Sequence[Field], take: Callable[[list[Tensor]], None]) -> None:
        """A message of this form will come, after those expected before; its tensors are ``take``'s for the call."""
        self._expected.put((fields, take))

    def close(self) -> None:
        """End the thread once everything expected has come."""
        self._expected.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (expected := self._expected.get()) is not None:
            fields, take = expected
            try:
                take(self._link.recv(fields))
            except Exception as error:
                self._on_error(error)
                return


class FrameReturn:
    """Takes decoded frames off the device of the last stage, without making its loop wait for them.

    Args:
        deliver: takes a finished chunk's row and its frames on the host.
        on_error: told when they cannot be delivered.
    """

    def __init__(self, deliver: Callable[[Row, Tensor], None], on_error: OnError):
        self._deliver = deliver
        self._on_error = on_error
        self._copies: queue.SimpleQueue[tuple[Row, Tensor, torch.cuda.Event] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="frame return", daemon=True)

    def __call__(self, row: Row, frames: Tensor) -> None:
        """Hand over the frames ``[T, H, W, 3]`` of a finished chunk."""
        if frames.device.type == "cpu":
            self._deliver(row, frames)
            return
        if not self._thread.is_alive():
            self._thread.start()
        copy = torch.empty(frames.shape, dtype=frames.dtype, pin_memory=True).copy_(frames, non_blocking=True)
        copied = torch.cuda.Event(blocking=True)
        copied.record()
        self._copies.put((row, copy, copied))

    def close(self) -> None:
        """Wait until everything is delivered."""
        if self._thread.is_alive():
            self._copies.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (item := self._copies.get()) is not None:
            row, copy, copied = item
            try:
                copied.synchronize()
                self._deliver(row, copy)
            except Exception as error:
                self._on_error(error)
                return
