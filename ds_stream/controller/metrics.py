"""What a session's stream achieved, measured where the user stands: at the controller."""

import itertools
import statistics
from collections import Counter, deque
from typing import Any

_LONGEST_HISTORY = 100_000


class SessionMetrics:
    """Times in seconds of ``time.monotonic()``; the latest 100,000 chunks count.

    A chunk counts as accepted when the ring takes it: files wait for the ring, not the ring for files.
    """

    def __init__(self) -> None:
        self.num_frames = 0
        """Frames written."""
        self.num_chunks = 0
        """Chunks written."""
        self.rows: Counter[int] = Counter()
        """How many launches had how many rows."""
        self.last_rows = 0
        """Rows of the latest launch."""
        self._accepted_at: dict[int, float] = {}
        self._latencies_s: deque[float] = deque(maxlen=_LONGEST_HISTORY)
        self._intervals_s: deque[float] = deque(maxlen=_LONGEST_HISTORY)
        self._first_accepted_at: float | None = None
        self._first_delivered_at: float | None = None
        self._last_delivered_at: float | None = None
        self._num_frames_of_first_chunk = 0

    def launched(self, num_rows: int) -> None:
        """A launch with ``num_rows`` rows held some of this session's."""
        self.rows[num_rows] += 1
        self.last_rows = num_rows

    def accepted(self, chunk: int, at: float) -> None:
        """The ring has taken ``chunk``."""
        self._accepted_at[chunk] = at
        if self._first_accepted_at is None:
            self._first_accepted_at = at

    def delivered(self, chunk: int, num_frames: int, at: float) -> None:
        """The frames of ``chunk`` came back."""
        self._latencies_s.append(at - self._accepted_at.pop(chunk))
        self.num_frames += num_frames
        self.num_chunks += 1
        if self._last_delivered_at is not None:
            self._intervals_s.append(at - self._last_delivered_at)
        self._last_delivered_at = at
        if self._first_delivered_at is None:
            self._first_delivered_at = at
            self._num_frames_of_first_chunk = num_frames

    @property
    def last_latency_ms(self) -> float | None:
        """Latency of the chunk that came back last."""
        return 1000 * self._latencies_s[-1] if self._latencies_s else None

    def summary(self) -> dict[str, Any]:
        """Figures of the whole stream; ``None`` where too little ran to tell.

        ``frames_per_second`` counts from the first chunk accepted to the last one delivered, VAE, transfers and the
        filling of the ring included; ``frames_per_second_after_first_chunk`` leaves out the first chunk and the time
        to it. A chunk's interval is the time from the delivery of the chunk before it to its own;
        ``chunk_interval_ms_by_quarter`` has the median of each quarter of the stream, first to last.
        """
        intervals_ms = [1000 * interval for interval in self._intervals_s]
        latencies_ms = sorted(1000 * latency for latency in self._latencies_s)
        whole = _seconds(self._first_accepted_at, self._last_delivered_at)
        to_first = _seconds(self._first_accepted_at, self._first_delivered_at)
        after_first = _seconds(self._first_delivered_at, self._last_delivered_at)
        later_frames = self.num_frames - self._num_frames_of_first_chunk
        return {
            "frames": self.num_frames,
            "chunks": self.num_chunks,
            "seconds": whole,
            "frames_per_second": self.num_frames / whole if whole else None,
            "frames_per_second_after_first_chunk": later_frames / after_first if after_first else None,
            "ttff_ms": 1000 * to_first if to_first is not None else None,
            "chunk_latency_ms_p50": statistics.median(latencies_ms) if latencies_ms else None,
            "chunk_latency_ms_p95": _percentile(latencies_ms, 0.95),
            "chunk_latency_ms_max": latencies_ms[-1] if latencies_ms else None,
            "chunk_interval_ms_p50": statistics.median(intervals_ms) if intervals_ms else None,
            "chunk_interval_ms_p95": _percentile(sorted(intervals_ms), 0.95),
            "chunk_interval_ms_by_quarter": _medians_by_quarter(intervals_ms),
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
