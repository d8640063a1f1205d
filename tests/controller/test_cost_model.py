"""Costs are learned through outliers and noise, follow what lasts, and stay in proportion when layers move."""

import random

import pytest

from ds_stream.controller.cost_model import CostModel, RowCosts
from ds_stream.core import LayerTiming, StageTiming
from ds_stream.partition import LayerList

H200_MS = {1: 16.9, 2: 29.7, 4: 56.1}
"""The whole Wan 1.3B at 480x832 by rows (DESIGN section 4)."""
LAYERS = LayerList(num_blocks=2, num_decode_layers=1)
"""encode, embed, 2 blocks, head, decode."""


def observed(observations: list[tuple[int, float]]) -> RowCosts:
    costs = RowCosts()
    for num_rows, ms in observations:
        costs.observe(num_rows, ms)
    return costs


def timing(stage: int, num_rows: int, forward: float, encode: float = 0.0, decode: float = 0.0, send: float = 0.0):
    return StageTiming(stage, 0, num_rows, forward, encode, decode, wait_ms=99.0, send_ms=send)


@pytest.mark.parametrize(
    ("by_rows", "num_rows", "ms"),
    [
        ({2: 30.0}, 2, 30.0),
        ({2: 30.0}, 4, 60.0),  # Through the origin.
        ({2: 30.0}, 1, 15.0),
        ({1: 10.0, 2: 18.0}, 4, 34.0),
        ({1: 10.0, 3: 26.0}, 2, 18.0),
        ({1: 1.0, 2: 2.0, 4: 5.0}, 3, 8 / 3 + 19 / 14 * 2 / 3),  # Least squares: 8/3 at 7/3 rows, slope 19/14.
        ({1: 20.0, 2: 10.0}, 3, 20.0),  # Falling with rows: no less than a smaller number.
        ({3: 10.0, 4: 30.0}, 1, 0.0),  # Not negative.
    ],
)
def test_rows_that_were_not_seen(by_rows: dict[int, float], num_rows: int, ms: float):
    costs = observed([(rows, each) for rows, each in by_rows.items() for _ in range(9)])
    assert costs.predict(num_rows) == pytest.approx(ms)


def test_nothing_seen():
    assert RowCosts().predict(1) is None


def test_the_line_meets_the_h200():
    """Seen at 1 and 2 rows, 4 rows are within 2% of what was measured."""
    costs = observed([(rows, H200_MS[rows]) for rows in (1, 2) for _ in range(9)])
    assert costs.predict(4) == pytest.approx(H200_MS[4], rel=0.02)


@pytest.mark.parametrize("factor", [10, 100])
def test_the_first_forward_does_no_harm(factor: float):
    costs = observed([(1, 10.0 * factor), *[(1, 10.0)] * 2])
    assert costs.predict(1) == 10.0
    costs.observe(2, 18.0 * factor)
    assert costs.predict(2) == 20.0  # Seen once only: the others' line counts.
    assert costs.predict(1) == 10.0
    for _ in range(2):
        costs.observe(2, 18.0)
    assert costs.predict(2) == 18.0
    assert costs.predict(1) == 10.0


def test_an_outlier_now_and_then_does_no_harm():
    costs = RowCosts()
    for index in range(300):
        costs.observe(1, 500.0 if index % 9 == 5 else 10.0)
        if index > 9:
            assert costs.predict(1) == 10.0


@pytest.mark.parametrize("factor", [2.0, 0.5, 1.3, 0.7, 10.0])
def test_a_lasting_change_is_followed_within_8(factor: float):
    costs = observed([(rows, 10.0 * rows) for rows in (1, 3) for _ in range(200)])
    for _ in range(8):
        costs.predict(1)
        costs.observe(1, 10.0 * factor)
    assert costs.predict(1) == pytest.approx(10 * factor)
    assert costs.predict(3) == pytest.approx(30 * factor), "a slow-down concerns all"
    # What is then seen of the other rows counts, and changes nothing where it agrees.
    for _ in range(8):
        costs.observe(3, 30.0 * factor)
        assert costs.predict(1) == pytest.approx(10 * factor)


def test_a_small_lasting_change_is_followed_within_66():
    costs = observed([(1, 10.0)] * 200 + [(1, 12.0)] * 66)
    assert costs.predict(1) == 12.0


def test_a_change_seen_at_two_numbers_of_rows_at_once_counts_once():
    costs = observed([(rows, 10.0 * rows) for rows in (1, 2, 3) for _ in range(20)])
    for _ in range(8):
        costs.predict(1)
        # Both between two predictions, as in a lap whose launches are not equally full.
        costs.observe(1, 20.0)
        costs.observe(2, 40.0)
    assert costs.predict(1) == 20.0
    assert costs.predict(3) == pytest.approx(60)


@pytest.mark.parametrize("seed", range(5))
def test_noise_makes_nothing_drift_off(seed: int):
    """10% noise for 2000 observations: rows in use stay within 5%, those that do not run within 12%."""
    chance = random.Random(seed)
    costs = observed([(rows, 10 * rows * chance.gauss(1, 0.1)) for rows in (1, 2, 4) for _ in range(60)])
    for index in range(2000):
        rows = 1 + index % 2
        costs.observe(rows, 10 * rows * chance.gauss(1, 0.1))
        if index % 4 == 0 and index > 200:
            assert costs.predict(2) == pytest.approx(20, rel=0.05)
            assert costs.predict(4) == pytest.approx(40, rel=0.12)


