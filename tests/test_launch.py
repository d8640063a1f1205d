"""README's command, through DeepSpeed's own launcher, as a user would type it."""

import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import av

from forked import free_port

STREAM = Path(__file__).parent.parent / "launch" / "stream.py"


def test_four_ranks_with_no_arguments_make_a_video(tmp_path: Path):
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    del environment["DS_ACCELERATOR"]
    launcher = [
        sys.executable,
        "-m",
        "deepspeed.launcher.runner",
        "--num_gpus",
        "4",
        "--master_port",
        str(free_port()),
    ]
    done = subprocess.run(
        [*launcher, str(STREAM), "--num-frames", "6"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    output = tmp_path / "ds_stream_output.mp4"
    assert f"output: {output}" in done.stdout
    assert "6 frames on 4 stages" in done.stdout
    with av.open(str(output)) as container:
        assert container.streams.video[0].average_rate == Fraction(16)
        pictures = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        assert len(container.streams.audio) == 1
    assert [picture.shape for picture in pictures] == [(128, 224, 3)] * 6
    assert all(picture.std() > 5 for picture in pictures)
    assert "ds_stream: layers measured on CPU, 1 threads; stages cut at [0, " in done.stdout
    # Ranks other than the first are quiet: clip made, layers measured, random weights, the run in five lines, output.
    assert done.stdout.count("ds_stream:") == 9
