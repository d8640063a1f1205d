"""The typed ``stream`` section of the JSON: every key, its unit, its default and what it does.

Each section is strict and frozen. :mod:`ds_stream.config` loads them.
"""

import itertools
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ds_stream.core import MAX_ROWS, NUM_WAN_DECODE_LAYERS, PIXELS_PER_TOKEN
from ds_stream.partition import LayerList

RANDOM = "random"
"""The ``weights`` that are no path."""
HASHED = "hashed"
"""The ``text.encoder`` that is no path."""

WAN_LATENT_MEAN = (
    *(-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508),
    *(0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921),
)
WAN_LATENT_STD = (
    *(2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743),
    *(3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160),
)


# JSON has lists where Python has tuples: these two alone may be converted.
_Ints = Annotated[tuple[int, ...], Field(strict=False)]
_Floats = Annotated[tuple[float, ...], Field(strict=False)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, strict=True)


class LoraConfig(Section):
    path: str
    """``.safetensors`` file with names of diffusers/PEFT or of the original model."""
    scale: float = 1.0
    """Factor of what it adds to the weights."""


class ModelConfig(Section):
    num_layers: int = Field(ge=1)
    """Transformer blocks."""
    num_heads: int = Field(ge=1)
    """Attention heads."""
    head_dim: int = Field(ge=6, multiple_of=2)
    """Channels of one head; the model's width is ``num_heads * head_dim``."""
    ffn_dim: int = Field(ge=1)
    """Hidden channels of the feed-forward layer."""
    in_channels: int = Field(default=16, ge=1)
    """Channels of the patch embedding: ``out_channels``, or twice as many for a model that also gets the source
    chunk's latents at every pass (control models)."""
    out_channels: int = Field(default=16, ge=1)
    """Latent channels out."""
    text_dim: int = Field(default=4096, ge=1)
    """Channels of a text embedding."""
    num_text_tokens: int = Field(default=512, ge=1)
    """Positions of a text embedding; shorter prompts are padded with zeros, as Wan does."""
    freq_dim: int = Field(default=256, ge=2, multiple_of=2)
    """Channels of the sinusoidal time embedding."""
    eps: float = Field(default=1e-6, gt=0)
    """Epsilon of every norm."""
    weights: str = RANDOM
    """Where the DiT's weights come from: a folder in the layout of diffusers or of Wan, a ``.safetensors`` or ``.pt``
    file, or ``random``. Relative paths start at the current folder."""
    weights_entry: str = "auto"
    """Which of a ``.pt`` file's models is taken, such as ``generator_ema``. ``auto``: the first there is of generator,
    generator_ema, model, state_dict."""
    weights_seed: int = Field(default=0, ge=0)
    """Seed of random weights, drawn layer by layer."""
    loras: Annotated[tuple[LoraConfig, ...], Field(strict=False)] = ()
    """LoRA files that are merged into the weights as they load."""

    @property
    def dim(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def takes_source(self) -> bool:
        """Whether the source chunk's latents are concatenated to the noisy ones on the channel axis."""
        return self.in_channels > self.out_channels


class TextConfig(Section):
    encoder: str = "auto"
    """``hashed`` gives every word a fixed Gaussian vector: enough for random weights. Otherwise the folder that holds
    UMT5, in the layout of diffusers or of Wan. ``auto``: hashed with random weights, else where the weights are."""
    cache_dir: str | None = "~/.cache/ds_stream/text"
    """Folder of embeddings that UMT5 has computed, one file per prompt and encoder. ``null``: none."""
    device: Literal["auto", "cpu"] = "auto"
    """Where UMT5 computes: ``auto``: on the first rank's device; ``cpu`` if it does not fit there."""
    blend_chunks: int = Field(default=0, ge=0)
    """Chunks over which a changed prompt fades in; 0 changes it at once."""
    blend: Literal["lerp", "slerp"] = "lerp"
    """How the embeddings of fading chunks lie between the two: on a line, or on an arc that keeps their length."""


class VaeConfig(Section):
    base_dim: int = Field(default=96, ge=1)
    """Channels of the widest picture; deeper levels multiply it by ``dim_mult``."""
    z_dim: int = Field(default=16, ge=1)
    """Latent channels."""
    dim_mult: tuple[int, int, int, int] = Field(default=(1, 2, 4, 4), strict=False)
    """Channel multiplier of the four levels (8 x 8 pixels a latent)."""
    num_res_blocks: int = Field(default=2, ge=1)
    """Residual blocks a level."""
    latent_mean: _Floats = WAN_LATENT_MEAN
    """Mean of each latent channel, taken off before the DiT."""
    latent_std: _Floats = WAN_LATENT_STD
    """Standard deviation of each latent channel."""
    normalize_input_latents: bool = True
    """Whether encoded latents are normalised by mean and std. Decoding always undoes it."""
    weights: str = "auto"
    """``random``, a folder or a file such as ``Wan2.1_VAE.pth``. ``auto``: random with random DiT weights, else where
    those are."""

    @model_validator(mode="after")
    def _check(self) -> "VaeConfig":
        for name in ("latent_mean", "latent_std"):
            if len(getattr(self, name)) != self.z_dim:
                raise ValueError(f"{name} has {len(getattr(self, name))} entries but z_dim is {self.z_dim}")
        if min(self.latent_std) <= 0:
            raise ValueError("latent_std must be above zero in every channel")
        return self


class LightVaeConfig(Section):
    """The tiny autoencoder for the same latents (TAEHV)."""

    use: Literal["no", "decoder", "both"] = "no"
    """What it stands in for: nothing, the Wan decoder, or the encoder too."""
    weights: str = RANDOM
    """``taew2_1.pth``, ``taew2_1.safetensors`` or the like, or ``random``."""
    encoder_width: int = Field(default=64, ge=1)
    """Channels of the encoder."""
    decoder_widths: Annotated[tuple[int, int, int, int], Field(strict=False)] = (256, 128, 64, 64)
    """Channels of the decoder's levels, smallest picture first."""
    num_memory_blocks: int = Field(default=3, ge=1)
    """Memory blocks a level."""


class VideoConfig(Section):
    width: int = Field(ge=PIXELS_PER_TOKEN, multiple_of=PIXELS_PER_TOKEN)
    """Pixels; a multiple of 16."""
    height: int = Field(ge=PIXELS_PER_TOKEN, multiple_of=PIXELS_PER_TOKEN)
    """Pixels; a multiple of 16."""
    fit: Literal["crop", "pad"] = "crop"
    """How an input of another shape is fitted: cut its edges off, or add black ones. The aspect is kept."""


def shifted_timestep(s: float, shift: float) -> float:
    """Timestep ``1000 sigma`` at ``s`` of 0 to 1: ``sigma = shift s / (1 + (shift - 1) s)``."""
    return 1000 * shift * s / (1 + (shift - 1) * s)


class NoiseConfig(Section):
    steps: _Ints = Field(min_length=1)
    """Timesteps of the denoising steps, falling, from 1000 (pure noise) down to 1. Video to video replaces the first
    one, see ``first_timestep_offset``."""
    shift: float = Field(default=8.0, gt=0)
    """Flow-matching shift: sigma = shift s / (1 + (shift - 1) s)."""
    warp: bool = False
    """Read ``steps`` as indices into the shifted table instead of as timesteps (Self-Forcing)."""
    strength: float = Field(default=0.8, gt=0, le=1)
    """Video to video: share of noise in the start, x = s eps + (1 - s) z."""
    motion_aware: bool = False
    """Video to video: less noise where the input moves more, down from ``strength`` (StreamDiffusionV2)."""
    motion_full_scale: float = Field(default=0.2, gt=0)
    """RMS difference of two frames, in pixels of -1 to 1, that counts as full motion."""
    motion_range: float = Field(default=0.1, ge=0, lt=1)
    """Noise that full motion takes off ``strength``."""
    motion_smoothing: float = Field(default=0.1, ge=0, lt=1)
    """Share of the previous chunk's strength in the next one's."""
    first_timestep_offset: int = Field(default=-100, ge=-999, le=0)
    """Video to video: step 0 is told timestep int(1000 s) plus this."""
    context_pass: bool = False
    """Whether a last pass at timestep 0 on the clean latents writes the keys/values that later chunks read."""
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    """Seed of all noise. ``null``: drawn at start and printed."""

    @model_validator(mode="after")
    def _check(self) -> "NoiseConfig":
        if any(a <= b for a, b in itertools.pairwise(self.steps)) or not (
            1 <= self.steps[-1] <= self.steps[0] <= 1000
        ):
            raise ValueError(f"steps must fall strictly and lie in 1..1000, not {list(self.steps)}")
        if self.motion_aware and self.motion_range >= self.strength:
            raise ValueError(f"motion_range {self.motion_range:g} must be below strength {self.strength:g}")
        return self

    @property
    def timesteps(self) -> tuple[float, ...]:
        """Timestep of each denoising step of a chunk that starts from noise alone, ``warp`` applied."""
        if not self.warp:
            return tuple(float(step) for step in self.steps)
        return tuple(shifted_timestep(1 - (1000 - step) / 1000, self.shift) for step in self.steps)

    @property
    def num_passes(self) -> int:
        """``K``: passes per chunk."""
        return len(self.steps) + int(self.context_pass)


class ContextConfig(Section):
    num_latent_frames_per_chunk: int = Field(default=1, ge=1)
    """Latent frames that the model denoises together."""
    lead: int = Field(default=0, ge=0)
    """How many passes cleaner the visible context is than the pass that reads it; passes - 1 is the exact model."""
    num_window_latent_frames: int = Field(default=3, ge=1)
    """Latent frames that a pass attends to, its own chunk included, sinks not."""
    num_sink_latent_frames: int = Field(default=3, ge=0)
    """First latent frames of a session that are never evicted."""
    sink_positions: Literal["sliding", "absolute"] = "sliding"
    """``sliding`` keeps sinks right before the window as it moves; ``absolute`` keeps their true index."""
    adaptive_sinks: bool = False
    """Whether a chunk's last latent frame replaces the least similar sink, if that is not similar enough; not before
    all sinks are filled (StreamDiffusionV2)."""
    adaptive_sink_threshold: float = Field(default=0.2, ge=-1, le=1)
    """Similarity to the new latent frame, -1 to 1, below which a sink is replaced."""


class BatchConfig(Section):
    max_rows: int = Field(default=1, ge=1, le=MAX_ROWS)
    """``B``: most rows that one forward runs together. 1 is the latency end, a chunk's passes the throughput end. The
    batch tuner stays at or below it."""
    autotune: bool = True
    """Choose the number of rows as the stream runs, from 1 to ``max_rows``, by ``slo`` and measured times. Off:
    always ``max_rows``."""
    exact_rows: bool | Literal["auto"] = "auto"
    """Run a batch's rows one after the other, so that no kernel's result depends on the batch. ``auto``: on CPU."""

    def runs_exact_rows(self, on_cpu: bool) -> bool:
        """``exact_rows`` with ``auto`` resolved."""
        return on_cpu if self.exact_rows == "auto" else self.exact_rows


class SloConfig(Section):
    """What the batch tuner keeps, if it can: service level objectives."""

    chunk_latency_ms: float | None = Field(default=None, gt=0)
    """From a chunk's last input frame to its first output frame. ``null``: no target."""
    fps: float | None = Field(default=None, gt=0)
    """Frames a second that must come out. ``null``: those that come in live; as many as can be from a file."""
    margin: float = Field(default=0.1, ge=0, lt=1)
    """Share by which a number of rows must better what is needed before it is taken up; what runs is kept until it
    misses the need itself."""


class LiveConfig(Section):
    """An input that does not wait: ``--realtime``."""

    when_full: Literal["block", "drop_oldest"] = "drop_oldest"
    """What happens to a frame that finds the queue full: the camera waits, or the oldest frame in it is dropped."""
    max_queued_frames: int = Field(default=16, ge=1)
    """Frames that wait for the ring."""


class StagesConfig(Section):
    partition: _Ints | Literal["auto"] = "auto"
    """Layer boundaries over [encode, embed, block x N, head, decode x D]: stages + 1 numbers from 0 to N + 3 + D. The
    Wan decoder has D = 5 layers (its middle, then one for each size of picture), the light one D = 1. A stage may hold
    layers of the VAE alone."""
    calibrate: bool = True
    """With ``partition`` ``auto``: measure the layers at start, and cut where the slowest stage is fastest. Otherwise
    blocks are spread evenly."""
    rebalance: bool = False
    """Measure as the stream runs, and move layers to other stages where that pays. The video does not change."""
    rebalance_gain: float = Field(default=0.15, gt=0)
    """Predicted gain in throughput from which layers are moved."""


class DeviceConfig(Section):
    kind: Literal["auto", "cpu", "cuda"] = "auto"
    """``auto``: CUDA where there is a GPU."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and activations. Latents and noise are always fp32."""
    transport: Literal["auto", "gloo", "nccl", "host_staged"] = "auto"
    """How stages exchange tensors. ``auto``: gloo on CPU; NCCL with a GPU per rank, otherwise host_staged."""
    cpu_threads_per_rank: int = Field(default=1, ge=1)
    """Threads of one rank's CPU kernels; a fixed number keeps results equal on any number of ranks."""


class LimitsConfig(Section):
    timeout_s: float = Field(default=30.0, ge=1, le=86_400)
    """Seconds after which a rank that does not answer is given up and the run ends."""
    start_timeout_s: float = Field(default=1800.0, ge=1, le=86_400)
    """Seconds that ranks have to build their layers and meet."""
    max_queued_chunks: int = Field(default=2, ge=1)
    """Chunks that a reader may be ahead of the ring, and that the ring may be ahead of a writer."""


class StreamConfig(Section):
    model: ModelConfig
    text: TextConfig = TextConfig()
    vae: VaeConfig = VaeConfig()
    light_vae: LightVaeConfig = LightVaeConfig()
    video: VideoConfig
    noise: NoiseConfig
    context: ContextConfig = ContextConfig()
    batch: BatchConfig = BatchConfig()
    slo: SloConfig = SloConfig()
    live: LiveConfig = LiveConfig()
    stages: StagesConfig = StagesConfig()
    device: DeviceConfig = DeviceConfig()
    limits: LimitsConfig = LimitsConfig()

    @property
    def layers(self) -> LayerList:
        """The model's layers."""
        num_decode_layers = NUM_WAN_DECODE_LAYERS if self.light_vae.use == "no" else 1
        return LayerList(self.model.num_layers, num_decode_layers)

    @model_validator(mode="after")
    def _check(self) -> "StreamConfig":
        passes, context = self.noise.num_passes, self.context
        if context.lead > passes - 1:
            raise ValueError(
                f"context.lead is {context.lead} but a chunk has {passes} passes; give a lead from 0 to {passes - 1}"
            )
        if context.num_window_latent_frames < context.num_latent_frames_per_chunk:
            raise ValueError(
                f"context.num_window_latent_frames is {context.num_window_latent_frames} but a chunk alone has "
                f"{context.num_latent_frames_per_chunk} latent frames; give at least as many"
            )
        if context.adaptive_sinks and context.num_sink_latent_frames == 0:
            raise ValueError(
                "context.adaptive_sinks is on but context.num_sink_latent_frames is 0; give sinks or none"
            )
        model, z_dim = self.model, self.vae.z_dim
        if model.out_channels != z_dim:
            raise ValueError(
                f"model.out_channels is {model.out_channels} but vae.z_dim is {z_dim}; give equal numbers"
            )
        if model.in_channels not in (z_dim, 2 * z_dim):
            raise ValueError(
                f"model.in_channels is {model.in_channels}; give {z_dim} (noisy latents alone) or {2 * z_dim} (with "
                "the source's latents)"
            )
        if self.stages.partition != "auto":
            self.layers.check(self.stages.partition)
        return self
