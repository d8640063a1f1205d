"""What a session's stream achieved, measured where the user stands: at the controller."""

import itertools
import statistics
from collections import Counter, deque
from dataclasses import asdict, dataclass
from typing import Any

_LONGEST_HISTORY = 100_000
STALL = 2.0
"""A chunk stalls if its interval is this many times the median interval."""


@dataclass(frozen=True, slots=True)
class DeliveredChunk:
    """One chunk that came back."""

    chunk: int
    delivered_s: float
    """Since the start of the stream."""
    latency_ms: float
    interval_ms: float | None
    """Since the chunk before it came back."""
    frames: int


class SessionMetrics:
    """Times in seconds of ``time.monotonic()``; the latest 100,000 chunks count.

    A chunk counts as accepted when its last frame has come, if the source is live; else when the ring takes it: files
    wait for the ring, not the ring for files.
    """

    def __init__(self) -> None:
        self.num_frames = 0
        """Frames written."""
        self.num_chunks = 0
        """Chunks written."""
        self.num_dropped = 0
        """Frames of a live source that were dropped."""
        self.rows: Counter[int] = Counter()
        """How many launches had how many rows."""
        self.last_rows = 0
        """Rows of the latest launch."""
        self.chunks: deque[DeliveredChunk] = deque(maxlen=_LONGEST_HISTORY)
        self._accepted_at: dict[int, float] = {}
        self._first_accepted_at: float | None = None
        self._first_delivered_at: float | None = None
        self._last_delivered_at: float | None = None
        self._num_frames_of_first_chunk = 0

    def launched(self, num_rows: int) -> None:
        """A launch with ``num_rows`` rows held some of this session's."""
        self.rows[num_rows] += 1
        self.last_rows = num_rows

    def accepted(self, chunk: int, at: float) -> None:
        """``chunk`` has been accepted."""
        self._accepted_at[chunk] = at
        if self._first_accepted_at is None:
            self._first_accepted_at = at

    def delivered(self, chunk: int, num_frames: int, at: float) -> None:
        """The frames of ``chunk`` came back."""
        assert self._first_accepted_at is not None
        last = self._last_delivered_at
        self.chunks.append(
            DeliveredChunk(
                chunk,
                at - self._first_accepted_at,
                1000 * (at - self._accepted_at.pop(chunk)),
                None if last is None else 1000 * (at - last),
                num_frames,
            )
        )
        self.num_frames += num_frames
        self.num_chunks += 1
        self._last_delivered_at = at
        if self._first_delivered_at is None:
            self._first_delivered_at = at
            self._num_frames_of_first_chunk = num_frames

    @property
    def last_latency_ms(self) -> float | None:
        """Latency of the chunk that came back last."""
        return self.chunks[-1].latency_ms if self.chunks else None

    def history(self) -> list[dict[str, Any]]:
        """Every chunk that came back."""
        return [asdict(chunk) for chunk in self.chunks]

    def summary(self, deadline_ms: float | None = None) -> dict[str, Any]:
        """Figures of the whole stream; ``None`` where too little ran to tell.

        ``frames_per_second`` counts from the first chunk accepted to the last one delivered, VAE, transfers and the
        filling of the ring included; ``frames_per_second_after_first_chunk`` leaves out the first chunk and the time
        to it. A chunk's interval is the time from the delivery of the chunk before it to its own;
        ``chunk_interval_ms_by_quarter`` has the median of each quarter of the stream, first to last. A stall is an
        interval of more than twice the median.

        Args:
            deadline_ms: chunk latency that was asked for.
        """
        intervals_ms = [chunk.interval_ms for chunk in self.chunks if chunk.interval_ms is not None]
        latencies_ms = [chunk.latency_ms for chunk in self.chunks]
        whole = _seconds(self._first_accepted_at, self._last_delivered_at)
        to_first = _seconds(self._first_accepted_at, self._first_delivered_at)
        after_first = _seconds(self._first_delivered_at, self._last_delivered_at)
        later_frames = self.num_frames - self._num_frames_of_first_chunk
        hits = None if deadline_ms is None else sum(latency <= deadline_ms for latency in latencies_ms)
        return {
            "frames": self.num_frames,
            "chunks": self.num_chunks,
            "seconds": whole,
            "frames_per_second": self.num_frames / whole if whole else None,
            "frames_per_second_after_first_chunk": later_frames / after_first if after_first else None,
            "ttff_ms": 1000 * to_first if to_first is not None else None,
            **_percentiles("chunk_latency_ms", latencies_ms),
            "chunk_latency_ms_max": max(latencies_ms, default=None),
            **_percentiles("chunk_interval_ms", intervals_ms),
            "chunk_interval_ms_by_quarter": _medians_by_quarter(intervals_ms),
            "deadline_ms": deadline_ms,
            "deadline_hits": hits,
            "deadline_misses": None if hits is None else len(latencies_ms) - hits,
            "stalls": num_stalls(intervals_ms),
            "frames_dropped": self.num_dropped,
        }


def num_stalls(intervals_ms: list[float]) -> int:
    """Intervals of more than :data:`STALL` times the median."""
    longest = STALL * statistics.median(intervals_ms) if intervals_ms else 0.0
    return sum(interval > longest for interval in intervals_ms)


def _percentiles(name: str, values: list[float]) -> dict[str, float | None]:
    ordered = sorted(values)
    return {
        f"{name}_p50": statistics.median(ordered) if ordered else None,
        f"{name}_p95": _percentile(ordered, 0.95),
        f"{name}_p99": _percentile(ordered, 0.99),
    }


def _medians_by_quarter(values: list[float]) -> list[float] | None:
    if len(values) < 4:
        return None
    bounds = [len(values) * quarter // 4 for quarter in range(5)]
    return [statistics.median(values[start:stop]) for start, stop in itertools.pairwise(bounds)]


def _percentile(ordered: list[float], share: float) -> float | None:
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else None


def _seconds(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
