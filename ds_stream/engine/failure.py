"""Ends all ranks within a timeout when one dies, raises, stops or hangs, and names the guilty one.

Every rank keeps a *beat* in the store that the process group was built on: what it does, since when, and whether it
has ended. A thread of each rank publishes its own beat and reads the others'; a second thread judges them by local
time alone, since a store whose host is stopped never answers.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta

import psutil
import torch.distributed as dist

from ds_stream.core import EXIT_FAILED, RankInfo

_BEAT_EVERY_S = 0.5
_JUDGE_EVERY_S = 0.2
_LOOK_FOR_CULPRIT_S = 2.0
_LINGER_S = 2.0
_ON_FATAL_S = 3.0
_STORE_HOST = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why the run ends."""

    guilty: int
    """Rank."""
    reason: str
    """What it did, as the rest of a sentence that begins with its name."""
    kill: bool = False
    """Whether its process may still be there and must go."""


@dataclass(frozen=True, slots=True)
class Beat:
    """What one rank says of itself."""

    pid: int
    host: str
    count: int
    """Grows with each beat."""
    phase: str
    """What the main thread does."""
    waiting: bool
    """Whether that is waiting for another rank or for input, which may take any time."""
    phase_s: float
    """Seconds since it began."""
    limit_s: float
    """Seconds that it may take, if it is not waiting."""
    done: bool = False
    """Ended in order."""
    guilty: int | None = None
    """Ended because of this rank."""
    reason: str = ""


