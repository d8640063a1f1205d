"""The balancer finds what trying everything finds, and does not move layers for nothing."""

import itertools
import random
import time

import pytest

from ds_stream.controller.stage_balancer import Balance, RebalanceTrigger, StreamShape, balance, evaluate
from ds_stream.partition import LayerList


def all_partitions(layers: LayerList, num_stages: int) -> list[tuple[int, ...]]:
    inner = range(1, layers.num_layers)
    return [(0, *cuts, layers.num_layers) for cuts in itertools.combinations(inner, num_stages - 1)]


@pytest.mark.parametrize("seed", range(150))
def test_the_best_of_all_partitions(seed: int):
    chance = random.Random(seed)
    layers = LayerList(chance.randint(1, 5), chance.choice([1, 2, 5]))
    num_stages = chance.randint(1, min(5, layers.num_layers))
    num_passes = chance.randint(1, 4)
    shape = StreamShape(num_passes, chance.randrange(num_passes), chance.randint(1, num_passes))
    layer_ms = [chance.choice([1.0, 2.0, 2.0, chance.uniform(0, 9)]) for _ in range(layers.num_layers)]
    if chance.random() < 0.3:
        layer_ms[chance.randrange(layers.num_layers)] = 40.0
    speeds = [chance.choice([1.0, 1.0, 2.5]) for _ in range(num_stages)] if chance.random() < 0.4 else None
    found = balance(layers, layer_ms, shape, num_stages, speeds)
    tried = [evaluate(layers, layer_ms, shape, each, speeds) for each in all_partitions(layers, num_stages)]
    most = max(each.chunks_per_ms for each in tried)
    assert found.chunks_per_ms == pytest.approx(most, rel=1e-9)
    least = min(each.chunk_latency_ms for each in tried if each.chunks_per_ms >= most * (1 - 1e-9))
    assert found.chunk_latency_ms == pytest.approx(least, rel=1e-9)
    assert found == evaluate(layers, layer_ms, shape, found.partition, speeds)


def test_what_a_partition_costs():
    """Two blocks; encode 10 and decode 20 ms a chunk, a chunk every other tick; the ring's layers 1, 3, 3, 1 ms."""
    layers = LayerList(2, 1)
    layer_ms, shape = [10.0, 1.0, 3.0, 3.0, 1.0, 20.0], StreamShape(num_passes=4, lead=0, max_rows=2)
    whole = evaluate(layers, layer_ms, shape, (0, 6))
    assert whole == Balance((0, 6), (5 + 8 + 10,), 0.5 / 23, 4 * 23)
    three = evaluate(layers, layer_ms, shape, (0, 1, 5, 6), speeds=[1, 1, 2])
    # The ring is one stage; the two others are passed once.
    assert three == Balance((0, 1, 5, 6), (5, 8, 20), 0.5 / 20, 4 * 20 + 10 + 40)


def test_stages_of_the_vae_alone_where_it_dominates():
    """Wan 1.3B at 480x832 on an H200, eager (DESIGN section 10): encode 51 ms, decode 83 ms, 56.1 ms for 4 rows."""
    layers = LayerList(30, 5)
    decode_ms = [3.0, 5.0, 16.0, 29.0, 30.0]
    layer_ms = [51.0, 0.5, *[1.84] * 30, 0.5, *decode_ms]
    best = balance(layers, layer_ms, StreamShape(4, 0, 4), 4)
    ring = layers.ring_of(best.partition)
    assert ring.last < 3
    # 190 ms of work cannot be cut finer than its layers.
    assert 190 / 4 <= best.slowest_ms <= 60
    assert best.partition == balance(layers, layer_ms, StreamShape(4, 0, 4), 4).partition


def test_layers_that_cost_nothing():
    found = balance(LayerList(2, 1), [0.0] * 6, StreamShape(2, 0, 1), 3)
    assert len(found.partition) == 4
    LayerList(2, 1).check(found.partition)


def test_more_stages_than_layers():
    with pytest.raises(ValueError, match="7 ranks were started but the model has 6 layers; start at most 6"):
        balance(LayerList(2, 1), [1.0] * 6, StreamShape(2, 0, 1), 7)
    assert balance(LayerList(2, 1), [1.0] * 6, StreamShape(2, 0, 1), 6).partition == (0, 1, 2, 3, 4, 5, 6)


def test_it_is_fast():
    layers = LayerList(40, 5)
    started = time.perf_counter()
    balance(layers, [1.0 + 0.01 * index for index in range(layers.num_layers)], StreamShape(4, 0, 4), 8)
    assert time.perf_counter() - started < 2


def noisy(layer_ms: list[float], chance: random.Random, noise: float = 0.1) -> list[float]:
    return [ms * max(chance.gauss(1, noise), 0.1) for ms in layer_ms]


@pytest.mark.parametrize("seed", range(20))
def test_noise_moves_nothing(seed: int):
    """Layers measured with 10% noise: from a bad partition one move, then none."""
    chance = random.Random(seed)
    layers, shape = LayerList(6, 5), StreamShape(4, 0, 4)
    true_ms = [9.0, 0.3, *[4.0] * 6, 0.3, 1.0, 1.0, 3.0, 5.0, 5.0]
    trigger, partition, moves = RebalanceTrigger(0.15), (0, 2, 3, layers.num_layers), 0
    for tick in range(0, 3000, 16):
        # What the regulator sees: estimates of many observations.
        seen = noisy(true_ms, chance, 0.02)
        best, current = balance(layers, seen, shape, 3), evaluate(layers, seen, shape, partition)
        if trigger.consider(tick, current, best, ticks_per_chunk=12):
            partition, moves = best.partition, moves + 1
            trigger.moved(tick, ticks_per_chunk=12)
    assert moves == 1
    best = balance(layers, true_ms, shape, 3)
    assert evaluate(layers, true_ms, shape, partition).chunks_per_ms > 0.85 * best.chunks_per_ms


def test_a_gain_must_last():
    layers, shape = LayerList(2, 1), StreamShape(2, 0, 1)
    bad, good = (evaluate(layers, [1, 1, 9, 1, 1, 1], shape, cuts) for cuts in ((0, 5, 6), (0, 3, 6)))
    trigger = RebalanceTrigger(0.1)
    assert not trigger.consider(0, bad, good, ticks_per_chunk=4)
    assert not trigger.consider(4, bad, good, ticks_per_chunk=4)
    # It vanishes for a moment: the wait begins anew.
    assert not trigger.consider(6, good, good, ticks_per_chunk=4)
    assert not trigger.consider(8, bad, good, ticks_per_chunk=4)
    assert not trigger.consider(15, bad, good, ticks_per_chunk=4)
    assert trigger.consider(16, bad, good, ticks_per_chunk=4)
    trigger.moved(20, ticks_per_chunk=4)
    assert not trigger.consider(35, bad, good, ticks_per_chunk=4)
