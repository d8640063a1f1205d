"""Admission: which rows the next launch holds. Integers only.

The rules are DESIGN section 4: a chunk enters at the earliest tick at which (1) it has arrived, (2) its elders have
entered, (3) its ring slot has fewer than ``max_rows`` rows, (4) the passes it will read have been written, which is
``lead * stages + 1`` ticks after its elder.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ds_stream.core import Row


@dataclass(slots=True)
class _Session:
    next_chunk: int = 0
    last_admission: int | None = None


class RingPlanner:
    """The ring's occupancy, tick by tick.

    Args:
        num_stages: ring stages ``P``.
        num_passes: passes per chunk ``K``.
        lead: context lead, 0 to ``K - 1``.
        max_rows: ``B``, most rows of one launch. May change at any time; rows in flight always finish.
        max_queued_chunks: launches that the ring may go on while a finished chunk is not delivered.
        num_stages_outside: stages before and after the ring.
    """

    def __init__(
        self,
        num_stages: int,
        num_passes: int,
        lead: int,
        max_rows: int,
        max_queued_chunks: int = 2,
        num_stages_outside: int = 0,
    ):
        self.num_stages = num_stages
        self.num_stages_outside = num_stages_outside
        self.num_passes = num_passes
        self.lead = lead
        self.max_rows = max_rows
        self.max_queued_chunks = max_queued_chunks
        self.tick = 0
        self._slots: list[tuple[Row, ...]] = [()] * num_stages
        self._sessions: dict[int, _Session] = {}
        self._undelivered: dict[tuple[int, int], int] = {}

    @property
    def may_launch(self) -> bool:
        """Whether another launch keeps the run-ahead bounded.

        Launches are held back while a chunk whose last pass was launched ``max_queued_chunks`` ticks more ago than
        there are stages is not delivered, so that neither messages between stages nor finished frames pile up.
        """
        oldest = next(iter(self._undelivered.values()), self.tick)
        return oldest > self.tick - self.num_stages - self.num_stages_outside - self.max_queued_chunks

    @property
    def num_undelivered(self) -> int:
        """Chunks whose last pass was launched and whose frames have not come back."""
        return len(self._undelivered)

    @property
    def is_empty(self) -> bool:
        """Whether no row goes on: the next launch has only rows that it admits."""
        return not any(row.step + 1 < self.num_passes for rows in self._slots for row in rows)

    def set_ring(self, num_stages: int, num_stages_outside: int) -> None:
        """Go on with a ring of another length, once it is empty."""
        assert self.is_empty, "rows are in flight"
        self.num_stages, self.num_stages_outside = num_stages, num_stages_outside
        self._slots = [()] * num_stages

    def open(self, session: int) -> None:
        """Let chunks of ``session`` enter, from chunk 0."""
        assert session not in self._sessions, f"session {session} is open"
        self._sessions[session] = _Session()

    def close(self, session: int) -> None:
        """Forget ``session``; its chunks in flight must have finished."""
        in_flight = [row.session for rows in self._slots for row in rows if row.step + 1 < self.num_passes]
        assert session not in in_flight, f"session {session} has rows in flight"
        del self._sessions[session]

    def delivered(self, session: int, chunk: int) -> None:
        """The frames of a finished chunk have reached the controller."""
        del self._undelivered[session, chunk]

    def num_admitted(self, session: int) -> int:
        """Chunks of ``session`` that have entered the ring."""
        return self._sessions[session].next_chunk

    def next_rows(
        self,
        num_arrived: Mapping[int, int],
        first_row: Callable[[int, int], Row] = lambda session, chunk: Row(session, chunk, step=0, prompt=0),
    ) -> tuple[Row, ...]:
        """Rows of the launch at the current tick, then advance the tick.

        Args:
            num_arrived: for each session that may admit a chunk, how many of its chunks have arrived so far.
            first_row: the row of step 0, given session and chunk; called once for every chunk that enters.
        """
        slot = self.tick % self.num_stages
        rows = [replace(row, step=row.step + 1) for row in self._slots[slot] if row.step + 1 < self.num_passes]
        for session in self._turn_order(num_arrived):
            if len(rows) >= self.max_rows:
                break
            state = self._sessions[session]
            if state.next_chunk >= num_arrived[session] or not self._context_is_written(state):
                continue
            rows.append(first_row(session, state.next_chunk))
            state.next_chunk += 1
            state.last_admission = self.tick
        self._slots[slot] = tuple(rows)
        for row in rows:
            if row.step == self.num_passes - 1:
                self._undelivered[row.session, row.chunk] = self.tick
        self.tick += 1
        return self._slots[slot]

    def _turn_order(self, sessions: Mapping[int, int]) -> list[int]:
        """Sessions that waited longest first, so that no session starves another."""

        def last_turn(session: int) -> tuple[int, int]:
            last = self._sessions[session].last_admission
            return (-1 if last is None else last, session)

        return sorted(sessions, key=last_turn)

    def _context_is_written(self, state: _Session) -> bool:
        return state.last_admission is None or self.tick >= state.last_admission + self.lead * self.num_stages + 1


def num_message_buffers(num_stages: int, max_queued_chunks: int) -> int:
    """Message buffers per link with which no send ever finds them all in flight, one message a launch.

    :attr:`RingPlanner.may_launch` bounds how far the first stage is ahead of a delivered chunk, and a row that goes on
    is awaited after ``num_stages`` ticks; the simulator proves the sum.
    """
    return 2 * num_stages + max_queued_chunks + 1


def backlogged_chunks_per_tick(num_stages: int, num_passes: int, lead: int, max_rows: int) -> float:
    """Throughput of one session whose chunks are all waiting, in chunks per tick: ``min(B / K, 1 / (lead P + 1))``."""
    return min(max_rows / num_passes, 1 / (lead * num_stages + 1))
