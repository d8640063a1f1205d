"""The ``stream`` command line: its options, the config they lead to, and what is wrong with both."""

import argparse
import os
import re
import sys
from fractions import Fraction
from pathlib import Path

from ds_stream import __version__
from ds_stream.config import Config, find_config, load_config
from ds_stream.settings import RANDOM

SYNTHETIC = "synthetic"
"""The ``--input`` that is no file."""
NO_OUTPUT = Path("none")
"""The ``--output`` that is no file."""
_DEFAULT_OUTPUT = Path("ds_stream_output.mp4")


def build_parser(default_config: Path) -> argparse.ArgumentParser:
    """The command line; ``default_config`` is what runs with no arguments."""
    parser = argparse.ArgumentParser(
        prog="stream.py",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Stream a video through a pipeline of video diffusion stages, one per rank.",
        epilog=(
            "deepspeed --num_gpus 4 launch/stream.py --input clip.mp4 --prompt 'charcoal drawing' --output out.mp4\n"
            "Exit codes: 0 done, 1 the run failed (what was done so far is kept as NAME.partial.EXT), "
            "2 a mistake in the command or its files, 130 interrupted."
        ),
    )
    # fmt: off
    parser.add_argument("--config", default=str(default_config), help="JSON file, or the name of one that ships, as in self_forcing_1_3b (default: %(default)s)")  # noqa: E501
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one key of the config, as in stream.batch.max_rows=2; may be given several times")  # noqa: E501
    parser.add_argument("--input", type=Path, help=f"video file, or '{SYNTHETIC}' for moving stripes, with --num-frames (default: a clip that is made on the spot)")  # noqa: E501
    parser.add_argument("--text-only", action="store_true", help="generate from the prompt alone, without a video; needs --num-frames")  # noqa: E501
    parser.add_argument("--num-frames", type=int, help="most frames to take from the input, or how many to generate")
    parser.add_argument("--realtime", action="store_true", help="play the input as if it were a camera: frames come by the clock, and stream.live says what happens to those that find no room")  # noqa: E501
    parser.add_argument("--output", type=Path, default=_DEFAULT_OUTPUT, help=f".mp4 or .mkv file, or '{NO_OUTPUT}' to keep no video (default: %(default)s)")  # noqa: E501
    parser.add_argument("--prompt", default="", help="what the video should look like")
    parser.add_argument("--prompt-at", action="append", default=[], metavar="SECONDS=PROMPT", help="change the prompt at the first chunk from that media time on, as in 3.5='a rainy night'; may be given several times; stream.text.blend_chunks fades")  # noqa: E501
    parser.add_argument("--prompt-embeds", type=Path, metavar="FILE", help="a .safetensors file with the text embedding, instead of --prompt and a text encoder")  # noqa: E501
    parser.add_argument("--seed", type=int, help="seed of the noise (default: the config's, otherwise drawn)")
    parser.add_argument("--report", type=Path, metavar="DIR", help="write what the run did and why it is as fast as it is: DIR/report.html with pictures, report.json with the figures, trace.json for ui.perfetto.dev")  # noqa: E501
    parser.add_argument("--dry-run", action="store_true", help="check config and weights, print the memory plan of each stage, and exit")  # noqa: E501
    parser.add_argument("--print-config", action="store_true", help="print the resolved config and exit")
    parser.add_argument("--print-schedule", action="store_true", help="print which stage runs what at which micro-step, and exit")  # noqa: E501
    parser.add_argument("--num-stages", type=int, help="with --dry-run, --print-config, --print-schedule: for how many stages (default: the ranks started)")  # noqa: E501
    # fmt: on
    parser.add_argument("--version", action="version", version=f"ds_stream {__version__}")
    # Given by the launcher.
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    return parser


