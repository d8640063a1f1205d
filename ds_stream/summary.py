"""What a run tells of itself: in the file's metadata, in the report, and at the end on the screen."""

import argparse
import hashlib
import json
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_stream import __version__
from ds_stream.cli import NO_OUTPUT
from ds_stream.config import Config

if TYPE_CHECKING:
    from ds_stream.run import RunResult


def describe_run(options: argparse.Namespace, config: Config) -> str:
    """What it takes to make the same video again, for the file's metadata."""
    prompts = [f"prompt: {options.prompt}", *(f"prompt at {text}" for text in options.prompt_at)]
    if options.prompt_embeds is not None:
        digest = hashlib.blake2b(options.prompt_embeds.read_bytes(), digest_size=6).hexdigest()
        prompts = [f"prompt embeds: {options.prompt_embeds.name} {digest}"]
    parts = [f"ds_stream {__version__}", *prompts, f"seed: {config.stream.noise.seed}", f"config: {config.digest}"]
    return "; ".join(parts)


def say_what_was_done(
    options: argparse.Namespace, config: Config, result: "RunResult", random_parts: list[str]
) -> None:
    """Write the report that was asked for, and print the figures and where the video is."""
    if random_parts:
        parts = ", ".join(random_parts)
        print(f"ds_stream: the weights are random ({parts}), so the picture is abstract; the pipeline works")
    for line in describe_result(result.figures, config.digest):
        print(f"ds_stream: {line}")
    if options.report is not None:
        from ds_stream.report.write import write_report

        write_report(options.report, make_report(options, config, result), result.spans)
        print(f"ds_stream: report: {(options.report / 'report.html').resolve()}")
    if options.output != NO_OUTPUT:
        print(f"ds_stream: output: {options.output.resolve()}", flush=True)


def make_report(options: argparse.Namespace, config: Config, result: "RunResult") -> dict[str, Any]:
    """All that the report shows."""
    stages = result.figures["stages"]
    return {
        "version": __version__,
        "config": json.loads(config.to_json()),
        "config_digest": config.digest,
        "prompt": options.prompt,
        "prompt_at": options.prompt_at,
        "versions": {
            "python": platform.python_version(),
            **{package: version(package) for package in ("torch", "deepspeed", "diffusers")},
        },
        "hardware": {
            "hosts": sorted({stage["host"] for stage in stages}),
            "cpu": _cpu_name(),
            "num_cpus": os.cpu_count(),
            "gpus": sorted({stage["gpu"] for stage in stages if stage["gpu"]}),
        },
        **result.figures,
    }


def describe_result(figures: dict[str, Any], digest: str) -> list[str]:
    """The run in five lines."""
    stream, stages = figures["stream"], figures["stages"]
    count = "1 stage" if len(stages) == 1 else f"{len(stages)} stages"
    lines = [f"{stream['frames']} frames on {count}, seed {stream['seed']}, config {digest}"]
    if stream["frames_per_second"] is None:
        return lines
    steady = stream["frames_per_second_after_first_chunk"]
    after = f", {steady:.2f} after the first chunk" if steady is not None else ""
    lines.append(
        f"{stream['frames_per_second']:.2f} frames/s with the filling of the ring{after}; first frame after "
        f"{stream['ttff_ms']:.0f} ms"
    )
    lines.append(
        f"chunk latency {stream['chunk_latency_ms_p50']:.0f} ms (median), {stream['chunk_latency_ms_p95']:.0f} ms "
        f"(95%){_deadline(stream)}; {_count(stream['stalls'], 'stall')}, "
        f"{_count(stream['frames_dropped'], 'frame')} dropped"
    )
    lines.append(_rows(figures))
    busiest = max(stages, key=lambda stage: stage["busy_share"] or 0.0)
    if busiest["busy_share"] is not None:
        lines.append(
            f"the busiest is stage {busiest['stage']} ({busiest['role']}), {busiest['busy_share']:.0%} of the time"
        )
    return lines


def _deadline(stream: dict[str, Any]) -> str:
    if stream["deadline_ms"] is None:
        return ""
    return f", {stream['deadline_hits']} of {stream['chunks']} chunks within {stream['deadline_ms']:g} ms"


def _rows(figures: dict[str, Any]) -> str:
    rows = figures["stream"]["rows"]
    most = int(max(rows, key=lambda count: rows[count]))
    changes = len(figures["tuning"]["decisions"])
    moves = sum(move["before"] is not None for move in figures["balance"])
    statement = figures["tuning"]["statement"]
    parts = [f"mostly {_count(most, 'row')} a launch"]
    parts.append(f"{_count(changes, 'change')} of rows, {_count(moves, 'move')} of layers")
    return "; ".join([*parts, statement] if statement is not None else parts)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
