"""The JSON that users write: DeepSpeed's own keys, and one strict typed ``stream`` section.

``load_config`` reads, checks and freezes it before any process group exists. A mistake is a :class:`ValueError` whose
text names the key, the value and what to do.
"""

import difflib
import hashlib
import json
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from ds_stream.settings import Section, StreamConfig

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


CONFIG_FOLDER = Path(__file__).resolve().parent.parent / "ds_configs"


_NOT_IN_THE_PICTURE: Any = {
    "batch": True,
    "stages": True,
    "limits": True,
    "slo": True,
    "live": True,
    "device": {"kind", "transport"},
    "text": {"cache_dir", "device"},
}


class Config(Section):
    """The whole file, checked."""

    deepspeed: dict[str, Any]
    """What DeepSpeed gets."""
    stream: StreamConfig

    def to_json(self) -> str:
        """The resolved file: it can be loaded again and gives an equal config."""
        return json.dumps({**self.deepspeed, "stream": self.stream.model_dump(mode="json")}, indent=2)

    @property
    def digest(self) -> str:
        """Twelve hex digits of all settings that decide what the video shows; ranks, batches and limits do not."""
        shown = self.stream.model_dump(mode="json", exclude=_NOT_IN_THE_PICTURE)
        return hashlib.blake2b(json.dumps(shown, sort_keys=True).encode(), digest_size=6).hexdigest()

    def resolve(self, num_stages: int) -> "Config":
        """A copy whose partition is explicit for ``num_stages`` stages.

        Raises:
            ValueError: the model or the given partition does not fit that many stages.
        """
        return self.with_partition(self.stream.layers.resolve(self.stream.stages.partition, num_stages))

    def with_partition(self, partition: tuple[int, ...]) -> "Config":
        """A copy with these layer boundaries."""
        return self._with("stages", partition=partition)

    def with_seed(self, seed: int) -> "Config":
        """A copy with the seed that was drawn."""
        return self._with("noise", seed=seed)

    def _with(self, section: str, **values: object) -> "Config":
        changed = getattr(self.stream, section).model_copy(update=values)
        return self.model_copy(update={"stream": self.stream.model_copy(update={section: changed})})


def shipped_configs() -> list[Path]:
    """The configs that come with the package."""
    return sorted(CONFIG_FOLDER.glob("*.json"))


def find_config(name: str) -> Path:
    """The file that ``--config`` means: a path, or the name of a shipped config.

    Raises:
        ValueError: it is neither.
    """
    path = Path(name)
    shipped = {config.stem: config for config in shipped_configs()}
    if path.is_file() or name not in shipped:
        if not path.exists() and path.suffix != ".json":
            raise ValueError(f"--config {name}: no such file, and no shipped config{_nearest(name, tuple(shipped))}")
        return path
    return shipped[name]


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
        # Items of a list are of one type, which is the list's first argument.
        section = get_args(section)[0] if part.isdigit() else section.model_fields[part].annotation
    return tuple(section.model_fields)


def _nearest(key: str, valid: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(key, valid, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; valid keys: {', '.join(valid)}"
