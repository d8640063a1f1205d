"""Times what a stage does without ever waiting for the device: events are read once they have passed."""

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ds_stream.core import LayerTiming, Span, StageTiming

FORWARD, ENCODE, DECODE, WAIT, SEND = "forward", "encode", "decode", "wait", "send"
"""What a stage can be doing."""

_MAX_SPANS = 20_000
# Events between the layers cost a device some time, and their times change slowly.
_LAUNCHES_PER_LAYER_SAMPLE = 8

Mark = Any
"""A moment on the stage's clock."""


class Clock(Protocol):
    """Where moments are taken: the host's, or a device's own, which runs behind it."""

    def mark(self) -> Mark:
        """This moment in the order of what the stage was told to do."""
        ...

    def has_passed(self, mark: Mark) -> bool: ...

    def seconds(self, start: Mark, end: Mark) -> float:
        """Between two moments that have passed."""
        ...

    def shared_time(self, mark: Mark) -> float:
        """A moment that has passed, in seconds on the clock that all stages share; no earlier than the last asked."""
        ...

    def release(self, marks: list[Mark]) -> None:
        """They are not needed any more."""
        ...


class HostClock:
    """Marks are seconds of ``time.perf_counter``; the shared clock is the wall clock as of the start."""

    def __init__(self) -> None:
        self._offset = time.time() - time.perf_counter()

    def mark(self) -> Mark:
        return time.perf_counter()

    def has_passed(self, mark: Mark) -> bool:
        return True

    def seconds(self, start: Mark, end: Mark) -> float:
        return end - start

    def shared_time(self, mark: Mark) -> float:
        return mark + self._offset

    def release(self, marks: list[Mark]) -> None:
        pass


class CudaClock:
    """Marks are events of the device's current stream."""

    def __init__(self, device: torch.device):
        torch.cuda.synchronize(device)
        self._base = torch.cuda.Event(enable_timing=True)
        self._base.record()
        self._base.synchronize()
        self._base_time = time.time()
        self._free: list[torch.cuda.Event] = []

    def mark(self) -> Mark:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def has_passed(self, mark: Mark) -> bool:
        return mark.query()

    def seconds(self, start: Mark, end: Mark) -> float:
        return start.elapsed_time(end) / 1000

    def shared_time(self, mark: Mark) -> float:
        return self._base_time + self.seconds(self._base, mark)

    def release(self, marks: list[Mark]) -> None:
        # Elapsed times are floats: far from its base an event would lose its microseconds.
        self._base_time = self.shared_time(marks[-1])
        self._free += [self._base, *marks[:-1]]
        self._base = marks[-1]


@dataclass(slots=True)
class _Record:
    launch: int
    num_rows: int
    host_wait_s: float
    phases: list[tuple[str, Mark, Mark]] = field(default_factory=list)
    layers: list[tuple[int, int, Mark, Mark]] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    """In order."""


class StageTimers:
    """The times of one stage, launch after launch.

    Args:
        spans: whether stretches of time are kept for pictures, the latest 20,000.
    """

    def __init__(self, stage: int, device: torch.device, keep_spans: bool = False):
        self.stage = stage
        self.spans: deque[Span] = deque(maxlen=_MAX_SPANS)
        self.totals_s: Counter[str] = Counter()
        """Seconds of each phase, of launches that have been read."""
        self.counts: Counter[str] = Counter()
        """How often each phase was entered."""
        self._on_device = device.type == "cuda"
        self._clock: Clock = CudaClock(device) if self._on_device else HostClock()
        self._keep_spans = keep_spans
        self._records: deque[_Record] = deque()
        self._record = _Record(-1, 0, 0.0)
        self._host_wait_s = 0.0
        self._layer_start: Mark | None = None

    def begin(self, launch: int, num_rows: int) -> None:
        """All that follows belongs to this launch."""
        if self._record.launch >= 0:
            self._records.append(self._record)
        self._record = _Record(launch, num_rows, self._host_wait_s)
        self._host_wait_s = 0.0

    def host_waited(self, since: float) -> None:
        """The host waited for the launch to come, since a moment of ``time.perf_counter``."""
        now = time.perf_counter()
        # A device may have been busy all the while.
        if not self._on_device:
            self._host_wait_s += now - since
            self._note_span(WAIT, self._record.launch + 1, 0, self._clock.shared_time(since), now - since)

    def start(self) -> Mark:
        """A phase begins."""
        mark = self._clock.mark()
        self._record.marks.append(mark)
        return mark

    def stop(self, phase: str, start: Mark) -> None:
        """The phase that began at ``start`` ends."""
        end = self.start()
        self._record.phases.append((phase, start, end))

    def layer_marker(self, start: Mark, num_rows: int, is_pass: bool) -> Callable[[int], None]:
        """To be called with a layer's index as it ends.

        Args:
            start: when the first one began.
            is_pass: whether it is one of many passes, of which samples will do.
        """
        if is_pass and self._on_device and self._record.launch % _LAUNCHES_PER_LAYER_SAMPLE:
            return _mark_nothing
        last = start

        def mark(layer: int) -> None:
            nonlocal last
            now = self.start()
            self._record.layers.append((layer, num_rows, last, now))
            last = now

        return mark

    def finish(self) -> None:
        """Nothing follows, and the device is done: read what is left."""
        self.begin(-1, 0)
        self.read(len(self._records))

    def read(self, max_launches: int) -> tuple[list[StageTiming], list[LayerTiming]]:
        """What has passed since the last call, of ``max_launches`` launches at most."""
        stages: list[StageTiming] = []
        layers: list[LayerTiming] = []
        while self._records and len(stages) < max_launches and self._has_passed(self._records[0]):
            record = self._records.popleft()
            stages.append(self._read_stage(record))
            layers += self._read_layers(record)
            if record.marks:
                self._clock.release(record.marks)
        return stages, layers

    def _has_passed(self, record: _Record) -> bool:
        return not record.marks or self._clock.has_passed(record.marks[-1])

    def _read_stage(self, record: _Record) -> StageTiming:
        seconds: Counter[str] = Counter({WAIT: record.host_wait_s})
        for phase, start, end in record.phases:
            taken = self._clock.seconds(start, end)
            seconds[phase] += taken
            self.counts[phase] += 1
            if self._keep_spans:
                self._note_span(phase, record.launch, record.num_rows, self._clock.shared_time(start), taken)
        self.totals_s.update(seconds)
        return StageTiming(
            self.stage,
            record.launch,
            record.num_rows,
            *(1000 * seconds[phase] for phase in (FORWARD, ENCODE, DECODE, WAIT, SEND)),
        )

    def _read_layers(self, record: _Record) -> list[LayerTiming]:
        ms: dict[tuple[int, int], float] = {}
        # With exact rows a layer runs once for each row.
        for layer, num_rows, start, end in record.layers:
            ms[layer, num_rows] = ms.get((layer, num_rows), 0.0) + 1000 * self._clock.seconds(start, end)
        return [LayerTiming(layer, num_rows, taken) for (layer, num_rows), taken in ms.items()]

    @property
    def num_unread(self) -> int:
        """Launches that are over for the host and not read."""
        return len(self._records)

    def _note_span(self, phase: str, launch: int, num_rows: int, start_s: float, seconds: float) -> None:
        if self._keep_spans:
            self.spans.append(Span(self.stage, phase, launch, num_rows, start_s, seconds))


def _mark_nothing(_layer: int) -> None:
    pass
