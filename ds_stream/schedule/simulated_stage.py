"""One stage of the simulator: carries out instructions on integers instead of tensors, and checks each."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace

from deepspeed.runtime.pipe.schedule import PipeInstruction

from ds_stream.core import Plan, Row
from ds_stream.model.window import ContextWindow
from ds_stream.schedule import instructions as ins
from ds_stream.schedule.stream_schedule import StreamSchedule

FRAMES = "frames"
"""The link from the last stage to the controller."""

Mutation = Callable[[int, int, list[PipeInstruction]], list[PipeInstruction]]
"""``(stage, launch index, instructions) -> instructions``: plants a fault, to show that it is caught."""


class ScheduleFault(AssertionError):  # noqa: N818
    """The schedule broke one of its promises."""


class Wires:
    """The links between stages, each a queue of messages in flight.

    Args:
        num_buffers: messages that one link may have in flight.
    """

    def __init__(self, num_buffers: int):
        self.num_buffers = num_buffers
        self.max_in_flight = 0
        self._queues: dict[str, deque[tuple[object, ...]]] = {}

    def send(self, link: str, message: tuple[object, ...]) -> None:
        queue = self._queues.setdefault(link, deque())
        # Frames leave the ring: the planner's back-pressure bounds them, not buffers.
        if link != FRAMES and len(queue) >= self.num_buffers:
            raise ScheduleFault(f"{link}: message {message} finds all {self.num_buffers} buffers in flight")
        queue.append(message)
        self.max_in_flight = max(self.max_in_flight, len(queue))

    def has_message(self, link: str) -> bool:
        return bool(self._queues.get(link))

    def receive(self, link: str) -> tuple[object, ...]:
        return self._queues[link].popleft()

    def left_over(self) -> dict[str, list[tuple[object, ...]]]:
        return {link: list(queue) for link, queue in self._queues.items() if queue}


class SimulatedStage:
    """What a stage would do, one instruction at a time.

    Args:
        plans: on the first stage the controller's plans; elsewhere they come over the wires.
        can_plan: whether the controller has a next plan; first stage only.
        mutate: plants a fault.
    """

    def __init__(
        self,
        stage: int,
        num_stages: int,
        window: ContextWindow,
        wires: Wires,
        plans: Iterator[Plan] | None = None,
        can_plan: Callable[[], bool] = lambda: False,
        mutate: Mutation | None = None,
    ):
        self.stage = stage
        self.num_stages = num_stages
        self.window = window
        self.wires = wires
        self.can_plan = can_plan
        self.mutate = mutate
        self.max_rows_seen = 0
        source = self._received_plans() if plans is None else plans
        self.steps = StreamSchedule(self._note_stop(source), num_stages, stage, window.num_passes).steps()
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
            plan = self.wires.receive(f"plan {self.stage}")[0]
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
            if self.stage == 0:
                return self.tick < 0 or self.can_plan()
            return self.wires.has_message(f"plan {self.stage}")
        link = self._incoming(self.todo[0])
        return link is None or self.wires.has_message(link)

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
            if self.mutate is not None:
                commands = self.mutate(self.stage, self.tick - self.stage, commands)
            self.todo.extend(commands)
            return
        instruction = self.todo.popleft()
        handler = getattr(self, f"_{type(instruction).__name__}")
        handler(instruction)

    def _fault(self, what: str) -> ScheduleFault:
        return ScheduleFault(f"stage {self.stage}, tick {self.tick}: {what}")

    def _receive(self, link: str, launch: int, num_rows: int | None = None) -> list[Row]:
        sent_launch, rows = self.wires.receive(link)
        assert isinstance(rows, tuple)
        if sent_launch != launch or (num_rows is not None and len(rows) != num_rows):
            raise self._fault(f"{link}: expected {num_rows} rows of launch {launch}, got {rows} of {sent_launch}")
        return list(rows)

    def _SendPlan(self, do: PipeInstruction) -> None:
        self.wires.send(f"plan {self.stage + 1}", (do.plan,))

    def _OpenSession(self, do: PipeInstruction) -> None:
        self.sessions[do.session] = {}

    def _CloseSession(self, do: PipeInstruction) -> None:
        del self.sessions[do.session]

    def _EmbedPrompt(self, do: PipeInstruction) -> None:
        self.prompts.add(do.prompt)

    def _RecvPrompt(self, do: PipeInstruction) -> None:
        launch, prompt = self.wires.receive(f"prompt {self.stage}")
        if (launch, prompt) != (do.launch, do.prompt):
            raise self._fault(f"expected prompt {do.prompt} of launch {do.launch}, got {prompt} of {launch}")
        self.prompts.add(do.prompt)

    def _SendPrompt(self, do: PipeInstruction) -> None:
        self.wires.send(f"prompt {self.stage + 1}", (do.launch, do.prompt))

    def _DropPrompt(self, do: PipeInstruction) -> None:
        self.prompts.remove(do.prompt)

    def _RecvLatents(self, do: PipeInstruction) -> None:
        rows = self._receive("latents", do.launch - self.num_stages, do.num_rows)
        self.held += [replace(row, step=row.step + 1) for row in rows]

    def _StartChunk(self, do: PipeInstruction) -> None:
        self.held.append(do.row)

    def _RecvActivations(self, do: PipeInstruction) -> None:
        self.held += self._receive(f"activations {self.stage}", do.launch, do.num_rows)

    def _ForwardPass(self, do: PipeInstruction) -> None:
        if tuple(self.held) != do.rows:
            raise self._fault(f"runs {do.rows} but holds {tuple(self.held)}")
        self.max_rows_seen = max(self.max_rows_seen, len(do.rows))
        for row in do.rows:
            if row in self.passes:
                raise self._fault(f"runs {row} twice")
            if row.step > 0 and replace(row, step=row.step - 1) not in self.passes:
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
        self.wires.send(f"activations {self.stage + 1}", (do.launch, tuple(self.held)))
        self.held = []

    def _StepLatents(self, do: PipeInstruction) -> None:
        if tuple(self.held) != do.rows:
            raise self._fault(f"steps {do.rows} but holds {tuple(self.held)}")

    def _ReturnLatents(self, do: PipeInstruction) -> None:
        self.wires.send("latents", (do.launch, tuple(self._held_row(index) for index in do.indices)))
        self._leave(len(do.indices))

    def _DecodeChunk(self, do: PipeInstruction) -> None:
        found = self._held_row(do.index)
        if found != do.row or do.row.step != self.window.num_passes - 1:
            raise self._fault(f"decodes {do.row} but row {do.index} is {found}")
        self.wires.send(FRAMES, (do.row.session, do.row.chunk, self.tick))
        self._leave(1)

    def _held_row(self, index: int) -> Row:
        if index >= len(self.held):
            raise self._fault(f"uses row {index} but holds {tuple(self.held)}")
        return self.held[index]

    def _check_held(self, num_rows: int) -> None:
        if num_rows != len(self.held):
            raise self._fault(f"sends {num_rows} rows but holds {len(self.held)}")

    def _leave(self, num_rows: int) -> None:
        """Rows leave the last stage by return or decoding; when all have left, the stage holds none."""
        self.left += num_rows
        if self.left == len(self.held):
            self.held, self.left = [], 0
