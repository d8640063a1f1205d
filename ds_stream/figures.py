"""What one stage did, in figures for the report."""

import socket
from pathlib import Path
from typing import Any

import torch

from ds_stream.engine.engine import StreamEngine
from ds_stream.engine.timers import DECODE, ENCODE, FORWARD, SEND
from ds_stream.partition import describe_role, stage_layers

_MIB = 2**20


def stage_figures(engine: StreamEngine, run_s: float, num_launches: int) -> dict[str, Any]:
    """Figures of the stage that ``engine`` runs.

    Args:
        run_s: seconds that the run took.
        num_launches: launches that it had; those without rows count as idle.
    """
    layers, partition = engine.stream_config.layers, engine.module.partition
    own = stage_layers(partition, engine.stage_id)
    timers, device = engine.stage_timers, engine.device
    forwards = timers.counts[FORWARD]
    busy_s = sum(timers.totals_s[phase] for phase in (FORWARD, ENCODE, DECODE))
    on_gpu = device.type == "cuda"
    busy, transfer = (min(seconds / run_s, 1.0) if run_s else None for seconds in (busy_s, timers.totals_s[SEND]))
    return {
        "stage": engine.stage_id,
        "rank": engine.stage_id,
        "host": socket.gethostname(),
        "device": str(device),
        "gpu": torch.cuda.get_device_name(device) if on_gpu else None,
        "role": describe_role(layers, own),
        "layers": [own.start, own.stop],
        "parameters": engine.module.num_parameters,
        "forwards": forwards,
        "rows_per_forward": engine.num_rows_run / forwards if forwards else None,
        "forward_ms_mean": _mean_ms(engine, FORWARD),
        "encode_ms_mean": _mean_ms(engine, ENCODE),
        "decode_ms_mean": _mean_ms(engine, DECODE),
        "busy_share": busy,
        "transfer_share": transfer,
        # A device may wait without being told to: what is left is waiting.
        "wait_share": None if busy is None or transfer is None else max(1.0 - busy - transfer, 0.0),
        "occupancy": forwards / num_launches if num_launches and forwards else None,
        "cache_mib": engine.state.peak_cache_bytes / _MIB,
        "peak_host_memory_mib": _peak_host_memory_kib() / 1024,
        "peak_gpu_memory_mib": torch.cuda.max_memory_allocated(device) / _MIB if on_gpu else None,
    }


def _mean_ms(engine: StreamEngine, phase: str) -> float | None:
    timers = engine.stage_timers
    return 1000 * timers.totals_s[phase] / timers.counts[phase] if timers.counts[phase] else None


def _peak_host_memory_kib() -> int:
    """Most memory that this process held. Not ``getrusage``, which counts what its parent held when it was started."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
