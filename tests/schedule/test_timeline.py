"""The clock that is made up: figures that can be worked out by hand."""

import itertools

import pytest
from deepspeed.runtime.pipe.schedule import PipeInstruction

from ds_stream.partition import LayerList
from ds_stream.schedule import instructions as ins
from ds_stream.schedule.planner import RingPlanner, backlogged_chunks_per_tick
from ds_stream.schedule.timeline import Machine, Timeline, play

FAST = {"link_bytes_per_ms": 1e12, "link_latency_ms": 0.0}


def play_ring(
    num_stages: int,
    num_passes: int,
    max_rows: int = 1,
    lead: int = 0,
    forward_ms: float = 10.0,
    decode_ms: float = 0.0,
    num_bytes: float = 0.0,
    machine: Machine | None = None,
    partition: tuple[int, ...] | None = None,
    num_chunks: int = 180,
) -> Timeline:
    layers = LayerList(6, 2)
    partition = partition or layers.resolve("auto", num_stages)
    ring = layers.ring_of(partition)
    planner = RingPlanner(ring.num_stages, num_passes, lead, max_rows, 2, num_stages - ring.num_stages)

    def work(stage: int, do: PipeInstruction) -> float:
        if isinstance(do, ins.ForwardPass):
            return forward_ms
        return decode_ms if isinstance(do, ins.DecodeChunk) else 0.0

    machine = machine or Machine(num_stages, False, **FAST)
    return play(layers, partition, planner, num_chunks, machine, work, lambda _stage, _do: num_bytes)


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_throughput_occupancy_and_latency_are_what_the_schedules_formula_says(num_stages: int):
    for num_passes, max_rows in itertools.product((1, 3, 4), (1, 2, 4)):
        for lead in (0, num_passes - 1):
            timeline = play_ring(num_stages, num_passes, min(max_rows, num_passes), lead)
            rate = backlogged_chunks_per_tick(num_stages, num_passes, lead, min(max_rows, num_passes))
            assert timeline.chunks_per_ms * 10 == pytest.approx(rate, rel=0.08)
            assert timeline.latency_ms == pytest.approx(10 * num_passes * num_stages, rel=0.01)
            # Each launch has as many rows as it may, but for the ticks that the context rule leaves empty.
            occupied = min(1.0, rate * num_passes)
            if max_rows == 1:
                assert all(n / timeline.num_ticks == pytest.approx(occupied, abs=0.1) for n in timeline.launches)


def test_the_slowest_stage_sets_the_pace():
    whole = play_ring(2, 2, max_rows=2, decode_ms=15.0)
    # The last stage decodes one chunk a tick beside its 10 ms.
    assert 1 / whole.chunks_per_ms == pytest.approx(25, rel=0.02)
    alone = play_ring(3, 2, max_rows=2, decode_ms=15.0, partition=(0, 4, 9, 11))
    assert 1 / alone.chunks_per_ms == pytest.approx(15, rel=0.05)
    # Two laps of two stages and the stage after them, at its pace; and up to two chunks that wait for it.
    assert 40 + 15 <= alone.latency_ms <= (2 * 2 + 1 + 2) * 15.1


def test_stages_share_devices():
    shared = Machine(1, False, **FAST)
    assert 1 / play_ring(2, 2, max_rows=2, machine=shared).chunks_per_ms == pytest.approx(20, rel=0.02)
    # Four stages on two cores, whichever they are.
    pooled = Machine(2, True, **FAST)
    assert 1 / play_ring(4, 2, max_rows=2, machine=pooled).chunks_per_ms == pytest.approx(20, rel=0.05)
    # One stage is no faster on two cores.
    assert 1 / play_ring(1, 2, max_rows=2, machine=pooled).chunks_per_ms == pytest.approx(10, rel=0.02)


def test_links_take_their_time():
    # 2000 bytes at 1000 a ms, and 1 ms of latency, on each of the two links that close the ring.
    slow = Machine(2, False, link_bytes_per_ms=1000.0, link_latency_ms=1.0)
    alone = play_ring(2, 2, num_bytes=2000, machine=slow, num_chunks=1)
    # Two laps of 2 x 10 ms; three links of 3 ms between the passes, and one back to the controller.
    assert alone.latencies_ms == [pytest.approx(2 * 20 + 3 * 3 + 3)]
    # A link that is slower than its stages sets the pace.
    full = play_ring(2, 1, num_bytes=30_000, machine=slow)
    assert 1 / full.chunks_per_ms == pytest.approx(30, rel=0.02)
