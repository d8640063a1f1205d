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
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from deepspeed.runtime.pipe.schedule import PipeInstruction

from ds_stream.core import Event, EventKind, Plan, Row
from ds_stream.model.window import ContextWindow
from ds_stream.schedule import instructions as ins
from ds_stream.schedule.planner import RingPlanner, num_message_buffers
from ds_stream.schedule.stream_schedule import StreamSchedule

Mutation = Callable[[int, int, list[PipeInstruction]], list[PipeInstruction]]
"""``(stage, launch index, instructions) -> instructions``: plants a fault, to show that it is caught."""


class ScheduleFault(AssertionError):  # noqa: N818
    """The schedule broke one of its promises."""


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
    finish_ticks: dict[tuple[int, int], int] = field(default_factory=dict)
    """Tick after which each chunk was finished."""
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
        self.mutate = mutate
        self.chance = random.Random(scenario.order_seed)
        self.links: dict[str, deque[tuple[object, ...]]] = {}
        self.num_buffers = num_message_buffers(scenario.num_stages, scenario.max_queued_chunks)
        self.controller = _Controller(scenario)
        self.stages = [_Stage(self, stage) for stage in range(scenario.num_stages)]
        self.result = SimulationResult(num_ticks=0)

    def run(self) -> SimulationResult:
        while not all(stage.done for stage in self.stages):
            ready = [stage for stage in self.stages if stage.can_go_on()]
            collect = bool(self.links.get("frames"))
            if not ready and not collect:
                raise ScheduleFault(f"deadlock: {'; '.join(stage.where() for stage in self.stages if not stage.done)}")
            if collect and (not ready or self.chance.random() < 0.3):
                self._collect()
            else:
                self.chance.choice(ready).go_on()
        while self.links.get("frames"):
            self._collect()
        left = {name: list(queue) for name, queue in self.links.items() if queue}
        if left:
            raise ScheduleFault(f"messages never received: {left}")
        expected = {(s, c) for s, ticks in enumerate(self.scenario.arrivals) for c in range(len(ticks))}
        if set(self.result.finished) != expected:
            raise ScheduleFault(f"finished {sorted(self.result.finished)} instead of {sorted(expected)}")
        self.result.num_ticks = self.controller.planner.tick
        return self.result

    def _collect(self) -> None:
        session, chunk, tick = self.links["frames"].popleft()
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
        self.result.finish_ticks[session, chunk] = tick
        self.controller.planner.delivered(session, chunk)

    def send(self, link: str, message: tuple[object, ...]) -> None:
        queue = self.links.setdefault(link, deque())
        if link != "frames" and len(queue) >= self.num_buffers:
            raise ScheduleFault(f"{link}: message {message} finds all {self.num_buffers} buffers in flight")
        queue.append(message)
        self.result.max_buffers_in_flight = max(self.result.max_buffers_in_flight, len(queue))


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
            rows = self.planner.next_rows(arrived, {s: s for s in sessions})
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


