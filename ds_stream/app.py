"""The ``stream`` command: from the command line to a finished file, on whichever rank this is."""

import argparse
import contextlib
import os
import secrets
import signal
import sys
import threading
import time
import warnings
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_stream.cli import (
    NO_OUTPUT,
    build_parser,
    configure,
    is_synthetic,
    prompt_changes,
    warn,
    warn_of_idle_settings,
    warn_of_late_prompts,
)
from ds_stream.config import Config
from ds_stream.core import (
    DEFAULT_FRAME_RATE,
    EXIT_FAILED,
    EXIT_USAGE,
    ChunkGeometry,
    FrameReader,
    FrameWriter,
    RankInfo,
    StreamError,
)
from ds_stream.device import prepare_device
from ds_stream.summary import describe_run, say_what_was_done

if TYPE_CHECKING:
    from ds_stream.controller.prompts import PromptTimeline
    from ds_stream.model.layer_times import LayerTimes
    from ds_stream.model.memory_plan import StageMemory
    from ds_stream.model.weights.load import ModelWeights
    from ds_stream.run import StreamRequest

_DEMO_CLIP = "ds_stream_demo_input.mp4"
_ENDING_SIGNALS = {signal.SIGINT, signal.SIGTERM}
_SAVING_S = 3.0
_WATCHDOG_SPEAKS_S = 1.0
_OTHERS_HEAR_S = 0.3


def main(argv: list[str], default_config: Path) -> int:
    """Run one rank; returns its exit code. Only the first rank speaks."""
    info = RankInfo.from_environment()
    with contextlib.nullcontext() if info.rank == 0 else _silence():
        options = build_parser(default_config).parse_args(argv)
    if info.rank == 0:
        # Warnings of the parts look like those of the command, and speak for all ranks.
        warnings.showwarning = lambda message, *_, **__: warn(message)
    else:
        warnings.simplefilter("ignore")
    try:
        config = configure(options)
        if options.print_config or options.print_schedule:
            if info.rank == 0:
                _print_plan(options, config, options.num_stages or info.num_ranks)
            return 0
        if options.dry_run:
            if info.rank == 0:
                _dry_run(options, config, options.num_stages or info.num_ranks, info)
            return 0
        return _stream(options, config, info)
    except (ValueError, StreamError) as error:
        if info.rank == 0:
            print(f"ds_stream: {error}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, ValueError) else EXIT_FAILED


def _print_plan(options: argparse.Namespace, config: Config, num_stages: int) -> None:
    resolved = config.resolve(num_stages)
    if options.print_config:
        print(resolved.to_json())
    if options.print_schedule:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        from ds_stream.schedule.grid import describe_schedule

        stream = resolved.stream
        assert stream.stages.partition != "auto", "resolved"
        ring = stream.layers.ring_of(stream.stages.partition)
        noise, context = stream.noise, stream.context
        print(describe_schedule(num_stages, ring, noise.num_passes, context.lead, stream.batch.max_rows))


def _dry_run(options: argparse.Namespace, config: Config, num_stages: int, info: RankInfo) -> None:
    """Everything that a run checks before it loads."""
    will_measure = _is_calibrated(config, num_stages)
    config = config.resolve(num_stages)
    prepare_device(config)
    from ds_stream.memory import check_memory
    from ds_stream.model.pipeline import open_weights
    from ds_stream.model.text.encode import read_embedding

    open_weights(config.stream)
    if options.prompt_embeds is not None:
        read_embedding(options.prompt_embeds, config.stream)
    plan = _plan_memory(options, config)
    if will_measure:
        print("boundaries as planned; the start of a run measures the layers and may cut them elsewhere")
    try:
        check_memory(plan, config.stream, info)
    except ValueError as error:
        warn(f"this machine will not do: {error}")


def _stream(options: argparse.Namespace, config: Config, info: RankInfo) -> int:
    is_calibrated = _is_calibrated(config, info.num_ranks)
    config = config.resolve(info.num_ranks)
    reader: FrameReader | None = None
    writer: FrameWriter | None = None
    # The launch script has done so before its imports, for threads that those start.
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING_SIGNALS)
    if info.rank == 0:
        warn_of_idle_settings(options, config)
        # One rank draws the seed; the others learn it when the session opens.
        config = config if config.stream.noise.seed is not None else config.with_seed(secrets.randbelow(2**31))
        reader, writer = _open_media(options, config)
    interrupted = threading.Event()
    threading.Thread(target=_end_on_signal, args=(writer, interrupted), name="signals", daemon=True).start()
    prepare_device(config)
    # Torch and DeepSpeed take seconds to import: mistakes in the command should not wait for them.
    from ds_stream.memory import memory_limit
    from ds_stream.model.pipeline import open_weights
    from ds_stream.run import run_rank

    request = None
    try:
        weights = open_weights(config.stream)
        if writer is not None:
            layer_times = None
            if is_calibrated:
                config, layer_times = _calibrate(config, info, weights)
            request = _make_request(options, config, info, weights, reader, writer)
            request = replace(
                request,
                layer_times=layer_times,
                memory=memory_limit(config.stream, info),
                keep_history=options.report is not None,
            )
    except (ValueError, StreamError):
        if writer is not None:
            writer.abort()
        raise
    result = run_rank(config, info, weights, request, interrupted)
    if result is None or writer is None:
        return 0
    if reader is not None:
        reader.close()
    if result.figures["stream"]["frames"] == 0:
        writer.abort()
        why = result.input_error or f"input {options.input} has no frame that can be decoded"
        raise StreamError(f"{why}; there is no output")
    writer.finish()
    say_what_was_done(options, config, result, weights.random_parts)
    if result.input_error is not None:
        print(f"ds_stream: {result.input_error}", file=sys.stderr)
        return EXIT_FAILED
    return 0


