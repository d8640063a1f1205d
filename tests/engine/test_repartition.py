"""Rows and layer boundaries may change at any time, several times: the video is that of the oracle, bit for bit."""

import gc
import random
import weakref
from collections.abc import Sequence

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ds_stream.config import Config
from ds_stream.controller.prompts import PromptTimeline
from ds_stream.controller.regulator import Steering
from ds_stream.core import LayerTiming, Plan, StageTiming
from ds_stream.engine.moves import group_moves, to_device
from ds_stream.partition import LayerList
from forked import fork_ranks
from rings import CPU, MockRing, Stream, embed, geometry, random_clip, reference_frames, tiny_config


class Forced:
    """Stands in for the regulator: other boundaries every few ticks, and another row cap at every tick."""

    def __init__(self, layers: LayerList, partitions: Sequence[tuple[int, ...]], ticks_each: int, caps: Sequence[int]):
        self.layers = layers
        self.partitions = list(partitions)
        self.ticks_each = ticks_each
        self.caps = caps
        self.in_force: list[tuple[int, ...]] = []
        self.timings: list[StageTiming] = []
        self._due = ticks_each

    def steer(self, tick: int, chunks_per_s: float | None) -> Steering:
        wanted = self.partitions[len(self.in_force)] if tick >= self._due and self.is_unfinished else ()
        return Steering.to(self.caps[tick % len(self.caps)], wanted, self.layers)

    @property
    def is_unfinished(self) -> bool:
        return len(self.in_force) < len(self.partitions)

    def launched(self, plan: Plan) -> None:
        if plan.partition:
            self.in_force.append(plan.partition)
            self._due = plan.tick + self.ticks_each

    def observe(self, stages: Sequence[StageTiming], layers: Sequence[LayerTiming]) -> None:
        self.timings += stages


def clip_of(config: Config, num_chunks: int) -> np.ndarray:
    return random_clip(geometry(config).first_frame(num_chunks))


# Three blocks: 0 encode, 1 embed, 2 to 4 blocks, 5 head, 6 to 10 decode.
MOVES = {
    1: [],
    2: [(0, 1, 11), (0, 9, 11), (0, 4, 11), (0, 7, 11)],
    3: [(0, 1, 6, 11), (0, 3, 5, 11), (0, 6, 8, 11), (0, 1, 2, 11)],
    4: [(0, 1, 4, 9, 11), (0, 2, 3, 4, 11), (0, 6, 7, 8, 11), (0, 1, 6, 10, 11), (0, 3, 4, 5, 11)],
}


@pytest.mark.parametrize(("num_stages", "lead"), [(2, 1), (3, 0), (4, 1)])
def test_moving_layers_does_not_change_the_video(num_stages: int, lead: int):
    config = tiny_config(
        model={"in_channels": 32},
        noise={"motion_aware": True},
        context={
            "lead": lead,
            "num_sink_latent_frames": 2,
            "adaptive_sinks": True,
            "adaptive_sink_threshold": 0.9,
        },
        batch={"max_rows": 3},
    )
    clip = clip_of(config, 18)
    prompts, wanted = PromptTimeline(embed(config, "red boats")), []
    prompts.change(6, embed(config, "harbour at night"))
    wanted = [embed(config, "red boats")] * 6 + [embed(config, "harbour at night")] * 12
    forced = Forced(config.stream.layers, MOVES[num_stages], 3, [3, 1, 2])
    ring = MockRing(config, num_stages, regulator=forced)
    (frames,) = ring.run([Stream(5, clip, prompts=prompts)])
    assert forced.in_force == MOVES[num_stages]
    assert [engine.module.partition for engine in ring.engines] == [forced.in_force[-1]] * num_stages
    assert np.array_equal(frames, reference_frames(config, Stream(5, clip), embedding_of=wanted.__getitem__))
    # What was timed came back, of every stage.
    assert {timing.stage for timing in forced.timings} == set(range(num_stages))


@pytest.mark.parametrize("seed", [0])
def test_two_sessions_and_any_boundaries(seed: int):
    chance = random.Random(seed)
    config = tiny_config(batch={"max_rows": 2}, context={"num_latent_frames_per_chunk": 2})
    layers = config.stream.layers
    partitions = [(0, *sorted(chance.sample(range(1, layers.num_layers), 2)), layers.num_layers) for _ in range(5)]
    streams = [Stream(1, clip_of(config, 9)), Stream(2, None, num_frames=40, prompt="boats")]
    forced = Forced(layers, partitions, 3, [2])
    ring = MockRing(config, 3, regulator=forced)
    for frames, stream in zip(ring.run(streams), streams, strict=True):
        assert np.array_equal(frames, reference_frames(config, stream))
    assert len(forced.in_force) >= 3


def test_a_light_decoder_moves_with_its_state():
    config = tiny_config(
        light_vae={"use": "both", "encoder_width": 4, "decoder_widths": [8, 4, 4, 4]}, batch={"max_rows": 2}
    )
    partitions = [(0, 1, 7), (0, 6, 7), (0, 4, 7)]
    forced = Forced(config.stream.layers, partitions, 6, [2])
    stream = Stream(5, clip_of(config, 12))
    (frames,) = MockRing(config, 2, regulator=forced).run([stream])
    assert forced.in_force == partitions
    assert np.array_equal(frames, reference_frames(config, stream))


def test_what_moved_away_is_freed():
    config = tiny_config()
    ring = MockRing(config, 2, regulator=Forced(config.stream.layers, [(0, 2, 11)], 4, [1]))
    parameters = [weakref.ref(parameter) for parameter in ring.engines[0].module.parameters()]
    before = len(parameters)
    ring.run([Stream(5, clip_of(config, 8))])
    gc.collect()
    kept = len(list(ring.engines[0].module.parameters()))
    assert sum(reference() is not None for reference in parameters) == kept < before


def test_layers_travel_between_real_ranks():
    """Both ends send all they have before either receives."""
    state = {"a": {3: torch.arange(200_000.0)[::2]}, "b": [None, "Rep", 1.5, torch.ones(2, dtype=torch.bfloat16)]}

    def exchange(rank: int) -> None:
        moves = group_moves(dist.new_group(backend="gloo"))
        for number in range(3):
            moves.send(1 - rank, {**state, "number": number})
        for number in range(3):
            received = to_device(moves.recv(1 - rank), CPU)
            assert received["number"] == number
            assert torch.equal(received["a"][3], state["a"][3])
            assert received["b"][:3] == state["b"][:3]
            assert torch.equal(received["b"][3], state["b"][3])
        moves.drain()

    fork_ranks(2, exchange)
