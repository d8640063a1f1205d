"""Rings for tests: tiny configs, clips and streams; several stages in one process."""

import functools
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from ds_stream.config import Config, parse_config
from ds_stream.controller.controller import StreamController
from ds_stream.controller.motion import strength_rule
from ds_stream.controller.prompts import PromptTimeline
from ds_stream.controller.regulator import Regulator
from ds_stream.core import ChunkGeometry, Frames, Row, VideoInfo
from ds_stream.engine.engine import StreamEngine
from ds_stream.engine.links import Link, LoopbackChannel, RingLinks, StageLinks
from ds_stream.engine.moves import ChannelMoves
from ds_stream.engine.timings import TimingBoard
from ds_stream.model.pipeline import StreamModule, open_weights
from ds_stream.model.text.hashed import HashedTextEncoder
from ds_stream.partition import Ring
from ds_stream.reference import Reference
from ds_stream.run import make_planner
from ds_stream.schedule.planner import num_message_buffers
from forked import leave_groups, rank_environment

CPU = torch.device("cpu")
LOOPBACK_TIMEOUT_S = 60

# One thread, so that kernels give the same bits in every process, and so that forking after their use is safe.
torch.set_num_threads(1)


def tiny_config(**sections: dict[str, object]) -> Config:
    """A model of a few thousand weights on 32 x 32 pixels; ``sections`` override keys of the ``stream`` section."""
    stream: dict[str, dict[str, object]] = {
        "model": {
            "num_layers": 3,
            "num_heads": 2,
            "head_dim": 12,
            "ffn_dim": 32,
            "text_dim": 8,
            "num_text_tokens": 4,
            "freq_dim": 8,
        },
        "vae": {"base_dim": 2, "num_res_blocks": 1},
        "video": {"width": 32, "height": 32},
        "noise": {"steps": [700, 500, 200]},
        "context": {"num_window_latent_frames": 2, "num_sink_latent_frames": 1},
        "device": {"kind": "cpu"},
    }
    for name, section in sections.items():
        stream.setdefault(name, {}).update(section)
    return parse_config({"stream": stream})


def random_clip(num_frames: int, seed: int = 0, size: tuple[int, int] = (32, 32)) -> Frames:
    """Noise frames ``[num_frames, height, width, 3]``: every frame differs from every other."""
    return np.random.default_rng(seed).integers(0, 256, (num_frames, *size, 3), dtype=np.uint8)


class ArrayReader:
    """A clip in memory as a reader; ``wait`` is called before each read."""

    def __init__(self, frames: Frames, wait: Callable[[], None] = lambda: None):
        self.info = VideoInfo(frames.shape[2], frames.shape[1], Fraction(16), len(frames))
        self._frames = frames
        self._position = 0
        self._wait = wait

    def read(self, num_frames: int) -> Frames:
        self._wait()
        part = self._frames[self._position : self._position + num_frames]
        self._position += len(part)
        return part

    def close(self) -> None:
        pass


@dataclass
class ArrayWriter:
    """Keeps what is written."""

    parts: list[Frames] = field(default_factory=list)

    def write(self, frames: Frames) -> None:
        self.parts.append(frames)

    def finish(self) -> None:
        pass

    def abort(self) -> None:
        pass

    @property
    def frames(self) -> Frames:
        return np.concatenate(self.parts) if self.parts else np.zeros((0, 1, 1, 3), np.uint8)


@dataclass
class Stream:
    """One session of a test: a clip, or ``num_frames`` from the prompt alone."""

    seed: int
    clip: Frames | None
    num_frames: int | None = None
    prompt: str = "red boats"
    wait: Callable[[], None] = lambda: None
    prompts: PromptTimeline | None = None
    """In place of ``prompt``, one that changes."""


def embed(config: Config, prompt: str) -> Tensor:
    model = config.stream.model
    return HashedTextEncoder(model.text_dim, model.num_text_tokens).encode(prompt)


def geometry(config: Config) -> ChunkGeometry:
    return ChunkGeometry(config.stream.context.num_latent_frames_per_chunk)


def make_controller(
    config: Config, num_stages: int, regulator: Regulator | None = None, **callbacks: Callable[..., None]
) -> StreamController:
    return StreamController(make_planner(config.resolve(num_stages).stream), geometry(config), regulator, **callbacks)


def open_streams(controller: StreamController, config: Config, streams: Sequence[Stream]) -> list[ArrayWriter]:
    writers = [ArrayWriter() for _ in streams]
    for session, (stream, writer) in enumerate(zip(streams, writers, strict=True)):
        reader = None if stream.clip is None else ArrayReader(stream.clip, stream.wait)
        prompts = stream.prompts or PromptTimeline(embed(config, stream.prompt))
        rule = strength_rule(config.stream.noise)
        controller.open_session(session, stream.seed, prompts, reader, writer, rule, stream.num_frames)
    return writers


