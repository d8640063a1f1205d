"""What a run tells of itself: in the file's metadata, in the report, and at the end on the screen."""

import argparse
import hashlib
import json
from typing import TYPE_CHECKING

from ds_stream import __version__
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
    if options.report is not None:
        options.report.mkdir(parents=True, exist_ok=True)
        report = {
            "version": __version__,
            "config": json.loads(config.to_json()),
            "config_digest": config.digest,
            "prompt": options.prompt,
            "prompt_at": options.prompt_at,
            "stream": result.stream,
            "stages": result.stages,
        }
        (options.report / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    if random_parts:
        parts = ", ".join(random_parts)
        print(f"ds_stream: the weights are random ({parts}), so the picture is abstract; the pipeline works")
    print(f"ds_stream: {_figures(result, config.digest)}")
    print(f"ds_stream: output: {options.output.resolve()}", flush=True)


def _figures(result: "RunResult", digest: str) -> str:
    stream = result.stream
    stages = "1 stage" if len(result.stages) == 1 else f"{len(result.stages)} stages"
    parts = [f"{stream['frames']} frames on {stages}, seed {stream['seed']}, config {digest}"]
    if stream["frames_per_second"] is not None:
        parts.append(f"{stream['frames_per_second']:.2f} frames/s with the filling of the ring")
        parts.append(f"first frame after {stream['ttff_ms']:.0f} ms")
        parts.append(f"chunk latency {stream['chunk_latency_ms_p50']:.0f} ms (median)")
    return "; ".join(parts)
