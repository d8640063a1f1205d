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

from ds_stream.core import Event, EventKind, Plan, Row
from ds_stream.model.window import ContextWindow
from ds_stream.schedule.planner import RingPlanner, num_message_buffers
from ds_stream.schedule.simulated_stage import FRAMES, Mutation, ScheduleFault, SimulatedStage, Wires


@dataclass(frozen=True, slots=True)
class Scenario:
    """One run to simulate: sessions of ``num_chunks`` chunks each, arriving at the ticks of ``arrivals``."""

    num_stages: int
    window: ContextWindow
    max_rows: int | Callable[[int], int]
    """Row cap, or a function from tick to row cap."""
    arrivals: Sequence[Sequence[int]]
    """For each session, the tick at which each of its chunks has arrived, rising. Ticks in which the ring stands still
    for lack of chunks count too."""
    order_seed: int = 0
    max_queued_chunks: int = 2


@dataclass(slots=True)
class SimulationResult:
    num_ticks: int
    finished: list[tuple[int, int]] = field(default_factory=list)
    """Finished ``(session, chunk)`` in order."""
    max_rows_seen: int = 0
    max_buffers_in_flight: int = 0


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
        self.wires = Wires(num_message_buffers(scenario.num_stages, scenario.max_queued_chunks))
        self.controller = _Controller(scenario)
        self.stages = [
            SimulatedStage(
                stage,
                scenario.num_stages,
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
        self.result.max_buffers_in_flight = self.wires.max_in_flight
        return self.result

    def _collect(self) -> None:
        session, chunk, tick = self.wires.receive(FRAMES)
        assert isinstance(session, int) and isinstance(chunk, int) and isinstance(tick, int)
        if any(other == (session, chunk) for other in self.result.finished):
            raise ScheduleFault(f"chunk {chunk} of session {session} came out twice")
        elders = [c for s, c in self.result.finished if s == session]
        if chunk != len(elders):
            raise ScheduleFault(f"chunk {chunk} of session {session} came out after {elders}")
        latency = tick + 1 - self.controller.admitted_at[session, chunk]
        if latency != self.scenario.window.num_passes * self.scenario.num_stages:
            raise ScheduleFault(f"chunk {chunk} of session {session} took {latency} ticks")
        self.result.finished.append((session, chunk))
        self.controller.planner.delivered(session, chunk)


class _Controller:
    """Feeds chunks as they arrive; ends when all have come back."""

    def __init__(self, scenario: Scenario):
        self.scenario = scenario
        window = scenario.window
        self.planner = RingPlanner(
            scenario.num_stages, window.num_passes, window.lead, self._cap(0), scenario.max_queued_chunks
        )
        self.admitted_at: dict[tuple[int, int], int] = {}
        self.idle_ticks = 0

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
            rows = self.planner.next_rows(arrived, lambda session, chunk: Row(session, chunk, 0, prompt=session))
            admitted = [row for row in rows if row.step == 0]
            if admitted and len(rows) > self.planner.max_rows:
                raise ScheduleFault(f"tick {tick} admits {admitted} beyond the cap of {self.planner.max_rows}")
            self.admitted_at.update({(row.session, row.chunk): tick for row in admitted})
            yield Plan(tick, rows, tuple(events))
            events = []
            all_admitted = all(self.planner.num_admitted(s) == len(self.scenario.arrivals[s]) for s in sessions)
            if all_admitted and self.planner.is_empty and self.planner.num_undelivered == 0:
                break
        closing = tuple(
            e for s in sessions for e in (Event(EventKind.CLOSE_SESSION, s), Event(EventKind.DROP_PROMPT, 0, s))
        )
        yield Plan(self.planner.tick, (), (*closing, Event(EventKind.STOP)))


def _set_prompt(session: int) -> Event:
    return Event(EventKind.SET_PROMPT, session, session)
