"""LoRA files, merged into weights as these load: ``W + scale * alpha / rank * B A`` (arXiv 2106.09685, section 4.1).

Names may be those of diffusers/PEFT (``transformer.blocks.0.attn1.to_q.lora_A.weight``) or of the original model
(``diffusion_model.blocks.0.self_attn.q.lora_down.weight``), the latter also with whole differences (``.diff``,
``.diff_b``).
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers
from torch import Tensor

from ds_stream.model.weights.checkpoint import without_wrappers
from ds_stream.model.weights.tensor_files import SafetensorsFile, TensorFile, open_tensors

_OUTER = re.compile(r"^(base_model\.model\.|transformer\.|diffusion_model\.)+")
_ROLE = re.compile(r"\.(lora_A|lora_B|lora_down|lora_up)(\.default)?\.weight$|\.(alpha|diff|diff_b|lora_B\.bias)$")
_ORIGINAL = re.compile(r"\.(self_attn|cross_attn|ffn\.[02])\.|(time_embedding|text_embedding|time_projection|head)\.")
_ROLES = {"lora_A": "down", "lora_down": "down", "lora_B": "up", "lora_up": "up", "lora_B.bias": "diff_b"}


@dataclass(frozen=True, slots=True)
class _Adapter:
    """What PEFT says of a LoRA beside its tensors."""

    alpha: float | None = None
    """Of all targets without an own one; ``None``: the rank, so that the change is taken as it is."""
    alphas: Mapping[str, float] = field(default_factory=dict)
    """Of targets whose name ends in the key, a pattern."""
    by_root: bool = False
    """Whether the change is divided by the rank's square root (rsLoRA, arXiv 2312.03732)."""

    def factor(self, module: str, rank: int, own_alpha: float | None) -> float:
        """What ``B A`` is multiplied with."""
        matching = [alpha for key, alpha in self.alphas.items() if re.match(rf"(.*\.)?({key})$", module)]
        alpha = next((alpha for alpha in (own_alpha, *matching, self.alpha) if alpha is not None), None)
        divisor = math.sqrt(rank) if self.by_root else rank
        return 1.0 if alpha is None else alpha / divisor


class Lora:
    """One file and its scale.

    Args:
        targets: shapes of all weights that there are, by diffusers' names.

    Raises:
        ValueError: it cannot be read, names an unknown target, lacks a half or does not fit.
    """

    def __init__(self, path: Path, scale: float, targets: Mapping[str, tuple[int, ...]]):
        self._file = open_tensors(path)
        self._scale = scale
        self._parts: dict[str, dict[str, str]] = defaultdict(dict)
        unknown, is_original = [], _is_original(self._file)
        for name in self._file.tensors:
            target, role = _target_of(name, is_original)
            if role is None or target not in targets:
                unknown.append(name)
            else:
                self._parts[target][role] = name
        if unknown:
            raise ValueError(
                f"{path}: {len(unknown)} of {len(self._file.tensors)} names have no target in this model: "
                f"{', '.join(unknown[:10])}; it is for another model, or not a LoRA of Wan"
            )
        self._adapter = _read_adapter(self._file)
        for target, parts in self._parts.items():
            self._check(path, target, parts, targets[target])

    def merge(self, name: str, weight: Tensor) -> Tensor:
        """``weight`` with this file's change, in fp32; the same tensor if it has none."""
        parts = self._parts.get(name)
        if not parts:
            return weight
        tensors = {name: tensor.float() for name, tensor in self._file.read(parts.values())}
        read = {role: tensors[file_name] for role, file_name in parts.items()}
        merged = weight.float()
        if "down" in read:
            own_alpha = read["alpha"].item() if "alpha" in read else None
            factor = self._adapter.factor(name.rpartition(".")[0], read["down"].shape[0], own_alpha)
            change = read["up"].flatten(1) @ read["down"].flatten(1)
            merged = merged + self._scale * factor * change.reshape(weight.shape)
        for whole in ("diff", "diff_b"):
            if whole in read:
                merged = merged + self._scale * read[whole]
        return merged

    def _check(self, path: Path, target: str, parts: Mapping[str, str], shape: tuple[int, ...]) -> None:
        shapes = {role: self._file.tensors[name].shape for role, name in parts.items()}
        if ("down" in shapes) != ("up" in shapes) or ("alpha" in shapes and "down" not in shapes):
            raise ValueError(f"{path}: {target} has only a part of its LoRA: {', '.join(parts.values())}")
        wrong = [role for role in ("diff", "diff_b") if shapes.get(role, shape) != shape]
        if "alpha" in shapes and torch.Size(shapes["alpha"]).numel() != 1:
            wrong.append("alpha")
        if "down" in shapes:
            up, down = (torch.Size((*shapes[role], 1, 1)) for role in ("up", "down"))
            rank, size = down[0], (shape[0], torch.Size(shape[1:]).numel())
            if rank == 0 or (up[0], down[1:].numel()) != size or up[1:].numel() != rank:
                wrong += ["up", "down"]
        if wrong:
            found = " and ".join(f"{parts[role]} is {list(shapes[role])}" for role in wrong)
            raise ValueError(f"{path}: {found}, but {target} is {list(shape)}; it is for another model")


