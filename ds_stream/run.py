"""One rank's run: joins the ring, carries out its stage, and leaves in order or ends loudly."""

import logging
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from ds_stream.config import Config
from ds_stream.controller.controller import StreamController
from ds_stream.controller.metrics import SessionMetrics
from ds_stream.controller.motion import strength_rule
from ds_stream.controller.prompts import PromptTimeline
from ds_stream.core import ChunkGeometry, FrameReader, FrameWriter, RankInfo, Row, StreamError
from ds_stream.engine.collector import FrameCollector
from ds_stream.engine.engine import StreamEngine
from ds_stream.engine.failure import Watchdog
from ds_stream.engine.groups import Placement, choose_placement, connect, init_process_groups
from ds_stream.engine.links import LinkError
from ds_stream.model.pipeline import StreamModule
from ds_stream.model.weights.load import ModelWeights
from ds_stream.schedule.planner import RingPlanner

_SESSION = 0
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class StreamRequest:
    """What the first rank streams."""

    prompts: PromptTimeline
    reader: FrameReader | None
    """The video, or ``None`` to generate ``num_frames`` frames from the prompt alone."""
    writer: FrameWriter
    num_frames: int | None
    """Most frames to take."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """What the first rank knows at the end."""

    stream: dict[str, Any]
    """Figures of the session."""
    stages: list[dict[str, Any]]
    """Figures of each stage."""
    input_error: StreamError | None
    """Why the input broke off; what had been read was processed."""


def run_rank(
    config: Config,
    info: RankInfo,
    weights: ModelWeights,
    request: StreamRequest | None,
    interrupted: threading.Event | None = None,
) -> RunResult | None:
    """Run this rank's stage from start to end; the first rank gets the result.

    Any failure ends all ranks; the process of a rank that fails or loses another does not come back from here.

    Args:
        config: resolved for the number of ranks; on the first rank with a seed.
        weights: where the layers' weights come from.
        request: on the first rank, what to stream.
        interrupted: set when this process is about to end by a signal, which is no failure.

    Raises:
        ValueError: the device, transport or port of ``config`` cannot be had.
    """
    deepspeed.utils.logger.setLevel(logging.ERROR)
    torch.set_num_threads(config.stream.device.cpu_threads_per_rank)
    limits = config.stream.limits
    placement = choose_placement(config.stream, info)
    init_process_groups(placement, info, limits.start_timeout_s)
    watchdog = Watchdog.start(
        info, limits.timeout_s, limits.start_timeout_s, request.writer.abort if request else None, interrupted
    )
    with _end_all_ranks_on_failure(watchdog):
        result = _Run(config, info, placement, weights, request, watchdog).run()
    watchdog.close()
    dist.destroy_process_group()
    return result


class _Run:
    """The parts of one rank, joined."""

    def __init__(
        self,
        config: Config,
        info: RankInfo,
        placement: Placement,
        weights: ModelWeights,
        request: StreamRequest | None,
        watchdog: Watchdog,
    ):
        self._config = config.stream
        self._info = info
        self._device = placement.device
        self._watchdog = watchdog
        self._links = connect(config.stream, placement, info)
        summary_timeout = timedelta(seconds=2 * config.stream.limits.timeout_s + 10)
        self._summary_group = dist.new_group(backend="gloo", timeout=summary_timeout)
        self._geometry = ChunkGeometry(self._config.context.num_latent_frames_per_chunk)
        self._request = request
        self._controller = None if request is None else self._make_controller()
        self._collector = self._make_collector()
        self._engine = StreamEngine(
            StreamModule(config.stream, weights, placement.device),
            config.stream,
            config.deepspeed,
            self._links.stage,
            source=self._controller,
            on_frames=self._hand_back,
            enter_phase=watchdog.enter,
        )

    def run(self) -> RunResult | None:
        if self._controller is None or self._request is None:
            self._engine.run()
            self._gather()
            return None
        request = self._request
        seed = self._config.noise.seed
        assert seed is not None
        with self._progress_bar() as self._bar:
            metrics = self._controller.open_session(
                _SESSION,
                seed,
                request.prompts,
                request.reader,
                request.writer,
                strength_rule(self._config.noise),
                request.num_frames,
            )
            self._engine.run(self._controller.plans())
        if self._collector is not None:
            self._collector.close()
        stream = {"seed": seed, "rows": dict(metrics.rows), **metrics.summary()}
        return RunResult(stream, self._gather(), self._controller.errors.get(_SESSION))

    def _make_controller(self) -> StreamController:
        config = self._config
        planner = RingPlanner(
            self._info.num_ranks,
            config.noise.num_passes,
            config.context.lead,
            config.batch.max_rows,
            config.limits.max_queued_chunks,
        )
        return StreamController(
            planner,
            self._geometry,
            before_launch=lambda plan: self._collector.expect(plan) if self._collector else None,
            on_progress=self._show_progress,
            enter_phase=self._watchdog.enter,
        )

    def _make_collector(self) -> FrameCollector | None:
        if self._controller is None or self._links.frames_in is None:
            return None
        video = self._config.video
        return FrameCollector(
            self._links.frames_in,
            self._config.noise.num_passes,
            (video.height, video.width),
            self._geometry.num_frames,
            self._controller.deliver,
            on_error=self._give_up,
        )

    def _give_up(self, error: Exception) -> None:
        """The collector's thread cannot go on."""
        if isinstance(error, LinkError):
            self._watchdog.lost(error.peer, str(error))
        self._watchdog.fail(f"collecting frames: {type(error).__name__}: {error}")

    def _hand_back(self, row: Row, frames: Tensor) -> None:
        """The last stage gives a finished chunk to the controller, wherever that is."""
        frames = frames.cpu()
        if self._links.frames_out is not None:
            self._links.frames_out.send([frames])
        else:
            assert self._controller is not None
            self._controller.deliver(row.session, row.chunk, frames.numpy())

    def _gather(self) -> list[dict[str, Any]]:
        """Figures of all stages, on the first rank."""
        self._watchdog.enter("comparing notes", True)
        gathered: list[Any] | None = [None] * self._info.num_ranks if self._info.rank == 0 else None
        dist.gather_object(self._stage_figures(), gathered, dst=0, group=self._summary_group)
        return gathered or []

    def _stage_figures(self) -> dict[str, Any]:
        engine = self._engine
        partition = self._config.stages.partition
        forwards = engine.num_forwards
        gpu = torch.cuda.max_memory_allocated(self._device) / _MIB if self._device.type == "cuda" else None
        return {
            "stage": engine.stage_id,
            "rank": self._info.rank,
            "device": str(self._device),
            "layers": [partition[engine.stage_id], partition[engine.stage_id + 1]],
            "parameters": engine.module.num_parameters,
            "forwards": forwards,
            "rows_per_forward": engine.num_rows_run / forwards if forwards else None,
            "forward_ms_mean": engine.forward_ms / forwards if forwards else None,
            "cache_mib": engine.peak_cache_bytes / _MIB,
            "peak_host_memory_mib": _peak_host_memory_kib() / 1024,
            "peak_gpu_memory_mib": gpu,
        }

    def _progress_bar(self) -> "tqdm[Any]":
        assert self._request is not None
        reader, total = self._request.reader, self._request.num_frames
        if reader is not None and reader.info.num_frames is not None:
            total = min(reader.info.num_frames, total or reader.info.num_frames)
        # None: only where somebody watches.
        return tqdm(total=total, unit="frame", desc="streaming", disable=None)

    def _show_progress(self, metrics: SessionMetrics) -> None:
        self._bar.update(metrics.num_frames - self._bar.n)
        self._bar.set_postfix_str(f"rows {metrics.last_rows}, chunk latency {metrics.last_latency_ms or 0:.0f} ms")


def _peak_host_memory_kib() -> int:
    """Most memory that this process held. Not ``getrusage``, which counts what its parent held when it was started."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


@contextmanager
def _end_all_ranks_on_failure(watchdog: Watchdog) -> Iterator[None]:
    try:
        yield
    except LinkError as error:
        watchdog.lost(error.peer, str(error))
    except StreamError as error:
        watchdog.fail(str(error))
    except BaseException as error:
        watchdog.fail(f"{type(error).__name__}: {error}", details=traceback.format_exc())
