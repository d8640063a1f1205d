"""Keeps the targets while the stream runs: learns what stages cost, and decides rows and layer boundaries.

The decisions themselves are pure functions, in :mod:`ds_stream.controller.batch_tuner` and
:mod:`ds_stream.controller.stage_balancer`; here they get their numbers and their turn, and are written down.
"""

import queue
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ds_stream.controller.batch_tuner import BatchTuner, Decision, Need, Prediction, predict_rows
from ds_stream.controller.cost_model import CostModel
from ds_stream.controller.stage_balancer import (
    Balance,
    MemoryLimit,
    RebalanceTrigger,
    StreamShape,
    balance,
    evaluate,
)
from ds_stream.core import ChunkGeometry, LayerTiming, Plan, StageTiming
from ds_stream.model.layer_times import LayerTimes
from ds_stream.partition import LayerList, Ring
from ds_stream.settings import StreamConfig

_LONGEST_HISTORY = 100_000
# A search over all partitions takes 10 ms for 48 layers on 8 stages.
_TICKS_PER_LOOK_AT_BALANCE = 16


@dataclass(frozen=True, slots=True)
class Steering:
    """What the next launches should be like."""

    max_rows: int
    """Most rows of a launch."""
    ring_stages: tuple[int, int] = (0, 0)
    """Stages in the ring, and outside it, of :attr:`partition`."""
    partition: tuple[int, ...] = ()
    """Layer boundaries to move to as soon as the ring is empty; none: stay."""

    @staticmethod
    def to(max_rows: int, partition: tuple[int, ...], layers: LayerList) -> "Steering":
        """Stay with ``partition`` empty, or move to it."""
        if not partition:
            return Steering(max_rows)
        num_ring_stages = layers.ring_of(partition).num_stages
        return Steering(max_rows, (num_ring_stages, len(partition) - 1 - num_ring_stages), partition)


@dataclass(frozen=True, slots=True)
class Tick:
    """One launch."""

    tick: int
    at_s: float
    """Since the first launch."""
    rows: int
    max_rows: int
    predicted_ms: float | None
    """What a tick with so many rows should take."""
    measured_ms: float | None
    """What it took, the mean of the lap that it ended."""


