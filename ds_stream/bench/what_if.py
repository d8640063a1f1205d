"""What a machine would do, worked out from the times of single layers: to plan it before renting it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from deepspeed.runtime.pipe.schedule import PipeInstruction

from ds_stream.controller.stage_balancer import StreamShape, balance
from ds_stream.core import ChunkGeometry
from ds_stream.model.layer_times import LayerTimes
from ds_stream.model.layers import latent_shape, message_fields
from ds_stream.model.pipeline import decoder_input_field
from ds_stream.partition import ENCODE, LayerList, describe_role, stage_layers
from ds_stream.schedule import instructions as ins
from ds_stream.schedule.planner import RingPlanner
from ds_stream.schedule.timeline import Machine, play
from ds_stream.settings import StreamConfig

_MIN_CHUNKS = 120


@dataclass(frozen=True, slots=True)
class Forecast:
    """One pipeline on one machine."""

    num_stages: int
    max_rows: int
    partition: tuple[int, ...]
    frames_per_s: float
    """Of one backlogged session, the filling and emptying of the ring left out."""
    chunk_latency_ms: float
    ttff_ms: float
    occupancy: tuple[float, ...]
    """Share of its time that each stage computes."""
    link_mb_per_s: float
    """Most that goes over a link between two stages."""


def forecast(
    config: StreamConfig,
    times: LayerTimes,
    num_stages: int,
    max_rows: int,
    machine: Machine,
    launch_overhead_ms: float = 0.0,
) -> Forecast:
    """Play ``config`` on ``num_stages`` stages.

    Args:
        config: its boundaries count if they are for so many stages, else the balancer's are taken.
        times: of its layers, measured with some numbers of rows.
        launch_overhead_ms: what a stage spends on a launch beside its layers.

    Raises:
        ValueError: the model has fewer layers than that, or ``times`` are of another model.
    """
    layers, noise = config.layers, config.noise
    layer_ms = times.at(max_rows)
    if len(layer_ms) != layers.num_layers:
        raise ValueError(
            f"the layer times are of a model with {len(layer_ms)} layers but the config's has {layers.num_layers}; "
            "measure them with the same config"
        )
    shape = StreamShape(noise.num_passes, config.context.lead, max_rows)
    given = config.stages.partition
    if given != "auto" and len(given) == num_stages + 1:
        partition = given
    else:
        best = balance(layers, layer_ms, shape, num_stages)
        assert best is not None, "there is no limit to memory"
        partition = best.partition
    ring = layers.ring_of(partition)
    planner = RingPlanner(
        ring.num_stages,
        noise.num_passes,
        config.context.lead,
        max_rows,
        config.limits.max_queued_chunks,
        num_stages - ring.num_stages,
    )
    costs = _Costs(config, times, partition, launch_overhead_ms)
    # A third of them is several times what fills the ring: chunks come in bursts.
    num_chunks = 6 * max_rows * num_stages + _MIN_CHUNKS
    timeline = play(layers, partition, planner, num_chunks, machine, costs.work_ms, costs.num_bytes)
    geometry = ChunkGeometry(config.context.num_latent_frames_per_chunk)
    total_ms = timeline.delivered_ms[-1]
    return Forecast(
        num_stages,
        max_rows,
        partition,
        1000 * timeline.chunks_per_ms * geometry.num_frames(1),
        timeline.latency_ms,
        timeline.delivered_ms[0],
        tuple(busy / total_ms for busy in timeline.busy_ms),
        max(costs.bytes_sent.values(), default=0.0) / total_ms / 1000,
    )


class _Costs:
    """Time and bytes of each instruction."""

    def __init__(self, config: StreamConfig, times: LayerTimes, partition: tuple[int, ...], launch_overhead_ms: float):
        self._config = config
        self._partition = partition
        self._overhead_ms = launch_overhead_ms
        self._times = times
        self._geometry = ChunkGeometry(config.context.num_latent_frames_per_chunk)
        self.bytes_sent: dict[int, float] = {}
        """By stage."""

    def work_ms(self, stage: int, do: PipeInstruction) -> float:
        layers, own = self._config.layers, stage_layers(self._partition, stage)
        if isinstance(do, ins.ForwardPass):
            layer_ms = self._times.at(len(do.rows))
            return self._overhead_ms + sum(layer_ms[i] for i in own if i in layers.ring)
        # A session's first chunk has fewer frames than others.
        if isinstance(do, ins.EncodeChunk):
            return self._times.at(1)[ENCODE] * self._share(do.row.chunk)
        if isinstance(do, ins.DecodeChunk):
            return sum(self._times.at(1)[i] for i in own if i in layers.decode) * self._share(do.row.chunk)
        return 0.0

    def num_bytes(self, stage: int, do: PipeInstruction) -> float:
        size = self._num_bytes(stage, do)
        self.bytes_sent[stage] = self.bytes_sent.get(stage, 0.0) + size
        return size

    def _num_bytes(self, stage: int, do: PipeInstruction) -> float:
        config = self._config
        fields: Sequence[tuple[tuple[int, ...], torch.dtype]] = [(latent_shape(config), torch.float32)]
        if isinstance(do, ins.SendActivations):
            fields = message_fields(config, do.num_rows)
        elif isinstance(do, ins.ReturnLatents):
            fields = list(fields) * len(do.indices)
        elif isinstance(do, ins.SendFinished):
            part = self._partition[stage + 1] - config.layers.decode.start
            fields = [decoder_input_field(config, part, is_first_chunk=do.row.chunk == 0)]
        elif isinstance(do, ins.DeliverChunk):
            shape = (self._geometry.num_frames(do.row.chunk), config.video.height, config.video.width, 3)
            fields = [(shape, torch.uint8)]
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in fields)

    def _share(self, chunk: int) -> float:
        return self._geometry.num_frames(chunk) / self._geometry.num_frames(1)


def describe_forecasts(layers: LayerList, forecasts: Sequence[Forecast]) -> str:
    """A table; the occupancy is that of each stage, with the boundaries of its layers."""
    lines = [
        f"{'stages':>6} {'rows':>4} {'frames/s':>9} {'latency ms':>11} {'ttff ms':>8} {'link MB/s':>10}  "
        "busy share of each stage, and its layers"
    ]
    for each in forecasts:
        stages = (
            f"{share:.0%} {describe_role(layers, stage_layers(each.partition, stage))}"
            for stage, share in enumerate(each.occupancy)
        )
        lines.append(
            f"{each.num_stages:6} {each.max_rows:4} {each.frames_per_s:9.2f} {each.chunk_latency_ms:11.0f} "
            f"{each.ttff_ms:8.0f} {each.link_mb_per_s:10.1f}  {'; '.join(stages)}"
        )
    return "\n".join(lines)
