"""Forecasts: of measured layers, for machines that are not there."""

from pathlib import Path

import pytest

from ds_stream.bench.what_if import describe_forecasts, forecast
from ds_stream.model.layer_times import LayerTimes, measure_layers
from ds_stream.model.pipeline import open_weights
from ds_stream.schedule.timeline import Machine
from rings import CPU, tiny_config

CONFIG = tiny_config(batch={"max_rows": 3}).stream
LAYERS = CONFIG.layers
# Encode 12 ms, decode 1 + 1 + 2 + 4 + 4; blocks 4 ms and 1 more per row.
TIMES = LayerTimes({rows: [12.0, 0.0, *[4.0 + rows] * 3, 0.0, 1.0, 1.0, 2.0, 4.0, 4.0] for rows in (1, 3)}, "a table")


def machine(num_devices: int) -> Machine:
    return Machine(num_devices, False, link_bytes_per_ms=1e9, link_latency_ms=0.0)


def test_one_stage_does_one_thing_after_the_other():
    one = forecast(CONFIG, TIMES, 1, 3, machine(1))
    # Three passes of three blocks make a chunk of four frames; with three rows, one tick.
    assert one.frames_per_s == pytest.approx(4 * 1000 / (3 * 7 + 12 + 12), rel=0.05)
    assert one.occupancy == (pytest.approx(1.0, rel=0.01),)
    single = forecast(CONFIG, TIMES, 1, 1, machine(1))
    assert single.frames_per_s == pytest.approx(4 * 1000 / (9 * 5 + 24), rel=0.05)


def test_the_balancers_boundaries_are_taken_unless_the_config_has_some():
    two = forecast(CONFIG, TIMES, 2, 3, machine(2))
    # 45 ms of work: 12 + 7 + 7 and 7 + 12, or 12 + 7 and 14 + 12.
    assert two.frames_per_s == pytest.approx(4 * 1000 / 26, rel=0.08)
    given = CONFIG.model_copy(update={"stages": CONFIG.stages.model_copy(update={"partition": (0, 1, 11)})})
    worse = forecast(given, TIMES, 2, 3, machine(2))
    assert worse.partition == (0, 1, 11)
    assert worse.frames_per_s == pytest.approx(4 * 1000 / 33, rel=0.08)
    # For another number of stages they are of no use.
    assert len(forecast(given, TIMES, 3, 3, machine(3)).partition) == 4


def test_more_stages_bring_more_until_a_layer_is_the_pace():
    rates = [forecast(CONFIG, TIMES, stages, 3, machine(stages)).frames_per_s for stages in (1, 2, 4, 8)]
    assert rates == sorted(rates)
    # Nothing is faster than the slowest layer, encode.
    assert rates[-1] <= 4 * 1000 / 12 * 1.06


def test_rows_that_were_not_measured_lie_on_a_line():
    assert TIMES.at(2) == [12.0, 0.0, *[6.0] * 3, 0.0, 1.0, 1.0, 2.0, 4.0, 4.0]
    assert TIMES.at(5)[2] == pytest.approx(9.0)
    assert LayerTimes({2: [1.0]}, "").at(4) == [1.0]


def test_times_are_kept_and_read_again(tmp_path: Path):
    TIMES.save(tmp_path / "times.json")
    assert LayerTimes.load(tmp_path / "times.json") == TIMES
    with pytest.raises(ValueError, match="cannot be read"):
        LayerTimes.load(tmp_path / "none.json")
    (tmp_path / "other.json").write_text("[1]")
    with pytest.raises(ValueError, match="does not hold layer times"):
        LayerTimes.load(tmp_path / "other.json")
    with pytest.raises(ValueError, match="a model with 11 layers but the config's has 13"):
        forecast(tiny_config(model={"num_layers": 5}).stream, TIMES, 1, 1, machine(1))


def test_every_layer_is_measured():
    times = measure_layers(CONFIG, open_weights(CONFIG), CPU, [1, 3])
    assert sorted(times.by_rows) == [1, 3]
    for layer_ms in times.by_rows.values():
        assert len(layer_ms) == LAYERS.num_layers
        assert all(ms > 0 for ms in layer_ms)
    # Rows run one after the other here: three cost more than one.
    assert times.by_rows[3][2] > 1.5 * times.by_rows[1][2]


def test_the_table_names_what_each_stage_holds():
    table = describe_forecasts(LAYERS, [forecast(CONFIG, TIMES, stages, 1, machine(stages)) for stages in (1, 3)])
    assert len(table.splitlines()) == 3
    assert "100% encode, embed, 3 blocks, head, decode" in table
