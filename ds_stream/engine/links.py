"""One-way, ordered message links between stages.

A message is a few tensors packed into one buffer, so that mixed types travel as one transfer. Both ends know its shape
beforehand (from the plan), so nothing is asked of the device to read a header.
"""

import itertools
import math
import queue
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ds_stream.core import StreamError

Field = tuple[tuple[int, ...], torch.dtype]
"""Shape and type of one tensor of a message."""

_ALIGNMENT = 16


class LinkError(StreamError):
    """The other end of a link is gone or does not answer.

    Args:
        peer: its rank.
        what: what was being sent or awaited.
    """

    def __init__(self, peer: int, what: str, detail: str):
        super().__init__(f"{what}: {detail}")
        self.peer = peer


class Channel(Protocol):
    """Moves buffers from one end to the other, in order."""

    def post(self, buffer: Tensor) -> Callable[[], None]:
        """Start sending ``buffer`` and return at once; the returned call waits until it may be overwritten."""
        ...

    def take(self, buffer: Tensor) -> None:
        """Fill ``buffer`` with the next message. Waits for it."""
        ...


class Link:
    """A channel with message buffers: packs on one end, unpacks on the other.

    Args:
        channel: what carries the bytes.
        device: where messages are made and wanted.
        num_buffers: sends that may be in flight; the schedule proves that one more never happens, so that no send
            waits for its receive.
    """

    def __init__(self, channel: Channel, device: torch.device, num_buffers: int):
        self._channel = channel
        self._device = device
        self._num_buffers = num_buffers
        self._in_flight: deque[tuple[Callable[[], None], Tensor]] = deque()
        self._free: dict[int, list[Tensor]] = {}
        self._received: dict[int, Tensor] = {}

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Send ``tensors`` as one message. Does not wait for the receive."""
        fields = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
        buffer = self._free_buffer(_num_bytes(fields))
        for view, tensor in zip(_views(buffer, fields), tensors, strict=True):
            view.copy_(tensor)
        self._in_flight.append((self._channel.post(buffer), buffer))

    def recv(self, fields: Sequence[Field]) -> list[Tensor]:
        """Wait for the next message; the tensors are valid until the next message of this size."""
        num_bytes = _num_bytes(fields)
        if num_bytes not in self._received:
            self._received[num_bytes] = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        buffer = self._received[num_bytes]
        self._channel.take(buffer)
        return _views(buffer, fields)

    def drain(self) -> None:
        """Wait until every message sent has left."""
        while self._in_flight:
            self._reclaim()

    def _free_buffer(self, num_bytes: int) -> Tensor:
        if len(self._in_flight) >= self._num_buffers:
            self._reclaim()
        free = self._free.get(num_bytes)
        if free:
            return free.pop()
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def _reclaim(self) -> None:
        wait, buffer = self._in_flight.popleft()
        wait()
        self._free.setdefault(buffer.numel(), []).append(buffer)


@dataclass(frozen=True, slots=True)
class StageLinks:
    """The links of one stage; ``None`` where the stage has no such neighbour."""

    plans_in: Link | None
    plans_out: Link | None
    activations_in: Link | None
    activations_out: Link | None
    latents_in: Link | None
    """First stage, from the last."""
    latents_out: Link | None
    """Last stage, to the first."""

    def drain(self) -> None:
        """Wait until every message sent has left."""
        for link in (self.plans_out, self.activations_out, self.latents_out):
            if link is not None:
                link.drain()


class GroupChannel:
    """Point-to-point on an own process group of two ranks: gloo for CPU tensors, NCCL for CUDA ones.

    A group per link keeps NCCL's in-order execution from making one direction wait for the other.
    """

    def __init__(self, group: dist.ProcessGroup, peer: int, what: str):
        self._group = group
        self._peer = peer
        self._what = what

    def post(self, buffer: Tensor) -> Callable[[], None]:
        work = self._guard(lambda: dist.isend(buffer, self._peer, group=self._group))
        return lambda: self._guard(work.wait)

    def take(self, buffer: Tensor) -> None:
        work = self._guard(lambda: dist.irecv(buffer, self._peer, group=self._group))
        self._guard(work.wait)

    def _guard(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except RuntimeError as error:
            # The backend's own text is long and means little to a user; it stays in the chain.
            detail = "timed out" if "timed out" in str(error).lower() else "the connection is closed"
            raise LinkError(self._peer, self._what, f"{detail} (rank {self._peer})") from error


class HostStagedChannel:
    """For ranks that share a GPU: through host memory and gloo, which must never see a CUDA tensor."""

    def __init__(self, channel: GroupChannel):
        self._channel = channel
        self._pinned: dict[int, Tensor] = {}

    def post(self, buffer: Tensor) -> Callable[[], None]:
        # Waits for the device: gloo reads the copy at once, and the returned call keeps it.
        host = buffer.to("cpu")
        return self._channel.post(host)

    def take(self, buffer: Tensor) -> None:
        size = buffer.numel()
        if size not in self._pinned:
            self._pinned[size] = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        self._channel.take(self._pinned[size])
        # Not asynchronous: the next message reuses the pinned memory.
        buffer.copy_(self._pinned[size])


class LoopbackChannel:
    """Within one process: the local hand-over of a one-stage ring, and tests that run several stages in threads."""

    def __init__(self, what: str, timeout_s: float):
        self._queue: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        self._what = what
        self._timeout_s = timeout_s

    def post(self, buffer: Tensor) -> Callable[[], None]:
        self._queue.put(buffer.clone())
        return lambda: None

    def take(self, buffer: Tensor) -> None:
        try:
            message = self._queue.get(timeout=self._timeout_s)
        except queue.Empty:
            raise LinkError(0, self._what, f"nothing came for {self._timeout_s:g} s") from None
        assert message.numel() == buffer.numel(), (
            f"{self._what}: sent {message.numel()}, awaited {buffer.numel()} bytes"
        )
        buffer.copy_(message)


def _num_bytes(fields: Sequence[Field]) -> int:
    return sum(_padded(field) for field in fields)


def _padded(field: Field) -> int:
    size = math.prod(field[0]) * field[1].itemsize
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _views(buffer: Tensor, fields: Sequence[Field]) -> list[Tensor]:
    starts = itertools.accumulate((_padded(field) for field in fields), initial=0)
    return [
        buffer[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
        for start, (shape, dtype) in zip(starts, fields, strict=False)
    ]
