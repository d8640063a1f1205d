"""Measures a matrix of settings, each by a run of the stream command, beside the sequential loop."""

import argparse
import itertools
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ds_stream.cli import NO_OUTPUT, SYNTHETIC
from ds_stream.config import Config, find_config, load_config
from ds_stream.core import RankInfo, StreamError
from ds_stream.device import prepare_device
from ds_stream.schedule.planner import backlogged_chunks_per_tick
from ds_stream.settings import StreamConfig

_STREAM = Path(__file__).resolve().parents[2] / "launch" / "stream.py"


@dataclass(frozen=True, slots=True)
class Case:
    """One point of the matrix."""

    stages: int
    rows: int
    lead: int
    steps: tuple[int, ...]
    width: int
    height: int

    @property
    def overrides(self) -> tuple[str, ...]:
        return (
            f"stream.batch.max_rows={self.rows}",
            "stream.batch.autotune=false",
            f"stream.context.lead={self.lead}",
            f"stream.noise.steps={list(self.steps)}",
            f"stream.video.width={self.width}",
            f"stream.video.height={self.height}",
        )


def cases(options: argparse.Namespace, config: Config) -> Iterator[Case]:
    """Every combination that was asked for."""
    stream = config.stream
    rows = options.rows or sorted({1, stream.batch.max_rows})
    leads, steps = options.leads or (stream.context.lead,), options.steps or [stream.noise.steps]
    sizes = options.sizes or [(stream.video.width, stream.video.height)]
    for size, of_steps, lead, of_rows, stages in itertools.product(sizes, steps, leads, rows, options.stages):
        yield Case(stages, of_rows, lead, of_steps, *size)


def measure_matrix(options: argparse.Namespace, config: Config) -> int:
    matrix = list(cases(options, config))
    for case in matrix:
        # All mistakes before the first run.
        _config_of(options, case).resolve(case.stages)
    results = []
    oracles: dict[tuple[object, ...], float] = {}
    for case in matrix:
        picture = (case.lead, case.steps, case.width, case.height)
        if picture not in oracles:
            oracles[picture] = _run_oracle(_config_of(options, case), options.num_frames)
        results.append({**asdict(case), "oracle_frames_per_second": oracles[picture], **_run(options, case)})
        print(_line(results[-1], results), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    return 0


def _config_of(options: argparse.Namespace, case: Case) -> Config:
    return load_config(find_config(options.config), (*options.set, *case.overrides))


def _run(options: argparse.Namespace, case: Case) -> dict[str, Any]:
    """One run of the stream command, as a user would start it."""
    launcher = ["-m", "deepspeed.launcher.runner", "--num_gpus", str(case.stages), "--master_port", str(_free_port())]
    overrides = [f"--set={override}" for override in (*options.set, *case.overrides)]
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, *(launcher if case.stages > 1 else []), str(_STREAM), "--config", options.config),
            *("--input", SYNTHETIC, "--num-frames", str(options.num_frames), "--output", str(NO_OUTPUT)),
            *("--seed", "0", "--report", folder, *overrides),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise StreamError(f"a run failed with exit code {done.returncode}:\n{done.stdout}{done.stderr}")
        report = json.loads((Path(folder) / "report.json").read_text())
    stream = report["stream"]
    measured = [tick["measured_ms"] for tick in report["ticks"] if tick["measured_ms"] is not None]
    return {
        "frames_per_second": stream["frames_per_second_after_first_chunk"],
        "chunk_latency_ms_p50": stream["chunk_latency_ms_p50"],
        "chunk_latency_ms_p95": stream["chunk_latency_ms_p95"],
        "ttff_ms": stream["ttff_ms"],
        "tick_ms": statistics.median(measured) if measured else None,
        **_occupancy(report, _config_of(options, case).stream),
        "busy_share": [stage["busy_share"] for stage in report["stages"]],
        "partition": report["config"]["stream"]["stages"]["partition"],
        "versions": report["versions"],
        "hardware": report["hardware"],
    }


