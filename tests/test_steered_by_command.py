"""What a user asks of the controller, on real ranks: live pacing, stages of the VAE alone, targets, moving layers."""

import json
import re
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from commands import Command, read_clip, write_clip
from ds_stream.media.reader import VideoReader
from ds_stream.model.layers import BlockLayer
from rings import Stream, random_clip, reference_frames, tiny_config


def expected(folder: Path, stream: Stream, rate: int = 16) -> np.ndarray:
    """What the oracle's frames are after the encoder, which goes by the frame rate."""
    return read_clip(write_clip(folder / "expected.mp4", reference_frames(tiny_config(), stream), Fraction(rate)))


def sleeping_blocks(seconds: float, *indices: int) -> Callable[[int], None]:
    """Some blocks of the model take so much longer, for every row."""

    def patch(_rank: int) -> None:
        forward = BlockLayer.forward

        def slowly(self: BlockLayer, *arguments: object, **options: object) -> object:
            if self.index in indices:
                time.sleep(seconds)
            return forward(self, *arguments, **options)

        BlockLayer.forward = slowly

    return patch


def report_of(folder: Path) -> dict:
    return json.loads((folder / "report.json").read_text())


def test_a_camera_that_waits_loses_nothing_and_none_is_late(tmp_path: Path):
    clip = write_clip(tmp_path / "clip.mp4", random_clip(30), Fraction(24))
    arguments = ("--input", str(clip), "--prompt", "red boats", "--seed", "1", "--report", str(tmp_path))
    command = Command(tmp_path, 2, *arguments, "--realtime", "--set", "stream.live.when_full=block")
    assert command.wait() == {}, command.said
    read = VideoReader(clip, 32, 32).read(99)
    assert np.array_equal(read_clip(command.output), expected(tmp_path, Stream(1, read), 24))
    assert report_of(tmp_path)["stream"]["frames_dropped"] == 0
    assert "0 frames dropped" in command.said


def test_a_camera_that_does_not_wait_drops_and_counts(tmp_path: Path):
    clip = write_clip(tmp_path / "clip.mp4", random_clip(60), Fraction(60))
    arguments = ("--input", str(clip), "--realtime", "--set", "stream.live.max_queued_frames=4")
    command = Command(tmp_path, 2, *arguments, "--report", str(tmp_path), before=sleeping_blocks(0.05, 1))
    assert command.wait() == {}, command.said
    stream = report_of(tmp_path)["stream"]
    assert stream["frames_dropped"] > 0
    assert stream["frames"] + stream["frames_dropped"] == 60
    assert len(read_clip(command.output)) == stream["frames"]
    assert f"{stream['frames_dropped']} frames dropped" in command.said


def test_a_report_without_a_video(tmp_path: Path):
    report = tmp_path / "report"
    arguments = ("--input", "synthetic", "--num-frames", "17", "--output", "none")
    command = Command(tmp_path, 2, *arguments, "--report", str(report))
    assert command.wait() == {}, command.said
    assert not command.output.exists()
    assert "output:" not in command.said
    assert sorted(path.name for path in report.iterdir()) == ["report.html", "report.json", "trace.json"]
    assert report_of(report)["stream"]["frames"] == 17


@pytest.mark.parametrize(
    ("partition", "roles"),
    [
        ([0, 1, 6, 11], ["encode", "embed, 3 blocks, head", "decode"]),
        ([0, 1, 3, 9, 11], ["encode", "embed, 1 block", "2 blocks, head, decode 3 of 5", "decode 2 of 5"]),
    ],
)
def test_ranks_that_are_only_vae(tmp_path: Path, partition: list[int], roles: list[str]):
    clip = write_clip(tmp_path / "clip.mp4", random_clip(22))
    arguments = ("--input", str(clip), "--prompt", "red boats", "--seed", "3", "--report", str(tmp_path))
    command = Command(tmp_path, len(roles), *arguments, "--set", f"stream.stages.partition={partition}")
    assert command.wait() == {}, command.said
    read = VideoReader(clip, 32, 32).read(99)
    assert np.array_equal(read_clip(command.output), expected(tmp_path, Stream(3, read)))
    assert [stage["role"] for stage in report_of(tmp_path)["stages"]] == roles


def test_boundaries_and_rows_that_were_badly_chosen_are_mended_while_the_video_stays_the_same(tmp_path: Path):
    clip = write_clip(tmp_path / "clip.mp4", random_clip(360))
    arguments = ("--input", str(clip), "--prompt", "red boats", "--seed", "3", "--report", str(tmp_path))
    settings = ("stages.partition=[0,9,11]", "stages.rebalance=true", "batch.max_rows=3", "batch.autotune=true")
    given = [f"--set=stream.{setting}" for setting in settings]
    command = Command(tmp_path, 2, *arguments, *given, before=sleeping_blocks(0.01, 0, 2))
    assert command.wait(timeout_s=180) == {}, command.said
    moves = [move for move in report_of(tmp_path)["balance"] if move["before"] is not None]
    assert moves
    assert moves[0]["before"]["partition"] == [0, 9, 11]
    # The blocks that sleep are layers 2 and 4.
    assert moves[-1]["after"]["partition"][1] in (3, 4)
    told = re.search(r"(\d+) moves? of layers", command.said)
    assert told
    assert int(told[1]) == len(moves)
    read = VideoReader(clip, 32, 32).read(999)
    assert np.array_equal(read_clip(command.output), expected(tmp_path, Stream(3, read)))


def test_a_dry_run_tells_that_boundaries_are_yet_to_be_measured(tmp_path: Path):
    command = Command(tmp_path, 2, "--dry-run")
    assert command.wait() == {}, command.said
    assert "the start of a run measures the layers and may cut them elsewhere" in command.said
    command.log.unlink()
    given = Command(tmp_path, 2, "--dry-run", "--set", "stream.stages.partition=[0,9,11]")
    assert given.wait() == {}, given.said
    assert "measures" not in given.said
