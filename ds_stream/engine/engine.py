"""``StreamEngine``: a DeepSpeed ``PipelineEngine`` that obeys the temporal schedule on one stage.

It decides nothing. Each handler does what the docstring of its instruction says.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor

from ds_stream.core import Frames, Plan, Row
from ds_stream.engine.groups import without_first_exchange
from ds_stream.engine.links import StageLinks
from ds_stream.engine.plans import PLAN_FIELD, decode_plan, encode_plan
from ds_stream.model.adaptive_sinks import NO_SINK
from ds_stream.model.attention import KeyValue
from ds_stream.model.cache import RollingCache
from ds_stream.model.layers import RowBatch, RowContext, RowContextFactory, latent_shape, message_fields, torch_dtype
from ds_stream.model.noise import keyed_noise
from ds_stream.model.pipeline import StreamModule
from ds_stream.model.vae import VaeState
from ds_stream.schedule import instructions as ins
from ds_stream.schedule.stream_schedule import StreamSchedule
from ds_stream.settings import StreamConfig

FORWARD_TIMER = "stream_forward"
_TICKS_PER_TIMER_READING = 64


class ChunkSource(Protocol):
    """What the first stage asks of the controller."""

    def take_chunk(self, session: int, chunk: int) -> Frames | None:
        """Pixels of a chunk that was planned, or ``None`` where there is no video."""
        ...

    def take_prompt(self, prompt: int) -> Tensor:
        """Text embedding ``[tokens, text_dim]`` of a prompt that was planned."""
        ...


@dataclass(slots=True)
class _Session:
    seed: int
    caches: dict[int, RollingCache]
    encoder: VaeState | None
    decoder: VaeState | None
    sources: dict[int, Tensor] = field(default_factory=dict)
    """Latents of the source chunks in the ring, for a model that takes them; first stage only."""


@dataclass(slots=True)
class _Prompt:
    context: Tensor
    texts: dict[int, KeyValue]


class StreamEngine(PipelineEngine):
    """One stage of the ring.

    Args:
        module: this stage's layers.
        config: the same on every stage, partition resolved.
        deepspeed_config: DeepSpeed's own keys.
        links: to the neighbouring stages.
        source: the controller; first stage only.
        on_frames: takes the decoded pixels of a finished chunk, uint8 ``[T, H, W, 3]``; last stage only.
        enter_phase: told what the stage does next, and whether that is waiting for another rank.
    """

    def __init__(
        self,
        module: StreamModule,
        config: StreamConfig,
        deepspeed_config: dict[str, Any],
        links: StageLinks,
        source: ChunkSource | None = None,
        on_frames: Callable[[Row, Tensor], None] | None = None,
        enter_phase: Callable[[str, bool], None] = lambda _phase, _waiting: None,
    ):
        with without_first_exchange():
            super().__init__(
                args=None,
                model=module,
                mpu=module.mpu(),
                config=deepspeed_config,
                config_class=DeepSpeedConfig(deepspeed_config, module.mpu()),
            )
        self.stream_config = config
        self.links = links
        self.source = source
        self.on_frames = on_frames
        self.enter_phase = enter_phase
        self.layers = module.layers
        self.rows = RowContextFactory(config, [block.index for block in self.layers.blocks], self.device)
        self.num_forwards = 0
        self.num_rows_run = 0
        self.forward_ms = 0.0
        """Time of the forwards that have been read from the timer, in ms."""
        self.peak_cache_bytes = 0
        """Most device memory that rolling caches took, all open sessions together."""
        self._sessions: dict[int, _Session] = {}
        self._prompts: dict[int, _Prompt] = {}
        self._entering: list[Tensor] = []
        self._stepped: list[Tensor] = []
        self._batch: RowBatch | None = None
        self._received: list[Tensor] = []

    @torch.no_grad()
    def run(self, plans: Iterator[Plan] | None = None) -> None:
        """Carry out plans until one stops.

        Args:
            plans: on the first stage, the controller's; elsewhere they come from the previous stage.
        """
        plans = self._received_plans() if plans is None else plans
        num_passes = self.stream_config.noise.num_passes
        self._exec_schedule(StreamSchedule(plans, self.num_stages, self.stage_id, num_passes))
        self.enter_phase("handing over the last messages", True)
        self.links.drain()
        self._read_timer()

    def _received_plans(self) -> Iterator[Plan]:
        assert self.links.plans_in is not None
        while True:
            self.enter_phase(f"waiting for a plan of stage {self.stage_id - 1}", True)
            (message,) = self.links.plans_in.recv([PLAN_FIELD])
            yield decode_plan(message)

    # The links that a stage lacks are those that its schedule never uses: asserts, not checks.

    def _exec_send_plan(self, launch: int, plan: Plan) -> None:
        assert self.links.plans_out is not None
        self.links.plans_out.send([encode_plan(plan)])

    def _exec_open_session(self, launch: int, session: int, seed: int) -> None:
        layers = self.layers
        self._sessions[session] = _Session(
            seed,
            self.rows.new_caches(),
            layers.encode.new_state() if layers.encode else None,
            layers.decode.new_state() if layers.decode else None,
        )
        caches = (cache for state in self._sessions.values() for cache in state.caches.values())
        self.peak_cache_bytes = max(self.peak_cache_bytes, sum(cache.num_bytes for cache in caches))

    def _exec_close_session(self, launch: int, session: int) -> None:
        del self._sessions[session]

    def _exec_embed_prompt(self, launch: int, prompt: int) -> None:
        assert self.source is not None and self.layers.embed is not None
        self._set_prompt(prompt, self.layers.embed.project_text(self.source.take_prompt(prompt)))

    def _exec_recv_prompt(self, launch: int, prompt: int) -> None:
        assert self.links.activations_in is not None
        self.enter_phase(f"waiting for a prompt of stage {self.stage_id - 1}", True)
        model = self.stream_config.model
        (context,) = self.links.activations_in.recv([((model.num_text_tokens, model.dim), self._dtype)])
        self._set_prompt(prompt, context.clone())

    def _set_prompt(self, prompt: int, context: Tensor) -> None:
        self.enter_phase("computing cross-attention keys and values", False)
        texts = {block.index: block.text_key_value(context) for block in self.layers.blocks}
        self._prompts[prompt] = _Prompt(context, texts)

    def _exec_send_prompt(self, launch: int, prompt: int) -> None:
        assert self.links.activations_out is not None
        self.links.activations_out.send([self._prompts[prompt].context])

    def _exec_drop_prompt(self, launch: int, prompt: int) -> None:
        del self._prompts[prompt]

    def _exec_recv_latents(self, launch: int, num_rows: int) -> None:
        assert self.links.latents_in is not None
        self.enter_phase(f"waiting for latents of stage {self.num_stages - 1}", True)
        (latents,) = self.links.latents_in.recv([((num_rows, *latent_shape(self.stream_config)), torch.float32)])
        self._entering = list(latents)

    def _exec_start_chunk(self, launch: int, row: Row) -> None:
        assert self.source is not None
        self.enter_phase(f"encoding chunk {row.chunk}", False)
        frames = self.source.take_chunk(row.session, row.chunk)
        video = None
        if frames is not None:
            session = self._sessions[row.session]
            assert self.layers.encode is not None and session.encoder is not None
            video = self.layers.encode(torch.from_numpy(frames).to(self.device), session.encoder)
            if self.stream_config.model.takes_source:
                session.sources[row.chunk] = video
        self._entering.append(self.rows.noise_schedule.start(self._noise(row, 0), video, row.strength))

    def _exec_recv_activations(self, launch: int, num_rows: int) -> None:
        assert self.links.activations_in is not None
        self.enter_phase(f"waiting for activations of stage {self.stage_id - 1}", True)
        self._received = self.links.activations_in.recv(message_fields(self.stream_config, num_rows))
        if self.stream_config.context.adaptive_sinks:
            # The caches keep it longer than the message's buffer lasts.
            self._received[-1] = self._received[-1].clone()

    def _exec_forward_pass(self, launch: int, rows: tuple[Row, ...]) -> None:
        self.enter_phase(f"forward of {len(rows)} rows", False)
        contexts = [self._context(row) for row in rows]
        tensors = self._received if self._received else [torch.stack(self._entering)]
        timer = self.timers(FORWARD_TIMER)
        timer.start()
        self._batch = self.module.forward(RowBatch(contexts, *tensors))
        timer.stop()
        self._entering, self._received = [], []
        self.num_forwards += 1
        self.num_rows_run += len(rows)
        # The timer keeps every reading until it is read.
        if self.num_forwards % _TICKS_PER_TIMER_READING == 0:
            self._read_timer()

    def _context(self, row: Row) -> RowContext:
        session = self._sessions[row.session]
        source = session.sources.get(row.chunk)
        if row.step == self.stream_config.noise.num_passes - 1:
            session.sources.pop(row.chunk, None)
        return self.rows.make(row, session.caches, self._prompts[row.prompt].texts, source)

    def _exec_send_activations(self, launch: int, num_rows: int) -> None:
        assert self.links.activations_out is not None and self._batch is not None
        batch = self._batch
        assert batch.hidden_RLD is not None and batch.temb_RD is not None and batch.modulation_R6D is not None
        message = [batch.latents_RCNhw, batch.hidden_RLD, batch.temb_RD, batch.modulation_R6D]
        if self.stream_config.context.adaptive_sinks:
            # A stage without a block, ahead of the first one, has nothing decided yet.
            undecided = torch.full((num_rows,), NO_SINK, device=self.device)
            message.append(undecided if batch.sink_choice_R is None else batch.sink_choice_R)
        self.links.activations_out.send(message)

    def _exec_step_latents(self, launch: int, rows: tuple[Row, ...]) -> None:
        assert self._batch is not None and self._batch.flow_RCNhw is not None
        schedule = self.rows.noise_schedule
        self._stepped = [
            schedule.step(
                self._batch.latents_RCNhw[index],
                self._batch.flow_RCNhw[index],
                row.step,
                self._noise(row, row.step + 1) if schedule.needs_noise(row.step) else None,
                row.strength,
            )
            for index, row in enumerate(rows)
        ]

    def _exec_return_latents(self, launch: int, indices: tuple[int, ...]) -> None:
        assert self.links.latents_out is not None
        self.links.latents_out.send([torch.stack([self._stepped[index] for index in indices])])

    def _exec_decode_chunk(self, launch: int, row: Row, index: int) -> None:
        decoder = self._sessions[row.session].decoder
        assert self.layers.decode is not None and decoder is not None and self.on_frames is not None
        self.enter_phase(f"decoding chunk {row.chunk}", False)
        self.on_frames(row, self.layers.decode(self._stepped[index], decoder))

    @property
    def _dtype(self) -> torch.dtype:
        return torch_dtype(self.stream_config)

    def _noise(self, row: Row, step: int) -> Tensor:
        seed = self._sessions[row.session].seed
        return keyed_noise(latent_shape(self.stream_config), seed, row.chunk, step, self.device)

    def _read_timer(self) -> None:
        if FORWARD_TIMER in self.timers.get_timers():
            self.forward_ms += self.timers(FORWARD_TIMER).elapsed(reset=True)

    # All of them are listed again because the stock map holds the base class's functions and is looked up by exact
    # type; instructions of training have no place here.
    _INSTRUCTION_MAP: ClassVar = {
        ins.SendPlan: _exec_send_plan,
        ins.OpenSession: _exec_open_session,
        ins.CloseSession: _exec_close_session,
        ins.EmbedPrompt: _exec_embed_prompt,
        ins.RecvPrompt: _exec_recv_prompt,
        ins.SendPrompt: _exec_send_prompt,
        ins.DropPrompt: _exec_drop_prompt,
        ins.RecvLatents: _exec_recv_latents,
        ins.StartChunk: _exec_start_chunk,
        ins.RecvActivations: _exec_recv_activations,
        ins.ForwardPass: _exec_forward_pass,
        ins.SendActivations: _exec_send_activations,
        ins.StepLatents: _exec_step_latents,
        ins.ReturnLatents: _exec_return_latents,
        ins.DecodeChunk: _exec_decode_chunk,
    }
