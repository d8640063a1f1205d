"""How long a schedule takes: the real planner and instructions of every stage, played against a clock that is made up.

Durations and sizes come from the caller; nothing is run. See :mod:`ds_stream.bench.what_if` for where they come from.
"""

import statistics
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from deepspeed.runtime.pipe.schedule import PipeInstruction

from ds_stream.core import Event, EventKind, Plan, Row
from ds_stream.partition import LayerList
from ds_stream.schedule import instructions as ins
from ds_stream.schedule.planner import RingPlanner
from ds_stream.schedule.stream_schedule import StreamSchedule

_SENDS = (ins.SendActivations, ins.SendVideo, ins.SendFinished)
_RECEIVES = (ins.RecvActivations, ins.RecvVideo, ins.RecvFinished)
# Work that is shorter than this, in ms, is done: sums of shares leave a rest.
_NOTHING = 1e-9


@dataclass(frozen=True, slots=True)
class Machine:
    """What stages run on and talk over."""

    num_devices: int
    """Devices; stages beyond their number share them."""
    is_pooled: bool
    """Whether any device works for any stage, as cores do; else stage ``r`` has device ``r % num_devices``."""
    link_bytes_per_ms: float
    link_latency_ms: float
    control_latency_ms: float = 0.0
    """Of a plan to the next stage."""


