"""The JSON that users write: DeepSpeed's own keys, and one strict typed ``stream`` section.

``load_config`` reads, checks and freezes it before any process group exists. A mistake is a :class:`ValueError` whose
text names the key, the value and what to do.
"""

import difflib
import itertools
import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ds_stream.core import MAX_ROWS, PIXELS_PER_TOKEN
from ds_stream.partition import check_partition, resolve_partition

DEEPSPEED_KEYS = (
    "train_micro_batch_size_per_gpu",
    "steps_per_print",
    "wall_clock_breakdown",
    "dump_state",
    "tensorboard",
    "wandb",
    "csv_monitor",
)
"""Keys that go to DeepSpeed untouched. Training keys (optimizer, fp16, bf16, zero_optimization) have no use here."""

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


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, strict=True)


class ModelConfig(_Section):
    num_layers: int = Field(ge=1)
    """Transformer blocks."""
    num_heads: int = Field(ge=1)
    """Attention heads."""
    head_dim: int = Field(ge=6, multiple_of=2)
    """Channels of one head; the model's width is ``num_heads * head_dim``."""
    ffn_dim: int = Field(ge=1)
    """Hidden channels of the feed-forward layer."""
    in_channels: int = Field(default=16, ge=1)
    """Latent channels in."""
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
    weights: Literal["random"] = "random"
    """Where the weights come from. ``random`` draws them from ``weights_seed``, layer by layer."""
    weights_seed: int = Field(default=0, ge=0)
    """Seed of random weights."""
    text_encoder: Literal["hashed"] = "hashed"
    """``hashed`` gives every word a fixed Gaussian vector: enough for random weights."""

    @property
    def dim(self) -> int:
        return self.num_heads * self.head_dim


class VaeConfig(_Section):
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

    @model_validator(mode="after")
    def _check(self) -> "VaeConfig":
        for name in ("latent_mean", "latent_std"):
            if len(getattr(self, name)) != self.z_dim:
                raise ValueError(f"{name} has {len(getattr(self, name))} entries but z_dim is {self.z_dim}")
        if min(self.latent_std) <= 0:
            raise ValueError("latent_std must be above zero in every channel")
        return self


class VideoConfig(_Section):
    width: int = Field(ge=PIXELS_PER_TOKEN, multiple_of=PIXELS_PER_TOKEN)
    """Pixels; a multiple of 16."""
    height: int = Field(ge=PIXELS_PER_TOKEN, multiple_of=PIXELS_PER_TOKEN)
    """Pixels; a multiple of 16."""
    fit: Literal["crop", "pad"] = "crop"
    """How an input of another shape is fitted: cut its edges off, or add black ones. The aspect is kept."""


class NoiseConfig(_Section):
    steps: _Ints = Field(min_length=1)
    """Timesteps of the denoising steps, falling, from 1000 (pure noise) down to 1. Video to video replaces the first
    one, see ``first_timestep_offset``."""
    shift: float = Field(default=8.0, gt=0)
    """Flow-matching shift: sigma = shift s / (1 + (shift - 1) s)."""
    warp: bool = False
    """Read ``steps`` as indices into the shifted table instead of as timesteps (Self-Forcing)."""
    strength: float = Field(default=0.8, gt=0, le=1)
    """Video to video: share of noise in the start, x = s eps + (1 - s) z."""
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
        return self

    @property
    def num_passes(self) -> int:
        """``K``: passes per chunk."""
        return len(self.steps) + int(self.context_pass)


class ContextConfig(_Section):
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


class BatchConfig(_Section):
    max_rows: int = Field(default=1, ge=1, le=MAX_ROWS)
    """``B``: most rows that one forward runs together. 1 is the latency end, a chunk's passes the throughput end."""
    exact_rows: bool | Literal["auto"] = "auto"
    """Run a batch's rows one after the other, so that no kernel's result depends on the batch. ``auto``: on CPU."""


class StagesConfig(_Section):
    partition: _Ints | Literal["auto"] = "auto"
    """Layer boundaries over [encode, embed, block x N, head, decode]: stages + 1 numbers from 0 to N + 4."""


class DeviceConfig(_Section):
    kind: Literal["auto", "cpu", "cuda"] = "auto"
    """``auto``: CUDA where there is a GPU."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and activations. Latents and noise are always fp32."""
    transport: Literal["auto", "gloo", "nccl", "host_staged"] = "auto"
    """How stages exchange tensors. ``auto``: gloo on CPU; NCCL with a GPU per rank, otherwise host_staged."""
    cpu_threads_per_rank: int = Field(default=1, ge=1)
    """Threads of one rank's CPU kernels; a fixed number keeps results equal on any number of ranks."""


class LimitsConfig(_Section):
    timeout_s: float = Field(default=30.0, ge=1, le=86_400)
    """Seconds after which a rank that does not answer is given up and the run ends."""
    start_timeout_s: float = Field(default=1800.0, ge=1, le=86_400)
    """Seconds that ranks have to build their layers and meet."""
    max_queued_chunks: int = Field(default=2, ge=1)
    """Chunks that a reader may be ahead of the ring, and that the ring may be ahead of a writer."""


