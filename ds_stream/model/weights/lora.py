"""LoRA files, merged into weights as these load: ``W + scale * alpha / rank * B A`` (arXiv 2106.09685, section 4.1).

Names may be those of diffusers/PEFT (``transformer.blocks.0.attn1.to_q.lora_A.weight``) or of the original model
(``diffusion_model.blocks.0.self_attn.q.lora_down.weight``), the latter also with whole differences (``.diff``,
``.diff_b``).
"""

import json
import re
from collections import defaultdict
from collections.abc import Collection, Mapping
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
        self._alpha_of_file = _alpha_in_metadata(self._file)
        for target, parts in self._parts.items():
            self._check(path, target, parts, targets[target])

    def targets(self) -> Collection[str]:
        """Weights that it changes, by diffusers' names."""
        return self._parts.keys()

    def merge(self, name: str, weight: Tensor) -> Tensor:
        """``weight`` with this file's change, in fp32; the same tensor if it has none."""
        parts = self._parts.get(name)
        if not parts:
            return weight
        tensors = {name: tensor.float() for name, tensor in self._file.read(parts.values())}
        read = {role: tensors[file_name] for role, file_name in parts.items()}
        merged = weight.float()
        if "down" in read:
            rank = read["down"].shape[0]
            alpha = read["alpha"].item() if "alpha" in read else self._alpha_of_file or rank
            change = read["up"].flatten(1) @ read["down"].flatten(1)
            merged = merged + (self._scale * alpha / rank) * change.reshape(weight.shape)
        for whole in ("diff", "diff_b"):
            if whole in read:
                merged = merged + self._scale * read[whole]
        return merged

    def _check(self, path: Path, target: str, parts: Mapping[str, str], shape: tuple[int, ...]) -> None:
        shapes = {role: self._file.tensors[name].shape for role, name in parts.items()}
        if ("down" in shapes) != ("up" in shapes):
            raise ValueError(f"{path}: {target} has only half of its LoRA: {', '.join(parts.values())}")
        wrong = [
            f"{parts[role]} is {list(shapes[role])}" for role in ("diff", "diff_b") if shapes.get(role, shape) != shape
        ]
        if "down" in shapes:
            size = (shape[0], int(torch.Size(shape[1:]).numel()))
            down, up = (int(torch.Size(shapes[role][1:]).numel()) for role in ("down", "up"))
            if (shapes["up"][0], down) != size or up != shapes["down"][0]:
                wrong.append(
                    f"{parts['up']} times {parts['down']} is {list(shapes['up'])} times {list(shapes['down'])}"
                )
        if wrong:
            raise ValueError(f"{path}: {'; '.join(wrong)}, but {target} is {list(shape)}; it is for another model")


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


def _alpha_in_metadata(file: object) -> float | None:
    """``lora_alpha`` where diffusers stored its adapter's settings beside the tensors."""
    if not isinstance(file, SafetensorsFile) or "lora_adapter_metadata" not in file.metadata:
        return None
    try:
        settings = json.loads(file.metadata["lora_adapter_metadata"])
    except json.JSONDecodeError as error:
        raise ValueError(f"{file.path}: its lora_adapter_metadata is not JSON ({error}); export it again") from None
    alphas = [value for key, value in settings.items() if key.endswith("lora_alpha")]
    return float(alphas[0]) if alphas else None
