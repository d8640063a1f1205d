"""The ``stream`` command: from the command line to a finished file, on whichever rank this is."""

import argparse
import contextlib
import json
import os
import secrets
import signal
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_stream import __version__
from ds_stream.config import Config, load_config
from ds_stream.core import EXIT_FAILED, EXIT_USAGE, FrameReader, FrameWriter, RankInfo, StreamError

if TYPE_CHECKING:
    from ds_stream.run import RunResult

DEFAULT_OUTPUT = Path("ds_stream_output.mp4")
_DEMO_CLIP = "ds_stream_demo_input.mp4"
_ENDING_SIGNALS = {signal.SIGINT, signal.SIGTERM}
_SAVING_S = 3.0
_WATCHDOG_SPEAKS_S = 1.0
_OTHERS_HEAR_S = 0.3


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
    parser.add_argument("--config", type=Path, default=default_config, help="JSON file (default: %(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one key of the config, as in stream.batch.max_rows=2; may be given several times")  # fmt: skip # noqa: E501
    parser.add_argument("--input", type=Path, help="video file (default: a clip that is made on the spot)")
    parser.add_argument("--text-only", action="store_true", help="generate from the prompt alone, without a video; needs --num-frames")  # fmt: skip # noqa: E501
    parser.add_argument("--num-frames", type=int, help="most frames to take from the input, or how many to generate")
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, help=".mp4 or .mkv file (default: %(default)s)")
    parser.add_argument("--prompt", default="", help="what the video should look like")
    parser.add_argument("--seed", type=int, help="seed of the noise (default: the config's, otherwise drawn)")
    parser.add_argument("--report", type=Path, metavar="DIR", help="write DIR/report.json with the run's figures")
    parser.add_argument("--print-config", action="store_true", help="print the resolved config and exit")
    parser.add_argument("--print-schedule", action="store_true", help="print which stage runs what at which micro-step, and exit")  # fmt: skip # noqa: E501
    parser.add_argument("--num-stages", type=int, help="with --print-config and --print-schedule: for how many stages (default: the ranks started)")  # fmt: skip # noqa: E501
    parser.add_argument("--version", action="version", version=f"ds_stream {__version__}")
    # Given by the launcher.
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    return parser


def main(argv: list[str], default_config: Path) -> int:
    """Run one rank; returns its exit code. Only the first rank speaks."""
    info = RankInfo.from_environment()
    with contextlib.nullcontext() if info.rank == 0 else _silence():
        options = build_parser(default_config).parse_args(argv)
    try:
        config = _configure(options, info)
        if options.print_config or options.print_schedule:
            if info.rank == 0:
                _print_plan(options, config, options.num_stages or info.num_ranks)
            return 0
        return _stream(options, config.resolve(info.num_ranks), info)
    except (ValueError, StreamError) as error:
        if info.rank == 0:
            print(f"ds_stream: {error}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, ValueError) else EXIT_FAILED


def _configure(options: argparse.Namespace, info: RankInfo) -> Config:
    overrides = list(options.set)
    if options.seed is not None:
        overrides.append(f"stream.noise.seed={options.seed}")
    if options.num_frames is not None and options.num_frames < 1:
        raise ValueError(f"--num-frames {options.num_frames}: give at least 1")
    if options.text_only and options.num_frames is None:
        raise ValueError("--text-only has no video to end it: say how long with --num-frames")
    if options.text_only and options.input is not None:
        raise ValueError(f"--text-only and --input {options.input} exclude each other: leave one out")
    if options.num_stages is not None and options.num_stages < 1:
        raise ValueError(f"--num-stages {options.num_stages}: give at least 1")
    if options.report is not None and options.report.exists() and not options.report.is_dir():
        raise ValueError(f"--report {options.report} is a file; give a folder")
    if options.num_stages is not None and not (options.print_config or options.print_schedule):
        raise ValueError("--num-stages goes with --print-config or --print-schedule; ranks come from the launcher")
    return load_config(options.config, tuple(overrides))


def _warn_of_idle_settings(options: argparse.Namespace, config: Config) -> None:
    noise, max_rows = config.stream.noise, config.stream.batch.max_rows
    if max_rows > noise.num_passes:
        _warn(
            f"stream.batch.max_rows is {max_rows}, but one stream has {noise.num_passes} passes a chunk and never "
            "more rows than that"
        )
    if not options.text_only and len(noise.steps) > 1:
        first = int(1000 * noise.strength) + noise.first_timestep_offset
        if first <= noise.steps[1]:
            _warn(
                f"stream.noise.strength {noise.strength:g} starts at timestep {first}, below the second step "
                f"{noise.steps[1]}, which adds noise back; lower the later steps too"
            )
    if options.text_only and noise.steps[0] != 1000:
        _warn(
            f"stream.noise.steps begins with {noise.steps[0]}, but without a video a chunk starts from pure noise, "
            "which is 1000"
        )


def _warn(message: object) -> None:
    print(f"ds_stream: warning: {message}", file=sys.stderr, flush=True)


def _print_plan(options: argparse.Namespace, config: Config, num_stages: int) -> None:
    resolved = config.resolve(num_stages)
    if options.print_config:
        print(resolved.to_json())
    if options.print_schedule:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        from ds_stream.schedule.grid import describe_schedule

        stream = resolved.stream
        print(describe_schedule(num_stages, stream.noise.num_passes, stream.context.lead, stream.batch.max_rows))


def _stream(options: argparse.Namespace, config: Config, info: RankInfo) -> int:
    reader: FrameReader | None = None
    writer: FrameWriter | None = None
    # The launch script has done so before its imports, for threads that those start.
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING_SIGNALS)
    if info.rank == 0:
        # Warnings of the parts look like those of the command.
        warnings.showwarning = lambda message, *_, **__: _warn(message)
        _warn_of_idle_settings(options, config)
        # One rank draws the seed; the others learn it when the session opens.
        config = config if config.stream.noise.seed is not None else config.with_seed(secrets.randbelow(2**31))
        reader, writer = _open_media(options, config)
    interrupted = threading.Event()
    threading.Thread(target=_end_on_signal, args=(writer, interrupted), name="signals", daemon=True).start()
    if config.stream.device.kind == "cpu" or not _has_gpu():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # Torch and DeepSpeed take seconds to import: mistakes in the command should not wait for them.
    from ds_stream.run import StreamRequest, run_rank

    request = None if writer is None else StreamRequest(options.prompt, reader, writer, options.num_frames)
    result = run_rank(config, info, request, interrupted)
    if result is None or writer is None:
        return 0
    if reader is not None:
        reader.close()
    if result.stream["frames"] == 0:
        writer.abort()
        why = result.input_error or f"input {options.input} has no frame that can be decoded"
        raise StreamError(f"{why}; there is no output")
    writer.finish()
    _say_what_was_done(options, config, result)
    if result.input_error is not None:
        print(f"ds_stream: {result.input_error}", file=sys.stderr)
        return EXIT_FAILED
    return 0


