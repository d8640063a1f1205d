"""Ranks that share one GPU against one rank alone: the same video, through the real launcher.

    python tests/gpu/ranks_on_one_gpu.py RESULT.json

Not collected by pytest: it needs a GPU. It kills one rank of four; then, for each type and batching, it streams
the same synthetic clip on 1 and 4 ranks (and 2) and compares the decoded outputs.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from ds_stream.media.synthetic import SyntheticReader  # noqa: E402
from ds_stream.media.writer import VideoWriter  # noqa: E402

NUM_FRAMES = 33


def read(path: Path) -> np.ndarray:
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def command(num_ranks: int, *arguments: str) -> list[str]:
    # The launcher by module: a target folder of packages has no scripts on the path.
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(num_ranks)]
    return [*launcher, str(ROOT / "launch" / "stream.py"), *arguments]


def stream(num_ranks: int, folder: Path, *settings: str) -> tuple[np.ndarray, dict]:
    output, report = folder / f"{num_ranks}.mp4", folder / f"report {num_ranks}"
    sets = [part for setting in settings for part in ("--set", setting)]
    arguments = ["--input", str(folder / "clip.mp4"), "--output", str(output), "--seed", "1", "--report", str(report)]
    done = subprocess.run(command(num_ranks, *arguments, *sets), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return read(output), json.loads((report / "report.json").read_text())


def compare(folder: Path, done: Callable[[dict], None]) -> None:
    for dtype in ("float32", "bfloat16"):
        for exact_rows in ("true", "false"):
            settings = [f"stream.device.dtype={dtype}", f"stream.batch.exact_rows={exact_rows}"]
            alone, report = stream(1, folder, *settings)
            for num_ranks in (2, 4) if dtype == "bfloat16" else (4,):
                shared, shared_report = stream(num_ranks, folder, *settings)
                difference = np.abs(shared.astype(int) - alone).astype(float)
                done(
                    {
                        "dtype": dtype,
                        "exact_rows": exact_rows == "true",
                        "ranks": num_ranks,
                        "devices": sorted({stage["device"] for stage in shared_report["stages"]}),
                        "frames": len(shared),
                        "equal": bool((difference == 0).all()),
                        "mean_difference_of_255": float(difference.mean()),
                        "max_difference_of_255": float(difference.max()),
                        "frames_per_second": shared_report["stream"]["frames_per_second"],
                        "frames_per_second_alone": report["stream"]["frames_per_second"],
                    }
                )


def kill_one_of_four(folder: Path) -> dict:
    output = folder / "killed.mp4"
    arguments = [
        "--text-only",
        "--num-frames",
        "100000",
        "--output",
        str(output),
        "--set",
        "stream.limits.timeout_s=8",
    ]
    run = subprocess.Popen(command(4, *arguments), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    partial = folder / "killed.partial.mp4"
    while not partial.exists() or partial.stat().st_size < 100_000:
        assert run.poll() is None
        time.sleep(0.1)
    victim = subprocess.run(["pgrep", "-f", "stream.py --local_rank=2"], capture_output=True, text=True).stdout.split()
    started = time.monotonic()
    os.kill(int(victim[0]), signal.SIGKILL)
    said, _ = run.communicate(timeout=60)
    return {
        "seconds": time.monotonic() - started,
        "exit_code": run.returncode,
        "said": [line for line in said.splitlines() if line.startswith("ds_stream: rank")],
        "frames_that_play": len(read(partial)),
    }


def main(result: Path) -> None:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    figures: dict = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": os.environ.get("COMMIT") or commit.stdout.strip(),
        "command": "python tests/gpu/ranks_on_one_gpu.py RESULT.json",
        "hardware": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "config": f"ds_configs/tiny.json, {NUM_FRAMES} frames; frames/s with VAE and the filling of the ring",
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        clip = SyntheticReader(224, 128, NUM_FRAMES)
        writer = VideoWriter(folder / "clip.mp4", Fraction(16), 224, 128)
        writer.write(clip.read(NUM_FRAMES))
        writer.finish()
        figures["kill_rank_2_of_4"] = kill_one_of_four(folder)
        print(figures["kill_rank_2_of_4"], flush=True)
        figures["ranks_on_one_gpu"] = []

        def note(row: dict) -> None:
            print(row, flush=True)
            figures["ranks_on_one_gpu"].append(row)
            result.write_text(json.dumps(figures, indent=2) + "\n")

        compare(folder, note)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