def reference_frames(config: Config, stream: Stream, embedding_of: Callable[[int], Tensor] | None = None) -> Frames:
    """What the oracle makes of ``stream``, trimmed to its frames.

    Args:
        embedding_of: of each chunk's prompt, in place of the stream's.
    """
    num_frames = len(stream.clip) if stream.clip is not None else stream.num_frames
    shape = geometry(config)
    reference = Reference(config.stream, CPU)
    strength = strength_rule(config.stream.noise)

    def chunks():
        for chunk in range(shape.num_chunks(num_frames)):
            first, wanted = shape.first_frame(chunk), shape.num_frames(chunk)
            if stream.clip is None:
                yield None
                continue
            part = stream.clip[first : first + wanted]
            padding = np.repeat(part[-1:], wanted - len(part), axis=0)
            yield torch.from_numpy(np.concatenate((part, padding))), strength(part)

    prompt = embed(config, stream.prompt)
    parts = [
        pixels.numpy()
        for _, pixels in reference.stream(stream.seed, chunks(), embedding_of or (lambda _chunk: prompt))
    ]
    return np.concatenate(parts)[:num_frames] if parts else np.zeros((0, 32, 32, 3), np.uint8)


class MockRing:
    """All stages in this process: engines on torch's fake process group, threads, loopback links."""

    def __init__(
        self,
        config: Config,
        num_stages: int,
        source: StreamController | None = None,
        regulator: Regulator | None = None,
    ):
        self.config = config.resolve(num_stages)
        self.regulator = regulator
        self.controller = source or make_controller(self.config, num_stages, regulator)
        stream = self.config.stream
        links = _loopback_links(num_stages, num_message_buffers(num_stages, stream.limits.max_queued_chunks))
        weights = open_weights(stream)
        self.engines = []
        for rank in range(num_stages):
            _enter_fake_group(rank, num_stages)
            is_last = rank == num_stages - 1
            self.engines.append(
                StreamEngine(
                    StreamModule(stream, weights),
                    stream,
                    self.config.deepspeed,
                    links[rank],
                    source=self.controller if rank == 0 else None,
                    on_frames=self._deliver if is_last else None,
                    on_timings=self._observe if is_last else None,
                )
            )

    def _observe(self, board: TimingBoard) -> None:
        if self.regulator is not None:
            self.regulator.observe(*board.take())

    def _deliver(self, row: Row, frames: Tensor) -> None:
        self.controller.deliver(row.session, row.chunk, frames.numpy())

    def run(self, streams: Sequence[Stream]) -> list[Frames]:
        """Run ``streams`` side by side to their ends."""
        writers = open_streams(self.controller, self.config, streams)
        self.run_engines()
        return [writer.frames for writer in writers]

    def run_engines(self) -> None:
        errors: list[BaseException] = []

        def run(engine: StreamEngine) -> None:
            try:
                engine.run(self.controller.plans() if engine.stage_id == 0 else None)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(engine,), daemon=True) for engine in self.engines]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + LOOPBACK_TIMEOUT_S
        # A stage that failed leaves the others waiting.
        while any(thread.is_alive() for thread in threads) and not errors and time.monotonic() < deadline:
            time.sleep(0.002)
        if errors:
            raise errors[0]
        assert not any(thread.is_alive() for thread in threads), "a stage hangs"


def _loopback_links(num_stages: int, num_buffers: int) -> list[StageLinks]:
    def channel(what: str) -> LoopbackChannel:
        return LoopbackChannel(what, LOOPBACK_TIMEOUT_S)

    def link(channel: LoopbackChannel) -> Link:
        return Link(channel, CPU, num_buffers)

    plans = [link(channel(f"plans to {stage}")) for stage in range(num_stages)]
    forward = [channel(f"activations to {stage}") for stage in range(num_stages)]
    activations, parcels = ([link(each) for each in forward] for _ in range(2))
    moves = {(a, b): channel(f"layers {a} to {b}") for a in range(num_stages) for b in range(num_stages)}
    latents: dict[Ring, Link] = {}
    closing = threading.Lock()

    def close_ring(stage: int, ring: Ring) -> RingLinks:
        with closing:
            returned = latents.setdefault(ring, link(channel("latents")))
        return RingLinks(returned if stage == ring.first else None, returned if stage == ring.last else None)

    return [
        StageLinks(
            plans_in=plans[stage] if stage else None,
            plans_out=plans[stage + 1] if stage + 1 < num_stages else None,
            activations_in=activations[stage] if stage else None,
            activations_out=activations[stage + 1] if stage + 1 < num_stages else None,
            parcels_in=parcels[stage] if stage else None,
            parcels_out=parcels[stage + 1] if stage + 1 < num_stages else None,
            connect_ring=functools.partial(close_ring, stage),
            moves=ChannelMoves(
                lambda other, stage=stage: moves[stage, other], lambda other, stage=stage: moves[other, stage]
            ),
        )
        for stage in range(num_stages)
    ]


def _enter_fake_group(rank: int, num_ranks: int) -> None:
    leave_groups()
    os.environ |= rank_environment(rank, num_ranks, port=1) | {"LOCAL_RANK": "0"}
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    dist.init_process_group("fake", rank=rank, world_size=num_ranks, store=FakeStore())
    deepspeed.init_distributed(dist_backend="fake", verbose=False)
