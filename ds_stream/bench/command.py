"""The ``bench`` command: a matrix of settings on a synthetic input, one table out; and forecasts of other machines."""

import argparse
import itertools
import json
import math
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ds_stream.bench.matrix import measure_matrix
from ds_stream.config import Config, find_config, load_config
from ds_stream.core import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, RankInfo, StreamError
from ds_stream.device import prepare_device


def build_parser(default_config: Path) -> argparse.ArgumentParser:
    """The command line; ``default_config`` is what is measured with no arguments."""
    parser = argparse.ArgumentParser(
        prog="bench.py",
        description="Measure a matrix of settings on a synthetic input (frames/s include VAE and transfers, and leave "
        "out the first chunk), or work out from the times of single layers what another machine would do.",
    )
    # fmt: off
    parser.add_argument("--config", default=str(default_config), help="JSON file, or the name of one that ships (default: %(default)s)")  # noqa: E501
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one key of the config")  # noqa: E501
    parser.add_argument("--stages", type=_counts, default=(1, 2), metavar="N,N", help="numbers of stages (default: 1,2)")  # noqa: E501
    parser.add_argument("--rows", type=_counts, metavar="N,N", help="row caps (default: 1 and the config's)")
    parser.add_argument("--leads", type=_numbers, metavar="N,N", help="context leads (default: the config's)")
    parser.add_argument("--steps", type=_numbers, action="append", metavar="T,T", help="denoising steps; may be given several times (default: the config's)")  # noqa: E501
    parser.add_argument("--sizes", type=_sizes, metavar="WxH,WxH", help="sizes of the video (default: the config's)")
    parser.add_argument("--num-frames", type=_count, default=65, help="frames of each run (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table's figures there, too")
    parser.add_argument("--overhead", action="store_true", help="measure instead what the host spends on a tick whose layers do nothing")  # noqa: E501
    what_if = parser.add_argument_group("what if", "simulate, with the real schedule, instead of running")
    what_if.add_argument("--what-if", action="store_true", help="time each layer on this machine's device (or take --layer-times), and play every combination of --stages and --rows")  # noqa: E501
    what_if.add_argument("--layer-times", type=Path, metavar="FILE", help="times that --save-layer-times has written, perhaps elsewhere")  # noqa: E501
    what_if.add_argument("--save-layer-times", type=Path, metavar="FILE", help="keep the measured times")
    what_if.add_argument("--devices", type=_count, metavar="N", help="devices that the stages share (default: one each)")  # noqa: E501
    what_if.add_argument("--pooled", action="store_true", help="any device works for any stage, as the cores of a CPU do")  # noqa: E501
    what_if.add_argument("--link-gb-per-s", type=_above_zero, default=25.0, help="bandwidth of a link, in GB (10^9 bytes) a second (default: %(default)s)")  # noqa: E501
    what_if.add_argument("--link-us", type=_not_negative, default=20.0, help="latency of a message, in microseconds (default: %(default)s)")  # noqa: E501
    what_if.add_argument("--launch-us", type=_not_negative, default=0.0, help="what a stage's host spends on a launch beside its layers, in microseconds (default: %(default)s)")  # noqa: E501
    # fmt: on
    return parser


def main(argv: list[str], default_config: Path) -> int:
    """Run the command; returns its exit code."""
    options = build_parser(default_config).parse_args(argv)
    try:
        for path in (options.json, options.save_layer_times):
            if path is not None and not path.parent.is_dir():
                raise ValueError(f"{path} cannot be written: there is no folder {path.parent}")
        overrides = (*options.set, "stream.device.kind=cpu") if options.overhead else options.set
        config = load_config(find_config(options.config), tuple(overrides))
        if options.overhead:
            return _overhead(options, config)
        return _what_if(options, config) if options.what_if else measure_matrix(options, config)
    except (ValueError, OSError) as error:
        print(f"ds_stream: {error}", file=sys.stderr)
        return EXIT_USAGE
    except StreamError as error:
        print(f"ds_stream: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _what_if(options: argparse.Namespace, config: Config) -> int:
    prepare_device(config)
    from ds_stream.bench.what_if import describe_forecasts, forecast
    from ds_stream.schedule.timeline import Machine

    rows = options.rows or sorted({1, config.stream.batch.max_rows})
    times = _layer_times(options, config, rows)
    if options.save_layer_times is not None:
        times.save(options.save_layer_times)
    forecasts = []
    for num_rows, num_stages in itertools.product(rows, options.stages):
        machine = Machine(
            options.devices or num_stages,
            options.pooled,
            link_bytes_per_ms=1e6 * options.link_gb_per_s,
            link_latency_ms=options.link_us / 1000,
            control_latency_ms=options.link_us / 1000,
        )
        forecasts.append(forecast(config.stream, times, num_stages, num_rows, machine, options.launch_us / 1000))
    print(f"layers measured on {times.device}")
    print(describe_forecasts(config.stream.layers, forecasts), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(each) for each in forecasts], indent=2) + "\n")
    return 0


def _layer_times(options: argparse.Namespace, config: Config, rows: "list[int]") -> Any:
    from ds_stream.model.layer_times import LayerTimes, measure_layers

    if options.layer_times is not None:
        return LayerTimes.load(options.layer_times)
    import torch

    from ds_stream.engine.groups import choose_placement
    from ds_stream.model.pipeline import open_weights

    torch.set_num_threads(config.stream.device.cpu_threads_per_rank)
    device = choose_placement(config.stream, RankInfo(0, 1, 0, 1)).device
    return measure_layers(config.stream, open_weights(config.stream), device, sorted({1, *rows}))


def _overhead(options: argparse.Namespace, config: Config) -> int:
    prepare_device(config)
    import torch

    from ds_stream.bench.overhead import measure_overhead

    torch.set_num_threads(1)
    overhead = measure_overhead(config, num_chunks=400)
    print(
        f"controller {overhead.controller_us:.0f} us a tick (median); whole host loop {overhead.host_us:.0f} us a tick"
    )
    if options.json is not None:
        options.json.write_text(json.dumps(asdict(overhead), indent=2) + "\n")
    return 0


def _numbers(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise argparse.ArgumentTypeError(f"{text!r}: write whole numbers, as in 1,2,4")
    return tuple(int(part) for part in text.split(","))


def _counts(text: str) -> tuple[int, ...]:
    numbers = _numbers(text)
    if 0 in numbers:
        raise argparse.ArgumentTypeError(f"{text!r}: give numbers from 1 on")
    return numbers


def _count(text: str) -> int:
    numbers = _counts(text)
    if len(numbers) > 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give one number")
    return numbers[0]


def _above_zero(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: give a number above 0")
    return number


def _not_negative(text: str) -> float:
    return 0.0 if text.strip() == "0" else _above_zero(text)


def _sizes(text: str) -> list[tuple[int, int]]:
    if not re.fullmatch(r"\d+x\d+(,\d+x\d+)*", text):
        raise argparse.ArgumentTypeError(f"{text!r}: write width x height, as in 832x480")
    return [(int(width), int(height)) for width, height in re.findall(r"(\d+)x(\d+)", text)]
