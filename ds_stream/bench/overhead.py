"""What the host spends on a tick beside the layers: the whole loop, run on one stage whose layers do nothing."""

import statistics
import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ds_stream.config import Config
from ds_stream.controller.controller import StreamController
from ds_stream.controller.motion import strength_rule
from ds_stream.controller.prompts import PromptTimeline
from ds_stream.controller.regulator import Regulator
from ds_stream.core import ChunkGeometry, Plan, RankInfo, Row
from ds_stream.engine.engine import StreamEngine
from ds_stream.engine.groups import Placement, connect, init_process_groups
from ds_stream.engine.timings import TimingBoard
from ds_stream.media.synthetic import SyntheticReader
from ds_stream.media.writer import NoWriter
from ds_stream.model.layers import EmbedLayer, RowBatch, latent_shape
from ds_stream.model.pipeline import CPU, StageLayers, StreamModule, open_weights
from ds_stream.model.vae import DecodeLayer, EncodeLayer, VaeState
from ds_stream.partition import EMBED, ENCODE
from ds_stream.run import make_planner
from ds_stream.settings import StreamConfig


@dataclass(frozen=True, slots=True)
class Overhead:
    """Microseconds per tick."""

    controller_us: float
    """Median of what the controller takes to decide a plan: planner, tuner, prompts, events, metrics."""
    host_us: float
    """The whole loop: that, instructions, engine, timers, noise and denoising steps, reader and writer threads."""


def measure_overhead(config: Config, num_chunks: int) -> Overhead:
    """Run a stream on a CPU and one stage with layers that return at once; all else is as ever."""
    config = config.resolve(1)
    stream = config.stream
    info = RankInfo(0, 1, 0, 1)
    placement = Placement(CPU, "gloo")
    init_process_groups(placement, info, stream.limits.start_timeout_s)
    geometry = ChunkGeometry(stream.context.num_latent_frames_per_chunk)
    regulator = Regulator(stream)
    controller = StreamController(make_planner(stream), geometry, regulator)

    def observe(board: TimingBoard) -> None:
        regulator.observe(*board.take())

    def deliver(row: Row, frames: Tensor) -> None:
        controller.deliver(row.session, row.chunk, frames.numpy())

    links = connect(stream, placement, info).stage
    module = StreamModule(stream, open_weights(stream))
    engine = StreamEngine(module, stream, config.deepspeed, links, controller, deliver, observe)
    module.layers = engine.state.layers = _no_op_layers(stream)
    num_frames = geometry.first_frame(num_chunks)
    reader = SyntheticReader(stream.video.width, stream.video.height, num_frames)
    prompt = torch.zeros((stream.model.num_text_tokens, stream.model.text_dim))
    controller.open_session(0, 0, PromptTimeline(prompt), reader, NoWriter(), strength_rule(stream.noise))
    planned_at: list[float] = []
    planning_s: list[float] = []
    next_plan = controller._next_plan

    def timed() -> Plan:
        started = time.perf_counter()
        plan = next_plan()
        planned_at.append(time.perf_counter())
        planning_s.append(planned_at[-1] - started)
        return plan

    controller._next_plan = timed  # type: ignore[method-assign]
    engine.run(controller.plans())
    # The first ticks load what is loaded late.
    warm_up = len(planned_at) // 10
    num_ticks = len(planned_at) - 1 - warm_up
    return Overhead(
        1e6 * statistics.median(planning_s[warm_up:]), 1e6 * (planned_at[-1] - planned_at[warm_up]) / num_ticks
    )


class _Embed(EmbedLayer):
    def __init__(self) -> None:
        nn.Module.__init__(self)

    def forward(self, batch: RowBatch) -> RowBatch:
        return replace(batch, flow_RCNhw=batch.latents_RCNhw)

    def project_text(self, embedding: Tensor) -> Tensor:
        return embedding


class _Encode(EncodeLayer):
    def __init__(self, latents: Tensor):
        nn.Module.__init__(self)
        self._latents = latents

    def new_state(self) -> VaeState:
        return VaeState()

    def forward(self, frames_THW3: Tensor, state: VaeState) -> Tensor:
        return self._latents


class _Decode(DecodeLayer):
    """A session's first chunk is shorter than the others."""

    def __init__(self, first: Tensor, later: Tensor):
        nn.Module.__init__(self)
        self._first, self._later = first, later

    def new_state(self) -> VaeState:
        return VaeState()

    def forward(self, hidden: Tensor, state: VaeState) -> Tensor:
        state.num_latent_frames += 1
        return self._first if state.num_latent_frames == 1 else self._later


def _no_op_layers(config: StreamConfig) -> StageLayers:
    geometry = ChunkGeometry(config.context.num_latent_frames_per_chunk)
    size = (config.video.height, config.video.width, 3)
    pictures = [torch.zeros((geometry.num_frames(chunk), *size), dtype=torch.uint8) for chunk in (0, 1)]
    layers = {
        ENCODE: _Encode(torch.zeros(latent_shape(config))),
        EMBED: _Embed(),
        config.layers.decode[0]: _Decode(*pictures),
    }
    return StageLayers(config.layers, layers)
