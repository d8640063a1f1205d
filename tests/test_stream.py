"""The whole command on real ranks: forked processes over gloo, from the command line to the file."""

import json
import os
import signal
import time
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import psutil
import pytest

from commands import TIMEOUT_S, Command, comment_of, read_clip, write_clip
from ds_stream.engine.engine import StreamEngine
from ds_stream.media.reader import VideoReader
from ds_stream.media.writer import VideoWriter
from ds_stream.model.pipeline import build_all_layers
from ds_stream.model.vae import DecodeLayer
from rings import CPU, Stream, random_clip, reference_frames, tiny_config


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_real_ranks_write_what_the_oracle_says(tmp_path: Path, num_ranks: int):
    clip = write_clip(tmp_path / "clip.mp4", random_clip(15, size=(32, 48)), Fraction(30000, 1001))
    command = Command(
        tmp_path, num_ranks, "--input", str(clip), "--seed", "3", "--prompt", "red boats", "--report", str(tmp_path)
    )
    assert command.wait() == {}, command.said
    assert not command.partial.exists()
    config = tiny_config()
    read = VideoReader(clip, 32, 32).read(99)
    expected = write_clip(tmp_path / "expected.mp4", reference_frames(config, Stream(3, read)), Fraction(30000, 1001))
    # The same pixels through the same encoder are the same file.
    found = read_clip(command.output)
    assert len(found) == 15
    assert np.array_equal(found, read_clip(expected))
    with av.open(str(command.output)) as container:
        assert container.streams.video[0].average_rate == Fraction(30000, 1001)
        assert "seed: 3" in container.metadata["comment"]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["stream"]["frames"] == 15
    assert [stage["rank"] for stage in report["stages"]] == list(range(num_ranks))
    layers = build_all_layers(config.stream, CPU).by_index.values()
    num_parameters = sum(parameter.numel() for layer in layers for parameter in layer.parameters())
    assert sum(stage["parameters"] for stage in report["stages"]) == num_parameters
    assert f"15 frames on {num_ranks} stage" in command.said
    assert "the weights are random" in command.said


def test_a_prompt_alone_makes_a_video(tmp_path: Path):
    arguments = ("--text-only", "--num-frames", "10", "--prompt", "boats", "--seed", "1")
    command = Command(tmp_path, 2, *arguments, "--set", "stream.batch.max_rows=9")
    assert command.wait() == {}, command.said
    assert "ds_stream: warning: stream.noise.steps begins with 700" in command.said
    assert "ds_stream: warning: stream.batch.max_rows is 9, but one stream has 3 passes" in command.said
    expected = reference_frames(tiny_config(), Stream(1, None, num_frames=10, prompt="boats"))
    assert np.array_equal(read_clip(command.output), read_clip(write_clip(tmp_path / "expected.mp4", expected)))


def test_an_unset_seed_is_drawn_told_and_gives_the_same_file_again(tmp_path: Path):
    clip = write_clip(tmp_path / "clip.mp4", random_clip(6))
    first = Command(tmp_path, 2, "--input", str(clip))
    assert first.wait() == {}, first.said
    drawn = first.said.split("seed ")[1].split(",")[0]
    frames = read_clip(first.output)
    digest = first.said.split("config ")[1].split("\n")[0]
    assert f"seed: {drawn}; config: {digest}" in comment_of(first.output)
    second = Command(tmp_path, 2, "--input", str(clip), "--seed", drawn)
    assert second.wait() == {}, second.said
    assert np.array_equal(frames, read_clip(second.output))
    # The whole file, not its pictures alone.
    whole = first.output.read_bytes()
    third = Command(tmp_path, 1, "--input", str(clip), "--seed", drawn)
    assert third.wait() == {}, third.said
    assert third.output.read_bytes() == whole


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--input", "missing.mp4"), "input missing.mp4 does not exist"),
        (("--text-only", "--num-frames", "1", "--output", "out.xyz"), "unknown extension"),
        (("--set", "stream.batch.max_row=2"), "did you mean max_rows"),
        (("--config", "missing.json"), "cannot read config missing.json"),
        (("--set", "stream.stages.partition=[0,3,4,5,11]"), "has 4 stages but 2 ranks were started"),
        (("--text-only",), "say how long with --num-frames"),
        (("--num-frames", "0"), "give at least 1"),
        (("--text-only", "--num-frames", "1", "--set", "stream.device.kind=cuda"), "no GPU is visible"),
        (("--text-only", "--num-frames", "1", "--set", "stream.device.transport=nccl"), "ranks run on the CPU"),
        (("--no-such-option",), "unrecognized arguments"),
    ],
)
def test_a_mistake_is_told_once_before_anything_starts(tmp_path: Path, arguments: tuple[str, ...], says: str):
    command = Command(tmp_path, 2, *arguments)
    codes = {}
    deadline = time.monotonic() + 30
    # A launcher ends the other ranks when the first one ends.
    while 0 not in codes and time.monotonic() < deadline:
        pid, status = os.waitpid(command.pid(0), os.WNOHANG)
        if pid:
            codes[0] = os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(command.pid(1), signal.SIGKILL)
    os.waitpid(command.pid(1), 0)
    assert codes == {0: 2}
    assert command.said.count(says) == 1, command.said
    assert "Traceback" not in command.said
    assert not command.output.exists()
    assert not command.partial.exists()


