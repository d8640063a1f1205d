"""Published checkpoints under one set of names: those of diffusers, whatever names the file itself uses.

A checkpoint is one part of a model (DiT, Wan VAE, light VAE) in one file or folder.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from pathlib import Path

from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers, convert_wan_vae_to_diffusers
from torch import Tensor

from ds_stream.model.weights.tensor_files import TensorFile, TensorInfo, TorchFile, open_tensors

# Wrappers that training put around modules: around the whole model, and around any module inside it.
_OUTER = ("model.", "module.", "diffusion_model.", "generator.")
_ANYWHERE = re.compile(r"(_fsdp_wrapped_module|_orig_mod|_checkpoint_wrapped_module)\.")


class Part(Enum):
    """What a checkpoint is a part of."""

    DIT = "DiT"
    VAE = "Wan VAE"
    LIGHT_VAE = "light VAE (TAEHV)"
    UMT5 = "UMT5 text encoder"


_MARKS = {
    # For each part, a name by which diffusers' layout is known, and one of the original.
    Part.DIT: (r"blocks\.\d+\.attn1\.to_q\.weight", r"blocks\.\d+\.self_attn\.q\.weight"),
    Part.VAE: (r"(encoder\.down_blocks|decoder\.up_blocks)\.", r"(encoder\.downsamples|decoder\.upsamples)\."),
    Part.LIGHT_VAE: (r"(encoder|decoder)\.\d+\.", None),
    Part.UMT5: (r"encoder\.block\.\d+\.layer\.", r"blocks\.\d+\.attn\.q\.weight"),
}


class Checkpoint:
    """The tensors of one part of a model.

    Args:
        file: what is on disk.

    Raises:
        ValueError: it is none of the known parts, or two of its names are one once wrappers are taken off.
    """

    def __init__(self, file: TensorFile):
        self.file = file
        plain: dict[str, str] = {}
        for name in file.tensors:
            short = without_wrappers(name)
            if short in plain:
                raise ValueError(f"{file.path}: {name} and {plain[short]} are both {short} without their wrappers")
            plain[short] = name
        self.part, self.is_original = _recognise(plain, file)
        # Diffusers' converters rename: fed with the names themselves, they give the table.
        table: Mapping[str, str] = {name: name for name in plain}
        if self.is_original and self.part is Part.DIT:
            table = convert_wan_transformer_to_diffusers(dict(table))
        elif self.is_original and self.part is Part.VAE:
            table = convert_wan_vae_to_diffusers(dict(table))
        self._file_names = {name: plain[old] for name, old in table.items()}
        self.tensors: dict[str, TensorInfo] = {name: file.tensors[old] for name, old in self._file_names.items()}
        """What there is, by diffusers' names."""

    @staticmethod
    def open(path: Path, entry: str = "auto") -> "Checkpoint":
        """The checkpoint in a file, or in a folder that holds one."""
        return Checkpoint(open_tensors(path, entry))

    @property
    def description(self) -> str:
        """What it is, in words."""
        names = "names of the original model" if self.is_original else "names of diffusers"
        entry = ""
        if isinstance(self.file, TorchFile) and self.file.entry:
            entry = f", entry {self.file.entry} of {', '.join(self.file.entries)}"
        return f"{self.part.value}, {names}{entry}"

    @property
    def num_parameters(self) -> int:
        return sum(info.num_bytes // info.dtype.itemsize for info in self.tensors.values())

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Each tensor by diffusers' name, mapped from disk as :meth:`TensorFile.read` says."""
        wanted = {self._file_names[name]: name for name in names}
        for file_name, tensor in self.file.read(wanted):
            yield wanted[file_name], tensor


def without_wrappers(name: str) -> str:
    """A tensor's name without what training wrapped around its modules, singly or nested."""
    name = _ANYWHERE.sub("", name)
    while name.startswith(_OUTER):
        name = name.split(".", 1)[1]
    return name


def check_names(where: str, wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, TensorInfo]) -> None:
    """Raise :class:`ValueError` that lists what is missing, unexpected or of another shape, ten of each at most."""
    problems = []
    missing = [name for name in wanted if name not in found]
    if missing:
        problems.append(_list("missing", missing))
    unexpected = [name for name in found if name not in wanted]
    if unexpected:
        problems.append(_list("unexpected", unexpected))
    misshapen = [
        f"{name} is {list(found[name].shape)} but the config makes it {list(shape)}"
        for name, shape in wanted.items()
        if name in found and found[name].shape != tuple(shape)
    ]
    if misshapen:
        problems.append(_list("of another shape", misshapen))
    if problems:
        raise ValueError(
            f"{where} does not fit the config ({len(found)} tensors there, {len(wanted)} wanted):\n  "
            + "\n  ".join(problems)
            + "\n  see: python -m ds_stream.model.weights inspect FILE"
        )


def _list(what: str, names: list[str]) -> str:
    rest = f", and {len(names) - 10} more" if len(names) > 10 else ""
    return f"{len(names)} {what}: {', '.join(names[:10])}{rest}"


def _recognise(names: Iterable[str], file: TensorFile) -> tuple[Part, bool]:
    names = list(names)
    for part, marks in _MARKS.items():
        for is_original, mark in zip((False, True), marks, strict=True):
            if mark is not None and any(re.match(mark, name) for name in names):
                return part, is_original
    shown = ", ".join(names[:3]) or "nothing"
    raise ValueError(f"{file.path}: not a part of a Wan model that is known here; it holds {shown}, ...")
