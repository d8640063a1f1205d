"""Host memory of each of four CPU ranks that load a file of T2V-1.3B's size, through the real launcher.

    python tests/measure/load_on_four_ranks.py RESULT.json

Not collected by pytest: it writes 5.7 GB and takes minutes. It streams one chunk of a small picture in bf16, once from
the file and once with the tiny model, whose peak is what Python, torch and DeepSpeed take by themselves.
"""

import json
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from checkpoint_of_real_size import ROOT
from checkpoint_of_real_size import main as write_checkpoint

NUM_RANKS = 4
PRESET = "sdv2_v2v_1_3b"


def peaks(folder: Path, *arguments: str) -> list[dict]:
    """Figures of each stage of a run."""
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(NUM_RANKS)]
    command = [*launcher, str(ROOT / "launch" / "stream.py"), "--output", str(folder / "out.mp4"), *arguments]
    # Convolutions in bf16 take a CPU minutes.
    command += ["--set", "stream.limits.timeout_s=900"]
    command += ["--report", str(folder / "report"), "--text-only", "--num-frames", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    print(done.stdout[-2000:], flush=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "report" / "report.json").read_text())["stages"]


def main(result: Path) -> None:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_checkpoint(PRESET, folder / "wan")
        file_size = (folder / "wan" / "diffusion_pytorch_model.safetensors").stat().st_size
        weights = [f"stream.{part}.weights={folder / 'wan'}" for part in ("model", "vae")]
        small = ["stream.video.width=64", "stream.video.height=64", "stream.noise.steps=[1000]"]
        sets = [part for setting in [*weights, *small] for part in ("--set", setting)]
        started = time.monotonic()
        loaded = peaks(
            folder, "--config", PRESET, "--prompt-embeds", str(folder / "wan" / "prompt.safetensors"), *sets
        )
        seconds = time.monotonic() - started
        bare = peaks(folder)
    figures = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit.stdout.strip(),
        "command": "python tests/measure/load_on_four_ranks.py RESULT.json",
        "hardware": f"{platform.machine()} CPU, 2 cores, 24 GiB",
        "torch": torch.__version__,
        "config": f"{PRESET}, 64x64, one step, one chunk, bf16; file in fp32, {file_size / 2**20:,.0f} MiB",
        "seconds_of_the_whole_command": seconds,
        "ranks": [
            {
                "layers": full["layers"],
                "weights_mib": full["parameters"] * 2 / 2**20,
                "peak_host_memory_mib": full["peak_host_memory_mib"],
                "peak_without_weights_mib": empty["peak_host_memory_mib"],
                "difference_mib": full["peak_host_memory_mib"] - empty["peak_host_memory_mib"],
            }
            for full, empty in zip(loaded, bare, strict=True)
        ],
    }
    result.write_text(json.dumps(figures, indent=2) + "\n")
    print(json.dumps(figures["ranks"], indent=2))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
