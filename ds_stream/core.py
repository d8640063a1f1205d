"""Values that every part shares: rows, plans, chunk geometry, reader and writer protocols, errors.

Nothing here imports torch or DeepSpeed, and nothing here imports another file of the package.
"""

import enum
import os
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

PIXEL_FRAMES_PER_LATENT_FRAME = 4
"""Temporal stride of the Wan VAE; the very first pixel frame of a stream has a latent frame of its own."""

PIXELS_PER_LATENT = 8
"""Spatial stride of the Wan VAE, in pixels."""

PATCH_SIZE = (1, 2, 2)
"""Latent frames, latent rows and latent columns that make one token of the DiT."""

PIXELS_PER_TOKEN = PIXELS_PER_LATENT * PATCH_SIZE[1]
"""Width and height of a video must be multiples of this many pixels."""

DEFAULT_FRAME_RATE = Fraction(16)
"""Frames per second of a video that has no source: what Wan was trained at."""

NUM_WAN_DECODE_LAYERS = 5
"""Layers of the Wan decoder: its middle, and one for each size of picture."""

MAX_ROWS = 64
"""Most rows that any launch can have."""

MAX_STAGES = 64
"""Most stages of a pipeline."""

EXIT_FAILED = 1
"""Exit code of a run that failed."""

EXIT_USAGE = 2
"""Exit code of a mistake in the command or its files."""

EXIT_INTERRUPTED = 130
"""Exit code after Ctrl-C."""

Frames = NDArray[np.uint8]
"""Pixel frames as ``[frames, height, width, 3]``, RGB, 0 to 255."""


class StreamError(RuntimeError):
    """A run-time failure that a user can understand: the message says what, where and what to do."""


@dataclass(frozen=True, slots=True)
class Row:
    """One pass ``(chunk, step)`` of one session: a row of a stream batch."""

    session: int
    chunk: int
    step: int
    prompt: int
    """Id of the prompt that the chunk keeps from its admission to its end."""
    strength: float | None = None
    """Share of noise in the chunk's start, video to video; ``None``: it starts from noise alone. Kept to its end."""

    @property
    def has_video(self) -> bool:
        """Whether its chunk is encoded from frames."""
        return self.strength is not None


class EventKind(enum.IntEnum):
    """What a plan can ask of every stage besides running rows. Events come into force before the plan's rows."""

    OPEN_SESSION = 1
    """``value`` is the session's seed."""
    CLOSE_SESSION = 2
    SET_PROMPT = 3
    """``value`` is the prompt id; the text context follows the plan, stage to stage."""
    DROP_PROMPT = 4
    """``value`` is the prompt id; no row uses it from here on."""
    STOP = 5


@dataclass(frozen=True, slots=True)
class Event:
    kind: EventKind
    session: int = 0
    value: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """What every stage does for one launch. Stage ``r`` carries out the plan of launch ``u`` at tick ``u + r``."""

    tick: int
    """The launch ``u``: the tick at which the first stage runs the rows."""
    rows: tuple[Row, ...] = ()
    events: tuple[Event, ...] = ()
    partition: tuple[int, ...] = ()
    """New layer boundaries, in force before the events and rows; empty: as before. No row is in flight."""

    @property
    def stops(self) -> bool:
        """Whether this is the last plan of the run."""
        return any(event.kind is EventKind.STOP for event in self.events)


@dataclass(frozen=True, slots=True)
class StageTiming:
    """What one stage spent on one launch, in ms."""

    stage: int
    launch: int
    num_rows: int
    forward_ms: float
    """Ring layers."""
    encode_ms: float
    decode_ms: float
    wait_ms: float
    """For plans and messages of other stages, and on the first stage for input and output."""
    send_ms: float
    """Handing messages on."""

    @property
    def busy_ms(self) -> float:
        """Time in layers."""
        return self.forward_ms + self.encode_ms + self.decode_ms


@dataclass(frozen=True, slots=True)
class LayerTiming:
    """What one layer spent on one launch, or, a layer of the VAE, on one chunk."""

    layer: int
    """Index in the model."""
    num_rows: int
    """Rows of the launch; 1 for a layer of the VAE."""
    ms: float


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time in which a stage did one thing, for pictures."""

    stage: int
    phase: str
    """``forward``, ``encode``, ``decode``, ``wait`` or ``send``."""
    launch: int
    num_rows: int
    start_s: float
    """On a clock that all stages share."""
    seconds: float


@dataclass(frozen=True, slots=True)
class ChunkGeometry:
    """How pixel frames map onto chunks of ``num_latent_frames`` latent frames each.

    The first chunk takes ``1 + 4(n-1)`` pixel frames, every other ``4n``; the tail is padded by its reader and trimmed
    by its writer.
    """

    num_latent_frames: int

    def num_frames(self, chunk: int) -> int:
        """Pixel frames that chunk ``chunk`` takes and gives."""
        full = PIXEL_FRAMES_PER_LATENT_FRAME * self.num_latent_frames
        return full - (PIXEL_FRAMES_PER_LATENT_FRAME - 1) if chunk == 0 else full

    def first_frame(self, chunk: int) -> int:
        """Index of the first pixel frame of chunk ``chunk``."""
        return 0 if chunk == 0 else self.num_frames(0) + (chunk - 1) * self.num_frames(1)

    def num_chunks(self, num_frames: int) -> int:
        """Chunks that ``num_frames`` pixel frames fill, the last one perhaps partly."""
        if num_frames <= 0:
            return 0
        return 1 + -(-max(num_frames - self.num_frames(0), 0) // self.num_frames(1))


@dataclass(frozen=True, slots=True)
class VideoInfo:
    """What a reader knows about its frames before it has read them."""

    width: int
    """Pixels of the frames that ``read`` returns."""
    height: int
    """Pixels of the frames that ``read`` returns."""
    frame_rate: Fraction
    """Frames per second of media time."""
    num_frames: int | None
    """Frames in all, or ``None`` where the source does not say. An estimate: only ``read`` knows."""
    is_live: bool = False
    """Whether frames come by a clock of their own: its reader is a :class:`LiveFrameReader`."""


class FrameReader(Protocol):
    """A stream of pixel frames in presentation order."""

    info: VideoInfo

    def read(self, num_frames: int) -> Frames:
        """Up to ``num_frames`` frames, fewer only at the end of the stream, none after it.

        Raises:
            StreamError: the source broke off; frames read before stay valid.
        """
        ...

    def close(self) -> None: ...


class LiveFrameReader(FrameReader, Protocol):
    """A source that does not wait for its reader."""

    num_dropped: int
    """Frames that found no room and were lost, or whose place another took."""
    last_arrived_at: float
    """``time.monotonic()`` at which the last frame that ``read`` returned had come."""


class FrameWriter(Protocol):
    """Takes pixel frames in presentation order."""

    def write(self, frames: Frames) -> None: ...

    def finish(self) -> None:
        """All frames are there: make the output whole under its final name."""
        ...

    def abort(self) -> None:
        """The run failed: keep what was written so far playable, under a name that says it is partial."""
        ...


@dataclass(frozen=True, slots=True)
class RankInfo:
    """This process among all."""

    rank: int
    num_ranks: int
    local_rank: int
    num_local_ranks: int

    @staticmethod
    def from_environment() -> "RankInfo":
        """What the launcher set; a plain ``python`` start is one rank of one."""
        rank, num_ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        return RankInfo(
            rank,
            num_ranks,
            int(os.environ.get("LOCAL_RANK", 0)),
            int(os.environ.get("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", num_ranks))),
        )
