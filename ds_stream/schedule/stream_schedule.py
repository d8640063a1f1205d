"""The temporal pipe schedule: turns plans into one stage's instructions, one list per tick."""

from collections.abc import Iterable, Iterator

from deepspeed.runtime.pipe.schedule import PipeInstruction, PipeSchedule

from ds_stream.core import Event, EventKind, Plan, Row
from ds_stream.partition import ENCODE, LayerList, stage_layers
from ds_stream.schedule import instructions as ins


class StreamSchedule(PipeSchedule):
    """Temporal micro-steps: at one tick, different stages run different launches.

    Stage ``r`` carries out launch ``u`` at tick ``u + r``, so it idles for the first ``r`` ticks. What it does follows
    from the layers that it holds. Open-ended: it goes on as long as ``plans`` does, and ends after a plan that stops.

    Args:
        plans: the plans in order of launch. On the first stage the controller makes them; elsewhere they come from the
            previous stage.
        layers: the model's.
        partition: boundaries of the stages at the start.
        stage_id: this stage.
        num_passes: passes per chunk ``K``.
    """

    def __init__(
        self, plans: Iterable[Plan], layers: LayerList, partition: tuple[int, ...], stage_id: int, num_passes: int
    ):
        super().__init__(micro_batches=1, stages=len(partition) - 1, stage_id=stage_id)
        self.plans = plans
        self.num_passes = num_passes
        self._layers = layers
        self._set_partition(partition)

    def num_pipe_buffers(self) -> int:
        """The stock pipe buffers are not used: messages have their own."""
        return 0

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for _ in range(self.stage_id):
            yield []
        for plan in self.plans:
            yield self.instructions(plan)
            if plan.stops:
                return

    def _set_partition(self, partition: tuple[int, ...]) -> None:
        ring = self._layers.ring_of(partition)
        own = stage_layers(partition, self.stage_id)
        self._is_last = self.stage_id == self.stages - 1
        self._is_ring_first = self.stage_id == ring.first
        self._is_ring_last = self.stage_id == ring.last
        self._is_in_ring = ring.first <= self.stage_id <= ring.last
        self._encodes = ENCODE in own
        self._decodes = own[-1] in self._layers.decode

    def instructions(self, plan: Plan) -> list[PipeInstruction]:
        """What this stage does for ``plan``, to be asked for in order of launch."""
        todo: list[PipeInstruction] = [
            ins.ReturnTimings(plan.tick, num_rows=len(plan.rows))
            if self._is_last
            else ins.SendPlan(plan.tick, plan=plan)
        ]
        if plan.partition:
            self._set_partition(plan.partition)
            todo.append(ins.Repartition(plan.tick, partition=plan.partition))
        for event in plan.events:
            todo += self._event_instructions(plan.tick, event)
        if not plan.rows:
            return todo
        if self._encodes:
            todo += self._encode_instructions(plan.tick, plan.rows)
        if self._is_in_ring:
            todo += self._ring_instructions(plan.tick, plan.rows)
        if self._is_ring_last or not self._is_in_ring:
            todo += self._finish_instructions(plan.tick, plan.rows)
        return todo

    def _event_instructions(self, launch: int, event: Event) -> list[PipeInstruction]:
        if event.kind is EventKind.OPEN_SESSION:
            return [ins.OpenSession(launch, session=event.session, seed=event.value)]
        if event.kind is EventKind.CLOSE_SESSION:
            return [ins.CloseSession(launch, session=event.session)]
        if event.kind is EventKind.DROP_PROMPT:
            return [ins.DropPrompt(launch, prompt=event.value)]
        if event.kind is EventKind.SET_PROMPT:
            return self._prompt_instructions(launch, event.value)
        assert event.kind is EventKind.STOP
        return []

    def _prompt_instructions(self, launch: int, prompt: int) -> list[PipeInstruction]:
        if not self._is_in_ring:
            return [ins.SendEmbedding(launch, prompt=prompt)] if self._encodes else []
        take = ins.EmbedPrompt if self._is_ring_first else ins.RecvPrompt
        pass_on = [] if self._is_ring_last else [ins.SendPrompt(launch, prompt=prompt)]
        return [take(launch, prompt=prompt), *pass_on]

    def _encode_instructions(self, launch: int, rows: tuple[Row, ...]) -> list[PipeInstruction]:
        todo: list[PipeInstruction] = []
        # Before the latents are awaited, so that the wait for them is put to use.
        for row in rows:
            if row.step == 0 and row.has_video:
                todo.append(ins.EncodeChunk(launch, row=row))
                if not self._is_in_ring:
                    todo.append(ins.SendVideo(launch, row=row))
        return todo

    def _ring_instructions(self, launch: int, rows: tuple[Row, ...]) -> list[PipeInstruction]:
        todo: list[PipeInstruction] = []
        if self._is_ring_first:
            num_going_on = sum(row.step > 0 for row in rows)
            if num_going_on:
                todo.append(ins.RecvLatents(launch, num_rows=num_going_on))
            for row in rows[num_going_on:]:
                if row.has_video and not self._encodes:
                    todo.append(ins.RecvVideo(launch, row=row))
                todo.append(ins.StartChunk(launch, row=row))
        else:
            todo.append(ins.RecvActivations(launch, num_rows=len(rows)))
        todo.append(ins.ForwardPass(launch, rows=rows))
        if not self._is_ring_last:
            return [*todo, ins.SendActivations(launch, num_rows=len(rows))]
        todo.append(ins.StepLatents(launch, rows=rows))
        going_on = tuple(index for index, row in enumerate(rows) if row.step + 1 < self.num_passes)
        if going_on:
            # Before the decoding, so that the first stage never waits for the VAE.
            todo.append(ins.ReturnLatents(launch, indices=going_on))
        return todo

    def _finish_instructions(self, launch: int, rows: tuple[Row, ...]) -> list[PipeInstruction]:
        todo: list[PipeInstruction] = []
        if self._encodes and not self._is_in_ring:
            return todo
        for index, row in enumerate(rows):
            if row.step + 1 < self.num_passes:
                continue
            take = (
                ins.TakeFinished(launch, row=row, index=index)
                if self._is_ring_last
                else ins.RecvFinished(launch, row=row)
            )
            todo.append(take)
            if self._decodes:
                todo.append(ins.DecodeChunk(launch, row=row))
            todo.append(ins.DeliverChunk(launch, row=row) if self._is_last else ins.SendFinished(launch, row=row))
        return todo