class Regulator:
    """One pipeline's targets.

    Args:
        config: resolved.
        layer_times: what a calibration has measured, if there was one.
        memory: what a stage can hold when layers move; ``None``: anything.
        now: a clock in seconds.
    """

    def __init__(
        self,
        config: StreamConfig,
        layer_times: LayerTimes | None = None,
        memory: MemoryLimit | None = None,
        now: Callable[[], float] = time.monotonic,
    ):
        assert config.stages.partition != "auto", "resolve the config first"
        self._config = config
        self._memory = memory
        self._now = now
        self._partition = config.stages.partition
        self._layers = config.layers
        self._num_passes = config.noise.num_passes
        self._costs = CostModel(config.layers, self._partition)
        if layer_times is not None:
            for num_rows, layer_ms in layer_times.by_rows.items():
                self._costs.seed_layers(num_rows, layer_ms)
        self._tuner = BatchTuner(self._num_passes)
        self._trigger = RebalanceTrigger(config.stages.rebalance_gain)
        self._max_rows = config.batch.max_rows
        self._wanted_partition: tuple[int, ...] = ()
        self._first_launch = 0
        self._predictions: list[Prediction] | None = None
        self._inbox: queue.SimpleQueue[tuple[Sequence[StageTiming], Sequence[LayerTiming]]] = queue.SimpleQueue()
        self._began_at: float | None = None
        self._lap: deque[float] = deque(maxlen=self._ring.num_stages + 1)
        self._chunks_per_s_wanted = self._wanted_rate()
        self._ticks: deque[Tick] = deque(maxlen=_LONGEST_HISTORY)
        self._num_launches = 0
        self._decisions: list[dict[str, Any]] = []
        self._statement: str | None = None
        self._balance: list[dict[str, Any]] = []
        if layer_times is not None:
            self._note_balance("calibration", None, self._evaluate(self._partition))

    @property
    def _ring(self) -> Ring:
        return self._layers.ring_of(self._partition)

    def observe(self, stages: Sequence[StageTiming], layers: Sequence[LayerTiming]) -> None:
        """Take in what stages have timed, from any thread."""
        self._inbox.put((stages, layers))

    def steer(self, tick: int, chunks_per_s: float | None) -> Steering:
        """Decide about the launch at ``tick``.

        Args:
            chunks_per_s: how many chunks live sources give; ``None``: all wait for the ring.
        """
        self._learn()
        if tick % self._ring.num_stages == 0:
            self._predictions = self._predict()
            if self._config.batch.autotune:
                self._tune(tick, chunks_per_s)
        if self._config.stages.rebalance and tick % _TICKS_PER_LOOK_AT_BALANCE == 0:
            self._look_at_balance(tick)
        return Steering.to(self._max_rows, self._wanted_partition, self._layers)

    def launched(self, plan: Plan) -> None:
        """``plan`` goes out."""
        now = self._now()
        if plan.partition:
            self._moved(plan)
        if self._began_at is None:
            self._began_at = now
        self._num_launches += 1
        if not plan.rows:
            self._lap.clear()
            return
        self._lap.append(now)
        num_ticks = len(self._lap) - 1
        num_rows = len(plan.rows)
        predictions = self._predictions
        self._ticks.append(
            Tick(
                plan.tick,
                now - self._began_at,
                num_rows,
                self._max_rows,
                predictions[num_rows - 1].tick_ms if predictions and num_rows <= len(predictions) else None,
                1000 * (now - self._lap[0]) / num_ticks if num_ticks else None,
            )
        )

    def _learn(self) -> None:
        while True:
            try:
                stages, layers = self._inbox.get_nowait()
            except queue.Empty:
                return
            for stage in stages:
                # What was timed before layers moved says nothing of the stages as they are now.
                if stage.launch >= self._first_launch:
                    self._costs.observe_stage(stage)
            for layer in layers:
                self._costs.observe_layer(layer)

    def _predict(self) -> list[Prediction] | None:
        lead, max_rows = self._config.context.lead, self._config.batch.max_rows
        predictions = [
            predict_rows(self._costs, num_rows, self._num_passes, lead, self._ring)
            for num_rows in range(1, max_rows + 1)
        ]
        known = [prediction for prediction in predictions if prediction is not None]
        return known if len(known) == max_rows else None

    def _tune(self, tick: int, chunks_per_s: float | None) -> None:
        if self._predictions is None:
            return
        slo = self._config.slo
        rates = [rate for rate in (chunks_per_s, self._chunks_per_s_wanted) if rate is not None]
        need = Need(max(rates, default=None), slo.chunk_latency_ms, slo.margin)
        decision = self._tuner.consider(tick, self._predictions, need, self._max_rows, self._ring)
        if decision is not None:
            self._take_up(tick, decision)

    def _take_up(self, tick: int, decision: Decision) -> None:
        if decision.unattainable is not None and self._statement is None:
            warnings.warn(decision.unattainable, stacklevel=2)
        self._statement = decision.unattainable
        if decision.num_rows != self._max_rows:
            change = {"from_rows": self._max_rows, "to_rows": decision.num_rows, "reason": decision.reason}
            self._decisions.append({"tick": tick, "at_s": self._elapsed_s, **change})
            self._max_rows = decision.num_rows

    def _look_at_balance(self, tick: int) -> None:
        current = self._evaluate(self._partition)
        # No partition is better than one whose stages are all even.
        if current is None or current.slowest_ms <= _mean(current.stage_ms) * (1 + self._config.stages.rebalance_gain):
            return
        layer_ms = self._costs.layer_ms(self._max_rows)
        assert layer_ms is not None
        best = balance(self._layers, layer_ms, self._shape, len(self._partition) - 1, memory=self._memory) or current
        if self._trigger.consider(tick, current, best, self._num_passes * self._ring.num_stages):
            self._wanted_partition = best.partition
            gain = best.chunks_per_ms / current.chunks_per_ms - 1
            self._note_balance(f"stages are uneven; {gain:.0%} more throughput", current, best)

    def _moved(self, plan: Plan) -> None:
        self._partition, self._wanted_partition = plan.partition, ()
        self._costs.set_partition(plan.partition)
        self._first_launch = plan.tick
        self._lap = deque(maxlen=self._ring.num_stages + 1)
        self._predictions = None
        self._tuner.changed(plan.tick, self._ring)
        self._trigger.moved(plan.tick, self._num_passes * self._ring.num_stages)

    @property
    def _shape(self) -> StreamShape:
        return StreamShape(self._num_passes, self._config.context.lead, self._max_rows)

    def _evaluate(self, partition: tuple[int, ...]) -> Balance | None:
        layer_ms = self._costs.layer_ms(self._max_rows)
        return None if layer_ms is None else evaluate(self._layers, layer_ms, self._shape, partition)

    def _wanted_rate(self) -> float | None:
        fps = self._config.slo.fps
        geometry = ChunkGeometry(self._config.context.num_latent_frames_per_chunk)
        return None if fps is None else fps / geometry.num_frames(1)

    def _note_balance(self, reason: str, before: Balance | None, after: Balance | None) -> None:
        def figures(of: Balance | None) -> dict[str, Any] | None:
            return None if of is None else {"partition": of.partition, "stage_ms": of.stage_ms}

        self._balance.append(
            {"at_s": self._elapsed_s, "reason": reason, "before": figures(before), "after": figures(after)}
        )

    @property
    def _elapsed_s(self) -> float:
        return 0.0 if self._began_at is None else self._now() - self._began_at

    @property
    def extent(self) -> tuple[float, int]:
        """Seconds from the first launch until now, and launches."""
        return self._elapsed_s, self._num_launches

    def history(self) -> dict[str, Any]:
        """What was launched and decided, for the report."""
        return {
            "ticks": [asdict(tick) for tick in self._ticks],
            "tuning": {"decisions": self._decisions, "statement": self._statement},
            "balance": self._balance,
        }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
