"""Runs the instruction lists of all stages against each other, in any order that chance has it, and checks them.

Stages are actors that carry out one instruction at a time in a random order; messages wait in queues. What must hold:

- every receive meets its send, in order, with the rows that it expects; nothing is left over;
- no message buffer is needed again while its message is in flight;
- every cache entry that a pass reads was written, at the right level, and not evicted; no younger chunk is seen;
- every chunk takes every pass once on every stage, in order, and leaves ``K * P`` ticks after it entered;
- no launch admits a row beyond the cap in force.

A breach raises :class:`ScheduleFault`. Together with a sweep this is the proof that the schedule is right.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ds_stream.core import Event, EventKind, Plan, Row
from ds_stream.model.window import ContextWindow
from ds_stream.partition import LayerList
from ds_stream.schedule.planner import RingPlanner, num_message_buffers
from ds_stream.schedule.simulated_stage import Mutation, SimulatedStage
from ds_stream.schedule.simulated_wires import FRAMES, Kind, ScheduleFault, Wires


@dataclass(frozen=True, slots=True)
class Scenario:
    """One run to simulate: sessions of ``num_chunks`` chunks each, arriving at the ticks of ``arrivals``."""

    layers: LayerList
    partitions: Sequence[tuple[int, ...]]
    """Boundaries of the stages at the start, and those that follow, one every ``ticks_per_partition``."""
    window: ContextWindow
    max_rows: int | Callable[[int], int]
    """Row cap, or a function from tick to row cap."""
    arrivals: Sequence[Sequence[int]]
    """For each session, the tick at which each of its chunks has arrived, rising. Ticks in which the ring stands still
    for lack of chunks count too."""
    order_seed: int = 0
    max_queued_chunks: int = 2
    ticks_per_partition: int = 5
    has_video: bool = True

    @staticmethod
    def ring_of(num_stages: int, *rest: Any, **options: Any) -> "Scenario":
        """A ring alone: a block on each stage, the VAE on the first and last ones."""
        layers = LayerList(num_stages, num_decode_layers=1)
        return Scenario(layers, [layers.resolve("auto", num_stages)], *rest, **options)

    @property
    def num_stages(self) -> int:
        return len(self.partitions[0]) - 1


@dataclass(slots=True)
class SimulationResult:
    num_ticks: int
    finished: list[tuple[int, int]] = field(default_factory=list)
    """Finished ``(session, chunk)`` in order."""
    max_rows_seen: int = 0
    num_partitions: int = 1
    """Partitions that came into force."""


def simulate(scenario: Scenario, mutate: Mutation | None = None) -> SimulationResult:
    """Run ``scenario`` to its end.

    Raises:
        ScheduleFault: the schedule broke a promise; the text says which, where and when.
    """
    return _Simulation(scenario, mutate).run()


class _Simulation:
    def __init__(self, scenario: Scenario, mutate: Mutation | None):
        self.scenario = scenario
        self.chance = random.Random(scenario.order_seed)
        self.controller = _Controller(scenario)
        num_launches = num_message_buffers(scenario.num_stages, scenario.max_queued_chunks)
        # Each row of a launch may finish, and each session's prompt may change besides.
        num_parcels = num_launches * (self.controller.most_rows + len(scenario.arrivals))
        self.wires = Wires({kind: num_parcels if kind is Kind.PARCEL else num_launches for kind in Kind})
        self.stages = [
            SimulatedStage(
                stage,
                scenario.layers,
                scenario.partitions[0],
                scenario.window,
                self.wires,
                self.controller.plans() if stage == 0 else None,
                self.controller.can_plan,
                mutate,
            )
            for stage in range(scenario.num_stages)
        ]
        self.result = SimulationResult(num_ticks=0)

    def run(self) -> SimulationResult:
        while not all(stage.done for stage in self.stages):
            ready = [stage for stage in self.stages if stage.can_go_on()]
            collect = self.wires.has_message(FRAMES)
            if not ready and not collect:
                raise ScheduleFault(f"deadlock: {'; '.join(stage.where() for stage in self.stages if not stage.done)}")
            if collect and (not ready or self.chance.random() < 0.3):
                self._collect()
            else:
                self.chance.choice(ready).go_on()
        while self.wires.has_message(FRAMES):
            self._collect()
        if left := self.wires.left_over():
            raise ScheduleFault(f"messages never received: {left}")
        expected = {(s, c) for s, ticks in enumerate(self.scenario.arrivals) for c in range(len(ticks))}
        if set(self.result.finished) != expected:
            raise ScheduleFault(f"finished {sorted(self.result.finished)} instead of {sorted(expected)}")
        self.result.num_ticks = self.controller.planner.tick
        self.result.max_rows_seen = max(stage.max_rows_seen for stage in self.stages)
        self.result.num_partitions = self.controller.num_partitions
        return self.result

    def _collect(self) -> None:
        message = self.wires.receive(FRAMES, Kind.FRAMES)
        assert isinstance(message, tuple)
        session, chunk, tick = message
        if any(other == (session, chunk) for other in self.result.finished):
            raise ScheduleFault(f"chunk {chunk} of session {session} came out twice")
        elders = [c for s, c in self.result.finished if s == session]
        if chunk != len(elders):
            raise ScheduleFault(f"chunk {chunk} of session {session} came out after {elders}")
        admitted_at, num_ring_stages = self.controller.admitted_at[session, chunk]
        latency = tick + 1 - admitted_at
        if latency != (self.scenario.window.num_passes - 1) * num_ring_stages + self.scenario.num_stages:
            raise ScheduleFault(f"chunk {chunk} of session {session} took {latency} ticks")
        self.result.finished.append((session, chunk))
        self.controller.planner.delivered(session, chunk)


class _Controller:
    """Feeds chunks as they arrive; ends when all have come back."""

    def __init__(self, scenario: Scenario):
        self.scenario = scenario
        window = scenario.window
        num_ring_stages = scenario.layers.ring_of(scenario.partitions[0]).num_stages
        self.planner = RingPlanner(
            num_ring_stages,
            window.num_passes,
            window.lead,
            self._cap(0),
            scenario.max_queued_chunks,
            scenario.num_stages - num_ring_stages,
        )
        self.admitted_at: dict[tuple[int, int], tuple[int, int]] = {}
        """Tick, and stages of the ring then."""
        self.most_rows = max(self._cap(tick) for tick in range(100))
        self.idle_ticks = 0
        self.num_partitions = 1

    def _cap(self, tick: int) -> int:
        cap = self.scenario.max_rows
        return cap if isinstance(cap, int) else cap(tick)

    def _arrived(self, tick: int) -> dict[int, int]:
        now = tick + self.idle_ticks
        return {s: sum(at <= now for at in ticks) for s, ticks in enumerate(self.scenario.arrivals)}

    def can_plan(self) -> bool:
        all_admitted = self.planner.tick > 0 and all(
            self.planner.num_admitted(session) == len(ticks) for session, ticks in enumerate(self.scenario.arrivals)
        )
        if all_admitted and self.planner.is_empty:
            return self.planner.num_undelivered == 0
        return self.planner.may_launch

    def plans(self) -> Iterator[Plan]:
        sessions = range(len(self.scenario.arrivals))
        for session in sessions:
            self.planner.open(session)
        events = [e for s in sessions for e in (Event(EventKind.OPEN_SESSION, s, s), _set_prompt(s))]
        while True:
            tick = self.planner.tick
            self.planner.max_rows = self._cap(tick)
            arrived = self._arrived(tick)
            while (
                self.planner.is_empty
                and tick > 0
                and all(arrived[s] == self.planner.num_admitted(s) for s in sessions)
            ):
                self.idle_ticks += 1
                arrived = self._arrived(tick)
            partition = self._next_partition()
            if partition and not self.planner.is_empty:
                # Rows in flight run out first.
                partition, arrived = (), dict.fromkeys(arrived, 0)
            elif partition:
                self._take_up(partition)
            rows = self.planner.next_rows(arrived, self._first_row)
            admitted = [row for row in rows if row.step == 0]
            if admitted and len(rows) > self.planner.max_rows:
                raise ScheduleFault(f"tick {tick} admits {admitted} beyond the cap of {self.planner.max_rows}")
            self.admitted_at.update({(row.session, row.chunk): (tick, self.planner.num_stages) for row in admitted})
            yield Plan(tick, rows, tuple(events), partition)
            events = []
            all_admitted = all(self.planner.num_admitted(s) == len(self.scenario.arrivals[s]) for s in sessions)
            if all_admitted and self.planner.is_empty and self.planner.num_undelivered == 0:
                break
        closing = tuple(
            e for s in sessions for e in (Event(EventKind.CLOSE_SESSION, s), Event(EventKind.DROP_PROMPT, 0, s))
        )
        yield Plan(self.planner.tick, (), (*closing, Event(EventKind.STOP)))

    def _next_partition(self) -> tuple[int, ...]:
        scenario = self.scenario
        is_due = self.planner.tick >= self.num_partitions * scenario.ticks_per_partition
        return (
            scenario.partitions[self.num_partitions]
            if is_due and self.num_partitions < len(scenario.partitions)
            else ()
        )

    def _take_up(self, partition: tuple[int, ...]) -> None:
        self.num_partitions += 1
        num_ring_stages = self.scenario.layers.ring_of(partition).num_stages
        self.planner.set_ring(num_ring_stages, self.scenario.num_stages - num_ring_stages)

    def _first_row(self, session: int, chunk: int) -> Row:
        return Row(session, chunk, 0, prompt=session, strength=0.5 if self.scenario.has_video else None)


def _set_prompt(session: int) -> Event:
    return Event(EventKind.SET_PROMPT, session, session)
