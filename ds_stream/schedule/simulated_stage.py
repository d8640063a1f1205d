"""One stage of the simulator: carries out instructions on integers instead of tensors, and checks each."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace

from deepspeed.runtime.pipe.schedule import PipeInstruction

from ds_stream.core import Plan, Row
from ds_stream.model.window import ContextWindow
from ds_stream.partition import EMBED, ENCODE, LayerList, stage_layers, stage_of
from ds_stream.schedule import instructions as ins
from ds_stream.schedule.simulated_wires import FRAMES, Kind, ScheduleFault, SimulatedLayer, Store, Wires
from ds_stream.schedule.stream_schedule import StreamSchedule

Mutation = Callable[[int, int, list[PipeInstruction]], list[PipeInstruction]]
"""``(stage, launch index, instructions) -> instructions``: plants a fault, to show that it is caught."""


class TakeInLayer(ins.StreamInstruction):
    """The waiting half of a repartition: receive one layer from the stage that held it."""


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
        layers: LayerList,
        partition: tuple[int, ...],
        window: ContextWindow,
        wires: Wires,
        plans: Iterator[Plan] | None = None,
        can_plan: Callable[[], bool] = lambda: False,
        mutate: Mutation | None = None,
    ):
        self.stage = stage
        self.model = layers
        self.partition = partition
        self.layers = {index: SimulatedLayer(index) for index in stage_layers(partition, stage)}
        self.window = window
        self.wires = wires
        self.can_plan = can_plan
        self.mutate = mutate
        self.max_rows_seen = 0
        source = self._received_plans() if plans is None else plans
        schedule = StreamSchedule(self._note_stop(source), layers, partition, stage, window.num_passes)
        self.steps = schedule.steps()
        self.tick = -1
        self.stopping = False
        self.todo: deque[PipeInstruction] = deque()
        self.held: list[Row] = []
        self.left = 0
        self.finished: tuple[Row, int] | None = None
        """A finished chunk and how many layers of the decoder it has passed."""
        self.videos: list[Row] = []
        self.sessions: set[int] = set()

    def where(self) -> str:
        return f"stage {self.stage} at tick {self.tick} before {self.todo[0] if self.todo else 'its next plan'}"

    def _received_plans(self) -> Iterator[Plan]:
        while True:
            plan = self.wires.receive(f"plan {self.stage}", Kind.PLAN)
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
        if isinstance(instruction, ins.RecvLatents):
            return "latents"
        if isinstance(instruction, TakeInLayer):
            return f"move {instruction.source} to {self.stage}"
        from_before = isinstance(instruction, ins.RecvActivations | ins.RecvPrompt | ins.RecvVideo | ins.RecvFinished)
        if from_before or (isinstance(instruction, ins.EmbedPrompt) and self.stage > 0):
            return f"forward {self.stage}"
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

    def _check(self, fault: str | None) -> None:
        if fault is not None:
            raise self._fault(fault)

    def _expect(self, link: str, kind: Kind, wanted: object) -> None:
        """Receive a message that has to be ``wanted``."""
        found = self.wires.receive(link, kind)
        if found != wanted:
            raise self._fault(f"{link}: expected {wanted}, got {found}")

    def _receive_rows(self, link: str, kind: Kind, launch: int, num_rows: int) -> list[Row]:
        message = self.wires.receive(link, kind)
        assert isinstance(message, tuple)
        if message[0] != launch or len(message[1]) != num_rows:
            raise self._fault(f"{link}: expected {num_rows} rows of launch {launch}, got {message}")
        return list(message[1])

    def _send_on(self, kind: Kind, message: object) -> None:
        self.wires.send(f"forward {self.stage + 1}", kind, message)

    def _blocks(self) -> list[SimulatedLayer]:
        return [layer for index, layer in self.layers.items() if EMBED < index < self.model.head]

    # One handler for each instruction.

    def _SendPlan(self, do: PipeInstruction) -> None:
        self.wires.send(f"plan {self.stage + 1}", Kind.PLAN, do.plan)

    def _ReturnTimings(self, do: PipeInstruction) -> None:
        """The collector takes them whenever it can; nothing waits for them."""

    def _Repartition(self, do: PipeInstruction) -> None:
        if self.held or self.finished or self.videos:
            raise self._fault(f"gives layers away while it holds {self.held}, {self.finished}, {self.videos}")
        before, self.partition = self.partition, do.partition
        for index in [index for index in self.layers if index not in stage_layers(do.partition, self.stage)]:
            self.wires.send(
                f"move {self.stage} to {stage_of(do.partition, index)}", Kind.LAYER, self.layers.pop(index)
            )
        for index in reversed(stage_layers(do.partition, self.stage)):
            if index not in self.layers:
                self.todo.appendleft(TakeInLayer(do.launch, index=index, source=stage_of(before, index)))

    def _TakeInLayer(self, do: PipeInstruction) -> None:
        layer = self.wires.receive(f"move {do.source} to {self.stage}", Kind.LAYER)
        assert isinstance(layer, SimulatedLayer)
        if layer.index != do.index:
            raise self._fault(f"expected layer {do.index}, got {layer.index}")
        self.layers = dict(sorted({**self.layers, layer.index: layer}.items()))

    def _OpenSession(self, do: PipeInstruction) -> None:
        self.sessions.add(do.session)

    def _CloseSession(self, do: PipeInstruction) -> None:
        self.sessions.remove(do.session)
        for layer in self.layers.values():
            layer.forget(do.session)

    def _SendEmbedding(self, do: PipeInstruction) -> None:
        self._send_on(Kind.PARCEL, ("embedding", do.prompt))

    def _EmbedPrompt(self, do: PipeInstruction) -> None:
        if self.stage > 0:
            self._expect(f"forward {self.stage}", Kind.PARCEL, ("embedding", do.prompt))
        self._keep_prompt(do.prompt)

    def _RecvPrompt(self, do: PipeInstruction) -> None:
        self._expect(f"forward {self.stage}", Kind.PARCEL, ("prompt", do.prompt))
        self._keep_prompt(do.prompt)

    def _keep_prompt(self, prompt: int) -> None:
        for block in self._blocks():
            block.prompts.add(prompt)

    def _SendPrompt(self, do: PipeInstruction) -> None:
        self._send_on(Kind.PARCEL, ("prompt", do.prompt))

    def _DropPrompt(self, do: PipeInstruction) -> None:
        for block in self._blocks():
            block.prompts.remove(do.prompt)

    def _EncodeChunk(self, do: PipeInstruction) -> None:
        self._check(self.layers[ENCODE].see_chunk(do.row))
        self.videos.append(do.row)

    def _SendVideo(self, do: PipeInstruction) -> None:
        if not self.videos:
            raise self._fault("sends a video on but holds none")
        self._send_on(Kind.PARCEL, ("video", self.videos.pop(0)))

    def _RecvVideo(self, do: PipeInstruction) -> None:
        self._expect(f"forward {self.stage}", Kind.PARCEL, ("video", do.row))
        self.videos.append(do.row)

    def _RecvLatents(self, do: PipeInstruction) -> None:
        ring = self.model.ring_of(self.partition)
        rows = self._receive_rows("latents", Kind.LATENTS, do.launch - ring.num_stages, do.num_rows)
        self.held += [replace(row, step=row.step + 1) for row in rows]

    def _StartChunk(self, do: PipeInstruction) -> None:
        if do.row.has_video and (not self.videos or self.videos.pop(0) != do.row):
            raise self._fault(f"starts {do.row} without its video")
        self.held.append(do.row)

    def _RecvActivations(self, do: PipeInstruction) -> None:
        self.held += self._receive_rows(f"forward {self.stage}", Kind.ACTIVATIONS, do.launch, do.num_rows)

    def _ForwardPass(self, do: PipeInstruction) -> None:
        if tuple(self.held) != do.rows:
            raise self._fault(f"runs {do.rows} but holds {tuple(self.held)}")
        self.max_rows_seen = max(self.max_rows_seen, len(do.rows))
        for layer in (layer for index, layer in self.layers.items() if index in self.model.ring):
            for row in do.rows:
                self._run_pass(layer, row)

    def _run_pass(self, layer: SimulatedLayer, row: Row) -> None:
        layer.passes[row] += 1
        if layer.passes[row] > 1:
            raise self._fault(f"{row} runs again in layer {layer.index}")
        if row.session not in self.sessions:
            raise self._fault(f"{row} belongs to a session that is not open")
        if layer in self._blocks():
            if row.prompt not in layer.prompts:
                raise self._fault(f"{row} uses a prompt that is not here")
            self._use_cache(layer.stores[row.session], row)

    def _use_cache(self, store: Store, row: Row) -> None:
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
        if do.num_rows != len(self.held):
            raise self._fault(f"sends {do.num_rows} rows but holds {len(self.held)}")
        self._send_on(Kind.ACTIVATIONS, (do.launch, tuple(self.held)))
        self.held = []

    def _StepLatents(self, do: PipeInstruction) -> None:
        if tuple(self.held) != do.rows:
            raise self._fault(f"steps {do.rows} but holds {tuple(self.held)}")

    def _ReturnLatents(self, do: PipeInstruction) -> None:
        rows = tuple(self._held_row(index) for index in do.indices)
        self.wires.send("latents", Kind.LATENTS, (do.launch, rows))
        self._leave(len(do.indices))

    def _TakeFinished(self, do: PipeInstruction) -> None:
        if self._held_row(do.index) != do.row:
            raise self._fault(f"finishes {do.row} but row {do.index} is {self._held_row(do.index)}")
        self._keep_finished(do.row, 0)
        self._leave(1)

    def _RecvFinished(self, do: PipeInstruction) -> None:
        num_passed = next(iter(self.layers)) - self.model.decode.start
        self._expect(f"forward {self.stage}", Kind.PARCEL, ("finished", do.row, num_passed))
        self._keep_finished(do.row, num_passed)

    def _keep_finished(self, row: Row, num_passed: int) -> None:
        if self.finished is not None or row.step != self.window.num_passes - 1:
            raise self._fault(f"finishes {row} while it holds {self.finished}")
        self.finished = (row, num_passed)

    def _DecodeChunk(self, do: PipeInstruction) -> None:
        row, num_passed = self._take_finished(do.row)
        for index in [index for index in self.layers if index in self.model.decode]:
            if index != self.model.decode.start + num_passed:
                raise self._fault(f"layer {index} decodes {row} after {num_passed} layers")
            self._check(self.layers[index].see_chunk(row))
            num_passed += 1
        self.finished = (row, num_passed)

    def _SendFinished(self, do: PipeInstruction) -> None:
        self._send_on(Kind.PARCEL, ("finished", *self._take_finished(do.row)))

    def _DeliverChunk(self, do: PipeInstruction) -> None:
        row, num_passed = self._take_finished(do.row)
        if num_passed != self.model.num_decode_layers:
            raise self._fault(f"delivers {row} after {num_passed} layers of the decoder")
        self.wires.send(FRAMES, Kind.FRAMES, (row.session, row.chunk, self.tick))

    def _take_finished(self, wanted: Row) -> tuple[Row, int]:
        if self.finished is None or self.finished[0] != wanted:
            raise self._fault(f"goes on with {wanted} but holds {self.finished}")
        finished, self.finished = self.finished, None
        return finished

    def _held_row(self, index: int) -> Row:
        if index >= len(self.held):
            raise self._fault(f"uses row {index} but holds {tuple(self.held)}")
        return self.held[index]

    def _leave(self, num_rows: int) -> None:
        """Rows leave the last stage by return or as finished; when all have left, the stage holds none."""
        self.left += num_rows
        if self.left == len(self.held):
            self.held, self.left = [], 0
