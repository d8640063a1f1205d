"""The ``bench`` command: a matrix of settings on a synthetic input, one table out; and forecasts of other machines."""

import argparse
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ds_stream.cli import NO_OUTPUT, SYNTHETIC, choose_accelerator
from ds_stream.config import Config, find_config, load_config
from ds_stream.core import EXIT_USAGE, RankInfo

_STREAM = Path(__file__).resolve().parent.parent / "launch" / "stream.py"


@dataclass(frozen=True, slots=True)
class Case:
    """One point of the matrix."""

    stages: int
    rows: int
    lead: int
    steps: tuple[int, ...]
    width: int
    height: int

    @property
    def overrides(self) -> tuple[str, ...]:
        return (
            f"stream.batch.max_rows={self.rows}",
            "stream.batch.autotune=false",
            f"stream.context.lead={self.lead}",
            f"stream.noise.steps={list(self.steps)}",
            f"stream.video.width={self.width}",
            f"stream.video.height={self.height}",
        )


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
    parser.add_argument("--stages", type=_numbers, default=(1, 2), metavar="N,N", help="numbers of stages (default: 1,2)")  # noqa: E501
    parser.add_argument("--rows", type=_numbers, metavar="N,N", help="row caps (default: 1 and the config's)")
    parser.add_argument("--leads", type=_numbers, metavar="N,N", help="context leads (default: the config's)")
    parser.add_argument("--steps", type=_numbers, action="append", metavar="T,T", help="denoising steps; may be given several times (default: the config's)")  # noqa: E501
    parser.add_argument("--sizes", type=_sizes, metavar="WxH,WxH", help="sizes of the video (default: the config's)")
    parser.add_argument("--num-frames", type=int, default=65, help="frames of each run (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table's figures there, too")
    parser.add_argument("--overhead", action="store_true", help="measure instead what the host spends on a tick whose layers do nothing")  # noqa: E501
    what_if = parser.add_argument_group("what if", "simulate, with the real schedule, instead of running")
    what_if.add_argument("--what-if", action="store_true", help="time each layer on this machine's device (or take --layer-times), and play every combination of --stages and --rows")  # noqa: E501
    what_if.add_argument("--layer-times", type=Path, metavar="FILE", help="times that --save-layer-times has written, perhaps elsewhere")  # noqa: E501
    what_if.add_argument("--save-layer-times", type=Path, metavar="FILE", help="keep the measured times")
    what_if.add_argument("--devices", type=int, metavar="N", help="devices that the stages share (default: one each)")
    what_if.add_argument("--pooled", action="store_true", help="any device works for any stage, as the cores of a CPU do")  # noqa: E501
    what_if.add_argument("--link-gb-per-s", type=float, default=25.0, help="bandwidth of a link, in GB (10^9 bytes) a second (default: %(default)s)")  # noqa: E501
    what_if.add_argument("--link-us", type=float, default=20.0, help="latency of a message, in microseconds (default: %(default)s)")  # noqa: E501
    what_if.add_argument("--launch-us", type=float, default=0.0, help="what a stage's host spends on a launch beside its layers, in microseconds (default: %(default)s)")  # noqa: E501
    # fmt: on
    return parser


def main(argv: list[str], default_config: Path) -> int:
    """Run the command; returns its exit code."""
    options = build_parser(default_config).parse_args(argv)
    try:
        config = load_config(find_config(options.config), tuple(options.set))
        if options.overhead:
            return _overhead(options, config)
        return _what_if(options, config) if options.what_if else _matrix(options, config)
    except ValueError as error:
        print(f"ds_stream: {error}", file=sys.stderr)
        return EXIT_USAGE


def cases(options: argparse.Namespace, config: Config) -> Iterator[Case]:
    """Every combination that was asked for."""
    stream = config.stream
    rows = options.rows or sorted({1, stream.batch.max_rows})
    leads, steps = options.leads or (stream.context.lead,), options.steps or [stream.noise.steps]
    sizes = options.sizes or [(stream.video.width, stream.video.height)]
    for size, of_steps, lead, of_rows, stages in itertools.product(sizes, steps, leads, rows, options.stages):
        yield Case(stages, of_rows, lead, of_steps, *size)


