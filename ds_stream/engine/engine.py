"""``StreamEngine``: a DeepSpeed ``PipelineEngine`` that obeys the temporal schedule on one stage.

It decides nothing. Each handler does what the docstring of its instruction says.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Protocol

import torch
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor

from ds_stream.core import Frames, Plan, Row
from ds_stream.engine.groups import without_first_exchange
from ds_stream.engine.links import Field, Link, StageLinks
from ds_stream.engine.plans import PLAN_FIELD, decode_plan, encode_plan
from ds_stream.engine.stage_state import StageState
from ds_stream.engine.timers import DECODE, ENCODE, FORWARD, SEND, WAIT, StageTimers
from ds_stream.engine.timings import RECORDS_PER_STAGE, TimingBoard
from ds_stream.model.adaptive_sinks import NO_SINK
from ds_stream.model.layers import RowBatch, latent_shape, message_fields, torch_dtype
from ds_stream.model.noise import NoiseSchedule, keyed_noise
from ds_stream.model.pipeline import StreamModule, decoder_input_field
from ds_stream.partition import ENCODE as ENCODE_LAYER
from ds_stream.partition import stage_layers, stage_of
from ds_stream.schedule import instructions as ins
from ds_stream.schedule.stream_schedule import StreamSchedule
from ds_stream.settings import StreamConfig


class ChunkSource(Protocol):
    """What the first stage asks of the controller."""

    def take_chunk(self, session: int, chunk: int) -> Frames:
        """Pixels of a chunk that was planned, and has video."""
        ...

    def take_prompt(self, prompt: int) -> Tensor:
        """Text embedding ``[tokens, text_dim]`` of a prompt that was planned."""
        ...


class StreamEngine(PipelineEngine):
    """One stage of the pipeline.

    Args:
        module: this stage's layers.
        config: the same on every stage, partition resolved.
        deepspeed_config: DeepSpeed's own keys.
        links: to the other stages.
        source: the controller; first stage only.
        on_frames: takes the decoded pixels of a finished chunk, uint8 ``[T, H, W, 3]``; last stage only.
        on_timings: takes what all stages have timed, once for each plan; last stage only.
        enter_phase: told what the stage does next, and whether that is waiting for another rank.
        keep_spans: whether stretches of time are kept for pictures.
    """

    def __init__(
        self,
        module: StreamModule,
        config: StreamConfig,
        deepspeed_config: dict[str, Any],
        links: StageLinks,
        source: ChunkSource | None = None,
        on_frames: Callable[[Row, Tensor], None] | None = None,
        on_timings: Callable[[TimingBoard], None] | None = None,
        enter_phase: Callable[[str, bool], None] = lambda _phase, _waiting: None,
        keep_spans: bool = False,
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
        self.on_timings = on_timings
        self.enter_phase = enter_phase
        self.state = StageState(module.layers, config, self.device)
        self.stage_timers = StageTimers(self.stage_id, self.device, keep_spans)
        self.num_rows_run = 0
        """Rows of all forwards."""
        self._board = TimingBoard(self.num_stages, config.layers.num_layers)
        self._entering: list[Tensor] = []
        self._stepped: list[Tensor] = []
        self._batch: RowBatch | None = None
        self._received: list[Tensor] = []
        self._videos: dict[tuple[int, int], Tensor] = {}
        self._finished: Tensor | None = None
        self._connect_ring()

    @torch.no_grad()
    def run(self, plans: Iterator[Plan] | None = None) -> None:
        """Carry out plans until one stops.

        Args:
            plans: on the first stage, the controller's; elsewhere they come from the previous stage.
        """
        plans = self._received_plans() if plans is None else self._awaited_plans(plans)
        config = self.stream_config
        partition = self.module.partition
        self._exec_schedule(StreamSchedule(plans, config.layers, partition, self.stage_id, config.noise.num_passes))
        self.enter_phase("handing over the last messages", True)
        self.links.drain()
        if self._ring_links.latents_out is not None:
            self._ring_links.latents_out.drain()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.stage_timers.finish()

    def _received_plans(self) -> Iterator[Plan]:
        assert self.links.plans_in is not None
        while True:
            self.enter_phase(f"waiting for a plan of stage {self.stage_id - 1}", True)
            began = time.perf_counter()
            message, *timings = self.links.plans_in.recv([PLAN_FIELD, *self._board.fields])
            self.stage_timers.host_waited(began)
            self._board.load(timings)
            yield decode_plan(message)

    def _awaited_plans(self, plans: Iterator[Plan]) -> Iterator[Plan]:
        while True:
            began = time.perf_counter()
            plan = next(plans, None)
            if plan is None:
                return
            self.stage_timers.host_waited(began)
            self._board.clear()
            yield plan

    def _connect_ring(self) -> None:
        ring = self.stream_config.layers.ring_of(self.module.partition)
        self._ring_links = self.links.connect_ring(ring)

    # The links that a stage lacks are those that its schedule never uses: asserts, not checks.

    def _exec_send_plan(self, launch: int, plan: Plan) -> None:
        assert self.links.plans_out is not None
        self._begin_launch(launch, len(plan.rows))
        self.links.plans_out.send([encode_plan(plan), *self._board.tensors])

    def _exec_return_timings(self, launch: int, num_rows: int) -> None:
        assert self.on_timings is not None
        self._begin_launch(launch, num_rows)
        self.on_timings(self._board)

    def _begin_launch(self, launch: int, num_rows: int) -> None:
        """All that is timed from here on is this launch's; what was timed before goes on the board."""
        self.stage_timers.begin(launch, num_rows)
        self._board.put(*self.stage_timers.read(RECORDS_PER_STAGE))

    def _exec_repartition(self, launch: int, partition: tuple[int, ...]) -> None:
        moves, before = self.links.moves, self.module.partition
        assert moves is not None
        own = stage_layers(partition, self.stage_id)
        self.enter_phase("handing layers over", False)
        for index in self.module.layers.by_index:
            if index not in own:
                moves.send(stage_of(partition, index), self.state.give(index))
        arrived, states = {}, {}
        for index in own:
            if index in self.module.layers.by_index:
                continue
            source = stage_of(before, index)
            self.enter_phase(f"waiting for a layer of stage {source}", True)
            states[index] = moves.recv(source)
            arrived[index] = self.module.build_moved(index, states[index].pop("parameters"), self.device)
        self.module.repartition(partition, arrived)
        # DeepSpeed keeps a name for each parameter, and with it the parameter.
        self.param_names = {parameter: name for name, parameter in self.module.named_parameters()}
        self.state.layers = self.module.layers
        for index, layer in arrived.items():
            self.state.take(index, layer, states[index])
        self.enter_phase("handing layers over", True)
        moves.drain()
        self._connect_ring()

    def _exec_open_session(self, launch: int, session: int, seed: int) -> None:
        self.state.open(session, seed)

    def _exec_close_session(self, launch: int, session: int) -> None:
        self.state.close(session)

    def _exec_send_embedding(self, launch: int, prompt: int) -> None:
        assert self.source is not None
        self._send_parcel(self.source.take_prompt(prompt).to(self.device, torch.float32))

    def _exec_embed_prompt(self, launch: int, prompt: int) -> None:
        model = self.stream_config.model
        if self.source is not None:
            embedding = self.source.take_prompt(prompt)
        else:
            embedding = self._recv_parcel("a prompt", (model.num_text_tokens, model.text_dim), torch.float32)
        assert self.module.layers.embed is not None
        self._set_prompt(prompt, self.module.layers.embed.project_text(embedding))

    def _exec_recv_prompt(self, launch: int, prompt: int) -> None:
        model = self.stream_config.model
        self._set_prompt(prompt, self._recv_parcel("a prompt", (model.num_text_tokens, model.dim), self._dtype))

    def _set_prompt(self, prompt: int, context: Tensor) -> None:
        self.enter_phase("computing cross-attention keys and values", False)
        self.state.set_prompt(prompt, context)
        self._prompt_context = context

    def _exec_send_prompt(self, launch: int, prompt: int) -> None:
        self._send_parcel(self._prompt_context)

    def _exec_drop_prompt(self, launch: int, prompt: int) -> None:
        self.state.drop_prompt(prompt)

    def _exec_encode_chunk(self, launch: int, row: Row) -> None:
        assert self.source is not None and self.module.layers.encode is not None
        self.enter_phase(f"encoding chunk {row.chunk}", False)
        frames = _upload(torch.from_numpy(self.source.take_chunk(row.session, row.chunk)), self.device)
        start = self.stage_timers.start()
        state = self.state.sessions[row.session].encoder
        self._videos[row.session, row.chunk] = self.module.layers.encode(frames, state)
        self.stage_timers.layer_marker(start, 1, is_pass=False)(ENCODE_LAYER)
        self.stage_timers.stop(ENCODE, start)

    def _exec_send_video(self, launch: int, row: Row) -> None:
        self._send_parcel(self._videos.pop((row.session, row.chunk)))

    def _exec_recv_video(self, launch: int, row: Row) -> None:
        shape = latent_shape(self.stream_config)
        self._videos[row.session, row.chunk] = self._recv_parcel("an encoded chunk", shape, torch.float32)

    def _exec_recv_latents(self, launch: int, num_rows: int) -> None:
        assert self._ring_links.latents_in is not None
        fields = [((num_rows, *latent_shape(self.stream_config)), torch.float32)]
        (latents,) = self._recv(self._ring_links.latents_in, "latents of the last ring stage", fields)
        self._entering = list(latents)

    def _exec_start_chunk(self, launch: int, row: Row) -> None:
        video = self._videos.pop((row.session, row.chunk), None)
        if video is not None and self.stream_config.model.takes_source:
            self.state.sessions[row.session].sources[row.chunk] = video
        self._entering.append(self._noise_schedule.start(self._noise(row, 0), video, row.strength))

    def _exec_recv_activations(self, launch: int, num_rows: int) -> None:
        assert self.links.activations_in is not None
        fields = message_fields(self.stream_config, num_rows)
        self._received = self._recv(self.links.activations_in, f"activations of stage {self.stage_id - 1}", fields)
        if self.stream_config.context.adaptive_sinks:
            # The caches keep it longer than the message's buffer lasts.
            self._received[-1] = self._received[-1].clone()

    def _exec_forward_pass(self, launch: int, rows: tuple[Row, ...]) -> None:
        self.enter_phase(f"forward of {len(rows)} rows", False)
        start = self.stage_timers.start()
        contexts = [self.state.context(row) for row in rows]
        tensors = self._received if self._received else [torch.stack(self._entering)]
        on_layer = self.stage_timers.layer_marker(start, len(rows), is_pass=True)
        self._batch = self.module.forward(RowBatch(contexts, *tensors), on_layer)
        self.stage_timers.stop(FORWARD, start)
        self._entering, self._received = [], []
        self.num_rows_run += len(rows)

    def _exec_send_activations(self, launch: int, num_rows: int) -> None:
        assert self.links.activations_out is not None and self._batch is not None
        batch = self._batch
        assert batch.hidden_RLD is not None and batch.temb_RD is not None and batch.modulation_R6D is not None
        message = [batch.latents_RCNhw, batch.hidden_RLD, batch.temb_RD, batch.modulation_R6D]
        if self.stream_config.context.adaptive_sinks:
            # A stage without a block, ahead of the first one, has nothing decided yet.
            undecided = torch.full((num_rows,), NO_SINK, device=self.device)
            message.append(undecided if batch.sink_choice_R is None else batch.sink_choice_R)
        self._send(self.links.activations_out, message)

    def _exec_step_latents(self, launch: int, rows: tuple[Row, ...]) -> None:
        assert self._batch is not None and self._batch.flow_RCNhw is not None
        schedule = self._noise_schedule
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
        assert self._ring_links.latents_out is not None
        self._send(self._ring_links.latents_out, [torch.stack([self._stepped[index] for index in indices])])

    def _exec_take_finished(self, launch: int, row: Row, index: int) -> None:
        self._finished = self._stepped[index]

    def _exec_recv_finished(self, launch: int, row: Row) -> None:
        config = self.stream_config
        part = self.module.partition[self.stage_id] - config.layers.decode.start
        field = decoder_input_field(config, part, is_first_chunk=row.chunk == 0)
        self._finished = self._recv_parcel("a finished chunk", *field)

    def _exec_decode_chunk(self, launch: int, row: Row) -> None:
        assert self._finished is not None
        self.enter_phase(f"decoding chunk {row.chunk}", False)
        start = self.stage_timers.start()
        on_layer = self.stage_timers.layer_marker(start, 1, is_pass=False)
        states = self.state.sessions[row.session].decoders
        self._finished = self.module.layers.decode_chunk(self._finished, states, on_layer)
        self.stage_timers.stop(DECODE, start)

    def _exec_send_finished(self, launch: int, row: Row) -> None:
        assert self._finished is not None
        self._send_parcel(self._finished)

    def _exec_deliver_chunk(self, launch: int, row: Row) -> None:
        assert self._finished is not None and self.on_frames is not None
        self.on_frames(row, self._finished)

    @property
    def _dtype(self) -> torch.dtype:
        return torch_dtype(self.stream_config)

    @property
    def _noise_schedule(self) -> NoiseSchedule:
        return self.state.rows.noise_schedule

    def _noise(self, row: Row, step: int) -> Tensor:
        seed = self.state.sessions[row.session].seed
        return keyed_noise(latent_shape(self.stream_config), seed, row.chunk, step, self.device)

    def _send(self, link: Link, tensors: list[Tensor]) -> None:
        start = self.stage_timers.start()
        link.send(tensors)
        self.stage_timers.stop(SEND, start)

    def _recv(self, link: Link, what: str, fields: list[Field]) -> list[Tensor]:
        self.enter_phase(f"waiting for {what}", True)
        start = self.stage_timers.start()
        tensors = link.recv(fields)
        self.stage_timers.stop(WAIT, start)
        return tensors

    def _send_parcel(self, tensor: Tensor) -> None:
        assert self.links.parcels_out is not None
        self._send(self.links.parcels_out, [tensor])

    def _recv_parcel(self, what: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        assert self.links.parcels_in is not None
        (tensor,) = self._recv(self.links.parcels_in, f"{what} of stage {self.stage_id - 1}", [(shape, dtype)])
        # It outlives the message's buffer.
        return tensor.clone()

    # All of them are listed again because the stock map holds the base class's functions and is looked up by exact
    # type; instructions of training have no place here.
    _INSTRUCTION_MAP: ClassVar = {
        ins.SendPlan: _exec_send_plan,
        ins.ReturnTimings: _exec_return_timings,
        ins.Repartition: _exec_repartition,
        ins.OpenSession: _exec_open_session,
        ins.CloseSession: _exec_close_session,
        ins.SendEmbedding: _exec_send_embedding,
        ins.EmbedPrompt: _exec_embed_prompt,
        ins.RecvPrompt: _exec_recv_prompt,
        ins.SendPrompt: _exec_send_prompt,
        ins.DropPrompt: _exec_drop_prompt,
        ins.EncodeChunk: _exec_encode_chunk,
        ins.SendVideo: _exec_send_video,
        ins.RecvVideo: _exec_recv_video,
        ins.RecvLatents: _exec_recv_latents,
        ins.StartChunk: _exec_start_chunk,
        ins.RecvActivations: _exec_recv_activations,
        ins.ForwardPass: _exec_forward_pass,
        ins.SendActivations: _exec_send_activations,
        ins.StepLatents: _exec_step_latents,
        ins.ReturnLatents: _exec_return_latents,
        ins.TakeFinished: _exec_take_finished,
        ins.RecvFinished: _exec_recv_finished,
        ins.DecodeChunk: _exec_decode_chunk,
        ins.SendFinished: _exec_send_finished,
        ins.DeliverChunk: _exec_deliver_chunk,
    }


def _upload(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor on the device, without waiting for the device."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
