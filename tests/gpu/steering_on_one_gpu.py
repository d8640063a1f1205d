"""The controller on a GPU: a loop that never waits for the device, ranks that trade layers, forecasts against runs.

    python tests/gpu/steering_on_one_gpu.py RESULT.json

Not collected by pytest: it needs a GPU. Beside RESULT.json it leaves the times of the 1.3B model's layers, for
``launch/bench.py --what-if --layer-times`` on any machine, and the report of a steered run.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent.parent

# What PyTorch knows to wait for the device fails between the first instruction and the last.
WATCHED = """
import sys
import torch
from pathlib import Path
sys.path.insert(0, {root!r})
from ds_stream.app import main
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
from ds_stream.engine.engine import StreamEngine
run = StreamEngine._exec_schedule
def watched(self, schedule):
    torch.cuda.set_sync_debug_mode("error")
    run(self, schedule)
    torch.cuda.set_sync_debug_mode("default")
    print("watched the whole loop")
StreamEngine._exec_schedule = watched
sys.exit(main(sys.argv[1:], Path({root!r}) / "ds_configs" / "tiny.json"))
"""
WAN = ["--config", "sdv2_v2v_1_3b", "--set", "stream.model.weights=random", "--set", "stream.vae.weights=random"]
STREAM = str(ROOT / "launch" / "stream.py")
BENCH = [sys.executable, str(ROOT / "launch" / "bench.py")]


def run(command: list[str], timeout_s: float = 300) -> str:
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    said = done.stdout + done.stderr
    print(f"[{time.monotonic() - started:.0f} s] {' '.join(command)[-200:]}\n{said[-1500:]}", flush=True)
    assert done.returncode == 0, said
    return said


def nothing_waits(folder: Path) -> dict[str, Any]:
    code = WATCHED.format(root=str(ROOT))
    runs = {
        "tiny, everything on": [
            *("--num-frames", "61", "--prompt", "a boat", "--prompt-at", "1=a train", "--report", str(folder / "r")),
            *("--set", "stream.noise.motion_aware=true", "--set", "stream.context.adaptive_sinks=true"),
            *("--set", "stream.text.blend_chunks=3", "--set", "stream.slo.chunk_latency_ms=500"),
        ],
        "tiny, one row at a time": ["--num-frames", "61", "--set", "stream.batch.exact_rows=true"],
        "sdv2_v2v_1_3b": [*WAN, "--num-frames", "61"],
    }
    for title, arguments in runs.items():
        said = run([sys.executable, "-c", code, "--input", "synthetic", "--output", "none", *arguments])
        assert "watched the whole loop" in said, title
    return {"passed with torch.cuda.set_sync_debug_mode('error')": list(runs)}


def forecast_and_run(folder: Path, layer_times: Path) -> list[dict[str, Any]]:
    """One stage of the 1.3B model, forecast from the times of its layers and measured."""
    forecasts, measured = folder / "forecasts.json", folder / "measured.json"
    rows = ["--stages", "1", "--rows", "1,2,4"]
    run([*BENCH, *WAN, "--what-if", *rows, "--save-layer-times", str(layer_times), "--json", str(forecasts)])
    run([*BENCH, *WAN, *rows, "--num-frames", "121", "--json", str(measured)])
    return [
        {
            "stages": real["stages"],
            "rows": real["rows"],
            "forecast_frames_per_second": expected["frames_per_s"],
            "measured_frames_per_second": real["frames_per_second"],
            "forecast_over_measured": expected["frames_per_s"] / real["frames_per_second"],
            "forecast_latency_ms": expected["chunk_latency_ms"],
            "measured_latency_ms": real["chunk_latency_ms_p50"],
            "loop_frames_per_second": real["oracle_frames_per_second"],
            "occupancy": real["occupancy"],
            "occupancy_by_formula": real["occupancy_by_formula"],
        }
        for expected, real in zip(json.loads(forecasts.read_text()), json.loads(measured.read_text()), strict=True)
    ]


def read(path: Path) -> np.ndarray:
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def steered_against_alone(folder: Path, report: Path) -> dict[str, Any]:
    """Four ranks that share the GPU, begun with bad boundaries, and one rank."""
    same = ["--input", "synthetic", "--num-frames", "481", "--seed", "1", "--set", "stream.batch.exact_rows=true"]
    alone, steered = folder / "alone.mp4", folder / "steered.mp4"
    run([sys.executable, STREAM, *same, "--output", str(alone)])
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "4", STREAM]
    steering = ["--set", "stream.stages.rebalance=true", "--set", "stream.batch.max_rows=4"]
    said = run([*launcher, *same, *steering, "--output", "none"])
    bad_start = ["--set", "stream.stages.partition=[0,1,2,3,14]"]
    run([*launcher, *same, *steering, *bad_start, "--output", str(steered), "--report", str(report)])
    figures = json.loads((report / "report.json").read_text())
    difference = np.abs(read(alone).astype(int) - read(steered))
    return {
        "equal": bool((difference == 0).all()),
        "max_difference_of_255": int(difference.max()),
        "moves": figures["balance"],
        "calibrated": next(line for line in said.splitlines() if "stages cut at" in line),
        "rows": figures["stream"]["rows"],
        "frames_per_second": figures["stream"]["frames_per_second_after_first_chunk"],
    }


def main(result: Path) -> None:
    figures: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": os.environ.get("COMMIT"),
        "command": "python tests/gpu/steering_on_one_gpu.py RESULT.json",
        "hardware": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "config": "tiny.json; sdv2_v2v_1_3b with random weights, 480x832, bf16, eager kernels; frames/s with VAE",
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        steps = {
            "nothing_waits_for_the_device": lambda: nothing_waits(folder),
            "forecast_and_measured": lambda: forecast_and_run(folder, result.parent / "layer-times-h200-1-3b.json"),
            "four_ranks_steered_against_one": lambda: steered_against_alone(folder, result.parent / "report"),
        }
        for title, step in steps.items():
            try:
                figures[title] = step()
            except (AssertionError, subprocess.TimeoutExpired) as error:
                figures[title] = {"failed": str(error)[-3000:]}
            print(title, json.dumps(figures[title]), flush=True)
            result.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
