"""The temporal pipe schedule: turns plans into one stage's instructions, one list per tick."""

from collections.abc import Iterable, Iterator

from deepspeed.runtime.pipe.schedule import PipeInstruction, PipeSchedule

from ds_stream.core import Event, EventKind, Plan, Row
from ds_stream.schedule import instructions as ins


class StreamSchedule(PipeSchedule):
    """Temporal micro-steps: at one tick, different stages run different launches.

    Stage ``r`` runs launch ``u`` at tick ``u + r``, so it idles for the first ``r`` ticks. Open-ended: it goes on as
    long as ``plans`` does, and ends after a plan that stops.

    Args:
        plans: the plans in order of launch. On the first stage the controller makes them; elsewhere they come from the
            previous stage.
        num_stages: ring stages ``P``.
        stage_id: this stage.
        num_passes: passes per chunk ``K``.
    """

    def __init__(self, plans: Iterable[Plan], num_stages: int, stage_id: int, num_passes: int):
        super().__init__(micro_batches=1, stages=num_stages, stage_id=stage_id)
        self.plans = plans
        self.num_passes = num_passes

    def num_pipe_buffers(self) -> int:
        """The stock pipe buffers are not used: messages have their own."""
        return 0

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for _ in range(self.stage_id):
            yield []
        for plan in self.plans:
            yield self._instructions(plan)
            if plan.stops:
                return

    @property
    def _is_first(self) -> bool:
        return self.stage_id == 0

    @property
    def _is_last(self) -> bool:
        return self.stage_id == self.stages - 1

    def _instructions(self, plan: Plan) -> list[PipeInstruction]:
        todo: list[PipeInstruction] = [] if self._is_last else [ins.SendPlan(plan.tick, plan=plan)]
        for event in plan.events:
            todo += self._event_instructions(plan.tick, event)
        if not plan.rows:
            return todo
        rows, num_rows = plan.rows, len(plan.rows)
        if self._is_first:
            going_on = [row for row in rows if row.step > 0]
            if going_on:
                todo.append(ins.RecvLatents(plan.tick, num_rows=len(going_on)))
            todo += [ins.StartChunk(plan.tick, row=row) for row in rows if row.step == 0]
        else:
            todo.append(ins.RecvActivations(plan.tick, num_rows=num_rows))
        todo.append(ins.ForwardPass(plan.tick, rows=rows))
        if self._is_last:
            todo += self._finish_instructions(plan.tick, rows)
        else:
            todo.append(ins.SendActivations(plan.tick, num_rows=num_rows))
        return todo

    def _event_instructions(self, launch: int, event: Event) -> list[PipeInstruction]:
        if event.kind is EventKind.OPEN_SESSION:
            return [ins.OpenSession(launch, session=event.session, seed=event.value)]
        if event.kind is EventKind.CLOSE_SESSION:
            return [ins.CloseSession(launch, session=event.session)]
        if event.kind is EventKind.DROP_PROMPT:
            return [ins.DropPrompt(launch, prompt=event.value)]
        if event.kind is EventKind.SET_PROMPT:
            take = ins.EmbedPrompt if self._is_first else ins.RecvPrompt
            pass_on = [] if self._is_last else [ins.SendPrompt(launch, prompt=event.value)]
            return [take(launch, prompt=event.value), *pass_on]
        assert event.kind is EventKind.STOP
        return []

    def _finish_instructions(self, launch: int, rows: tuple[Row, ...]) -> list[PipeInstruction]:
        going_on = tuple(index for index, row in enumerate(rows) if row.step + 1 < self.num_passes)
        todo: list[PipeInstruction] = [ins.StepLatents(launch, rows=rows)]
        if going_on:
            # Before the decoding, so that the first stage never waits for the VAE.
            todo.append(ins.ReturnLatents(launch, indices=going_on))
        todo += [
            ins.DecodeChunk(launch, row=row, index=index) for index, row in enumerate(rows) if index not in going_on
        ]
        return todo