@pytest.mark.parametrize("total", [0.5, 2.0])
def test_a_slow_drift_is_followed(total: float):
    """Over 1500 observations: never more than 12% behind, at rows that run and at others."""
    costs = observed([(rows, 10.0 * rows) for rows in (1, 2) for _ in range(9)])
    for index in range(1500):
        factor = total ** (index / 1500)
        costs.observe(1, 10 * factor)
        if index % 5 == 0:
            assert costs.predict(1) == pytest.approx(10 * factor, rel=0.12)
            assert costs.predict(2) == pytest.approx(20 * factor, rel=0.12)


def test_a_tick_of_a_stage():
    model = CostModel(LAYERS, (0, 3, 6))
    for _ in range(9):
        model.observe_stage(timing(0, 1, forward=10, encode=8, send=1))
        model.observe_stage(timing(0, 2, forward=18, send=1))
        model.observe_stage(timing(1, 1, forward=6, decode=0, send=1))
    assert model.tick_ms(1, 0.5) is None, "no chunk was decoded yet"
    for _ in range(9):
        model.observe_stage(timing(1, 1, forward=6, decode=30, send=1))
    # Launches that encode or decode nothing say nothing of what that costs.
    assert model.stage_tick_ms(0, 1, 0.5) == pytest.approx(10 + 1 + 8 / 2)
    assert model.stage_tick_ms(0, 2, 0.25) == pytest.approx(18 + 1 + 8 / 4)
    assert model.stage_tick_ms(1, 1, 0.5) == pytest.approx(6 + 1 + 30 / 2)
    assert model.stage_tick_ms(1, 2, 0.5) == pytest.approx(2 * 7 + 30 / 2)
    assert model.tick_ms(1, 0.5) == pytest.approx(22)
    assert model.tick_ms(1, 0.1) == pytest.approx(11.8)


def test_a_stream_without_video_never_encodes():
    model = CostModel(LAYERS, (0, 6))
    for _ in range(9):
        model.observe_stage(timing(0, 1, forward=10, decode=4))
    assert model.tick_ms(1, 0.5) == pytest.approx(12)


def test_stages_outside_the_ring():
    model = CostModel(LAYERS, (0, 1, 5, 6))
    for _ in range(9):
        model.observe_stage(timing(0, 1, forward=0, encode=8))
        model.observe_stage(timing(1, 1, forward=10))
        model.observe_stage(timing(2, 1, forward=0, decode=30))
    assert [model.stage_tick_ms(stage, 1, 0.5) for stage in range(3)] == pytest.approx([4, 10, 15])
    assert model.tick_ms(1, 0.5) == pytest.approx(15)


def test_layers():
    model = CostModel(LAYERS, (0, 6))
    assert model.layer_ms(1) is None
    model.seed_layers(1, [8.0, 1.0, 4.0, 4.0, 1.0, 30.0])
    model.seed_layers(2, [8.0, 1.0, 7.0, 7.0, 1.0, 30.0])
    assert model.layer_ms(1) == pytest.approx([8, 1, 4, 4, 1, 30])
    assert model.layer_ms(3) == pytest.approx([8, 1, 10, 10, 1, 30])
    assert model.tick_ms(2, 0.5) == pytest.approx(16 + 19)
    for _ in range(130):
        model.observe_layer(LayerTiming(layer=3, num_rows=1, ms=6.0))
        model.observe_layer(LayerTiming(layer=5, num_rows=1, ms=20.0))
    assert model.layer_ms(1) == pytest.approx([8, 1, 4, 6, 1, 20])
    assert model.layer_ms(2) == pytest.approx([8, 1, 7, 7 * 1.5, 1, 20])


def test_moved_layers_take_their_costs_along():
    """Stages cost a quarter more than their layers, at every number of rows, and do so after a move."""
    model = CostModel(LAYERS, (0, 3, 6))
    by_rows = {1: [8.0, 1.0, 4.0, 4.0, 1.0, 30.0], 2: [8.0, 1.0, 7.0, 7.0, 1.0, 30.0]}
    for rows, layer_ms in by_rows.items():
        model.seed_layers(rows, layer_ms)
    for rows, layer_ms in by_rows.items():
        for _ in range(200):
            model.observe_stage(timing(0, rows, forward=1.25 * sum(layer_ms[1:3]), encode=8))
            model.observe_stage(timing(1, rows, forward=1.25 * sum(layer_ms[3:5]), decode=30))
    model.set_partition((0, 4, 6))
    assert model.stage_tick_ms(0, 1, 0.5) == pytest.approx(1.25 * 9 + 4)
    assert model.stage_tick_ms(1, 1, 0.5) == pytest.approx(1.25 * 1 + 15)
    assert model.stage_tick_ms(0, 2, 0.5) == pytest.approx(1.25 * 15 + 4)
    model.set_partition((0, 1, 5, 6))
    assert [model.stage_tick_ms(stage, 1, 0.5) for stage in range(3)] == pytest.approx([4, 12.5, 15])
    # And then what is seen of the new stages counts.
    for _ in range(9):
        model.observe_stage(timing(1, 1, forward=20))
    assert model.stage_tick_ms(1, 1, 0.5) == pytest.approx(20)
