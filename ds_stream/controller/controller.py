"""The control loop: decides every tick's plan on the first stage's rank.

It admits chunks by the rules of :mod:`ds_stream.schedule.planner`, carries prompts and sessions as events of the
plans, and holds back when finished frames are not taken.
"""

import queue
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torch import Tensor

from ds_stream.controller.metrics import SessionMetrics
from ds_stream.controller.motion import StrengthRule
from ds_stream.controller.prompts import PromptTimeline
from ds_stream.controller.regulator import Regulator
from ds_stream.controller.session import (
    ChunkArrived,
    ChunkReader,
    ChunkWriter,
    ChunkWritten,
    Inbox,
    InputEnded,
    Message,
    PromptChanged,
    WriteFailed,
)
from ds_stream.core import ChunkGeometry, Event, EventKind, FrameReader, Frames, FrameWriter, Plan, Row, StreamError
from ds_stream.engine.plans import MAX_EVENTS
from ds_stream.schedule.planner import RingPlanner


@dataclass(slots=True)
class _Session:
    reader: ChunkReader
    writer: ChunkWriter
    metrics: SessionMetrics
    timeline: PromptTimeline
    prompt: int | None = None
    """Id of the prompt in force; ``None`` before the first chunk."""
    arrived: dict[int, ChunkArrived] = field(default_factory=dict)
    """Chunks that are not admitted."""
    chunks: dict[int, Frames] = field(default_factory=dict)
    """Pixels of chunks that have been admitted and are not encoded."""
    num_frames: dict[int, int] = field(default_factory=dict)
    """Frames that belong to the stream, for each chunk between arrival and delivery."""
    num_arrived: int = 0
    num_finished: int = 0
    """Chunks whose last pass was launched."""
    num_written: int = 0
    input_ended: bool = False
    is_closing: bool = False


