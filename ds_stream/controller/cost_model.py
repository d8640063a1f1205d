"""What stages and layers cost, learned from their timings. Pure: numbers in, numbers out, no clock."""

import statistics
from collections import deque
from collections.abc import Sequence
from itertools import islice

from ds_stream.core import LayerTiming, StageTiming
from ds_stream.partition import LayerList, stage_layers

_WINDOW = 128
"""Observations that an estimate rests on while nothing changes: few enough for a drift, enough against noise."""
_RECENT = 8
"""Observations that show a lasting change."""
_CHANGE = 0.25
"""Share by which recent observations must differ from all of them to count as a change."""
_TRUSTED = 3
"""Observations before which one may be a cold start."""


class RowCosts:
    """What something costs by number of rows, in ms.

    An estimate is the median of the last observations; once the recent ones all differ, only those count. A number of
    rows that is not observed any more keeps its proportion to those that are: a slow-down concerns them all.
    """

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self._fresh: set[int] = set()
        self._round = 0

    def observe(self, num_rows: int, ms: float) -> None:
        """It took ``ms``."""
        entry = self._entries.setdefault(num_rows, _Entry())
        if num_rows not in self._fresh:
            entry.scale(self._factor(entry))
            self._fresh.add(num_rows)
        entry.window.append(ms)

    def seed(self, num_rows: int, ms: float) -> None:
        """Start from ``ms``, as if it had been observed a few times and nothing else had."""
        self._entries[num_rows] = entry = _Entry()
        entry.window.extend([ms] * _RECENT)
        self._fresh.add(num_rows)

    def predict(self, num_rows: int) -> float | None:
        """What it costs; ``None`` if nothing was observed often enough.

        Numbers of rows that were not seen lie on a straight line through those that were, through the origin if there
        is one only; they cost no less than a smaller number.
        """
        self._refresh()
        known = {rows: self._estimate(entry) for rows, entry in self._entries.items() if entry.is_trusted}
        if not known:
            return None
        if num_rows in known:
            return known[num_rows]
        if len(known) == 1:
            ((rows, ms),) = known.items()
            return ms * num_rows / rows
        slope, intercept = statistics.linear_regression(list(known), list(known.values()))
        floor = max((ms for rows, ms in known.items() if rows < num_rows), default=0.0)
        return max(slope * num_rows + intercept, floor)

    @property
    def seen(self) -> list[int]:
        """Numbers of rows that were observed."""
        return sorted(self._entries)

    def _refresh(self) -> None:
        if not self._fresh:
            return
        self._round += 1
        fresh = [self._entries[rows] for rows in self._fresh]
        self._fresh.clear()
        for entry in fresh:
            entry.update(self._round)
        # All at once: what one learns about now must not count as a change for another.
        trusted = {rows: self._estimate(entry) for rows, entry in self._entries.items() if entry.is_trusted}
        for entry in self._entries.values():
            # What is new had no part in how far the others have moved.
            factor = self._factor(entry)
            known = {} if entry.round == self._round else entry.others
            entry.others = {rows: ms / factor for rows, ms in trusted.items()} | known

    def _estimate(self, entry: "_Entry") -> float:
        return entry.estimate * self._factor(entry)

    def _factor(self, entry: "_Entry") -> float:
        """By how much those observed after ``entry`` was have moved since."""
        moves = [
            self._estimate(self._entries[rows]) / before
            for rows, before in entry.others.items()
            if self._entries[rows].round > entry.round and before > 0
        ]
        return statistics.median(moves) if moves else 1.0


class _Entry:
    """Observations at one number of rows."""

    def __init__(self) -> None:
        self.estimate = 0.0
        """As of the last observation."""
        self.round = 0
        """When that was."""
        self.others: dict[int, float] = {}
        """What all numbers of rows cost at that time."""
        self.window: deque[float] = deque(maxlen=_WINDOW)

    @property
    def is_trusted(self) -> bool:
        return len(self.window) >= _TRUSTED

    def update(self, now: int) -> None:
        middle = statistics.median(self.window)
        if len(self.window) > _RECENT:
            recent = list(islice(reversed(self.window), _RECENT))
            lower, _, upper = statistics.quantiles(recent, n=4)
            # Where most of them lie on one side: the middle of old and new ones would be neither.
            if lower > middle * (1 + _CHANGE) or upper < middle * (1 - _CHANGE):
                self.window = deque(reversed(recent), maxlen=_WINDOW)
                middle = statistics.median(recent)
        self.estimate, self.round = middle, now

    def scale(self, factor: float) -> None:
        """Bring observations of another time to the present."""
        if factor != 1.0:
            self.window = deque((ms * factor for ms in self.window), maxlen=_WINDOW)


class _StageCosts:
    def __init__(self) -> None:
        self.per_pass = RowCosts()
        self.encode = RowCosts()
        self.decode = RowCosts()