def is_lora(file: TensorFile) -> bool:
    """Whether the tensors of ``file`` are those of a LoRA."""
    return any(_ROLE.search(name) for name in file.tensors)


def describe_lora(file: TensorFile) -> str:
    """What a LoRA file changes, in words."""
    targets = {_target_of(name, _is_original(file))[0] for name in file.tensors}
    ranks = {info.shape[0] for name, info in file.tensors.items() if _ROLES.get(_role_of(name) or "") == "down"}
    names = "names of the original model" if _is_original(file) else "names of diffusers"
    rank = ", ".join(map(str, sorted(ranks)))
    return f"LoRA, {names}, {len(targets)} targets, rank {rank}; give it in stream.model.loras"


def _is_original(file: TensorFile) -> bool:
    return any(_ORIGINAL.search(name) for name in file.tensors)


def _role_of(name: str) -> str | None:
    found = _ROLE.search(name)
    return None if found is None else found[1] or found[3]


def _target_of(name: str, is_original: bool) -> tuple[str, str | None]:
    """The weight that a LoRA tensor changes, by diffusers' name, and its role in that."""
    role = _role_of(name)
    if role is None:
        return name, None
    role = _ROLES.get(role, role)
    module = without_wrappers(_OUTER.sub("", _ROLE.sub("", name)))
    target = f"{module}.bias" if role == "diff_b" else f"{module}.weight"
    if not is_original:
        return target, role
    return next(iter(convert_wan_transformer_to_diffusers({target: target}))), role


def _read_adapter(file: TensorFile) -> _Adapter:
    """The settings that diffusers stores in the file, or PEFT in ``adapter_config.json`` beside it."""
    beside = file.path.parent / "adapter_config.json"
    if isinstance(file, SafetensorsFile) and "lora_adapter_metadata" in file.metadata:
        where, text = f"{file.path}: its lora_adapter_metadata", file.metadata["lora_adapter_metadata"]
    elif file.path.name.startswith("adapter_model.") and beside.exists():
        where, text = str(beside), beside.read_text(errors="replace")
    else:
        return _Adapter()
    try:
        # In diffusers' own, every key begins with the name of the part that it is for.
        settings = {key.removeprefix("transformer."): value for key, value in json.loads(text).items()}
        alpha = settings.get("lora_alpha")
        return _Adapter(
            None if alpha is None else float(alpha),
            {key: float(value) for key, value in (settings.get("alpha_pattern") or {}).items()},
            bool(settings.get("use_rslora")),
        )
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{where} is not the settings of a LoRA ({error}); export it again") from None
