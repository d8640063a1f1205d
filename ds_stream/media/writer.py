"""Writes video files through PyAV, so that whatever was written plays even if the process is killed."""

import contextlib
import os
import threading
import warnings
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import av
import av.error
from av.audio.stream import AudioStream
from av.packet import Packet
from av.video.frame import VideoFrame
from av.video.reformatter import ColorRange, Colorspace
from av.video.stream import VideoStream

from ds_stream.core import Frames, StreamError

_CONTAINER_OPTIONS = {
    # Fragments: a file without its end is still a file.
    ".mp4": {"movflags": "frag_keyframe+empty_moov+default_base_moof", "flush_packets": "1"},
    ".mkv": {"flush_packets": "1"},
}
_COPIED_AUDIO = {
    ".mp4": ("aac", "mp3", "mp3float"),
    ".mkv": ("aac", "mp3", "mp3float", "opus", "vorbis", "flac", "ac3", "eac3", "pcm_s16le"),
}
_BT709 = 1


class NoWriter:
    """Takes frames and keeps none."""

    def write(self, frames: Frames) -> None:
        pass

    def finish(self) -> None:
        pass

    def abort(self) -> None:
        pass


class VideoWriter:
    """An H.264 file. It grows beside its final name and gets that name when it is whole.

    Args:
        path: ``.mp4`` or ``.mkv``; an existing file is replaced when the new one is whole.
        frame_rate: frames per second.
        width, height: pixels, even.
        audio_from: file whose first audio track is copied along.
        metadata: tags of the file.

    Raises:
        ValueError: the extension is unknown, or the folder is missing or may not be written.
    """

    def __init__(
        self,
        path: Path,
        frame_rate: Fraction,
        width: int,
        height: int,
        audio_from: Path | None = None,
        metadata: dict[str, str] | None = None,
    ):
        self.check_path(path, audio_from)
        extension = path.suffix.lower()
        self.num_frames = 0
        """Frames written."""
        self.path = path
        self.partial_path = _partial_path(path)
        self._frame_rate = frame_rate
        self._is_open = True
        # A failing run aborts from another thread than the one that writes.
        self._lock = threading.Lock()
        try:
            self._container = av.open(str(self.partial_path), "w", options=_CONTAINER_OPTIONS[extension])
        except OSError as error:
            raise ValueError(f"output {self.partial_path} cannot be written: {error.strerror or error}") from None
        self._container.metadata.update(metadata or {})
        self._video = self._add_video(frame_rate, width, height)
        self._audio = None if audio_from is None else _AudioCopy.open(audio_from, self._container, extension)

    @staticmethod
    def check_path(path: Path, source: Path | None) -> None:
        """Raise :class:`ValueError` unless ``path`` can become an output that does not overwrite ``source``."""
        if path.suffix.lower() not in _CONTAINER_OPTIONS:
            known = " or ".join(_CONTAINER_OPTIONS)
            raise ValueError(f"output {path} has an unknown extension '{path.suffix}'; name it {known}")
        if path.is_dir():
            raise ValueError(f"output {path} is a folder; give a file name")
        if not path.parent.is_dir():
            raise ValueError(f"output folder {path.parent} does not exist; make it first")
        if not os.access(path.parent, os.W_OK):
            raise ValueError(f"output folder {path.parent} may not be written; change its permissions")
        for target in (path, _partial_path(path)):
            if source is not None and target.exists() and source.exists() and target.samefile(source):
                raise ValueError(f"output {path} would overwrite the input {source}; give it another name")

    def write(self, frames: Frames) -> None:
        """Append frames ``[frames, height, width, 3]``.

        Raises:
            StreamError: they cannot be written, or the file was closed.
        """
        with self._lock:
            if not self._is_open:
                raise StreamError(f"{self.partial_path} is closed; no frame can follow")
            self._encode(frames)

    def finish(self) -> None:
        """Complete the file and give it its name.

        Raises:
            StreamError: its end cannot be written.
        """
        with self._lock:
            if not self._is_open:
                return
            try:
                self._close()
            except (OSError, ValueError) as error:
                raise StreamError(f"{self.partial_path} cannot be completed: {error}") from error
            self.partial_path.replace(self.path)

    def abort(self) -> None:
        """Close what was written under its partial name, as well as may be; without a frame, leave nothing."""
        with self._lock:
            if not self._is_open:
                return
            with contextlib.suppress(Exception):
                self._close()
            if self.num_frames == 0:
                self.partial_path.unlink(missing_ok=True)

    def _add_video(self, frame_rate: Fraction, width: int, height: int) -> VideoStream:
        stream = self._container.add_stream("libx264", rate=frame_rate, options={"crf": "18", "preset": "veryfast"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        context = stream.codec_context
        context.time_base = 1 / frame_rate
        # A fragment a second; no reordering, so that a fragment's frames are all there.
        context.gop_size = max(round(frame_rate), 1)
        context.max_b_frames = 0
        context.colorspace = context.color_primaries = context.color_trc = _BT709
        context.color_range = ColorRange.MPEG
        return stream

    def _encode(self, frames: Frames) -> None:
        try:
            for picture in frames:
                frame = VideoFrame.from_ndarray(picture, format="rgb24").reformat(
                    format="yuv420p", dst_colorspace=Colorspace.ITU709, dst_color_range=ColorRange.MPEG
                )
                frame.pts = self.num_frames
                frame.time_base = 1 / self._frame_rate
                self._container.mux(self._video.encode(frame))
                self.num_frames += 1
            self._copy_audio()
        except (OSError, ValueError) as error:
            raise StreamError(f"{self.partial_path} cannot be written: {error}") from error

    def _copy_audio(self) -> None:
        if self._audio is not None:
            for packet in self._audio.packets_until(self.num_frames / self._frame_rate):
                self._container.mux(packet)

    def _close(self) -> None:
        self._is_open = False
        try:
            if self.num_frames:
                self._container.mux(self._video.encode(None))
                self._copy_audio()
        finally:
            self._container.close()
            if self._audio is not None:
                self._audio.close()


def _partial_path(path: Path) -> Path:
    return path.with_name(f"{path.stem}.partial{path.suffix}")


class _AudioCopy:
    """Packets of a file's first audio track, in step with the video that is written."""

    def __init__(self, source: av.container.InputContainer, stream: AudioStream, target: AudioStream):
        self._source = source
        self._target = target
        self._packets = self._demux(stream)
        self._next: Packet | None = None

    @staticmethod
    def open(path: Path, output: av.container.OutputContainer, extension: str) -> "_AudioCopy | None":
        """The audio of ``path``, or ``None`` if it has none or the container cannot take it."""
        source = av.open(str(path))
        if not source.streams.audio:
            source.close()
            return None
        stream = source.streams.audio[0]
        codec = stream.codec_context.name
        # Raw AAC as broadcasts carry it lacks the header that files need.
        if codec not in _COPIED_AUDIO[extension] or (codec == "aac" and not stream.codec_context.extradata):
            warnings.warn(f"the {codec} audio of {path} cannot be copied to {extension} and is left out", stacklevel=3)
            source.close()
            return None
        return _AudioCopy(source, stream, output.add_stream_from_template(stream))

    def packets_until(self, seconds: Fraction) -> Iterator[Packet]:
        """Packets that begin before ``seconds`` of media time and were not given yet."""
        while True:
            packet = self._next or next(self._packets, None)
            self._next = None
            if packet is None:
                return
            if (packet.pts or 0) * packet.time_base >= seconds:
                self._next = packet
                return
            packet.stream = self._target
            yield packet

    def close(self) -> None:
        self._source.close()

    def _demux(self, stream: AudioStream) -> Iterator[Packet]:
        # The output begins with the first picture, wherever the source's clock stood then.
        video = self._source.streams.video
        start = Fraction(0)
        if video and video[0].start_time is not None and video[0].time_base is not None:
            start = video[0].start_time * video[0].time_base
        with contextlib.suppress(av.error.FFmpegError):
            for packet in self._source.demux(stream):
                if packet.pts is None or packet.dts is None:
                    continue
                shift = round(start / packet.time_base)
                packet.pts, packet.dts = packet.pts - shift, packet.dts - shift
                # Packets before time zero only warm a decoder up; kept, they would push the video back.
                if packet.pts >= 0:
                    yield packet
