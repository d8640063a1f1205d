"""Which layers each stage should hold: the contiguous partition with the most throughput, a pure function.

A layer of the VAE counts per chunk, a layer of the ring per pass. How many chunks a tick brings depends on the length
of the ring if the context leads, so that length is part of the search.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ds_stream.partition import ENCODE, LayerList, stage_layers
from ds_stream.schedule.planner import backlogged_chunks_per_tick

_SAME = 1e-9
_Extend = Callable[[tuple[float, ...], float, float], tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class StreamShape:
    """How chunks go round."""

    num_passes: int
    lead: int
    max_rows: int


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """What stages can hold."""

    layer_bytes: tuple[float, ...]
    """What each layer takes: its weights, and what sessions and prompts keep in it."""
    most_bytes: float
    """Of one stage."""

    def fits(self, partition: tuple[int, ...]) -> bool:
        """Whether no stage holds more than it can."""
        stages = itertools.pairwise(partition)
        return all(sum(self.layer_bytes[start:stop]) <= self.most_bytes for start, stop in stages)


@dataclass(frozen=True, slots=True)
class Balance:
    """A partition and what it costs."""

    partition: tuple[int, ...]
    stage_ms: tuple[float, ...]
    """Each stage's time for a tick of a full ring."""
    chunks_per_ms: float
    chunk_latency_ms: float

    @property
    def slowest_ms(self) -> float:
        return max(self.stage_ms)


def evaluate(
    layers: LayerList,
    layer_ms: Sequence[float],
    shape: StreamShape,
    partition: tuple[int, ...],
    speeds: Sequence[float] | None = None,
) -> Balance:
    """What ``partition`` costs.

    Args:
        layer_ms: of every layer: for a pass of ``max_rows`` rows, or, of the VAE, for a chunk.
        speeds: how much longer each stage takes for the same layer; ``None``: all alike.
    """
    assert all(ms >= 0 for ms in layer_ms), f"layer times must be numbers from 0 on, not {layer_ms}"
    ring = layers.ring_of(partition)
    rate = backlogged_chunks_per_tick(ring.num_stages, shape.num_passes, shape.lead, shape.max_rows)
    stage_ms = []
    outside_ms = 0.0
    for stage in range(len(partition) - 1):
        slowness = 1.0 if speeds is None else speeds[stage]
        own = stage_layers(partition, stage)
        stage_ms.append(slowness * sum(layer_ms[i] * (1.0 if i in layers.ring else rate) for i in own))
        if not ring.first <= stage <= ring.last:
            outside_ms += slowness * sum(layer_ms[i] for i in own)
    slowest = max(stage_ms)
    return Balance(
        partition,
        tuple(stage_ms),
        rate / slowest if slowest > 0 else float("inf"),
        shape.num_passes * ring.num_stages * slowest + outside_ms,
    )


def balance(
    layers: LayerList,
    layer_ms: Sequence[float],
    shape: StreamShape,
    num_stages: int,
    speeds: Sequence[float] | None = None,
    memory: MemoryLimit | None = None,
) -> Balance | None:
    """The partition for ``num_stages`` stages with the most throughput; of equals, the one with the least latency.

    Args:
        layer_ms: of every layer: for a pass of ``max_rows`` rows, or, of the VAE, for a chunk.
        speeds: how much longer each stage takes for the same layer; ``None``: all alike.
        memory: what a stage can hold; ``None``: anything.

    Returns:
        ``None`` if no partition fits the memory.

    Raises:
        ValueError: there are more stages than layers.
    """
    if num_stages > layers.num_layers:
        raise ValueError(
            f"{num_stages} ranks were started but the model has {layers.num_layers} layers; start at most "
            f"{layers.num_layers} (deepspeed --num_gpus {layers.num_layers})"
        )
    best: Balance | None = None
    for num_before, num_after in itertools.product(range(2), range(layers.num_decode_layers + 1)):
        num_ring_stages = num_stages - num_before - num_after
        if not 1 <= num_ring_stages <= layers.num_layers:
            continue
        rate = backlogged_chunks_per_tick(num_ring_stages, shape.num_passes, shape.lead, shape.max_rows)
        all_alike = [1.0] * num_stages
        search = _Search(layers, layer_ms, speeds or all_alike, memory, num_before, num_ring_stages, num_after, rate)
        # What is no better than the best so far need not be looked at.
        partition = search.best(float("inf") if best is None else rate / best.chunks_per_ms * (1 + _SAME))
        if partition is not None:
            found = evaluate(layers, layer_ms, shape, partition, speeds)
            if best is None or _is_better(found, best):
                best = found
    return best


