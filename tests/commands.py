"""The whole command on forked ranks, and clips on disk."""

import io
import os
import sys
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import av
import numpy as np

from ds_stream.app import main
from ds_stream.media.writer import VideoWriter
from forked import start_forked, wait_for
from rings import tiny_config

TIMEOUT_S = 2.0


class Command:
    """``stream.py`` on forked ranks, all talking into one file."""

    def __init__(self, folder: Path, num_ranks: int, *arguments: str, before: Callable[[int], None] = lambda _: None):
        self.log = folder / "log"
        self.output = folder / "out.mp4"
        self.partial = folder / "out.partial.mp4"
        config = folder / "config.json"
        if not config.exists():
            config.write_text(tiny_config(limits={"timeout_s": TIMEOUT_S}).to_json())
        argv = ["--output", str(self.output), *arguments]

        def run(rank: int) -> None:
            log = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            for descriptor in (1, 2):
                os.dup2(log, descriptor)
            sys.stdout, sys.stderr = (io.TextIOWrapper(os.fdopen(fd, "wb", 0), write_through=True) for fd in (1, 2))
            before(rank)
            sys.exit(main(argv, default_config=config))

        self.started = time.monotonic()
        self.children = start_forked(num_ranks, run, join=False)

    def wait(self, timeout_s: float = 90) -> dict[int, int]:
        """Exit codes other than 0 by rank."""
        return wait_for(self.children, timeout_s)

    def pid(self, rank: int) -> int:
        return next(pid for pid, of in self.children.items() if of == rank)

    @property
    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""


def write_clip(path: Path, frames: np.ndarray, rate: Fraction = Fraction(16)) -> Path:
    writer = VideoWriter(path, rate, frames.shape[2], frames.shape[1])
    writer.write(frames)
    writer.finish()
    return path


def comment_of(path: Path) -> str:
    with av.open(str(path)) as container:
        return container.metadata["comment"]


def read_clip(path: Path) -> np.ndarray:
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