def _occupancy(report: dict[str, Any], config: StreamConfig) -> dict[str, float | None]:
    """Rows that launches had, as a share of those that they may have, while the ring neither fills nor empties."""
    num_passes, max_rows, ticks = config.noise.num_passes, config.batch.max_rows, report["ticks"]
    num_ring_stages = config.layers.ring_of(tuple(report["config"]["stream"]["stages"]["partition"])).num_stages
    rate = backlogged_chunks_per_tick(num_ring_stages, num_passes, config.context.lead, max_rows)
    lap = num_passes * num_ring_stages
    first, end = ticks[0]["tick"] + lap, ticks[-1]["tick"] - lap
    rows = sum(tick["rows"] for tick in ticks if first <= tick["tick"] < end)
    return {
        # Launches without rows are not in the list.
        "occupancy": rows / (end - first) / max_rows if end > first else None,
        "occupancy_by_formula": rate * num_passes / max_rows,
    }


def _run_oracle(config: Config, num_frames: int) -> float:
    """Frames per second of the plain loops over the same layers, the first chunk left out."""
    prepare_device(config)
    import torch

    from ds_stream.core import ChunkGeometry
    from ds_stream.engine.groups import choose_placement
    from ds_stream.media.synthetic import SyntheticReader
    from ds_stream.reference import Reference

    stream = config.stream
    torch.set_num_threads(stream.device.cpu_threads_per_rank)
    device = choose_placement(stream, RankInfo(0, 1, 0, 1)).device
    reader = SyntheticReader(stream.video.width, stream.video.height, num_frames)
    geometry = ChunkGeometry(stream.context.num_latent_frames_per_chunk)
    num_chunks = geometry.num_chunks(num_frames)

    def chunks() -> Iterator[tuple[torch.Tensor, float]]:
        for chunk in range(num_chunks):
            frames = reader.read(geometry.num_frames(chunk))
            if len(frames) == geometry.num_frames(chunk):
                yield torch.from_numpy(frames), stream.noise.strength

    prompt = torch.zeros((stream.model.num_text_tokens, stream.model.text_dim))
    started, done = 0.0, 0
    for _, pixels in Reference(stream, device).stream(0, iter(chunks()), lambda _chunk: prompt):
        pixels.cpu()
        if not started:
            started = time.perf_counter()
        else:
            done += len(pixels)
    return done / (time.perf_counter() - started)


def _line(result: dict[str, Any], results: list[dict[str, Any]]) -> str:
    header = (
        f"{'stages':>6} {'rows':>4} {'lead':>4} {'steps':>5} {'size':>9} {'frames/s':>9} {'of loop':>8} "
        f"{'latency p50':>12} {'p95 ms':>8} {'ttff ms':>8} {'tick ms':>8} {'occupancy':>9} "
        f"{'formula':>8} {'busiest':>8}"
    )
    size = f"{result['width']}x{result['height']}"
    rate = result["frames_per_second"] or 0.0
    occupancy = "-" if result["occupancy"] is None else f"{result['occupancy']:.0%}"
    line = (
        f"{result['stages']:6} {result['rows']:4} {result['lead']:4} {len(result['steps']):5} {size:>9} {rate:9.2f} "
        f"{rate / result['oracle_frames_per_second']:7.2f}x {result['chunk_latency_ms_p50']:12.0f} "
        f"{result['chunk_latency_ms_p95']:8.0f} {result['ttff_ms']:8.0f} {result['tick_ms'] or 0.0:8.1f} "
        f"{occupancy:>9} {result['occupancy_by_formula']:8.0%} {max(result['busy_share']):8.0%}"
    )
    if len(results) > 1:
        return line
    return f"loop: the sequential oracle, {result['oracle_frames_per_second']:.2f} frames/s\n{header}\n{line}"


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