def _matrix(options: argparse.Namespace, config: Config) -> int:
    matrix = list(cases(options, config))
    for case in matrix:
        # All mistakes before the first run.
        _config_of(options, case).resolve(case.stages)
    results = []
    oracles: dict[tuple[object, ...], float] = {}
    for case in matrix:
        picture = (case.lead, case.steps, case.width, case.height)
        if picture not in oracles:
            oracles[picture] = _run_oracle(_config_of(options, case), options.num_frames)
        results.append({**asdict(case), "oracle_frames_per_second": oracles[picture], **_run(options, case)})
        print(_line(results[-1], results), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    return 0


def _config_of(options: argparse.Namespace, case: Case) -> Config:
    return load_config(find_config(options.config), (*options.set, *case.overrides))


def _run(options: argparse.Namespace, case: Case) -> dict[str, Any]:
    """One run of the stream command, as a user would start it."""
    launcher = ["-m", "deepspeed.launcher.runner", "--num_gpus", str(case.stages), "--master_port", str(_free_port())]
    overrides = [f"--set={override}" for override in (*options.set, *case.overrides)]
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, *(launcher if case.stages > 1 else []), str(_STREAM), "--config", options.config),
            *("--input", SYNTHETIC, "--num-frames", str(options.num_frames), "--output", str(NO_OUTPUT)),
            *("--seed", "0", "--report", folder, *overrides),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise ValueError(f"a run failed with exit code {done.returncode}:\n{done.stdout}{done.stderr}")
        report = json.loads((Path(folder) / "report.json").read_text())
    stream = report["stream"]
    measured = [tick["measured_ms"] for tick in report["ticks"] if tick["measured_ms"] is not None]
    return {
        "frames_per_second": stream["frames_per_second_after_first_chunk"],
        "chunk_latency_ms_p50": stream["chunk_latency_ms_p50"],
        "chunk_latency_ms_p95": stream["chunk_latency_ms_p95"],
        "ttff_ms": stream["ttff_ms"],
        "tick_ms": measured[len(measured) // 2] if measured else None,
        "occupancy": [stage["occupancy"] for stage in report["stages"]],
        "busy_share": [stage["busy_share"] for stage in report["stages"]],
        "partition": report["config"]["stream"]["stages"]["partition"],
        "versions": report["versions"],
        "hardware": report["hardware"],
    }


def _run_oracle(config: Config, num_frames: int) -> float:
    """Frames per second of the plain loops over the same layers, the first chunk left out."""
    choose_accelerator(config)
    import torch

    from ds_stream.core import ChunkGeometry
    from ds_stream.engine.groups import choose_placement
    from ds_stream.media.synthetic import SyntheticReader
    from ds_stream.reference import Reference

    stream = config.stream
    torch.set_num_threads(stream.device.cpu_threads_per_rank)
    device = choose_placement(stream, RankInfo(0, 1, 0, 1)).device
    reader = SyntheticReader(stream.video.width, stream.video.height, num_frames)
    geometry = ChunkGeometry(stream.context.num_latent_frames_per_chunk)
    num_chunks = geometry.num_chunks(num_frames)

    def chunks() -> Iterator[tuple[torch.Tensor, float]]:
        for chunk in range(num_chunks):
            frames = reader.read(geometry.num_frames(chunk))
            if len(frames) == geometry.num_frames(chunk):
                yield torch.from_numpy(frames), stream.noise.strength

    prompt = torch.zeros((stream.model.num_text_tokens, stream.model.text_dim))
    started, done = 0.0, 0
    for _, pixels in Reference(stream, device).stream(0, iter(chunks()), lambda _chunk: prompt):
        pixels.cpu()
        if not started:
            started = time.perf_counter()
        else:
            done += len(pixels)
    return done / (time.perf_counter() - started)


def _line(result: dict[str, Any], results: list[dict[str, Any]]) -> str:
    header = (
        f"{'stages':>6} {'rows':>4} {'lead':>4} {'steps':>5} {'size':>9} {'frames/s':>9} {'of loop':>8} "
        f"{'latency p50':>12} {'p95 ms':>8} {'ttff ms':>8} {'tick ms':>8} {'occupancy':>9} {'busiest':>8}"
    )
    size = f"{result['width']}x{result['height']}"
    rate = result["frames_per_second"] or 0.0
    line = (
        f"{result['stages']:6} {result['rows']:4} {result['lead']:4} {len(result['steps']):5} {size:>9} {rate:9.2f} "
        f"{rate / result['oracle_frames_per_second']:7.2f}x {result['chunk_latency_ms_p50']:12.0f} "
        f"{result['chunk_latency_ms_p95']:8.0f} {result['ttff_ms']:8.0f} {result['tick_ms'] or 0.0:8.1f} "
        f"{min(result['occupancy']):9.0%} {max(result['busy_share']):8.0%}"
    )
    if len(results) > 1:
        return line
    return f"loop: the sequential oracle, {result['oracle_frames_per_second']:.2f} frames/s\n{header}\n{line}"


def _what_if(options: argparse.Namespace, config: Config) -> int:
    choose_accelerator(config)
    from ds_stream.schedule.timeline import Machine
    from ds_stream.what_if import describe_forecasts, forecast

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
    os.environ["DS_ACCELERATOR"] = "cpu"
    import torch

    from ds_stream.overhead import measure_overhead

    torch.set_num_threads(1)
    overhead = measure_overhead(config, num_chunks=400)
    print(
        f"controller {overhead.controller_us:.0f} us a tick (median); whole host loop {overhead.host_us:.0f} us a tick"
    )
    if options.json is not None:
        options.json.write_text(json.dumps(asdict(overhead), indent=2) + "\n")
    return 0


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _sizes(text: str) -> list[tuple[int, int]]:
    sizes = [tuple(int(side) for side in part.split("x")) for part in text.split(",")]
    return [(width, height) for width, height in sizes]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