def test_a_taken_port_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import socket

    import forked

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        monkeypatch.setattr(forked, "free_port", lambda: listener.getsockname()[1])
        command = Command(tmp_path, 1, "--text-only", "--num-frames", "1")
        assert command.wait() == {0: 2}
    assert "is taken, perhaps by another run" in command.said
    assert "Traceback" not in command.said


def test_printing_needs_no_ranks(tmp_path: Path):
    command = Command(tmp_path, 1, "--print-schedule", "--num-stages", "2", "--set", "stream.batch.max_rows=2")
    assert command.wait() == {}
    assert "stage 1   .   0a" in command.said
    folder = tmp_path / "again"
    folder.mkdir()
    printed = Command(folder, 1, "--print-config", "--num-stages", "3", "--set", "stream.batch.max_rows=3")
    assert printed.wait() == {}
    resolved = json.loads(printed.said)
    assert resolved["stream"]["batch"]["max_rows"] == 3
    assert len(resolved["stream"]["stages"]["partition"]) == 4
    (folder / "fed back.json").write_text(printed.said)
    printed.log.unlink()
    again = Command(folder, 1, "--print-config", "--num-stages", "3", "--config", str(folder / "fed back.json"))
    assert again.wait() == {}
    assert json.loads(again.said) == resolved