def _is_calibrated(config: Config, num_stages: int) -> bool:
    """Whether a start measures the layers to find the boundaries of ``config``, which is not resolved."""
    stages = config.stream.stages
    return stages.partition == "auto" and stages.calibrate and num_stages > 1


def _calibrate(config: Config, info: RankInfo, weights: "ModelWeights") -> "tuple[Config, LayerTimes | None]":
    """Layer boundaries by measured times, on the first rank, before anything is loaded."""
    import torch

    from ds_stream.controller.stage_balancer import StreamShape, balance
    from ds_stream.engine.groups import choose_placement
    from ds_stream.memory import memory_limit
    from ds_stream.model.layer_times import measure_layers

    stream = config.stream
    torch.set_num_threads(stream.device.cpu_threads_per_rank)
    try:
        times = measure_layers(
            stream, weights, choose_placement(stream, info).device, sorted({1, stream.batch.max_rows})
        )
    except torch.OutOfMemoryError:
        warn("layers could not be measured for lack of memory, so blocks are spread evenly")
        return config, None
    layer_ms = times.by_rows[stream.batch.max_rows]
    shape = StreamShape(stream.noise.num_passes, stream.context.lead, stream.batch.max_rows)
    best = balance(stream.layers, layer_ms, shape, info.num_ranks, memory=memory_limit(stream, info))
    if best is None:
        return config, times
    print(f"ds_stream: layers measured on {times.device}; stages cut at {list(best.partition)}", flush=True)
    return config.with_partition(best.partition), times