def configure(options: argparse.Namespace) -> Config:
    """The config that the options lead to.

    Raises:
        ValueError: options that exclude or lack each other, or a mistake in the config.
    """
    overrides = list(options.set)
    if options.seed is not None:
        overrides.append(f"stream.noise.seed={options.seed}")
    if options.num_frames is not None and options.num_frames < 1:
        raise ValueError(f"--num-frames {options.num_frames}: give at least 1")
    if options.text_only and options.num_frames is None:
        raise ValueError("--text-only has no video to end it: say how long with --num-frames")
    if options.text_only and options.input is not None:
        raise ValueError(f"--text-only and --input {options.input} exclude each other: leave one out")
    if options.text_only and options.realtime:
        raise ValueError("--realtime plays an input by the clock, but --text-only has none: leave one out")
    if is_synthetic(options) and options.num_frames is None:
        raise ValueError(f"--input {SYNTHETIC} has no end: say how long with --num-frames")
    if options.prompt_embeds is not None and (options.prompt or options.prompt_at):
        raise ValueError("--prompt-embeds stands for the prompt: leave out --prompt and --prompt-at, or it")
    if options.prompt_embeds is not None and not os.access(options.prompt_embeds, os.R_OK):
        raise ValueError(f"--prompt-embeds {options.prompt_embeds}: there is no such file that may be read")
    if options.num_stages is not None and options.num_stages < 1:
        raise ValueError(f"--num-stages {options.num_stages}: give at least 1")
    if options.report is not None and options.report.exists() and not options.report.is_dir():
        raise ValueError(f"--report {options.report} is a file; give a folder")
    if options.num_stages is not None and not (options.dry_run or options.print_config or options.print_schedule):
        raise ValueError(
            "--num-stages goes with --dry-run, --print-config or --print-schedule; ranks come from the launcher"
        )
    prompt_changes(options)
    return load_config(find_config(options.config), tuple(overrides))


def is_synthetic(options: argparse.Namespace) -> bool:
    """Whether the input is made of moving stripes."""
    return options.input == Path(SYNTHETIC)


def prompt_changes(options: argparse.Namespace) -> list[tuple[float, str]]:
    """Media time in seconds and prompt of each ``--prompt-at``, in order of time.

    Raises:
        ValueError: one of them is not written ``SECONDS=PROMPT``.
    """
    changes = []
    for text in options.prompt_at:
        found = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*=(.*)", text, flags=re.DOTALL)
        if found is None:
            raise ValueError(f"--prompt-at {text!r}: write seconds from 0 on, =, and the prompt: 3.5='a rainy night'")
        changes.append((float(found[1]), found[2]))
    return sorted(changes, key=lambda change: change[0])


def warn_of_idle_settings(options: argparse.Namespace, config: Config) -> None:
    """Tell what has no effect, or an unlikely one, with these options."""
    noise, max_rows = config.stream.noise, config.stream.batch.max_rows
    if max_rows > noise.num_passes:
        warn(
            f"stream.batch.max_rows is {max_rows}, but one stream has {noise.num_passes} passes a chunk and never "
            "more rows than that"
        )
    if not options.text_only and len(noise.steps) > 1:
        lowest = noise.strength - noise.motion_range * noise.motion_aware
        first, second = int(1000 * lowest) + noise.first_timestep_offset, noise.timesteps[1]
        if first <= second:
            warn(
                f"stream.noise.strength {noise.strength:g} starts at timestep {first}, below the second step "
                f"{second:g}, which adds noise back; lower the later steps too"
            )
    if options.text_only and noise.steps[0] != 1000:
        warn(
            f"stream.noise.steps begins with {noise.steps[0]}, but without a video a chunk starts from pure noise, "
            "which is 1000"
        )
    light = config.stream.light_vae
    if light.use == "no" and light.weights != RANDOM:
        warn(f"stream.light_vae.weights is {light.weights}, but stream.light_vae.use is no, so it is not read")
    if config.stream.text.blend_chunks and not options.prompt_at:
        warn("stream.text.blend_chunks fades prompts that change, but there is no --prompt-at")
    batch, slo, stages = config.stream.batch, config.stream.slo, config.stream.stages
    if not batch.autotune and (slo.chunk_latency_ms is not None or slo.fps is not None):
        warn("stream.slo has a target, but stream.batch.autotune is off: it is reported, not sought")
    if stages.rebalance and options.num_stages == 1:
        warn("stream.stages.rebalance is on, but there is one stage")
    if options.realtime and config.stream.live.when_full == "drop_oldest" and options.output != NO_OUTPUT:
        warn("frames may be dropped (stream.live.when_full), so the output has no sound")
    if options.text_only and noise.motion_aware:
        warn("stream.noise.motion_aware is on, but without a video there is no motion to follow")


def warn_of_late_prompts(options: argparse.Namespace, num_frames: int | None, frame_rate: Fraction) -> None:
    """Tell of prompts whose time never comes, as far as the length of the video is known."""
    if num_frames is None:
        return
    length = float(min(num_frames, options.num_frames or num_frames) / frame_rate)
    for seconds, prompt in prompt_changes(options):
        if seconds >= length:
            warn(f"--prompt-at {seconds:g}={prompt!r} comes after the end of the video, which is {length:.2f} s long")


def warn(message: object) -> None:
    """One line on standard error."""
    print(f"ds_stream: warning: {message}", file=sys.stderr, flush=True)