class StreamConfig(_Section):
    model: ModelConfig
    vae: VaeConfig = VaeConfig()
    video: VideoConfig
    noise: NoiseConfig
    context: ContextConfig = ContextConfig()
    batch: BatchConfig = BatchConfig()
    stages: StagesConfig = StagesConfig()
    device: DeviceConfig = DeviceConfig()
    limits: LimitsConfig = LimitsConfig()

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
        for name in ("in_channels", "out_channels"):
            channels = getattr(self.model, name)
            if channels != self.vae.z_dim:
                raise ValueError(f"model.{name} is {channels} but vae.z_dim is {self.vae.z_dim}; give equal numbers")
        if self.stages.partition != "auto":
            check_partition(self.stages.partition, self.model.num_layers)
        return self


class Config(_Section):
    """The whole file, checked."""

    deepspeed: dict[str, Any]
    """What DeepSpeed gets."""
    stream: StreamConfig

    def to_json(self) -> str:
        """The resolved file: it can be loaded again and gives an equal config."""
        return json.dumps({**self.deepspeed, "stream": self.stream.model_dump(mode="json")}, indent=2)

    def resolve(self, num_stages: int) -> "Config":
        """A copy whose partition is explicit for ``num_stages`` stages.

        Raises:
            ValueError: the model or the given partition does not fit that many stages.
        """
        partition = resolve_partition(self.stream.stages.partition, self.stream.model.num_layers, num_stages)
        return self._with("stages", partition=partition)

    def with_seed(self, seed: int) -> "Config":
        """A copy with the seed that was drawn."""
        return self._with("noise", seed=seed)

    def _with(self, section: str, **values: object) -> "Config":
        changed = getattr(self.stream, section).model_copy(update=values)
        return self.model_copy(update={"stream": self.stream.model_copy(update={section: changed})})


def load_config(path: Path, overrides: tuple[str, ...] = ()) -> Config:
    """Read ``path``, apply ``--set`` overrides (``stream.batch.max_rows=2``) and check everything.

    Raises:
        ValueError: one message with every mistake, each with its key and, for an unknown key, the nearest valid one.
    """
    try:
        raw = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"cannot read config {path}: {error.strerror}; give an existing JSON file") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"config {path} is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"config {path} must hold a JSON object, not {type(raw).__name__}")
    for override in overrides:
        _apply_override(raw, override)
    return parse_config(raw, str(path))


def parse_config(raw: dict[str, Any], name: str = "config") -> Config:
    """Check a config that is already a dictionary; ``name`` is what errors call it."""
    problems = [
        f"{key}: not a key here{_nearest(key, (*DEEPSPEED_KEYS, 'stream'))}"
        for key in raw
        if key != "stream" and key not in DEEPSPEED_KEYS
    ]
    if "stream" not in raw:
        problems.append("stream: missing; it holds everything that is not DeepSpeed's own")
    deepspeed = {"train_micro_batch_size_per_gpu": 1} | {k: v for k, v in raw.items() if k in DEEPSPEED_KEYS}
    if deepspeed["train_micro_batch_size_per_gpu"] != 1:
        problems.append(
            f"train_micro_batch_size_per_gpu: {deepspeed['train_micro_batch_size_per_gpu']!r} has no meaning here; "
            "leave it at 1 and set stream.batch.max_rows"
        )
    stream = None
    if "stream" in raw:
        try:
            stream = StreamConfig.model_validate(raw["stream"])
        except ValidationError as error:
            problems.extend(_describe(item) for item in error.errors())
    if problems:
        raise ValueError(f"{name}: " + "\n  ".join(problems))
    assert stream is not None
    return Config(deepspeed=deepspeed, stream=stream)


def _apply_override(raw: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    parts = key.split(".")
    if not separator or not all(parts):
        raise ValueError(f"--set {override}: write key=value, as in --set stream.batch.max_rows=2")
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = text
    target = raw
    for part in parts[:-1]:
        target = target.setdefault(part, {})
        if not isinstance(target, dict):
            raise ValueError(f"--set {override}: {part} is a value, not a section")
    target[parts[-1]] = value


def _describe(error: Any) -> str:
    """One line for one of pydantic's findings."""
    location = [str(part) for part in error["loc"]]
    # pydantic ends the location of a union with the name of the member that it tried.
    known = [part for part in location if not part.startswith(("literal[", "tuple[", "function-"))]
    key = ".".join(["stream", *known])
    if error["type"] == "extra_forbidden":
        return f"{key}: not a key{_nearest(location[-1], _keys_at(location[:-1]))}"
    if error["type"] == "missing":
        return f"{key}: missing"
    if error["type"] == "value_error":
        # A check across sections begins with the keys that it names.
        return f"{key}: {error['ctx']['error']}" if known else f"stream.{error['ctx']['error']}"
    message = error["msg"][0].lower() + error["msg"][1:]
    return f"{key}: {message}, got {json.dumps(error['input'], default=repr)}"


def _keys_at(path: list[str]) -> tuple[str, ...]:
    section: Any = StreamConfig
    for part in path:
        section = section.model_fields[part].annotation
    return tuple(section.model_fields)


def _nearest(key: str, valid: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(key, valid, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; valid keys: {', '.join(valid)}"