class Watchdog:
    """One rank's watch over all ranks.

    Use :meth:`start`; then tell it with :meth:`enter` what the main thread does, and end with :meth:`close`,
    :meth:`fail` or :meth:`lost`.
    """

    def __init__(
        self,
        store: dist.Store | None,
        rank: int,
        num_ranks: int,
        timeout_s: float,
        start_timeout_s: float,
        on_fatal: Callable[[], None] | None,
        interrupted: threading.Event | None = None,
    ):
        self._store = store
        self._rank = rank
        self._num_ranks = num_ranks
        self._timeout_s = timeout_s
        self._on_fatal = on_fatal
        self._interrupted = interrupted or threading.Event()
        self._phase = ("starting", False, time.monotonic(), start_timeout_s)
        self._count = 0
        self._done = False
        self._verdict: Verdict | None = None
        self._closed = threading.Event()
        self._ending = threading.Lock()
        self._publishing = threading.Lock()
        self._beats: dict[int, Beat] = {}
        self._changed_at: dict[int, float] = {}
        self._answered_at = time.monotonic()
        self._store_is_gone = False

    @staticmethod
    def start(
        info: RankInfo,
        timeout_s: float,
        start_timeout_s: float,
        on_fatal: Callable[[], None] | None = None,
        interrupted: threading.Event | None = None,
    ) -> "Watchdog":
        """Begin to watch; every rank calls it once the process group exists.

        Args:
            timeout_s: after which a rank that shows no sign, or stands in one phase, is given up.
            start_timeout_s: the same until the first :meth:`enter`.
            on_fatal: called before a failing process ends, in whatever thread; has three seconds.
            interrupted: set when this process ends by a signal; from then on nothing is a failure.
        """
        store = None
        if info.num_ranks > 1:
            # A connection of its own: calls of the default one may be stuck in a rendezvous.
            store = dist.TCPStore(
                os.environ["MASTER_ADDR"],
                int(os.environ["MASTER_PORT"]),
                is_master=False,
                timeout=timedelta(seconds=start_timeout_s),
            )
        watchdog = Watchdog(store, info.rank, info.num_ranks, timeout_s, start_timeout_s, on_fatal, interrupted)
        if store is not None:
            watchdog._publish()
            store.wait([_key(rank) for rank in range(info.num_ranks)], timedelta(seconds=start_timeout_s))
            watchdog._read_beats()
            for target in (watchdog._beat, watchdog._judge):
                threading.Thread(target=target, name=f"watchdog {target.__name__}", daemon=True).start()
        return watchdog

    def enter(self, phase: str, waiting: bool) -> None:
        """The main thread begins ``phase``. Cheap: it is called many times a tick."""
        self._phase = (phase, waiting, time.monotonic(), self._timeout_s)

    def close(self) -> None:
        """The run ended in order. The store's host waits for the others, so that none of them misses it."""
        self._closed.set()
        if self._store is None:
            return
        self._done = True
        # A store that is gone has no reader left either.
        _bounded(self._publish, 1.0)
        if self._rank == _STORE_HOST:
            self._wait_for_others(self._timeout_s)

    def fail(self, reason: str, details: str = "") -> None:
        """This rank cannot go on: end all ranks. Does not return.

        If another rank is dead, that is why, and it is named instead.

        Args:
            details: printed if this rank is the guilty one.
        """
        verdict = None
        if self._store is not None:
            _bounded(self._read_beats, 0.5)
            verdict = self._known_verdict() or self._verdict_on_the_dead()
        if verdict is None and details:
            print(details, file=sys.stderr, flush=True)
        self._end(verdict or Verdict(self._rank, f"failed: {reason}"))

    def lost(self, peer: int, detail: str) -> None:
        """``peer`` is gone: find out who failed first, and end all ranks. Does not return.

        Args:
            detail: what this rank noticed.
        """
        deadline = time.monotonic() + _LOOK_FOR_CULPRIT_S
        while time.monotonic() < deadline:
            # Bounded, since the store may be what is gone.
            _bounded(self._read_beats, 0.5)
            verdict = self._known_verdict()
            if verdict is not None:
                self._end(verdict)
            if self._is_dead(peer) or (self._store_is_gone and peer == _STORE_HOST):
                break
            time.sleep(0.05)
        how = "died without a word" if self._is_dead(peer) else f"is out of reach: {detail}"
        self._end(Verdict(peer, how))

    # Threads.

    def _beat(self) -> None:
        while not self._closed.wait(_BEAT_EVERY_S):
            try:
                self._publish()
                self._read_beats()
            except dist.DistError:
                self._store_is_gone = not self._closed.is_set()
                return

    def _judge(self) -> None:
        while not self._closed.wait(_JUDGE_EVERY_S):
            verdict = self._known_verdict() or self._verdict_on_the_dead()
            verdict = verdict or self._verdict_on_store() or self._verdict_on_beats()
            if verdict is not None and not self._closed.is_set():
                self._end(verdict)

    def _known_verdict(self) -> Verdict | None:
        """What a rank that has already ended found."""
        for beat in list(self._beats.values()):
            if beat.guilty is not None:
                return Verdict(beat.guilty, beat.reason)
        return None

    def _verdict_on_the_dead(self) -> Verdict | None:
        """A rank of this host whose process is gone, though it did not end in order."""
        for rank in list(self._beats):
            if rank == self._rank or self._beats[rank].done or not self._is_dead(rank):
                continue
            # Its last words may not have been read yet.
            _bounded(self._read_beats, 0.5)
            if not self._beats[rank].done:
                return self._known_verdict() or Verdict(rank, "died without a word")
        return None

    def _verdict_on_store(self) -> Verdict | None:
        if self._rank == _STORE_HOST:
            return None
        if self._store_is_gone:
            return Verdict(_STORE_HOST, "died without a word")
        silent_s = time.monotonic() - self._answered_at
        if silent_s > self._timeout_s:
            return Verdict(_STORE_HOST, f"does not answer for {silent_s:.0f} s", kill=True)
        return None

    def _verdict_on_beats(self) -> Verdict | None:
        now = time.monotonic()
        # Beats are as old as the last answer: a store that is slow to answer must not make others look silent.
        behind_s = now - self._answered_at
        for rank, beat in list(self._beats.items()):
            if rank == self._rank or beat.done:
                continue
            silent_s = now - self._changed_at[rank] - behind_s
            if silent_s > self._timeout_s:
                how = f"does not answer for {silent_s:.0f} s, last seen {_describe(beat)}"
                return Verdict(rank, how, kill=True)
            if not beat.waiting and beat.phase_s > beat.limit_s:
                how = f"hangs for {beat.phase_s:.0f} s (limit {beat.limit_s:g} s, stream.limits.timeout_s)"
                return Verdict(rank, f"{how}, {_describe(beat)}", kill=True)
        return None

    # The store.

    def _publish(self) -> None:
        assert self._store is not None
        # One at a time: a beat composed before the end must not arrive after the one that tells it.
        with self._publishing:
            verdict = self._verdict
            phase, waiting, since, limit_s = self._phase
            self._count += 1
            beat = Beat(
                os.getpid(),
                socket.gethostname(),
                self._count,
                phase,
                waiting,
                time.monotonic() - since,
                limit_s,
                self._done,
                verdict.guilty if verdict else None,
                verdict.reason if verdict else "",
            )
            self._store.set(_key(self._rank), json.dumps(asdict(beat)))

    def _read_beats(self) -> None:
        assert self._store is not None
        texts = self._store.multi_get([_key(rank) for rank in range(self._num_ranks)])
        now = time.monotonic()
        for rank, text in enumerate(texts):
            beat = Beat(**json.loads(text))
            if rank not in self._beats or beat.count != self._beats[rank].count:
                self._changed_at[rank] = now
            self._beats[rank] = beat
        self._answered_at = now

    def _is_dead(self, rank: int) -> bool:
        """Whether the process of ``rank`` is on this host and no more."""
        beat = self._beats.get(rank)
        if beat is None or beat.host != socket.gethostname():
            return False
        try:
            return psutil.Process(beat.pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    def _wait_for_others(self, timeout_s: float) -> None:
        """Until every other rank has ended, in order or not."""
        deadline = time.monotonic() + timeout_s
        others = [rank for rank in range(self._num_ranks) if rank != self._rank]
        while time.monotonic() < deadline:
            _bounded(self._read_beats, 0.5)
            ended = (rank in self._beats and (self._beats[rank].done or self._is_over(rank)) for rank in others)
            if all(ended):
                return
            time.sleep(0.05)

    def _is_over(self, rank: int) -> bool:
        return self._beats[rank].guilty is not None or self._is_dead(rank)

    # The end.

    def _end(self, verdict: Verdict) -> None:
        if self._interrupted.is_set():
            # The process ends by a signal, and so do the others.
            time.sleep(_LOOK_FOR_CULPRIT_S + _LINGER_S + _ON_FATAL_S)
        if not self._ending.acquire(blocking=False):
            # Another thread is at it.
            time.sleep(_LOOK_FOR_CULPRIT_S + _LINGER_S + _ON_FATAL_S)
            os._exit(EXIT_FAILED)
        self._closed.set()
        self._verdict = verdict
        if self._store is not None:
            _bounded(self._publish, 1.0)
        if self._is_reporter(verdict):
            stage = f"rank {verdict.guilty} (stage {verdict.guilty})"
            print(f"ds_stream: {stage} {verdict.reason}; all ranks end", file=sys.stderr, flush=True)
        beat = self._beats.get(verdict.guilty)
        if verdict.kill and verdict.guilty != self._rank and beat and beat.host == socket.gethostname():
            # The launcher's SIGTERM would wait for a stopped process.
            if verdict.guilty == _STORE_HOST:
                # The others read this verdict from its store.
                time.sleep(2 * _BEAT_EVERY_S)
            with contextlib.suppress(ProcessLookupError):
                os.kill(beat.pid, signal.SIGKILL)
        if self._on_fatal is not None:
            _bounded(self._on_fatal, _ON_FATAL_S)
        if self._rank == _STORE_HOST and self._store is not None:
            # The others still have to read the verdict.
            self._wait_for_others(_LINGER_S)
        os._exit(EXIT_FAILED)

    def _is_reporter(self, verdict: Verdict) -> bool:
        """One rank speaks: the first to claim it, or the lowest that is left when the store is gone."""
        claims: list[int] = []
        if self._store is not None:
            store = self._store
            _bounded(lambda: claims.append(store.add("ds_stream/reporter", 1)), 1.0)
        if claims:
            return claims[0] == 1
        return self._rank == (1 if verdict.guilty == _STORE_HOST and self._num_ranks > 1 else _STORE_HOST)


def _key(rank: int) -> str:
    return f"ds_stream/beat/{rank}"


def _describe(beat: Beat) -> str:
    return f"in phase '{beat.phase}'"


def _bounded(action: Callable[[], object], timeout_s: float) -> None:
    """Do ``action``, but wait no longer than ``timeout_s``, and mind no error: the process is about to end."""

    def run() -> None:
        with contextlib.suppress(Exception):
            action()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout_s)
