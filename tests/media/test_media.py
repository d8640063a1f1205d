"""Files in and out: counts, rates, shapes, colours, sound, broken files, killed writers."""

import itertools
import os
import signal
import struct
import time
import wave
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from ds_stream.core import StreamError
from ds_stream.media.fit import Fit
from ds_stream.media.reader import VideoReader
from ds_stream.media.synthetic import SyntheticReader, make_demo_clip
from ds_stream.media.writer import VideoWriter

WIDTH, HEIGHT = 96, 64


def coloured(num_frames: int, width: int = WIDTH, height: int = HEIGHT) -> np.ndarray:
    """Quarters of known colours, and a white bar that moves, so that frames can be told apart."""
    frames = np.zeros((num_frames, height, width, 3), np.uint8)
    frames[:, : height // 2, : width // 2] = (200, 40, 40)
    frames[:, : height // 2, width // 2 :] = (40, 200, 40)
    frames[:, height // 2 :, : width // 2] = (40, 40, 200)
    frames[:, height // 2 :, width // 2 :] = (128, 128, 128)
    for index in range(num_frames):
        bar = 4 * index % (width - 8)
        frames[index, height // 2 - 4 : height // 2 + 4, bar : bar + 8] = 255
    return frames


def write(path: Path, frames: np.ndarray, rate: Fraction = Fraction(16), **options: object) -> Path:
    writer = VideoWriter(path, rate, frames.shape[2], frames.shape[1], **options)
    for start in range(0, len(frames), 5):
        writer.write(frames[start : start + 5])
    writer.finish()
    return path


def read_all(reader: VideoReader, step: int = 7) -> np.ndarray:
    parts = [reader.read(step)]
    while len(parts[-1]):
        parts.append(reader.read(step))
    return np.concatenate(parts)


@pytest.mark.parametrize("extension", [".mp4", ".mkv"])
@pytest.mark.parametrize("rate", [Fraction(16), Fraction(30000, 1001), Fraction(241, 20)])
def test_what_is_written_is_read_back(tmp_path: Path, extension: str, rate: Fraction):
    frames = coloured(33)
    path = write(tmp_path / f"clip{extension}", frames, rate)
    reader = VideoReader(path, WIDTH, HEIGHT)
    assert float(reader.info.frame_rate) == pytest.approx(float(rate), rel=1e-3)
    assert reader.info.num_frames == pytest.approx(33, abs=1)
    found = read_all(reader)
    assert found.shape == frames.shape
    error = np.abs(found.astype(int) - frames).mean(axis=(1, 2, 3))
    # H.264 and 4:2:0 colour cost a little; a neighbouring frame or a wrong matrix costs more.
    assert error.max() < 5
    shifted = np.abs(found[1:].astype(int) - frames[:-1]).mean(axis=(1, 2, 3))
    assert (error[1:] < shifted).all()


def test_colours_keep_their_values(tmp_path: Path):
    found = read_all(VideoReader(write(tmp_path / "clip.mp4", coloured(5)), WIDTH, HEIGHT))[0]
    for (y, x), colour in {(8, 8): (200, 40, 40), (8, 90): (40, 200, 40), (60, 8): (40, 40, 200)}.items():
        assert np.abs(found[y, x].astype(int) - colour).max() <= 4


@pytest.mark.parametrize(
    ("source", "mode", "scaled"),
    [((1920, 1080), "crop", (228, 128)), ((1920, 1080), "pad", (224, 126)), ((100, 400), "crop", (224, 896)),
     ((100, 400), "pad", (32, 128)), ((224, 128), "crop", (224, 128)), ((3, 1000), "pad", (1, 128))],
)  # fmt: skip
def test_fit_keeps_the_aspect(source: tuple[int, int], mode: str, scaled: tuple[int, int]):
    fit = Fit(*source, 224, 128, mode)
    assert fit.scaled_size == scaled
    picture = np.full((scaled[1], scaled[0], 3), 9, np.uint8)
    placed = fit.place(picture)
    assert placed.shape == (128, 224, 3)
    assert (placed == 9).all(axis=2).sum() == min(scaled[0], 224) * min(scaled[1], 128)
    # The middle stays in the middle.
    assert (placed[64, 111:113] == 9).any()


@pytest.mark.parametrize("size", [(97, 63), (674, 389), (31, 19)])
def test_odd_sizes_are_read(tmp_path: Path, size: tuple[int, int]):
    path = tmp_path / "odd.mkv"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("ffv1", rate=10)
        stream.width, stream.height, stream.pix_fmt = *size, "bgr0"
        for picture in coloured(4, *size):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode(None))
    found = read_all(VideoReader(path, WIDTH, HEIGHT))
    assert found.shape == (4, HEIGHT, WIDTH, 3)
    assert np.abs(found[0, 5, 20].astype(int) - (200, 40, 40)).max() < 12


def test_a_phone_held_upright_gives_upright_pictures(tmp_path: Path):
    """The display matrix says: turn by 90 degrees clockwise, so what is stored top left is shown top right."""
    path = write(tmp_path / "phone.mp4", coloured(3, 64, 96))
    data = bytearray(path.read_bytes())
    matrix = data.index(b"tkhd") + 4 + 40
    data[matrix : matrix + 36] = struct.pack(">9i", 0, 1 << 16, 0, -(1 << 16), 0, 0, 96 << 16, 0, 1 << 30)
    path.write_bytes(data)
    found = read_all(VideoReader(path, 96, 64))
    assert np.abs(found[0] - np.rot90(coloured(1, 64, 96)[0], -1).astype(int)).mean() < 5


def test_pixels_that_are_not_square_are_shown_in_shape(tmp_path: Path):
    path = tmp_path / "wide.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=10)
        stream.width, stream.height, stream.pix_fmt = 48, 64, "yuv420p"
        stream.codec_context.sample_aspect_ratio = Fraction(2)
        container.mux(stream.encode(av.VideoFrame.from_ndarray(coloured(1, 48, 64)[0], format="rgb24")))
        container.mux(stream.encode(None))
    # 48 x 64 pixels twice as wide as high fill 96 x 64 without bars.
    found = read_all(VideoReader(path, 96, 64, "pad"))[0]
    assert (found[40:].min(axis=(1, 2)) > 30).all()
    assert np.abs(found[60, 5].astype(int) - (40, 40, 200)).max() < 12


def test_mistakes_are_told_in_one_line(tmp_path: Path):
    text = tmp_path / "text.mp4"
    text.write_text("this is not a film")
    empty = tmp_path / "empty.mp4"
    empty.touch()
    sound = tmp_path / "sound.wav"
    with wave.open(str(sound), "wb") as container:
        container.setparams((1, 2, 8000, 0, "NONE", ""))
        container.writeframes(bytes(8000))
    for path, message in {
        tmp_path / "missing.mp4": "does not exist",
        tmp_path: "is not a file",
        text: "not a video that can be opened",
        empty: "not a video that can be opened",
        sound: "holds no video",
    }.items():
        with pytest.raises(ValueError, match=message) as caught:
            VideoReader(path, WIDTH, HEIGHT)
        assert "\n" not in str(caught.value)
        assert str(path) in str(caught.value)
    for path, message in {
        tmp_path / "missing" / "out.mp4": "does not exist",
        tmp_path / "out.xyz": r"unknown extension '.xyz'; name it .mp4 or .mkv",
        tmp_path / "out": "unknown extension",
    }.items():
        with pytest.raises(ValueError, match=message):
            VideoWriter(path, Fraction(16), WIDTH, HEIGHT)


def test_a_truncated_file_gives_its_frames_and_then_its_end(tmp_path: Path):
    whole = write(tmp_path / "whole.mp4", coloured(64))
    cut = tmp_path / "cut.mp4"
    cut.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    reader = VideoReader(cut, WIDTH, HEIGHT)
    found, error = [], None
    while error is None and (not found or len(found[-1])):
        try:
            found.append(reader.read(3))
        except StreamError as broken:
            error = broken
    if error is not None:
        with pytest.raises(StreamError, match="cannot be decoded any further"):
            reader.read(1)
    assert 8 < sum(map(len, found)) < 64


def test_an_unfinished_file_has_another_name(tmp_path: Path):
    path = tmp_path / "clip.mp4"
    writer = VideoWriter(path, Fraction(16), WIDTH, HEIGHT)
    writer.write(coloured(20))
    assert not path.exists()
    writer.abort()
    writer.abort()
    assert not path.exists()
    assert len(read_all(VideoReader(tmp_path / "clip.partial.mp4", WIDTH, HEIGHT))) == 20
    writer = VideoWriter(path, Fraction(16), WIDTH, HEIGHT)
    writer.abort()
    assert list(tmp_path.iterdir()) == []


def test_an_existing_file_is_replaced_only_by_a_whole_one(tmp_path: Path):
    path = write(tmp_path / "clip.mp4", coloured(4))
    before = path.read_bytes()
    writer = VideoWriter(path, Fraction(16), WIDTH, HEIGHT)
    writer.write(coloured(9))
    assert path.read_bytes() == before
    writer.finish()
    assert len(read_all(VideoReader(path, WIDTH, HEIGHT))) == 9


@pytest.mark.parametrize("extension", [".mp4", ".mkv"])
def test_a_killed_writer_leaves_a_playable_part(tmp_path: Path, extension: str):
    path = tmp_path / f"clip{extension}"
    pid = os.fork()
    if pid == 0:
        writer = VideoWriter(path, Fraction(16), WIDTH, HEIGHT)
        for part in coloured(160).reshape(-1, 4, HEIGHT, WIDTH, 3):
            writer.write(part)
        (tmp_path / "written").touch()
        time.sleep(60)
    while not (tmp_path / "written").exists():
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert not path.exists()
    found = read_all(VideoReader(tmp_path / f"clip.partial{extension}", WIDTH, HEIGHT))
    # What the encoder had not given back yet is lost, at most a few seconds.
    assert 64 <= len(found) <= 160
    assert np.abs(found[:64].astype(int) - coloured(64)).mean() < 5


def test_a_full_disk_is_an_error(tmp_path: Path):
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full")
    path = tmp_path / "clip.partial.mkv"
    path.symlink_to("/dev/full")
    with pytest.raises((StreamError, ValueError), match="cannot be"):
        write(tmp_path / "clip.mkv", np.random.default_rng(0).integers(0, 255, (80, HEIGHT, WIDTH, 3), np.uint8))
    assert not (tmp_path / "clip.mkv").exists()


def test_the_demo_clip_has_its_frames_and_sound_that_is_carried_along(tmp_path: Path):
    clip, copy = tmp_path / "demo.mp4", tmp_path / "copy.mp4"
    make_demo_clip(clip, 112, 64, num_frames=25)
    reader = VideoReader(clip, 112, 64)
    frames = read_all(reader)
    assert len(frames) == 25
    assert reader.info.frame_rate == 16
    assert frames.std() > 30
    assert all(np.abs(a.astype(int) - b).mean() > 0.5 for a, b in itertools.pairwise(frames))
    write(copy, frames, audio_from=clip)
    for path in (clip, copy):
        with av.open(str(path)) as container:
            sound = np.concatenate([f.to_ndarray()[0] for f in container.decode(audio=0)])
            (audio,) = container.streams.audio
            assert audio.start_time == 0
            assert len(sound) / 48000 == pytest.approx(25 / 16, abs=0.03)
            # The second note begins at half a second: the quiet before it is where it should be.
            note = np.abs(sound[int(0.45 * 48000) : int(0.6 * 48000)])
            assert (0.45 + np.argmax(note > 0.1) / 48000) == pytest.approx(0.505, abs=0.02)


@pytest.mark.parametrize("name", ["out.mp4", "out.partial.mp4"])
def test_an_output_never_overwrites_its_input(tmp_path: Path, name: str):
    source = write(tmp_path / "clip.mp4", coloured(4)).rename(tmp_path / name)
    before = source.read_bytes()
    with pytest.raises(ValueError, match="would overwrite the input"):
        VideoWriter(tmp_path / "out.mp4", Fraction(16), WIDTH, HEIGHT, audio_from=source)
    assert source.read_bytes() == before


def test_the_demo_clip_is_the_same_every_time(tmp_path: Path):
    paths = [tmp_path / "a.mp4", tmp_path / "b.mp4"]
    for path in paths:
        make_demo_clip(path, 64, 48, num_frames=5)
    first, second = (read_all(VideoReader(path, 64, 48)) for path in paths)
    assert np.array_equal(first, second)


def test_synthetic_frames_differ_and_end():
    reader = SyntheticReader(32, 16, num_frames=10)
    frames = np.concatenate([reader.read(4), reader.read(4), reader.read(4)])
    assert frames.shape == (10, 16, 32, 3)
    assert len(reader.read(4)) == 0
    assert all(not np.array_equal(a, b) for a, b in itertools.pairwise(frames))
    assert len(SyntheticReader(32, 16).read(500)) == 500
