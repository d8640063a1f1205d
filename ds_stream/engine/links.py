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
from ds_stream.partition import Ring

Field = tuple[tuple[int, ...], torch.dtype]
"""Shape and type of one tensor of a message."""

_ALIGNMENT = 16
# Copies on the host that may be on their way: more than a ring's links ever have.
_MAX_STAGED = 64


class LinkError(StreamError):
    """The other end of a link is gone or does not answer.

    Args:
        peer: its rank.
        what: what was being sent or awaited.
    """

    def __init__(self, peer: int, what: str, detail: str):
        super().__init__(f"{what}: {detail}")
        self.peer = peer


class Departure(Protocol):
    """A buffer on its way."""

    def wait(self) -> None:
        """Until it may be overwritten."""
        ...

    def has_left(self) -> bool:
        """Whether it surely may be overwritten, without waiting."""
        ...


class Channel(Protocol):
    """Moves buffers from one end to the other, in order."""

    def post(self, buffer: Tensor) -> Departure:
        """Start sending ``buffer`` and return at once."""
        ...

    def take(self, buffer: Tensor) -> None:
        """Fill ``buffer`` with the next message. Waits for it."""
        ...

    def drain(self) -> None:
        """Wait until everything posted has left."""
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
        self._in_flight: deque[tuple[Departure, Tensor]] = deque()
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
        self._channel.drain()

    def _free_buffer(self, num_bytes: int) -> Tensor:
        while self._in_flight and (len(self._in_flight) >= self._num_buffers or self._in_flight[0][0].has_left()):
            self._reclaim()
        free = self._free.get(num_bytes)
        if free:
            return free.pop()
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def _reclaim(self) -> None:
        departure, buffer = self._in_flight.popleft()
        departure.wait()
        self._free.setdefault(buffer.numel(), []).append(buffer)


class Moves(Protocol):
    """Carries layers between any two stages, in order."""

    def send(self, stage: int, state: dict[str, Any]) -> None:
        """Start handing ``state``, of tensors, numbers, strings and containers of them, to ``stage``."""
        ...

    def recv(self, stage: int) -> dict[str, Any]:
        """Wait for the next state from ``stage``; its tensors are on the host."""
        ...

    def drain(self) -> None:
        """Wait until everything sent has left."""
        ...


@dataclass(frozen=True, slots=True)
class RingLinks:
    """What closes a ring: from its last stage to its first; ``None`` on other stages."""

    latents_in: Link | None
    """First ring stage."""
    latents_out: Link | None
    """Last ring stage."""


@dataclass(frozen=True, slots=True)
class StageLinks:
    """The links of one stage; ``None`` where the stage has no such neighbour.

    Activations and parcels share a channel: what is sent before is received before, whatever it is.
    """

    plans_in: Link | None
    plans_out: Link | None
    activations_in: Link | None
    activations_out: Link | None
    parcels_in: Link | None
    """What does not come with every launch: prompts, encoded video, finished chunks."""
    parcels_out: Link | None
    connect_ring: Callable[[Ring], RingLinks]
    """Closes a ring; every stage calls it at the same point of its work."""
    moves: Moves | None
    """``None`` where there is one stage."""

    def drain(self) -> None:
        """Wait until every message sent has left."""
        for link in (self.plans_out, self.activations_out, self.parcels_out):
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
        self._backend = dist.get_backend(group)

    def post(self, buffer: Tensor) -> Departure:
        return _Send(self, self._guard(lambda: dist.isend(buffer, self._peer, group=self._group)))

    def take(self, buffer: Tensor) -> None:
        work = self._guard(lambda: dist.irecv(buffer, self._peer, group=self._group))
        self._guard(work.wait)

    def drain(self) -> None:
        """The departures know."""

    @property
    def tells_departures(self) -> bool:
        """Gloo's sends never report their end before it is waited for."""
        return self._backend == "nccl"

    def _guard(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except RuntimeError as error:
            # The backend's own text is long and means little to a user; it stays in the chain.
            detail = "timed out" if "timed out" in str(error).lower() else "the connection is closed"
            raise LinkError(self._peer, self._what, f"{detail} (rank {self._peer})") from error


class _Send:
    def __init__(self, channel: GroupChannel, work: Any):
        self._channel = channel
        self._work = work

    def wait(self) -> None:
        self._channel._guard(self._work.wait)

    def has_left(self) -> bool:
        return self._channel.tells_departures and self._work.is_completed()


class _Gone:
    """The departure of a buffer that was copied."""

    def wait(self) -> None:
        pass

    def has_left(self) -> bool:
        return True


class HostStagedChannel:
    """For ranks that share a GPU: through host memory and gloo, which must never see a CUDA tensor."""

    def __init__(self, channel: GroupChannel):
        self._channel = channel
        self._pinned: dict[int, Tensor] = {}
        self._in_flight: deque[tuple[Departure, Tensor]] = deque()

    def post(self, buffer: Tensor) -> Departure:
        # Waits for the device: gloo reads the copy at once. The buffer itself is free.
        host = buffer.to("cpu")
        if len(self._in_flight) >= _MAX_STAGED:
            self._in_flight.popleft()[0].wait()
        self._in_flight.append((self._channel.post(host), host))
        return _Gone()

    def drain(self) -> None:
        while self._in_flight:
            self._in_flight.popleft()[0].wait()

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

    def post(self, buffer: Tensor) -> Departure:
        self._queue.put(buffer.clone())
        return _Gone()

    def take(self, buffer: Tensor) -> None:
        try:
            message = self._queue.get(timeout=self._timeout_s)
        except queue.Empty:
            raise LinkError(0, self._what, f"nothing came for {self._timeout_s:g} s") from None
        assert message.numel() == buffer.numel(), (
            f"{self._what}: sent {message.numel()}, awaited {buffer.numel()} bytes"
        )
        buffer.copy_(message)

    def drain(self) -> None:
        """Nothing is on its way."""


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