def _make_request(
    options: argparse.Namespace,
    config: Config,
    info: RankInfo,
    weights: "ModelWeights",
    reader: FrameReader | None,
    writer: FrameWriter,
) -> "StreamRequest":
    """What the first rank streams, once everything that can be checked without loading is in order."""
    from ds_stream.memory import check_memory
    from ds_stream.run import StreamRequest

    if weights.random_parts and len(weights.random_parts) < len(weights.checkpoints):
        warn(f"the weights of {', '.join(weights.random_parts)} are random while others are not; name their files")
    check_memory(_plan_memory(options, config), config.stream, info)
    frame_rate = DEFAULT_FRAME_RATE if reader is None else reader.info.frame_rate
    warn_of_late_prompts(options, options.num_frames if reader is None else reader.info.num_frames, frame_rate)
    prompts = _make_timeline(options, config, info, frame_rate)
    return StreamRequest(prompts, reader, writer, options.num_frames)


def _plan_memory(options: argparse.Namespace, config: Config) -> "list[StageMemory]":
    """Print what each stage will hold, and the text encoder before them, whose files are looked for."""
    from ds_stream.memory import print_memory_plan
    from ds_stream.model.text.encode import text_encoder_bytes

    needs_encoder = options.prompt_embeds is None
    return print_memory_plan(config.stream, text_encoder_bytes(config.stream) if needs_encoder else 0)


def _make_timeline(
    options: argparse.Namespace, config: Config, info: RankInfo, frame_rate: Fraction
) -> "PromptTimeline":
    """The embeddings of all prompts, each where it begins. The text encoder is gone when this returns."""
    import torch

    from ds_stream.controller.prompts import PromptTimeline, chunk_at
    from ds_stream.engine.groups import choose_placement
    from ds_stream.model.text.encode import encode_all, read_embedding

    text = config.stream.text
    if options.prompt_embeds is not None:
        return PromptTimeline(read_embedding(options.prompt_embeds, config.stream))
    changes = prompt_changes(options)
    device = torch.device("cpu") if text.device == "cpu" else choose_placement(config.stream, info).device
    try:
        first, *later = encode_all(config.stream, [options.prompt, *(prompt for _, prompt in changes)], device)
    except torch.OutOfMemoryError as error:
        raise StreamError(
            f"the text encoder does not fit on {device}; set stream.text.device to cpu, or give --prompt-embeds"
        ) from error
    timeline = PromptTimeline(first, text.blend_chunks, text.blend)
    geometry = ChunkGeometry(config.stream.context.num_latent_frames_per_chunk)
    for (seconds, _), embedding in zip(changes, later, strict=True):
        timeline.change(chunk_at(seconds, float(frame_rate), geometry), embedding)
    return timeline


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
    from ds_stream.media.synthetic import SyntheticReader, make_demo_clip
    from ds_stream.media.writer import NoWriter, VideoWriter

    video, live = config.stream.video, config.stream.live
    source = None if is_synthetic(options) else options.input
    has_output = options.output != NO_OUTPUT
    if has_output:
        VideoWriter.check_path(options.output, source)
    if options.input is None and not options.text_only:
        source = (options.output.parent if has_output else Path()) / _DEMO_CLIP
        make_demo_clip(source)
        print(f"ds_stream: no --input, so this one was made: {source}", flush=True)
    reader: FrameReader | None = None
    if is_synthetic(options):
        reader = SyntheticReader(video.width, video.height, options.num_frames)
    elif source is not None:
        reader = VideoReader(source, video.width, video.height, video.fit)
    may_drop = options.realtime and live.when_full == "drop_oldest"
    if reader is not None and options.realtime:
        from ds_stream.media.live import RealtimeReader

        reader = RealtimeReader(reader, live)
    if not has_output:
        return reader, NoWriter()
    writer = VideoWriter(
        options.output,
        DEFAULT_FRAME_RATE if reader is None else reader.info.frame_rate,
        video.width,
        video.height,
        # Sound would run ahead of pictures of which some are missing.
        audio_from=None if may_drop else source,
        metadata={"comment": describe_run(options, config)},
    )
    return reader, writer


@contextlib.contextmanager
def _silence() -> Any:
    """Let a rank that is not the first make the first one's mistakes without a word."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere), contextlib.redirect_stdout(nowhere):
        yield
