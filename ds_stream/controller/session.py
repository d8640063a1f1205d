"""One stream from its reader to its writer, each in a thread of its own, so that both overlap the ring."""

import queue
import threading
import time
from dataclasses import dataclass
from typing import cast

import numpy as np
from torch import Tensor

from ds_stream.controller.motion import StrengthRule
from ds_stream.core import ChunkGeometry, FrameReader, Frames, FrameWriter, LiveFrameReader, StreamError


@dataclass(frozen=True, slots=True)
class ChunkArrived:
    """A chunk has been read, or, without a reader, may be generated."""

    session: int
    chunk: int
    frames: Frames | None
    num_frames: int
    """Frames of the chunk that belong to the stream; the rest of the last chunk is padding."""
    strength: float | None
    """Share of noise in its start; ``None`` without frames."""
    accepted_at: float | None = None
    """``time.monotonic()`` at which its last frame had come, of a live source; else it waits to be accepted."""


@dataclass(frozen=True, slots=True)
class InputEnded:
    """No chunk follows; ``error`` says why, if the source broke off."""

    session: int
    error: StreamError | None = None


@dataclass(frozen=True, slots=True)
class ChunkWritten:
    """All frames of a chunk are in the writer's hands."""

    session: int
    chunk: int
    num_frames: int
    at: float
    """``time.monotonic()`` when its frames came back from the ring."""


@dataclass(frozen=True, slots=True)
class PromptChanged:
    """Chunks admitted from now on get another prompt."""

    session: int
    embedding: Tensor


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """The writer cannot go on; the run cannot either."""

    session: int
    error: Exception


Message = ChunkArrived | InputEnded | ChunkWritten | PromptChanged | WriteFailed
Inbox = queue.SimpleQueue
"""Where the threads of all sessions tell the controller what happened."""


class ChunkReader:
    """Cuts a reader's frames into chunks, a bounded number of chunks ahead of the ring.

    The last chunk is padded by repeating its last frame.

    Args:
        strength: how much noise a chunk starts with, asked for each chunk in order.
        num_frames: most frames to take; ``None`` for all. Without a reader, how many to generate.
        max_queued_chunks: chunks that may have been read but not admitted.
    """

    def __init__(
        self,
        session: int,
        reader: FrameReader | None,
        strength: StrengthRule,
        geometry: ChunkGeometry,
        num_frames: int | None,
        max_queued_chunks: int,
        inbox: "Inbox[Message]",
    ):
        assert reader is not None or num_frames is not None, "without a reader, say how many frames to generate"
        self._session = session
        self._reader = reader
        self._live = cast(LiveFrameReader, reader) if reader is not None and reader.info.is_live else None
        self._strength = strength
        self._geometry = geometry
        self._num_frames = num_frames
        self._inbox = inbox
        self._room = threading.Semaphore(max_queued_chunks)
        self._thread = threading.Thread(target=self._run, name=f"reader of session {session}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def num_dropped(self) -> int:
        """Frames that a live source has dropped so far."""
        return 0 if self._live is None else self._live.num_dropped

    @property
    def chunks_per_s(self) -> float | None:
        """How many chunks a live source gives; ``None`` for others."""
        if self._live is None:
            return None
        return float(self._live.info.frame_rate) / self._geometry.num_frames(1)

    def admitted(self) -> None:
        """A chunk has left the queue: there is room for another."""
        self._room.release()

    def _run(self) -> None:
        error: StreamError | None = None
        chunk = 0
        try:
            while True:
                self._room.acquire()
                wanted = self._geometry.num_frames(chunk)
                if self._num_frames is not None:
                    wanted = min(wanted, self._num_frames - self._geometry.first_frame(chunk))
                if wanted <= 0:
                    break
                frames = self._reader.read(wanted) if self._reader is not None else None
                num_frames = wanted if frames is None else len(frames)
                if num_frames == 0:
                    break
                strength = None
                if frames is not None:
                    strength = self._strength(frames)
                    frames = _pad(frames, self._geometry.num_frames(chunk))
                accepted_at = None if self._live is None else self._live.last_arrived_at
                self._inbox.put(ChunkArrived(self._session, chunk, frames, num_frames, strength, accepted_at))
                # A short read is followed by another, which says whether the source ended or broke off.
                chunk += 1
        except StreamError as broken:
            error = broken
        except Exception as bug:
            error = StreamError(f"reading failed: {type(bug).__name__}: {bug}")
        finally:
            self._inbox.put(InputEnded(self._session, error))


class ChunkWriter:
    """Hands finished chunks to a writer, trimmed to the frames that belong to the stream.

    Its queue needs no bound of its own: the ring stops when chunks are not written.
    """

    def __init__(self, session: int, writer: FrameWriter, inbox: "Inbox[Message]"):
        self._session = session
        self._writer = writer
        self._inbox = inbox
        self._queue: queue.SimpleQueue[tuple[int, Frames, float] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"writer of session {session}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, chunk: int, frames: Frames) -> None:
        """Write the next chunk's frames, padding already cut off."""
        self._queue.put((chunk, frames, time.monotonic()))

    def close(self) -> None:
        """Wait until everything that was put is written."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            chunk, frames, at = item
            try:
                self._writer.write(frames)
            except Exception as error:
                self._inbox.put(WriteFailed(self._session, error))
                return
            self._inbox.put(ChunkWritten(self._session, chunk, len(frames), at))


def _pad(frames: Frames, num_frames: int) -> Frames:
    missing = num_frames - len(frames)
    return frames if missing == 0 else np.concatenate((frames, np.repeat(frames[-1:], missing, axis=0)))
