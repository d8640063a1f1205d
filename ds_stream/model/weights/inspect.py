"""What a checkpoint is: its part, names, size, which shipped config fits, and what is missing."""

import functools
from collections import Counter
from pathlib import Path
from typing import Any

from ds_stream.config import load_config, shipped_configs
from ds_stream.model.pipeline import part_shapes
from ds_stream.model.weights.checkpoint import Checkpoint, Part, check_names
from ds_stream.model.weights.load import Shapes
from ds_stream.model.weights.lora import describe_lora, is_lora
from ds_stream.model.weights.tensor_files import TensorFile, TorchFile, open_tensors

_HEAD_DIM = 128
_PARTS_OF_A_FOLDER = ("transformer", "vae", "text_encoder")
_KNOWN_WIDTHS = {1536: "T2V-1.3B", 5120: "T2V-14B"}


def inspect(path: Path) -> str:
    """A few lines on a file, or on every part in a folder.

    Raises:
        ValueError: it cannot be read, or is nothing that is known here.
    """
    if path.is_dir():
        parts = [path / name for name in _PARTS_OF_A_FOLDER if (path / name).is_dir()]
        parts += sorted(path.glob("*.pth"))
        if sorted(path.glob("*.safetensors")):
            parts.insert(0, path)
        if parts:
            return "\n".join(_inspect_file(part, open_tensors(part)) for part in parts)
    return _inspect_file(path, open_tensors(path))


def _inspect_file(path: Path, file: TensorFile) -> str:
    if is_lora(file):
        lines = [describe_lora(file)]
    elif isinstance(file, TorchFile) and len(file.entries) > 1:
        lines = [line for entry in file.entries for line in _describe_entry(file.path, entry, entry == file.entry)]
    else:
        lines = _describe(Checkpoint(file), True)
    return "\n".join([str(path), *(f"  {line}" for line in lines)])


def _describe_entry(path: Path, entry: str, is_chosen: bool) -> list[str]:
    file = TorchFile(path, entry)
    try:
        return _describe(Checkpoint(file), is_chosen)
    except ValueError:
        # An optimizer's state, a step counter.
        return [f"entry {entry or 'outside of all others'}: {len(file.tensors)} tensors that are no part of a model"]


def _describe(checkpoint: Checkpoint, is_chosen: bool) -> list[str]:
    types = Counter(str(info.dtype).removeprefix("torch.") for info in checkpoint.tensors.values())
    lines = [
        checkpoint.description + ("" if is_chosen else " (to take it: stream.model.weights_entry)"),
        f"{len(checkpoint.tensors)} tensors, {checkpoint.num_parameters / 1e6:,.1f} M parameters, {', '.join(types)}",
    ]
    if checkpoint.part is Part.UMT5:
        return lines
    if checkpoint.part is Part.DIT:
        lines.append(_describe_size(checkpoint))
    fitting, complaint = _fitting_configs(checkpoint)
    if fitting:
        return [*lines, "complete; fits the config " + ", ".join(fitting)]
    return [*lines, *complaint.splitlines()]


def model_settings(checkpoint: Checkpoint) -> dict[str, Any]:
    """The ``stream.model`` sizes that a DiT's tensors have; heads are taken to be of 128 channels, as all Wan's."""
    shapes = {name: info.shape for name, info in checkpoint.tensors.items()}
    blocks = {int(name.split(".")[1]) for name in shapes if name.startswith("blocks.")}
    wanted = {
        "dim": ("patch_embedding.weight", 0),
        "in_channels": ("patch_embedding.weight", 1),
        "ffn_dim": ("blocks.0.ffn.net.0.proj.weight", 0),
        "text_dim": ("condition_embedder.text_embedder.linear_1.weight", 1),
        "freq_dim": ("condition_embedder.time_embedder.linear_1.weight", 1),
        "out_features": ("proj_out.weight", 0),
    }
    found = {key: shapes[name][axis] for key, (name, axis) in wanted.items() if name in shapes}
    settings = {key: value for key, value in found.items() if key not in ("dim", "out_features")}
    settings["num_layers"] = max(blocks) + 1
    if "dim" in found:
        settings |= {"num_heads": found["dim"] // _HEAD_DIM, "head_dim": _HEAD_DIM}
    if "out_features" in found:
        settings["out_channels"] = found["out_features"] // 4
    return settings


def _describe_size(checkpoint: Checkpoint) -> str:
    settings = model_settings(checkpoint)
    width = settings.get("num_heads", 0) * _HEAD_DIM
    name = f": the size of {_KNOWN_WIDTHS[width]}" if width in _KNOWN_WIDTHS else ""
    return ", ".join(f"{key} {value}" for key, value in settings.items()) + name


def _fitting_configs(checkpoint: Checkpoint) -> tuple[list[str], str]:
    """Names of the shipped configs that take it, and what keeps the nearest from it."""
    fitting, nearest = [], ""
    for path in shipped_configs():
        complaint = _complaint(checkpoint, path)
        if not complaint:
            fitting.append(path.stem)
        elif not nearest or len(complaint) < len(nearest):
            nearest = complaint.replace(str(checkpoint.file.path), f"for config {path.stem} it")
    return fitting, nearest


@functools.cache
def _shapes(config: Path, part: Part) -> Shapes:
    return part_shapes(load_config(config).stream, part)


def _complaint(checkpoint: Checkpoint, config: Path) -> str:
    try:
        check_names(str(checkpoint.file.path), _shapes(config, checkpoint.part), checkpoint.tensors)
    except ValueError as error:
        return str(error).rsplit("\n", 1)[0]
    return ""