def _end_on_signal(writer: FrameWriter | None, interrupted: threading.Event) -> None:
    """Let Ctrl-C and the launcher's SIGTERM end this rank, even while it waits in foreign code."""
    received = signal.sigwait(_ENDING_SIGNALS)
    if received == signal.SIGTERM:
        # The launcher sends it when a rank is gone: leave the watchdog time to say which.
        time.sleep(_WATCHDOG_SPEAKS_S)
    interrupted.set()
    # All ranks are told at once: none should take another's end for a failure.
    time.sleep(_OTHERS_HEAR_S)
    if writer is not None:
        saving = threading.Thread(target=writer.abort, daemon=True)
        saving.start()
        saving.join(_SAVING_S)
        if received == signal.SIGINT:
            print(
                "\nds_stream: interrupted; what was done so far is kept as a partial file", file=sys.stderr, flush=True
            )
    os._exit(128 + received)


def _open_media(options: argparse.Namespace, config: Config) -> tuple[FrameReader | None, FrameWriter]:
    from ds_stream.media.reader import VideoReader
    from ds_stream.media.synthetic import DEFAULT_FRAME_RATE, make_demo_clip
    from ds_stream.media.writer import VideoWriter

    video = config.stream.video
    source = options.input
    VideoWriter.check_path(options.output, source)
    if source is None and not options.text_only:
        source = options.output.parent / _DEMO_CLIP
        make_demo_clip(source)
        print(f"ds_stream: no --input, so this one was made: {source}", flush=True)
    reader = None if source is None else VideoReader(source, video.width, video.height, video.fit)
    writer = VideoWriter(
        options.output,
        DEFAULT_FRAME_RATE if reader is None else reader.info.frame_rate,
        video.width,
        video.height,
        audio_from=source,
        metadata={"comment": f"ds_stream {__version__}; prompt: {options.prompt}; seed: {config.stream.noise.seed}"},
    )
    return reader, writer


def _say_what_was_done(options: argparse.Namespace, config: Config, result: "RunResult") -> None:
    if options.report is not None:
        options.report.mkdir(parents=True, exist_ok=True)
        report = {
            "version": __version__,
            "config": json.loads(config.to_json()),
            "stream": result.stream,
            "stages": result.stages,
        }
        (options.report / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    if config.stream.model.weights == "random":
        print("ds_stream: the weights are random, so the picture is abstract; it shows that the pipeline works")
    print(f"ds_stream: {_figures(result)}")
    print(f"ds_stream: output: {options.output.resolve()}", flush=True)


def _figures(result: "RunResult") -> str:
    stream = result.stream
    stages = "1 stage" if len(result.stages) == 1 else f"{len(result.stages)} stages"
    parts = [f"{stream['frames']} frames on {stages}, seed {stream['seed']}"]
    if stream["frames_per_second"] is not None:
        parts.append(f"{stream['frames_per_second']:.2f} frames/s with the filling of the ring")
        parts.append(f"first frame after {stream['ttff_ms']:.0f} ms")
        parts.append(f"chunk latency {stream['chunk_latency_ms_p50']:.0f} ms (median)")
    return "; ".join(parts)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@contextlib.contextmanager
def _silence() -> Any:
    """Let a rank that is not the first make the first one's mistakes without a word."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere), contextlib.redirect_stdout(nowhere):
        yield
