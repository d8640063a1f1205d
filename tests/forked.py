"""Ranks for tests: forked processes, a second instead of ten for fresh ones."""

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable

import deepspeed
import torch.distributed as dist


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def fork_ranks(num_ranks: int, run: Callable[[int], None], timeout_s: float = 60) -> None:
    """Run ``run(rank)`` in forked processes that share a gloo group; a second instead of ten for fresh ones.

    Raises:
        AssertionError: a rank failed or did not end.
    """
    failed = wait_for(start_forked(num_ranks, run), timeout_s)
    assert not failed, f"ranks that failed or hang: {failed}"


def start_forked(num_ranks: int, run: Callable[[int], None], join: bool = True) -> dict[int, int]:
    """Start ``run(rank)`` in forked processes; returns ``{pid: rank}``.

    Args:
        join: whether they share a gloo group already; if not, they find what a launcher would tell them.
    """
    port = free_port()
    children = {}
    for rank in range(num_ranks):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                leave_groups()
                os.environ |= rank_environment(rank, num_ranks, port)
                if join:
                    dist.init_process_group("gloo")
                run(rank)
                code = 0
            except SystemExit as end:
                code = end.code
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        children[pid] = rank
    return children


def wait_for(children: dict[int, int], timeout_s: float) -> dict[int, int]:
    """Exit codes, other than 0, of the forked ranks ``{pid: rank}``; what hangs is killed and counts as -9."""
    deadline = time.monotonic() + timeout_s
    codes: dict[int, int] = {}
    while len(codes) < len(children):
        for pid, rank in children.items():
            if rank in codes:
                continue
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                codes[rank] = -signal.SIGKILL
            elif (ended := os.waitpid(pid, os.WNOHANG))[0] == pid:
                codes[rank] = os.waitstatus_to_exitcode(ended[1])
        time.sleep(0.01)
    return {rank: code for rank, code in codes.items() if code != 0}


def rank_environment(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """What a launcher tells a rank."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def leave_groups() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    deepspeed.comm.comm.cdb = None
