"""The bench command: a small matrix through real runs, a forecast, and mistakes told in one line."""

import json
from pathlib import Path

import pytest

from ds_stream.bench.command import build_parser, main
from ds_stream.bench.matrix import Case, cases
from ds_stream.config import load_config
from rings import tiny_config


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(tiny_config().to_json())
    return path


def test_the_matrix_is_every_combination(config: Path):
    options = build_parser(config).parse_args(
        ["--stages", "1,2", "--rows", "1,3", "--leads", "0,1", "--steps", "1000", "--steps", "1000,500"]
    )
    found = list(cases(options, load_config(config)))
    assert len(found) == len(set(found)) == 2 * 2 * 2 * 2
    assert Case(2, 3, 1, (1000, 500), 32, 32) in found
    options = build_parser(config).parse_args(["--sizes", "64x32"])
    assert list(cases(options, load_config(config))) == [
        Case(1, 1, 0, (700, 500, 200), 64, 32),
        Case(2, 1, 0, (700, 500, 200), 64, 32),
    ]


def test_a_matrix_is_measured(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    arguments = ["--stages", "1", "--rows", "2", "--num-frames", "81", "--json", str(tmp_path / "bench.json")]
    assert main(arguments, config) == 0
    (result,) = json.loads((tmp_path / "bench.json").read_text())
    assert result["stages"] == 1 and result["rows"] == 2
    assert result["frames_per_second"] > 0 and result["oracle_frames_per_second"] > 0
    # Two rows of a chunk's three passes: a launch is always full.
    assert result["occupancy"] == result["occupancy_by_formula"] == 1.0
    header, line = capsys.readouterr().out.splitlines()[1:]
    assert header.split()[:3] == ["stages", "rows", "lead"]
    assert line.split()[:5] == ["1", "2", "0", "3", "32x32"]


def test_a_run_that_fails_is_told(config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr("ds_stream.bench.matrix._STREAM", Path("/nowhere/stream.py"))
    assert main(["--stages", "1", "--rows", "1", "--num-frames", "5"], config) == 1
    assert "ds_stream: a run failed with exit code 2" in capsys.readouterr().err


def test_a_forecast_of_times_that_were_kept(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    times, table = tmp_path / "times.json", tmp_path / "table.json"
    what_if = ["--what-if", "--stages", "1,4", "--rows", "3"]
    assert main([*what_if, "--save-layer-times", str(times)], config) == 0
    first = capsys.readouterr().out
    assert main([*what_if, "--layer-times", str(times), "--json", str(table)], config) == 0
    assert capsys.readouterr().out == first
    one, four = json.loads(table.read_text())
    assert one["num_stages"] == 1 and four["num_stages"] == 4
    assert one["frames_per_s"] < four["frames_per_s"] <= 4.2 * one["frames_per_s"]
    assert main([*what_if, "--layer-times", str(times), "--devices", "1"], config) == 0
    shared = capsys.readouterr().out.splitlines()[-1].split()
    # Four stages on one device are no faster than one.
    assert float(shared[2]) <= 1.05 * one["frames_per_s"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--stages", "0"), "give numbers from 1 on"),
        (("--stages", "one"), "write whole numbers, as in 1,2,4"),
        (("--num-frames", "1,2"), "give one number"),
        (("--sizes", "32"), "write width x height, as in 832x480"),
        (("--link-gb-per-s", "0"), "give a number above 0"),
        (("--link-us", "-1"), "give a number above 0"),
        (("--json", "/nowhere/x.json"), "there is no folder /nowhere"),
        (("--stages", "99"), "enough for 5 stages at most"),
        (("--rows", "99"), "64"),
        (("--leads", "7"), "context.lead is 7 but a chunk has 3 passes"),
        (("--what-if", "--stages", "12"), "11"),
        (("--what-if", "--layer-times", "/nowhere/times.json"), "cannot be read"),
    ],
)
def test_mistakes(config: Path, arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]):
    try:
        code = main(list(arguments), config)
    except SystemExit as end:
        code = end.code
    assert code == 2
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said
