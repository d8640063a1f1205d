"""Files of named tensors: what is in them without reading it, and any part of them through a memory map.

``.safetensors`` files, alone or sharded with an index, and PyTorch files, which may hold several models ("entries").
PyTorch files are read with ``weights_only``: a pickle that holds code is refused.
"""

import json
import pickle
import re
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_ENTRY_ORDER = ("generator", "generator_ema", "model", "state_dict")
_INDEX_SUFFIX = ".safetensors.index.json"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor in a file that nobody has read."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return int(torch.Size(self.shape).numel()) * self.dtype.itemsize


class TensorFile(Protocol):
    """Named tensors on disk."""

    path: Path

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Each tensor, mapped from disk: to be copied if it is to outlast the file as it is now, and not changed."""
        ...


def open_tensors(path: Path, entry: str = "auto") -> TensorFile:
    """The tensors of a file, or of the one set of safetensors in a folder.

    Args:
        entry: which model of a PyTorch file; ``auto``: the first of generator, generator_ema, model, state_dict.

    Raises:
        ValueError: nothing there, not a file of tensors, damaged, or it holds code.
    """
    if path.is_dir():
        return open_tensors(_weights_in(path), entry)
    if not path.exists():
        raise ValueError(f"{path}: there is no such file or folder")
    if entry != "auto" and path.suffix not in TORCH_SUFFIXES:
        warnings.warn(f"{path} has no entries, so {entry!r} is not looked for", stacklevel=2)
    if path.name.endswith(_INDEX_SUFFIX):
        return SafetensorsFile(path, _shards_of(path))
    if path.suffix == ".safetensors":
        return SafetensorsFile(path, [path])
    if path.suffix in TORCH_SUFFIXES:
        return TorchFile(path, entry)
    raise ValueError(f"{path}: tensors are read from .safetensors, {_INDEX_SUFFIX[1:]}, {', '.join(TORCH_SUFFIXES)}")


class SafetensorsFile:
    """One or several ``.safetensors`` files."""

    def __init__(self, path: Path, shards: list[Path]):
        self.path = path
        self.tensors: dict[str, TensorInfo] = {}
        self.metadata: dict[str, str] = {}
        """What the files say about themselves."""
        self._shard_of: dict[str, Path] = {}
        for shard in shards:
            try:
                with safe_open(shard, "pt") as file:
                    self.metadata |= file.metadata() or {}
                    for name in file.keys():  # noqa: SIM118
                        part = file.get_slice(name)
                        self.tensors[name] = TensorInfo(tuple(part.get_shape()), _SAFETENSORS_TYPES[part.get_dtype()])
                        self._shard_of[name] = shard
            except (SafetensorError, OSError, KeyError) as error:
                raise ValueError(f"{shard}: not a whole .safetensors file ({error}); fetch it again") from None

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        wanted = list(names)
        for shard in dict.fromkeys(self._shard_of[name] for name in wanted):
            # Closed with the last tensor, so that pages that were read do not count as this process's for long.
            with safe_open(shard, "pt") as file:
                for name in wanted:
                    if self._shard_of[name] == shard:
                        yield name, file.get_tensor(name)


class TorchFile:
    """One model of a PyTorch file."""

    def __init__(self, path: Path, entry: str = "auto"):
        self.path = path
        models = _models_in(self._load())
        if not models:
            raise ValueError(f"{path}: it holds no named tensors; give a file of model weights")
        self.entries = tuple(models)
        """Names of all models of the file; a model that is the file itself has an empty one."""
        self.entry = self._choose(entry)
        self.tensors = {
            name: TensorInfo(tuple(tensor.shape), tensor.dtype) for name, tensor in models[self.entry].items()
        }

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        # Mapped anew each time: pages that were read are given back with the map.
        model = _models_in(self._load())[self.entry]
        for name in names:
            yield name, model[name]

    def _choose(self, entry: str) -> str:
        # Entries may lie in one another: state_dict.generator.
        by_name = {name.rpartition(".")[2]: name for name in reversed(self.entries)} | {e: e for e in self.entries}
        if entry == "auto":
            ranked = [by_name[name] for name in _ENTRY_ORDER if name in by_name]
            return (ranked or [self.entries[0]])[0]
        if entry not in by_name:
            raise ValueError(f"{self.path}: no entry {entry!r}; it has {', '.join(map(repr, self.entries))}")
        return by_name[entry]

    def _load(self) -> Any:
        is_zip = zipfile.is_zipfile(self.path)
        try:
            return torch.load(self.path, map_location="cpu", weights_only=True, mmap=is_zip or None)
        except pickle.UnpicklingError as error:
            if not is_zip:
                raise ValueError(f"{self.path}: {_DAMAGED}") from None
            found = re.search(r"WeightsUnpickler error: ([^\n]*)", str(error))
            raise ValueError(
                f"{self.path}: it holds code or objects besides tensors, which are not run; ask its author for the "
                f"weights alone, as .safetensors ({found[1].split('. ')[0] if found else 'refused by weights_only'})"
            ) from None
        except (RuntimeError, OSError, EOFError, ValueError, KeyError) as error:
            raise ValueError(f"{self.path}: {_DAMAGED} ({first_line(error).split('. ')[0]})") from None


_DAMAGED = "not a PyTorch file, or not a whole one; fetch it again"

_SAFETENSORS_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def _models_in(content: Any, prefix: str = "") -> dict[str, dict[str, Tensor]]:
    """Every dictionary of tensors inside ``content``, by its path (``state_dict.generator``)."""
    if not isinstance(content, Mapping):
        return {}
    tensors = {str(name): value for name, value in content.items() if isinstance(value, Tensor)}
    models = {prefix: tensors} if tensors else {}
    for name, value in content.items():
        models |= _models_in(value, f"{prefix}.{name}" if prefix else str(name))
    return models


def _weights_in(folder: Path) -> Path:
    """The index, the file by its usual name, or the only safetensors file of a folder."""
    patterns = (f"*{_INDEX_SUFFIX}", "diffusion_pytorch_model.safetensors", "*.safetensors", "*.pt")
    for found in (sorted(folder.glob(pattern)) for pattern in patterns):
        if len(found) == 1:
            return found[0]
        if len(found) > 1:
            raise ValueError(f"{folder}: holds {', '.join(path.name for path in found)}; name one of them")
    raise ValueError(f"{folder}: holds no .safetensors or .pt file")


def shard_names(index: Path) -> list[str]:
    """Files that an index names, beside it. ``ValueError`` if it is damaged."""
    try:
        return sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index}: not an index of shards ({first_line(error)}); fetch it again") from None


def _shards_of(index: Path) -> list[Path]:
    names = shard_names(index)
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise ValueError(f"{index}: {len(missing)} of {len(names)} shards are missing: {', '.join(missing[:10])}")
    return [index.parent / name for name in names]


def first_line(error: Exception) -> str:
    """What an error of a library says, in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
