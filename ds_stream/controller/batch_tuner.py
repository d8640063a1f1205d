"""How many rows a launch may have: a pure function of predicted times and what is asked for (DESIGN section 7)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ds_stream.controller.cost_model import CostModel
from ds_stream.partition import Ring
from ds_stream.schedule.planner import backlogged_chunks_per_tick


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a number of rows would bring, with every launch full."""

    num_rows: int
    tick_ms: float
    chunk_latency_ms: float
    chunks_per_s: float


@dataclass(frozen=True, slots=True)
class Need:
    """What is asked for."""

    chunks_per_s: float | None
    """What must come through; ``None``: as much as can be."""
    chunk_latency_ms: float | None
    """``None``: any."""
    margin: float
    """Share by which a number of rows must be better before it is taken up."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A number of rows, and why."""

    num_rows: int
    reason: str
    unattainable: str | None = None
    """What cannot be kept, and the best that is possible."""


def predict_rows(costs: CostModel, num_rows: int, num_passes: int, lead: int, ring: Ring) -> Prediction | None:
    """Predict ticks of ``num_rows`` rows; ``None`` while a stage has not been seen.

    ``tick = max over stages``; ``latency = K P tick``, and the stages outside the ring once; ``capacity = chunks per
    tick / tick``.
    """
    rate = backlogged_chunks_per_tick(ring.num_stages, num_passes, lead, num_rows)
    tick_ms = costs.tick_ms(num_rows, rate)
    if tick_ms is None:
        return None
    outside = (stage for stage in range(costs.num_stages) if not ring.first <= stage <= ring.last)
    outside_ms = sum(costs.stage_tick_ms(stage, num_rows, 1.0) or 0.0 for stage in outside)
    latency_ms = num_passes * ring.num_stages * tick_ms + outside_ms
    return Prediction(num_rows, tick_ms, latency_ms, 1000 * rate / tick_ms if tick_ms > 0 else float("inf"))


def choose_num_rows(predictions: Sequence[Prediction], need: Need, current: int) -> Decision:
    """The smallest number of rows that keeps what is asked for, else the best that there is.

    Args:
        predictions: for 1 row, 2 rows, and so on.
        current: rows in force: they are kept until they miss the need itself, or another number is better by the
            margin. So an estimate that wavers by less than the margin cannot bring a number back that missed.
    """

    def keeps(part: Callable[[Prediction, bool], bool]) -> Callable[[Prediction], bool]:
        return lambda prediction: part(prediction, prediction.num_rows != current)

    def is_in_time(prediction: Prediction, is_new: bool) -> bool:
        if need.chunk_latency_ms is None:
            return True
        return prediction.chunk_latency_ms <= need.chunk_latency_ms * (1 - is_new * need.margin)

    def is_enough(prediction: Prediction, is_new: bool) -> bool:
        return need.chunks_per_s is not None and prediction.chunks_per_s >= need.chunks_per_s * (
            1 + is_new * need.margin
        )

    in_time = list(filter(keeps(is_in_time), predictions))
    if not in_time:
        return _too_late(predictions, need, current)
    enough = list(filter(keeps(is_enough), in_time))
    if enough:
        chosen = enough[0]
        reason = f"the fewest rows for {chosen.chunks_per_s:.3g} chunks/s of {need.chunks_per_s:.3g} needed"
        return Decision(chosen.num_rows, f"{reason}{_within(chosen, need)}")
    chosen = _most_capacity(in_time, current, need.margin / 2)
    reason = f"the most capacity, {chosen.chunks_per_s:.3g} chunks/s{_within(chosen, need)}"
    # What falls short by less than the margin is not called impossible.
    if need.chunks_per_s is None or chosen.chunks_per_s >= need.chunks_per_s:
        return Decision(chosen.num_rows, reason)
    return Decision(
        chosen.num_rows,
        reason,
        f"{need.chunks_per_s:.3g} chunks/s cannot be kept{_within_target(need)}: the best possible is "
        f"{chosen.chunks_per_s:.3g} chunks/s, with {_rows(chosen.num_rows)}",
    )


class BatchTuner:
    """When a number of rows may change: not before the change before it shows.

    Args:
        num_passes: passes per chunk ``K``.
    """

    def __init__(self, num_passes: int):
        self._num_passes = num_passes
        self._judged_from = 0

    def consider(
        self, tick: int, predictions: Sequence[Prediction], need: Need, current: int, ring: Ring
    ) -> Decision | None:
        """A decision, or ``None`` while ``K P`` ticks have not passed since the last change."""
        if tick < self._judged_from:
            return None
        decision = choose_num_rows(predictions, need, current)
        if decision.num_rows != current:
            self.changed(tick, ring)
        return decision

    def changed(self, tick: int, ring: Ring) -> None:
        """Something changed at ``tick`` that takes a chunk's whole way to show."""
        self._judged_from = tick + self._num_passes * ring.num_stages


def _too_late(predictions: Sequence[Prediction], need: Need, current: int) -> Decision:
    fastest = min(predictions, key=lambda prediction: prediction.chunk_latency_ms)
    held = next((prediction for prediction in predictions if prediction.num_rows == current), fastest)
    # Between equals the one that runs stays.
    if held.chunk_latency_ms <= fastest.chunk_latency_ms * (1 + need.margin / 2):
        fastest = held
    reason = f"no number of rows is fast enough; {fastest.chunk_latency_ms:.0f} ms is the best"
    if need.chunk_latency_ms is not None and fastest.chunk_latency_ms <= need.chunk_latency_ms:
        return Decision(fastest.num_rows, "within the latency target, if barely")
    return Decision(
        fastest.num_rows,
        reason,
        f"chunk latency of {need.chunk_latency_ms:g} ms cannot be kept: the best possible is "
        f"{fastest.chunk_latency_ms:.0f} ms, with {_rows(fastest.num_rows)}",
    )


def _most_capacity(predictions: Sequence[Prediction], current: int, margin: float) -> Prediction:
    """The most; of those that are as good but for the margin the current one, else the fewest rows."""
    most = max(prediction.chunks_per_s for prediction in predictions)
    held = [prediction for prediction in predictions if prediction.num_rows == current]
    if held and most <= held[0].chunks_per_s * (1 + margin):
        return held[0]
    return next(prediction for prediction in predictions if prediction.chunks_per_s == most)


def _within(prediction: Prediction, need: Need) -> str:
    if need.chunk_latency_ms is None:
        return ""
    return f" at {prediction.chunk_latency_ms:.0f} ms of {need.chunk_latency_ms:g} ms"


def _within_target(need: Need) -> str:
    return "" if need.chunk_latency_ms is None else f" within {need.chunk_latency_ms:g} ms of latency"


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"
