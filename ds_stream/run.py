"""One rank's run: joins the ring, carries out its stage, and leaves in order or ends loudly."""

import functools
import logging
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
from ds_stream.controller.regulator import Regulator
from ds_stream.controller.stage_balancer import MemoryLimit
from ds_stream.core import ChunkGeometry, FrameReader, FrameWriter, Plan, RankInfo, Row, Span, StreamError
from ds_stream.engine.collector import Collector, FrameReturn
from ds_stream.engine.engine import StreamEngine
from ds_stream.engine.failure import Watchdog
from ds_stream.engine.groups import Placement, choose_placement, connect, init_process_groups
from ds_stream.engine.links import Link, LinkError
from ds_stream.engine.timings import TimingBoard
from ds_stream.figures import stage_figures
from ds_stream.model.layer_times import LayerTimes
from ds_stream.model.pipeline import CPU, StreamModule
from ds_stream.model.weights.load import ModelWeights
from ds_stream.schedule.planner import RingPlanner
from ds_stream.settings import StreamConfig

_SESSION = 0


@dataclass(frozen=True, slots=True)
class StreamRequest:
    """What the first rank streams."""

    prompts: PromptTimeline
    reader: FrameReader | None
    """The video, or ``None`` to generate ``num_frames`` frames from the prompt alone."""
    writer: FrameWriter
    num_frames: int | None
    """Most frames to take."""
    layer_times: LayerTimes | None = None
    """What a calibration has measured."""
    memory: MemoryLimit | None = None
    """What a stage can hold when layers move; ``None``: anything."""
    keep_history: bool = False
    """Whether stretches of time are kept for a report."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """What the first rank knows at the end."""

    figures: dict[str, Any]
    """Of the session, of each stage, and how rows and boundaries came about: most of the report."""
    spans: list[Span]
    """Stretches of time of all stages; none without a report."""
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
        config: on the first rank resolved for the number of ranks, and with a seed; the others take its boundaries.
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
        config = _agree_on_boundaries(config, info)
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
        self._geometry = ChunkGeometry(self._config.context.num_latent_frames_per_chunk)
        self._request = request
        self._regulator = None if request is None else Regulator(self._config, request.layer_times, request.memory)
        self._controller = None if request is None else self._make_controller()
        self._frame_collector = self._make_collector("frame", self._links.frames_in)
        self._timing_collector = self._make_collector("timing", self._links.timings_in)
        self._board = TimingBoard(info.num_ranks, self._config.layers.num_layers)
        self._frame_return = FrameReturn(self._hand_back, self._give_up)
        self._engine = StreamEngine(
            StreamModule(config.stream, weights, placement.device),
            config.stream,
            config.deepspeed,
            self._links.stage,
            source=self._controller,
            on_frames=self._frame_return,
            on_timings=self._return_timings,
            enter_phase=watchdog.enter,
            keep_spans=_tell_all(request is not None and request.keep_history, self._links.ranks),
        )

    def run(self) -> RunResult | None:
        if self._controller is None or self._request is None or self._regulator is None:
            self._engine.run()
            self._frame_return.close()
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
        self._frame_return.close()
        for collector in (self._frame_collector, self._timing_collector):
            if collector is not None:
                collector.close()
        gathered = self._gather()
        figures = {
            "stream": {
                "seed": seed,
                "rows": {str(rows): count for rows, count in sorted(metrics.rows.items())},
                **metrics.summary(self._config.slo.chunk_latency_ms),
            },
            "chunks": metrics.history(),
            **self._regulator.history(),
            "stages": [of_stage for of_stage, _ in gathered],
        }
        spans = [span for _, of_stage in gathered for span in of_stage]
        return RunResult(figures, spans, self._controller.errors.get(_SESSION))

    def _make_controller(self) -> StreamController:
        return StreamController(
            make_planner(self._config),
            self._geometry,
            self._regulator,
            before_launch=self._expect,
            on_progress=self._show_progress,
            enter_phase=self._watchdog.enter,
        )

    def _make_collector(self, what: str, link: Link | None) -> Collector | None:
        return None if link is None else Collector(what, link, self._give_up)

    def _expect(self, plan: Plan) -> None:
        """Wait for what ``plan`` will bring back, in the collectors' threads."""
        if self._timing_collector is not None:
            self._timing_collector.expect(self._board.fields, self._take_timings)
        if self._frame_collector is None:
            return
        for row in plan.rows:
            if row.step == self._config.noise.num_passes - 1:
                shape = (self._geometry.num_frames(row.chunk), self._config.video.height, self._config.video.width, 3)
                self._frame_collector.expect([(shape, torch.uint8)], functools.partial(self._take_frames, row))

    def _take_frames(self, row: Row, tensors: list[Tensor]) -> None:
        assert self._controller is not None
        # The link's buffer is overwritten by the next chunk.
        self._controller.deliver(row.session, row.chunk, tensors[0].numpy().copy())

    def _take_timings(self, tensors: list[Tensor]) -> None:
        assert self._regulator is not None
        self._board.load(tensors)
        self._regulator.observe(*self._board.take())

    def _return_timings(self, board: TimingBoard) -> None:
        """The last stage gives what all stages have timed to the controller, wherever that is."""
        if self._links.timings_out is not None:
            self._links.timings_out.send(board.tensors)
        else:
            assert self._regulator is not None
            self._regulator.observe(*board.take())

    def _give_up(self, error: Exception) -> None:
        """A collector's thread cannot go on."""
        if isinstance(error, LinkError):
            self._watchdog.lost(error.peer, str(error))
        self._watchdog.fail(f"collecting frames: {type(error).__name__}: {error}")

    def _hand_back(self, row: Row, frames: Tensor) -> None:
        """The last stage gives a finished chunk to the controller, wherever that is."""
        if self._links.frames_out is not None:
            self._links.frames_out.send([frames])
        else:
            assert self._controller is not None
            self._controller.deliver(row.session, row.chunk, frames.numpy())

    def _gather(self) -> list[tuple[dict[str, Any], list[Span]]]:
        """Figures and stretches of time of all stages, on the first rank."""
        self._watchdog.enter("comparing notes", True)
        run = self._regulator and self._regulator.extent
        run_s, num_launches = _tell_all(run, self._links.ranks)
        own = (stage_figures(self._engine, run_s, num_launches), list(self._engine.stage_timers.spans))
        if self._links.ranks is None:
            return [own]
        gathered: list[Any] | None = [None] * self._info.num_ranks if self._info.rank == 0 else None
        dist.gather_object(own, gathered, dst=0, group=self._links.ranks)
        return gathered or []

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


def make_planner(config: StreamConfig) -> RingPlanner:
    """The occupancy of the ring that ``config``, resolved, asks for."""
    partition = config.stages.partition
    assert partition != "auto", "resolve the config first"
    num_ring_stages = config.layers.ring_of(partition).num_stages
    return RingPlanner(
        num_ring_stages,
        config.noise.num_passes,
        config.context.lead,
        config.batch.max_rows,
        config.limits.max_queued_chunks,
        len(partition) - 1 - num_ring_stages,
    )


def _agree_on_boundaries(config: Config, info: RankInfo) -> Config:
    """The first rank's layer boundaries, on all ranks."""
    partition = config.stream.stages.partition if info.rank == 0 else ()
    return config.with_partition(_tell_all(partition, dist.group.WORLD if info.num_ranks > 1 else None))


def _tell_all(value: Any, group: dist.ProcessGroup | None) -> Any:
    """The first rank's ``value``, on all ranks of a CPU group; ``None``: there is one rank."""
    if group is None:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0, group=group, device=CPU)
    return values[0]


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