@dataclass(slots=True)
class Timeline:
    """What came of it; times in ms."""

    delivered_ms: list[float] = field(default_factory=list)
    """When each chunk was back at the controller."""
    latencies_ms: list[float] = field(default_factory=list)
    """From a chunk's admission to its delivery."""
    busy_ms: list[float] = field(default_factory=list)
    """Each stage's work, sharing of devices not counted."""
    launches: list[int] = field(default_factory=list)
    """Each stage's launches with rows."""
    num_ticks: int = 0

    @property
    def chunks_per_ms(self) -> float:
        """While the ring neither fills nor empties: of the middle third of the chunks."""
        first, last = len(self.delivered_ms) // 3, 2 * len(self.delivered_ms) // 3
        taken = self.delivered_ms[last] - self.delivered_ms[first]
        return (last - first) / taken if taken else float("inf")

    @property
    def latency_ms(self) -> float:
        """Median, the first third left out."""
        return statistics.median(self.latencies_ms[len(self.latencies_ms) // 3 :])


def play(
    layers: LayerList,
    partition: tuple[int, ...],
    planner: RingPlanner,
    num_chunks: int,
    machine: Machine,
    work_ms: Callable[[int, PipeInstruction], float],
    num_bytes: Callable[[int, PipeInstruction], float],
) -> Timeline:
    """Play one session whose ``num_chunks`` chunks are all waiting.

    Args:
        planner: fresh, without sessions.
        work_ms: how long a stage computes for an instruction.
        num_bytes: size of the message that an instruction of a stage sends.
    """
    return _Player(layers, partition, planner, num_chunks, machine, work_ms, num_bytes).play()


@dataclass(frozen=True, slots=True)
class _Work:
    ms: float


@dataclass(frozen=True, slots=True)
class _Arrival:
    link: str


@dataclass(frozen=True, slots=True)
class _Condition:
    is_met: Callable[[], bool]


_Need = _Work | _Arrival | _Condition


class _Player:
    def __init__(
        self,
        layers: LayerList,
        partition: tuple[int, ...],
        planner: RingPlanner,
        num_chunks: int,
        machine: Machine,
        work_ms: Callable[[int, PipeInstruction], float],
        num_bytes: Callable[[int, PipeInstruction], float],
    ):
        self.planner = planner
        self.num_chunks = num_chunks
        self.machine = machine
        self.work_ms = work_ms
        self.num_bytes = num_bytes
        self.num_stages = len(partition) - 1
        self.schedules = [
            StreamSchedule((), layers, partition, stage, planner.num_passes) for stage in range(self.num_stages)
        ]
        self.now = 0.0
        self.links: dict[str, deque[tuple[float, object]]] = {}
        self.link_free_at: dict[str, float] = {}
        self.admitted_at: dict[int, float] = {}
        self.result = Timeline(busy_ms=[0.0] * self.num_stages, launches=[0] * self.num_stages)
        self.stages = [self._run_stage(stage) for stage in range(self.num_stages)]
        self.needs: list[_Need | None] = [next(stage) for stage in self.stages]
        self.left_ms = [need.ms if isinstance(need, _Work) else 0.0 for need in self.needs]

    def play(self) -> Timeline:
        while any(need is not None for need in self.needs):
            self._collect()
            if not any([self._go_on(stage) for stage in range(self.num_stages)]):
                self._pass_time()
        self._collect()
        # The plan that stops comes after the last delivery.
        assert not self.links.get("frames")
        self.result.num_ticks = self.planner.tick
        return self.result

    def _go_on(self, stage: int) -> bool:
        """Let a stage go on if what it needs is there; whether it did."""
        need = self.needs[stage]
        if need is None or not self._is_met(stage, need):
            return False
        self.needs[stage] = need = next(self.stages[stage], None)
        self.left_ms[stage] = need.ms if isinstance(need, _Work) else 0.0
        return True

    def _is_met(self, stage: int, need: _Need) -> bool:
        match need:
            case _Work():
                return self.left_ms[stage] <= _NOTHING
            case _Arrival():
                return bool(self.links.get(need.link)) and self.links[need.link][0][0] <= self.now
            case _Condition():
                return need.is_met()

    def _pass_time(self) -> None:
        """To the next moment at which something happens."""
        speeds = self._speeds()
        waits = [self.left_ms[stage] / speed for stage, speed in speeds.items()]
        awaited = [need.link for need in self.needs if isinstance(need, _Arrival)]
        queues = [self.links[link] for link in [*awaited, "frames"] if self.links.get(link)]
        waits += [queue[0][0] - self.now for queue in queues]
        assert waits, "the stages wait for each other"
        step = max(min(waits), 0.0)
        for stage, speed in speeds.items():
            self.left_ms[stage] -= step * speed
        # Not past an arrival by a rounding.
        self.now += step + _NOTHING

    def _speeds(self) -> dict[int, float]:
        """How fast each stage that has work gets on."""
        working = [stage for stage, need in enumerate(self.needs) if isinstance(need, _Work)]
        if self.machine.is_pooled:
            return dict.fromkeys(working, min(1.0, self.machine.num_devices / max(len(working), 1)))
        devices = [stage % self.machine.num_devices for stage in working]
        return {stage: 1 / devices.count(device) for stage, device in zip(working, devices, strict=True)}

    def _collect(self) -> None:
        queue = self.links.get("frames")
        while queue and queue[0][0] <= self.now:
            at, chunk = queue.popleft()
            assert isinstance(chunk, int)
            self.planner.delivered(0, chunk)
            self.result.delivered_ms.append(at)
            self.result.latencies_ms.append(at - self.admitted_at[chunk])

    # One stage.

    def _run_stage(self, stage: int) -> Generator[_Need, None, None]:
        while True:
            if stage == 0:
                yield _Condition(self._can_plan)
                plan = self._plan()
            else:
                yield _Arrival(f"plan {stage}")
                received = self.links[f"plan {stage}"].popleft()[1]
                assert isinstance(received, Plan)
                plan = received
            for do in self.schedules[stage].instructions(plan):
                yield from self._carry_out(stage, do)
            if plan.stops:
                return

    def _carry_out(self, stage: int, do: PipeInstruction) -> Generator[_Need, None, None]:
        ms = self.work_ms(stage, do)
        self.result.busy_ms[stage] += ms
        if isinstance(do, ins.ForwardPass):
            self.result.launches[stage] += 1
        if isinstance(do, _RECEIVES):
            yield from self._receive(f"forward {stage}")
        elif isinstance(do, ins.RecvLatents):
            yield from self._receive("latents")
        if ms:
            yield _Work(ms)
        if isinstance(do, ins.SendPlan):
            self._arrives(f"plan {stage + 1}", self.now + self.machine.control_latency_ms, do.plan)
        elif isinstance(do, _SENDS):
            self._send(f"forward {stage + 1}", self.num_bytes(stage, do))
        elif isinstance(do, ins.ReturnLatents):
            self._send("latents", self.num_bytes(stage, do))
        elif isinstance(do, ins.DeliverChunk):
            # The controller's own rank needs no link.
            self._send("frames", self.num_bytes(stage, do) if stage > 0 else 0.0, do.row.chunk, stage > 0)

    def _receive(self, link: str) -> Generator[_Need, None, None]:
        yield _Arrival(link)
        self.links[link].popleft()

    def _send(self, link: str, num_bytes: float, message: object = None, is_far: bool = True) -> None:
        """Hand a message to a link, which carries one after the other."""
        started = max(self.now, self.link_free_at.get(link, 0.0))
        self.link_free_at[link] = sent = started + num_bytes / self.machine.link_bytes_per_ms
        self._arrives(link, sent + self.machine.link_latency_ms * is_far, message)

    def _arrives(self, link: str, at: float, message: object) -> None:
        self.links.setdefault(link, deque()).append((at, message))

    # The controller.

    def _is_all_admitted(self) -> bool:
        return self.planner.tick > 0 and self.planner.num_admitted(0) == self.num_chunks

    def _can_plan(self) -> bool:
        if self._is_all_admitted() and self.planner.is_empty:
            return self.planner.num_undelivered == 0
        return self.planner.may_launch

    def _plan(self) -> Plan:
        if self.planner.tick == 0:
            self.planner.open(0)
        if self._is_all_admitted() and self.planner.is_empty:
            return Plan(self.planner.tick, events=(Event(EventKind.STOP),))
        tick = self.planner.tick
        rows = self.planner.next_rows({0: self.num_chunks}, lambda session, chunk: Row(session, chunk, 0, 0, 0.5))
        for row in rows:
            if row.step == 0:
                self.admitted_at[row.chunk] = self.now
        return Plan(tick, rows)