def test_a_broken_input_is_processed_as_far_as_it_goes(tmp_path: Path):
    whole = write_clip(tmp_path / "whole.mp4", random_clip(64))
    cut = tmp_path / "cut.mp4"
    data = bytearray(whole.read_bytes())
    # Garbage from the middle on.
    data[len(data) // 2 :] = os.urandom(len(data) - len(data) // 2)
    cut.write_bytes(data)
    command = Command(tmp_path, 2, "--input", str(cut))
    codes = command.wait()
    frames = read_clip(command.output)
    assert 0 < len(frames) < 64
    if codes:
        assert codes == {0: 1}
        assert "cannot be decoded any further" in command.said
    assert "Traceback" not in command.said


def test_an_input_without_frames_is_an_error(tmp_path: Path):
    whole = write_clip(tmp_path / "whole.mp4", random_clip(4))
    head = tmp_path / "head.mp4"
    data = whole.read_bytes()
    # The header says that there is video; the first fragment is not there.
    head.write_bytes(data[: data.index(b"moof") - 4])
    command = Command(tmp_path, 2, "--input", str(head))
    assert command.wait() == {0: 1}
    assert command.said.count("there is no output") == 1, command.said
    assert "Traceback" not in command.said
    assert not command.output.exists()
    assert not command.partial.exists()


def slow_decode(_rank: int) -> None:
    """Makes runs long enough to be disturbed, and the frames come out one chunk after the other."""
    decode = DecodeLayer.forward

    def slowly(self: DecodeLayer, *arguments: object) -> object:
        if self.is_last:
            time.sleep(0.1)
        return decode(self, *arguments)

    DecodeLayer.forward = slowly


def raise_in_third_forward(rank: int) -> None:
    slow_decode(rank)
    if rank == 1:
        forward = StreamEngine._exec_forward_pass

        def failing(self: StreamEngine, launch: int, rows: tuple) -> None:
            if launch == 30:
                raise RuntimeError("the cat sat on the cable")
            forward(self, launch, rows)

        StreamEngine._INSTRUCTION_MAP = {
            instruction: failing if handler is forward else handler
            for instruction, handler in StreamEngine._INSTRUCTION_MAP.items()
        }


@pytest.mark.parametrize(("misdeed", "guilty"), [("kill", 0), ("kill", 2), ("stop", 0), ("raise", 1)])
def test_a_guilty_rank_ends_all_and_what_was_done_plays(tmp_path: Path, misdeed: str, guilty: int):
    before = raise_in_third_forward if misdeed == "raise" else slow_decode
    # Every rank is to run passes.
    arguments = ("--text-only", "--num-frames", "4000", "--set", "stream.stages.calibrate=false")
    command = Command(tmp_path, 3, *arguments, before=before)
    # Let some frames get to the file: a fragment is a second of video.
    while not command.partial.exists() or command.partial.stat().st_size < 60_000:
        assert time.monotonic() - command.started < 60, command.said
        if "ds_stream: rank" in command.said:
            break
        time.sleep(0.05)
    disturbed = time.monotonic()
    if misdeed != "raise":
        os.kill(command.pid(guilty), signal.SIGKILL if misdeed == "kill" else signal.SIGSTOP)
    codes = command.wait(timeout_s=30)
    assert time.monotonic() - disturbed < TIMEOUT_S + 5
    assert set(codes) == {0, 1, 2}
    assert all(code != 0 for code in codes.values())
    lines = [line for line in command.said.splitlines() if line.startswith("ds_stream: rank")]
    assert len(lines) == 1, command.said
    assert lines[0].startswith(f"ds_stream: rank {guilty} (stage {guilty})"), lines
    assert not command.output.exists()
    if misdeed != "raise":
        assert len(read_clip(command.partial)) > 8


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_a_playable_part(tmp_path: Path, number: signal.Signals):
    command = Command(tmp_path, 2, "--text-only", "--num-frames", "4000", before=slow_decode)
    while not command.partial.exists() or command.partial.stat().st_size < 30_000:
        assert time.monotonic() - command.started < 60, command.said
        time.sleep(0.05)
    for pid in command.children:
        os.kill(pid, number)
    assert command.wait(timeout_s=10) == {0: 128 + number, 1: 128 + number}
    assert "Traceback" not in command.said
    assert not command.output.exists()
    assert len(read_clip(command.partial)) > 4


def test_a_start_needs_no_compiler(tmp_path: Path):
    """DeepSpeed would build a CPU all-reduce that the ring never uses: 50 s, and fatal without a compiler."""

    def forbid(_rank: int) -> None:
        from torch.utils import cpp_extension

        def build(*_arguments: object, **_options: object) -> None:
            raise AssertionError("something is being compiled")

        cpp_extension.load = cpp_extension.load_inline = build
        os.environ["PATH"] = ""

    command = Command(tmp_path, 2, "--text-only", "--num-frames", "1", before=forbid)
    assert command.wait() == {}, command.said
    assert len(read_clip(command.output)) == 1


def test_memory_of_the_first_rank_is_flat_and_positions_have_no_limit(tmp_path: Path):
    """240 chunks of 6 latent frames: past 1,024, where tables end."""
    samples = tmp_path / "samples"
    config = tiny_config(
        video={"width": 16, "height": 16},
        noise={"steps": [700, 400]},
        # The Wan VAE would take most of the time.
        light_vae={"use": "both", "encoder_width": 2, "decoder_widths": [2, 2, 2, 2], "num_memory_blocks": 1},
        context={"num_latent_frames_per_chunk": 6, "num_window_latent_frames": 6, "num_sink_latent_frames": 2},
    )
    (tmp_path / "config.json").write_text(config.to_json())

    def sample(rank: int) -> None:
        if rank != 0:
            return
        write = VideoWriter.write
        process = psutil.Process()

        def sampled(self: VideoWriter, frames: np.ndarray) -> None:
            write(self, frames)
            with samples.open("a") as file:
                file.write(f"{process.memory_info().rss}\n")

        VideoWriter.write = sampled

    command = Command(tmp_path, 2, "--text-only", "--num-frames", str(21 + 239 * 24), before=sample)
    assert command.wait(timeout_s=120) == {}, command.said
    resident = [int(line) for line in samples.read_text().split()]
    assert len(resident) == 240
    growth = max(resident[230:]) - max(resident[15:25])
    # A page here and there is not a leak; a chunk's pixels kept would be 210 * 18 KiB, which is more.
    assert growth < 3 * 2**20, f"{growth / 2**20:.1f} MiB"
