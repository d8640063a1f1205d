"""T2V-1.3B at 480x832 on one GPU: a minute of synthetic input through published formats, with memory watched.

    python tests/gpu/wan_1_3b_stream.py RESULT.json

Not collected by pytest: it needs a GPU and writes 5.7 GB. Random weights in Wan's original layout are streamed by
``launch/stream.py`` with the presets; GPU memory and host memory of the process are read from outside every second.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import av
import numpy as np
import psutil
import torch

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests" / "measure"))

from checkpoint_of_real_size import main as write_checkpoint  # noqa: E402

RUNS = {
    "sdv2_v2v_1_3b, 60 s of video": ("sdv2_v2v_1_3b", ["--input", "synthetic", "--num-frames", "961"], []),
    "sdv2_v2v_1_3b, light decoder": (
        "sdv2_v2v_1_3b",
        ["--input", "synthetic", "--num-frames", "321"],
        ["stream.light_vae.use=decoder", "stream.light_vae.weights={folder}/taew2_1.safetensors"],
    ),
    "sdv2_v2v_1_3b, light VAE both ways": (
        "sdv2_v2v_1_3b",
        ["--input", "synthetic", "--num-frames", "161"],
        ["stream.light_vae.use=both", "stream.light_vae.weights={folder}/taew2_1.safetensors"],
    ),
    "sdv2_v2v_1_3b, one row at a time": (
        "sdv2_v2v_1_3b",
        ["--input", "synthetic", "--num-frames", "161"],
        ["stream.batch.max_rows=1"],
    ),
    "self_forcing_1_3b, 20 s from text": ("self_forcing_1_3b", ["--text-only", "--num-frames", "321"], []),
}


class Watch:
    """Memory of a process and of the GPU, once a second."""

    def __init__(self, process: subprocess.Popen):
        self.gpu_mib: list[int] = []
        self.host_mib: list[float] = []
        self._process = process
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        while self._process.poll() is None:
            used = subprocess.run(query, capture_output=True, text=True).stdout.split()
            try:
                host = psutil.Process(self._process.pid).memory_info().rss / 2**20
            except psutil.NoSuchProcess:
                return
            if used:
                self.gpu_mib.append(int(used[0]))
                self.host_mib.append(host)
            time.sleep(1)

    def by_quarter(self, values: list) -> list:
        """Largest of each quarter of the time after loading, which is when the GPU holds most of its peak."""
        start = next(i for i, used in enumerate(self.gpu_mib) if used > 0.8 * max(self.gpu_mib))
        part = values[start:]
        return [max(part[len(part) * i // 4 : max(len(part) * (i + 1) // 4, 1)], default=0) for i in range(4)]


def stream(folder: Path, preset: str, arguments: list[str], settings: list[str], num_ranks: int = 1) -> dict:
    weights = [f"stream.{part}.weights={folder}" for part in ("model", "vae")] + ["stream.model.weights_entry=auto"]
    sets = [part for setting in [*weights, *settings] for part in ("--set", setting.format(folder=folder))]
    launcher = ["-m", "deepspeed.launcher.runner", "--num_gpus", str(num_ranks)] if num_ranks > 1 else []
    command = [sys.executable, *launcher, str(ROOT / "launch" / "stream.py"), "--config", preset, *arguments, *sets]
    command += ["--prompt-embeds", str(folder / "prompt.safetensors"), "--seed", "1"]
    command += ["--output", str(folder / "out.mp4"), "--report", str(folder / "report")]
    started = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    watch = Watch(process)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said[-3000:]
    report = json.loads((folder / "report" / "report.json").read_text())
    return {
        "arguments": " ".join([*arguments, *settings]),
        "seconds_of_the_whole_command": time.monotonic() - started,
        "planned_mib": float(
            next(line for line in said.splitlines() if line.split()[:1] == ["all"]).split()[-1].replace(",", "")
        ),
        "gpu_mib_by_quarter": watch.by_quarter(watch.gpu_mib),
        "host_mib_by_quarter": watch.by_quarter(watch.host_mib),
        "stream": report["stream"],
        "stages": report["stages"],
    }


def ranks_agree(folder: Path) -> dict:
    """Four ranks that share the GPU against one, everything on that the preset has."""
    arguments, settings = ["--input", "synthetic", "--num-frames", "33"], ["stream.batch.exact_rows=true"]
    videos = []
    for num_ranks in (1, 4):
        figures = stream(folder, "sdv2_v2v_1_3b", arguments, settings, num_ranks)
        with av.open(str(folder / "out.mp4")) as container:
            videos.append(np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]))
    difference = np.abs(videos[0].astype(int) - videos[1])
    return {
        "arguments": " ".join([*arguments, *settings]),
        "equal": bool((difference == 0).all()),
        "max_difference_of_255": int(difference.max()),
        "planned_mib": figures["planned_mib"],
        "peak_host_memory_mib_of_each_rank": [stage["peak_host_memory_mib"] for stage in figures["stages"]],
        "peak_gpu_memory_mib_of_each_rank": [stage["peak_gpu_memory_mib"] for stage in figures["stages"]],
    }


def main(result: Path) -> None:
    figures: dict = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": os.environ.get("COMMIT"),
        "command": "python tests/gpu/wan_1_3b_stream.py RESULT.json",
        "hardware": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "config": "480x832, bf16, random weights in Wan's original layout, one rank, eager kernels; frames/s with VAE",
        "runs": {},
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        started = time.monotonic()
        write_checkpoint("sdv2_v2v_1_3b", folder)
        print(f"wrote the checkpoint in {time.monotonic() - started:.0f} s", flush=True)
        torch.cuda.empty_cache()
        for title, (preset, arguments, settings) in RUNS.items():
            figures["runs"][title] = stream(folder, preset, arguments, settings)
            print(title, json.dumps(figures["runs"][title]), flush=True)
            result.write_text(json.dumps(figures, indent=2) + "\n")
        figures["four_ranks_on_one_gpu_against_one"] = ranks_agree(folder)
        print(json.dumps(figures["four_ranks_on_one_gpu_against_one"]), flush=True)
        result.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