class _Stage:
    def __init__(self, simulation: _Simulation, stage: int):
        self.sim = simulation
        self.stage = stage
        self.window = simulation.scenario.window
        self.is_first = stage == 0
        self.is_last = stage == simulation.scenario.num_stages - 1
        plans = simulation.controller.plans() if self.is_first else self._received_plans()
        num_stages, num_passes = simulation.scenario.num_stages, simulation.scenario.window.num_passes
        self.steps = StreamSchedule(self._note_stop(plans), num_stages, stage, num_passes).steps()
        self.tick = -1
        self.stopping = False
        self.todo: deque[PipeInstruction] = deque()
        self.held: list[Row] = []
        self.left = 0
        self.sessions: dict[int, dict[tuple[int, int], tuple[int, int]]] = {}
        self.prompts: set[int] = set()
        self.passes: set[Row] = set()

    def where(self) -> str:
        return f"stage {self.stage} at tick {self.tick} before {self.todo[0] if self.todo else 'its next plan'}"

    def _received_plans(self) -> Iterator[Plan]:
        while True:
            plan = self.sim.links[f"plan {self.stage}"].popleft()[0]
            assert isinstance(plan, Plan)
            yield plan

    def _note_stop(self, plans: Iterator[Plan]) -> Iterator[Plan]:
        for plan in plans:
            self.stopping = plan.stops
            yield plan

    @property
    def done(self) -> bool:
        return self.stopping and not self.todo

    def can_go_on(self) -> bool:
        if self.done:
            return False
        if not self.todo:
            if self.tick + 1 < self.stage:
                return True
            if self.is_first:
                return self.tick < 0 or self.sim.controller.can_plan()
            return bool(self.sim.links.get(f"plan {self.stage}"))
        link = self._incoming(self.todo[0])
        return link is None or bool(self.sim.links.get(link))

    def _incoming(self, instruction: PipeInstruction) -> str | None:
        if isinstance(instruction, ins.RecvActivations):
            return f"activations {self.stage}"
        if isinstance(instruction, ins.RecvLatents):
            return "latents"
        if isinstance(instruction, ins.RecvPrompt):
            return f"prompt {self.stage}"
        return None

    def go_on(self) -> None:
        if not self.todo:
            commands = next(self.steps)
            self.tick += 1
            if self.sim.mutate is not None:
                commands = self.sim.mutate(self.stage, self.tick - self.stage, commands)
            self.todo.extend(commands)
            return
        instruction = self.todo.popleft()
        handler = getattr(self, f"_{type(instruction).__name__}")
        handler(instruction)

    def _fault(self, what: str) -> ScheduleFault:
        return ScheduleFault(f"stage {self.stage}, tick {self.tick}: {what}")

    def _receive(self, link: str, launch: int, num_rows: int | None = None) -> list[Row]:
        sent_launch, rows = self.sim.links[link].popleft()
        assert isinstance(rows, tuple)
        if sent_launch != launch or (num_rows is not None and len(rows) != num_rows):
            raise self._fault(f"{link}: expected {num_rows} rows of launch {launch}, got {rows} of {sent_launch}")
        return list(rows)

    def _SendPlan(self, do: PipeInstruction) -> None:
        self.sim.send(f"plan {self.stage + 1}", (do.plan,))

    def _OpenSession(self, do: PipeInstruction) -> None:
        self.sessions[do.session] = {}

    def _CloseSession(self, do: PipeInstruction) -> None:
        del self.sessions[do.session]

    def _EmbedPrompt(self, do: PipeInstruction) -> None:
        self.prompts.add(do.prompt)

    def _RecvPrompt(self, do: PipeInstruction) -> None:
        launch, prompt = self.sim.links[f"prompt {self.stage}"].popleft()
        if (launch, prompt) != (do.launch, do.prompt):
            raise self._fault(f"expected prompt {do.prompt} of launch {do.launch}, got {prompt} of {launch}")
        self.prompts.add(do.prompt)

    def _SendPrompt(self, do: PipeInstruction) -> None:
        self.sim.send(f"prompt {self.stage + 1}", (do.launch, do.prompt))

    def _DropPrompt(self, do: PipeInstruction) -> None:
        self.prompts.remove(do.prompt)

    def _RecvLatents(self, do: PipeInstruction) -> None:
        rows = self._receive("latents", do.launch - self.sim.scenario.num_stages, do.num_rows)
        self.held += [Row(row.session, row.chunk, row.step + 1, row.prompt) for row in rows]

    def _StartChunk(self, do: PipeInstruction) -> None:
        self.held.append(do.row)

    def _RecvActivations(self, do: PipeInstruction) -> None:
        self.held += self._receive(f"activations {self.stage}", do.launch, do.num_rows)

    def _ForwardPass(self, do: PipeInstruction) -> None:
        if tuple(self.held) != do.rows:
            raise self._fault(f"runs {do.rows} but holds {tuple(self.held)}")
        self.sim.result.max_rows_seen = max(self.sim.result.max_rows_seen, len(do.rows))
        for row in do.rows:
            if row in self.passes:
                raise self._fault(f"runs {row} twice")
            if row.step > 0 and Row(row.session, row.chunk, row.step - 1, row.prompt) not in self.passes:
                raise self._fault(f"runs {row} before its previous step")
            if row.prompt not in self.prompts:
                raise self._fault(f"{row} uses a prompt that is not here")
            self.passes.add(row)
            self._use_cache(row)

    def _use_cache(self, row: Row) -> None:
        """Entries are ``(store level, slot) -> (latent frame, level at which it was computed)``."""
        store = self.sessions.get(row.session)
        if store is None:
            raise self._fault(f"{row} belongs to a session that is not open")
        window = self.window
        own = window.frames(row.chunk)
        for level in window.levels_written(row.step):
            for frame in own:
                store[level, window.slot(frame)] = (frame, row.step)
        level = window.level_read(row.step)
        filled = [slot for (at, slot) in store if at == level]
        if sorted(filled) != list(range(window.num_filled(row.chunk))):
            raise self._fault(f"{row} reads slots {sorted(filled)} of level {level}")
        for frame in window.visible(row.chunk):
            wanted = (frame, row.step if frame in own else level)
            found = store.get((level, window.slot(frame)))
            if found != wanted:
                raise self._fault(f"{row} reads latent frame, level {wanted} but the cache has {found}")

    def _SendActivations(self, do: PipeInstruction) -> None:
        self._check_held(do.num_rows)
        self.sim.send(f"activations {self.stage + 1}", (do.launch, tuple(self.held)))
        self.held = []

    def _StepLatents(self, do: PipeInstruction) -> None:
        if tuple(self.held) != do.rows:
            raise self._fault(f"steps {do.rows} but holds {tuple(self.held)}")

    def _ReturnLatents(self, do: PipeInstruction) -> None:
        self.sim.send("latents", (do.launch, tuple(self.held[index] for index in do.indices)))
        self._leave(len(do.indices))

    def _DecodeChunk(self, do: PipeInstruction) -> None:
        if self.held[do.index] != do.row or do.row.step != self.window.num_passes - 1:
            raise self._fault(f"decodes {do.row} but row {do.index} is {self.held[do.index]}")
        self.sim.send("frames", (do.row.session, do.row.chunk, self.tick))
        self._leave(1)

    def _check_held(self, num_rows: int) -> None:
        if num_rows != len(self.held):
            raise self._fault(f"sends {num_rows} rows but holds {len(self.held)}")

    def _leave(self, num_rows: int) -> None:
        """Rows leave the last stage by return or decoding; when all have left, the stage holds none."""
        self.left += num_rows
        if self.left == len(self.held):
            self.held, self.left = [], 0
