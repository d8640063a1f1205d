"""Whatever happens to one rank, all end in time and the guilty one is named."""

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ds_stream.core import RankInfo
from ds_stream.engine.failure import Watchdog
from ds_stream.engine.links import GroupChannel, Link, LinkError
from forked import start_forked, wait_for
from rings import CPU

NUM_RANKS = 3
TIMEOUT_S = 2.0


def hang(_rank: int) -> None:
    time.sleep(600)


def raise_error(_rank: int) -> None:
    raise RuntimeError("the cat sat on the cable")


def stop(_rank: int) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def die(_rank: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def relay(rank: int, guilty: int | None, misdeed: Callable[[int], None], stderr: Path) -> None:
    """A ring that hands a token on, until ``guilty`` misbehaves in its third round."""
    # What the processes say goes to one file, as it does under a launcher.
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    watchdog = Watchdog.start(RankInfo(rank, NUM_RANKS, rank, NUM_RANKS), TIMEOUT_S, start_timeout_s=30)
    pairs = [(stage, (stage + 1) % NUM_RANKS) for stage in range(NUM_RANKS)]
    groups = [dist.new_group(sorted(pair), backend="gloo") for pair in pairs]
    outgoing = Link(GroupChannel(groups[rank], (rank + 1) % NUM_RANKS, "sending"), CPU, 8)
    incoming = Link(GroupChannel(groups[rank - 1], (rank - 1) % NUM_RANKS, "waiting"), CPU, 8)
    field = ((1,), torch.float32)
    try:
        for turn in range(8):
            watchdog.enter(f"working on turn {turn}", False)
            if rank == guilty and turn == 2:
                misdeed(rank)
            time.sleep(0.02)
            outgoing.send([torch.ones(1)])
            watchdog.enter("waiting for a token", True)
            incoming.recv([field])
    except LinkError as error:
        watchdog.lost(error.peer, str(error))
    except RuntimeError as error:
        watchdog.fail(str(error))
    watchdog.close()


@pytest.mark.parametrize("guilty", [0, NUM_RANKS - 1])
@pytest.mark.parametrize(
    ("misdeed", "says"),
    [
        (die, "died without a word"),
        (raise_error, "failed: the cat sat on the cable"),
        (stop, "does not answer for"),
        (hang, "hangs for .* 'working on turn 2'"),
    ],
)
def test_all_ranks_end_and_the_guilty_one_is_named(
    guilty: int, misdeed: Callable[[int], None], says: str, tmp_path: Path
):
    stderr = tmp_path / "stderr"
    children = start_forked(NUM_RANKS, lambda rank: relay(rank, guilty, misdeed, stderr))
    started = time.monotonic()
    codes = wait_for(children, timeout_s=30)
    # Two seconds of grace for the start and the two good turns.
    assert time.monotonic() - started < TIMEOUT_S + 5 + 2
    # A hung rank may read the verdict itself before it is killed.
    expected = {raise_error: {1}, hang: {1, -signal.SIGKILL}}.get(misdeed, {-signal.SIGKILL})
    assert codes[guilty] in expected
    assert all(codes[rank] == 1 for rank in range(NUM_RANKS) if rank != guilty)
    lines = [line for line in stderr.read_text().splitlines() if line.startswith("ds_stream:")]
    assert len(lines) == 1, lines
    assert re.match(rf"ds_stream: rank {guilty} \(stage {guilty}\) {says}", lines[0]), lines


def test_an_orderly_end_is_not_reported(tmp_path: Path):
    stderr = tmp_path / "stderr"

    def run(rank: int) -> None:
        relay(rank, None, hang, stderr)
        # Ranks leave at their own pace.
        time.sleep(0.7 * rank)

    assert wait_for(start_forked(NUM_RANKS, run), timeout_s=30) == {}
    assert stderr.read_text() == ""


def test_a_long_wait_is_no_failure(tmp_path: Path):
    """Waiting for input may take any time."""
    stderr = tmp_path / "stderr"

    def run(rank: int) -> None:
        os.dup2(os.open(stderr, os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)
        watchdog = Watchdog.start(RankInfo(rank, 2, rank, 2), 1.0, start_timeout_s=30)
        watchdog.enter("waiting for input", True)
        time.sleep(2.5)
        watchdog.close()

    assert wait_for(start_forked(2, run), timeout_s=30) == {}
    assert stderr.read_text() == ""


def test_a_failing_rank_saves_its_output_first(tmp_path: Path):
    def run(rank: int) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        saved = tmp_path / f"saved by {rank}"
        watchdog = Watchdog.start(RankInfo(rank, 2, rank, 2), 5.0, 30, on_fatal=saved.touch if rank == 0 else None)
        if rank == 1:
            watchdog.fail("no reason")
        time.sleep(30)

    assert wait_for(start_forked(2, run), timeout_s=20) == {0: 1, 1: 1}
    assert (tmp_path / "saved by 0").exists()


def test_a_beat_composed_before_the_end_does_not_arrive_after_it():
    """The store is slow with the first beat; the end is told meanwhile, and must be the last word."""

    class SlowStore:
        def __init__(self):
            self.beats: list[dict] = []
            self.is_first = True

        def set(self, _key: str, text: str) -> None:
            if self.is_first:
                self.is_first = False
                time.sleep(0.3)
            self.beats.append(json.loads(text))

    store = SlowStore()
    watchdog = Watchdog(store, 1, 2, 5.0, 5.0, None)
    beating = threading.Thread(target=watchdog._publish)
    beating.start()
    time.sleep(0.1)
    watchdog.close()
    beating.join()
    assert [beat["done"] for beat in store.beats] == [False, True]