def _is_better(one: Balance, other: Balance) -> bool:
    if abs(one.chunks_per_ms - other.chunks_per_ms) > _SAME * other.chunks_per_ms:
        return one.chunks_per_ms > other.chunks_per_ms
    if abs(one.chunk_latency_ms - other.chunk_latency_ms) > _SAME * other.chunk_latency_ms:
        return one.chunk_latency_ms < other.chunk_latency_ms
    return one.partition < other.partition


@dataclass(frozen=True, slots=True)
class _Search:
    """Partitions with a given number of stages before, in and after the ring."""

    layers: LayerList
    layer_ms: Sequence[float]
    speeds: Sequence[float]
    memory: MemoryLimit | None
    num_before: int
    num_ring_stages: int
    num_after: int
    rate: float
    """Chunks per tick."""

    def best(self, most_ms: float) -> tuple[int, ...] | None:
        """Boundaries that make the slowest stage fastest; that given, stages outside the ring short, and all even.

        Dynamic programming over stages and layers. ``None``: no partition is like that.

        Args:
            most_ms: that the slowest stage may take.
        """
        slowest = self._least(lambda so_far, stage_ms, _outside_ms: (max(so_far[0], stage_ms),), (0.0,), most_ms)
        if slowest is None:
            return None
        found = self._least(
            lambda so_far, stage_ms, outside_ms: (so_far[0] + outside_ms, so_far[1] + stage_ms**2),
            (0.0, 0.0),
            slowest[0][0] * (1 + _SAME),
        )
        return None if found is None else found[1]

    def _least(
        self, extend: _Extend, nothing: tuple[float, ...], most_ms: float
    ) -> tuple[tuple[float, ...], tuple[int, ...]] | None:
        """The least score, and its boundaries, of partitions whose stages take ``most_ms`` at most."""
        passes = [ms * (index in self.layers.ring) for index, ms in enumerate(self.layer_ms)]
        of_passes = [0.0, *itertools.accumulate(passes)]
        of_all = [0.0, *itertools.accumulate(self.layer_ms)]
        reached: dict[int, tuple[tuple[float, ...], tuple[int, ...]]] = {0: (nothing, (0,))}
        num_stages = len(self.speeds)
        for stage, slowness in enumerate(self.speeds):
            following: dict[int, tuple[tuple[float, ...], tuple[int, ...]]] = {}
            for start, (score, bounds) in reached.items():
                for stop in range(start + 1, self.layers.num_layers - (num_stages - stage - 1) + 1):
                    if self.memory is not None and not self.memory.fits((start, stop)):
                        break
                    if not self._is_allowed(stage, start, stop):
                        continue
                    pass_ms = slowness * (of_passes[stop] - of_passes[start])
                    chunk_ms = slowness * (of_all[stop] - of_all[start]) - pass_ms
                    stage_ms = pass_ms + self.rate * chunk_ms
                    if stage_ms > most_ms:
                        # More layers take no less.
                        break
                    is_outside = not self.num_before <= stage < self.num_before + self.num_ring_stages
                    candidate = (extend(score, stage_ms, chunk_ms if is_outside else 0.0), (*bounds, stop))
                    if stop not in following or candidate < following[stop]:
                        following[stop] = candidate
            reached = following
        return reached.get(self.layers.num_layers)

    def _is_allowed(self, stage: int, start: int, stop: int) -> bool:
        if stage < self.num_before:
            return stop == ENCODE + 1
        has_ring_layer = start <= self.layers.head and stop > self.layers.ring.start
        return has_ring_layer == (stage < self.num_before + self.num_ring_stages)


class RebalanceTrigger:
    """When to move layers: only for a gain that lasts, and not before the last move has shown.

    Args:
        min_gain: share of throughput that a move must promise.
    """

    def __init__(self, min_gain: float):
        self._min_gain = min_gain
        self._since: int | None = None
        self._judged_from = 0

    def consider(self, tick: int, current: Balance, best: Balance, ticks_per_chunk: int) -> bool:
        """Whether to move from ``current`` to ``best``.

        Args:
            ticks_per_chunk: ``K P``, what a chunk takes.
        """
        if tick < self._judged_from:
            return False
        if best.chunks_per_ms <= current.chunks_per_ms * (1 + self._min_gain):
            self._since = None
            return False
        if self._since is None:
            self._since = tick
        return tick - self._since >= 2 * ticks_per_chunk

    def moved(self, tick: int, ticks_per_chunk: int) -> None:
        """The move came into force."""
        self._since = None
        self._judged_from = tick + 4 * ticks_per_chunk