class StreamController:
    """Feeds sessions into the ring and takes their frames out of it.

    Args:
        planner: the ring's occupancy.
        geometry: frames of a chunk.
        regulator: decides rows and layer boundaries as the stream runs; ``None``: they stay as they are.
        before_launch: called with each plan just before the first stage carries it out.
        on_progress: called with a session's metrics after each chunk that it wrote.
        enter_phase: told when the controller waits.
    """

    def __init__(
        self,
        planner: RingPlanner,
        geometry: ChunkGeometry,
        regulator: Regulator | None = None,
        before_launch: Callable[[Plan], None] = lambda _plan: None,
        on_progress: Callable[[SessionMetrics], None] = lambda _metrics: None,
        enter_phase: Callable[[str, bool], None] = lambda _phase, _waiting: None,
    ):
        self.planner = planner
        self.errors: dict[int, StreamError] = {}
        """Why a session's input ended early, for those whose source broke off."""
        self._geometry = geometry
        self._regulator = regulator
        self._before_launch = before_launch
        self._on_progress = on_progress
        self._enter_phase = enter_phase
        self._inbox: Inbox[Message] = queue.SimpleQueue()
        self._sessions: dict[int, _Session] = {}
        self._events: deque[Event] = deque()
        self._embeddings: dict[int, Tensor] = {}
        self._prompt_users: Counter[int] = Counter()
        self._next_prompt = 0

    def open_session(
        self,
        session: int,
        seed: int,
        prompts: PromptTimeline,
        reader: FrameReader | None,
        writer: FrameWriter,
        strength: StrengthRule,
        num_frames: int | None = None,
    ) -> SessionMetrics:
        """Let a stream in; call it before :meth:`plans` or from between its plans.

        Args:
            prompts: the embedding of each chunk's prompt.
            reader: the video, or ``None`` to generate ``num_frames`` frames from the prompt alone.
            strength: how much noise a video chunk starts with.
            num_frames: most frames to take.

        Returns:
            The session's metrics, kept up to date.
        """
        self._events.append(Event(EventKind.OPEN_SESSION, session, seed))
        self.planner.open(session)
        max_queued_chunks = self.planner.max_queued_chunks
        state = _Session(
            ChunkReader(session, reader, strength, self._geometry, num_frames, max_queued_chunks, self._inbox),
            ChunkWriter(session, writer, self._inbox),
            SessionMetrics(),
            prompts,
        )
        self._sessions[session] = state
        state.reader.start()
        state.writer.start()
        return state.metrics

    def set_prompt(self, session: int, prompt_embedding: Tensor) -> None:
        """Change a session's prompt, from any thread. Chunks in flight keep theirs, later ones move to the new one."""
        self._inbox.put(PromptChanged(session, prompt_embedding))

    def plans(self) -> Iterator[Plan]:
        """Plans until every session has ended and its frames are written.

        Raises:
            StreamError: a writer failed.
        """
        while self._sessions:
            if self._wait_for_work():
                yield self._next_plan()
        self._events.append(Event(EventKind.STOP))
        while self._events:
            yield self._next_plan()

    # What the engine asks for.

    def take_chunk(self, session: int, chunk: int) -> Frames:
        """Pixels of a planned chunk that has video."""
        return self._sessions[session].chunks.pop(chunk)

    def take_prompt(self, prompt: int) -> Tensor:
        """Text embedding of a planned prompt."""
        return self._embeddings.pop(prompt)

    def deliver(self, session: int, chunk: int, frames: Frames) -> None:
        """Take a finished chunk's frames ``[T, H, W, 3]``, from any thread."""
        state = self._sessions[session]
        state.writer.put(chunk, frames[: state.num_frames.pop(chunk)])

    # The loop's own.

    def _wait_for_work(self) -> bool:
        """Take in what happened, waiting for it if there is nothing to launch. Whether there is."""
        block = not self._has_work()
        if block:
            self._enter_phase("waiting for input or output", True)
        while True:
            try:
                self._handle(self._inbox.get(block))
            except queue.Empty:
                break
            block = False
        return self._has_work()

    def _has_work(self) -> bool:
        if not self.planner.may_launch:
            return False
        return not self.planner.is_empty or bool(self._events) or any(self._can_admit(s) for s in self._sessions)

    def _can_admit(self, session: int) -> bool:
        state = self._sessions[session]
        return not state.is_closing and state.num_arrived > self.planner.num_admitted(session)

    def _handle(self, message: Message) -> None:
        state = self._sessions.get(message.session)
        if state is None:
            return
        match message:
            case ChunkArrived():
                state.arrived[message.chunk] = message
                state.num_frames[message.chunk] = message.num_frames
                state.num_arrived += 1
            case InputEnded():
                state.input_ended = True
                if message.error is not None:
                    self.errors[message.session] = message.error
            case ChunkWritten():
                self.planner.delivered(message.session, message.chunk)
                state.num_written += 1
                state.metrics.delivered(message.chunk, message.num_frames, message.at)
                self._on_progress(state.metrics)
            case PromptChanged() if not state.is_closing:
                state.timeline.change(self.planner.num_admitted(message.session), message.embedding)
            case WriteFailed():
                raise StreamError(f"writing the output failed: {message.error}") from message.error
        self._end_if_done(message.session)

    def _next_plan(self) -> Plan:
        tick = self.planner.tick
        partition, may_admit = self._obey_regulator(tick)
        for session in self._sessions:
            self._update_prompt(session)
        # Taken before the rows: an event that a launched row causes belongs to the next plan.
        events = tuple(self._events.popleft() for _ in range(min(MAX_EVENTS, len(self._events))))
        # An event that does not fit any more may be one that a new chunk needs.
        may_admit = may_admit and not self._events
        admitting = [session for session, state in self._sessions.items() if may_admit and not state.is_closing]
        arrived = {session: self._sessions[session].num_arrived for session in admitting}
        rows = self.planner.next_rows(arrived, self._first_row)
        for session in {row.session for row in rows}:
            self._sessions[session].metrics.launched(len(rows))
        for row in rows:
            if row.step == self.planner.num_passes - 1:
                self._note_last_pass(row)
        plan = Plan(tick, rows, events, partition)
        if self._regulator is not None:
            self._regulator.launched(plan)
        self._before_launch(plan)
        return plan

    def _obey_regulator(self, tick: int) -> tuple[tuple[int, ...], bool]:
        """The boundaries that come into force with this launch, if any, and whether chunks may enter."""
        if self._regulator is None:
            return (), True
        rates = [state.reader.chunks_per_s for state in self._sessions.values()]
        live = [rate for rate in rates if rate is not None]
        steering = self._regulator.steer(tick, sum(live) if len(live) == len(rates) > 0 else None)
        self.planner.max_rows = steering.max_rows
        if not steering.partition:
            return (), True
        if not self.planner.is_empty:
            # What is in flight runs out first.
            return (), False
        self.planner.set_ring(*steering.ring_stages)
        return steering.partition, True

    def _update_prompt(self, session: int) -> None:
        """Bring the prompt into force that the next chunk to enter has."""
        state = self._sessions[session]
        if state.is_closing:
            return
        embedding = state.timeline.take(self.planner.num_admitted(session))
        if embedding is not None:
            self._release_prompt(state.prompt)
            state.prompt = self._add_prompt(session, embedding)

    def _first_row(self, session: int, chunk: int) -> Row:
        state = self._sessions[session]
        assert state.prompt is not None
        arrived = state.arrived.pop(chunk)
        if arrived.frames is not None:
            state.chunks[chunk] = arrived.frames
        self._prompt_users[state.prompt] += 1
        state.metrics.accepted(chunk, arrived.accepted_at or time.monotonic())
        state.reader.admitted()
        return Row(session, chunk, 0, state.prompt, arrived.strength)

    def _note_last_pass(self, row: Row) -> None:
        self._sessions[row.session].num_finished += 1
        self._release_prompt(row.prompt)
        self._end_if_done(row.session)

    def _end_if_done(self, session: int) -> None:
        state = self._sessions[session]
        if not state.input_ended:
            return
        if not state.is_closing and state.num_finished == state.num_arrived:
            state.is_closing = True
            self.planner.close(session)
            self._events.append(Event(EventKind.CLOSE_SESSION, session))
            self._release_prompt(state.prompt)
        if state.is_closing and state.num_written == state.num_arrived:
            state.writer.close()
            state.metrics.num_dropped = state.reader.num_dropped
            del self._sessions[session]

    def _add_prompt(self, session: int, embedding: Tensor) -> int:
        prompt = self._next_prompt
        self._next_prompt += 1
        self._embeddings[prompt] = embedding
        self._prompt_users[prompt] += 1
        self._events.append(Event(EventKind.SET_PROMPT, session, prompt))
        return prompt

    def _release_prompt(self, prompt: int | None) -> None:
        if prompt is None:
            return
        self._prompt_users[prompt] -= 1
        if self._prompt_users[prompt] == 0:
            del self._prompt_users[prompt]
            self._events.append(Event(EventKind.DROP_PROMPT, 0, prompt))