class CostModel:
    """What every stage and every layer of a pipeline costs.

    Args:
        layers: the model's.
        partition: boundaries of the stages.
    """

    def __init__(self, layers: LayerList, partition: tuple[int, ...]):
        self._layers = layers
        self._partition = partition
        self._by_layer = [RowCosts() for _ in range(layers.num_layers)]
        self._by_stage = [_StageCosts() for _ in range(len(partition) - 1)]

    @property
    def num_stages(self) -> int:
        return len(self._by_stage)

    def seed_layers(self, num_rows: int, layer_ms: Sequence[float]) -> None:
        """What a calibration measured with ``num_rows`` rows: ms of each layer, of a pass or of a chunk."""
        for layer, ms in enumerate(layer_ms):
            self._by_layer[layer].seed(num_rows if layer in self._layers.ring else 1, ms)
        self._seed_stages(overhead=1.0)

    def observe_stage(self, timing: StageTiming) -> None:
        """What a stage spent on a launch."""
        costs = self._by_stage[timing.stage]
        if timing.num_rows and timing.forward_ms > 0:
            costs.per_pass.observe(timing.num_rows, timing.forward_ms + timing.send_ms)
        # Launches that no chunk enters or leaves cost the VAE nothing.
        if timing.encode_ms > 0:
            costs.encode.observe(1, timing.encode_ms)
        if timing.decode_ms > 0:
            costs.decode.observe(1, timing.decode_ms)

    def observe_layer(self, timing: LayerTiming) -> None:
        """What a layer spent on a launch or a chunk."""
        self._by_layer[timing.layer].observe(timing.num_rows, timing.ms)

    def set_partition(self, partition: tuple[int, ...]) -> None:
        """Layers have moved: estimate stages from their layers, until they are observed."""
        overhead = self._overhead()
        self._partition = partition
        self._by_stage = [_StageCosts() for _ in range(len(partition) - 1)]
        self._seed_stages(overhead)

    def stage_tick_ms(self, stage: int, num_rows: int, chunks_per_tick: float) -> float | None:
        """What a stage spends on a tick of ``num_rows`` rows; ``None``: not all of it was seen yet."""
        own = stage_layers(self._partition, stage)
        costs = self._by_stage[stage]
        total = 0.0
        for is_part, part, rows, rate in (
            (any(layer in self._layers.ring for layer in own), costs.per_pass, num_rows, 1.0),
            (own.start == 0, costs.encode, 1, chunks_per_tick),
            (own[-1] in self._layers.decode, costs.decode, 1, chunks_per_tick),
        ):
            ms = part.predict(rows)
            if ms is not None:
                total += rate * ms
            elif is_part and part is not costs.encode:
                return None
        return total

    def tick_ms(self, num_rows: int, chunks_per_tick: float) -> float | None:
        """The slowest stage's time for a tick; ``None``: not every stage was seen yet."""
        stages = [self.stage_tick_ms(stage, num_rows, chunks_per_tick) for stage in range(len(self._by_stage))]
        return None if any(ms is None for ms in stages) else max(ms for ms in stages if ms is not None)

    def layer_ms(self, num_rows: int) -> list[float] | None:
        """Each layer's time for a pass of ``num_rows`` rows, or for a chunk; ``None``: not every one was seen yet.

        A stream without video never encodes: that costs nothing.
        """
        result = []
        for layer, costs in enumerate(self._by_layer):
            ms = costs.predict(num_rows if layer in self._layers.ring else 1)
            if ms is None and layer > 0:
                return None
            result.append(ms or 0.0)
        return result

    def _rows_seen(self) -> list[int]:
        return sorted({rows for layer in self._layers.ring for rows in self._by_layer[layer].seen})

    def _seed_stages(self, overhead: float) -> None:
        for stage, costs in enumerate(self._by_stage):
            own = stage_layers(self._partition, stage)
            ring = [layer for layer in own if layer in self._layers.ring]
            for num_rows in self._rows_seen() if ring else []:
                ms = [self._by_layer[layer].predict(num_rows) for layer in ring]
                if None not in ms:
                    costs.per_pass.seed(num_rows, overhead * sum(each for each in ms if each is not None))
            for part, indices in ((costs.encode, [0]), (costs.decode, list(self._layers.decode))):
                known = [self._by_layer[layer].predict(1) for layer in own if layer in indices]
                if known and None not in known:
                    part.seed(1, sum(each for each in known if each is not None))

    def _overhead(self) -> float:
        """What stages spend on passes, relative to what their layers do."""
        ratios = []
        for stage, costs in enumerate(self._by_stage):
            ring = [layer for layer in stage_layers(self._partition, stage) if layer in self._layers.ring]
            for num_rows in costs.per_pass.seen:
                of_stage = costs.per_pass.predict(num_rows)
                of_layers = [self._by_layer[layer].predict(num_rows) for layer in ring]
                total = sum(ms for ms in of_layers if ms is not None)
                if of_stage is not None and total > 0 and None not in of_layers:
                    ratios.append(of_stage / total)
        return max(statistics.median(ratios), 1.0) if ratios else 1.0
