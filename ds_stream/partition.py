"""Which layers each stage holds: boundaries over ``[encode, embed, block x N, head, decode x D]``.

Integers only. Encode and decode are the VAE's: they run once per chunk. The layers from embed to head run once per
pass: the stages that hold some of them are the *ring*. A stage before or after it holds layers of the VAE alone.
"""

import bisect
import itertools
from dataclasses import dataclass
from typing import Literal

ENCODE = 0
"""Index of the encode layer."""
EMBED = 1
"""Index of the embed layer, the ring's first."""


@dataclass(frozen=True, slots=True)
class Ring:
    """The stages that hold layers of the DiT, by number."""

    first: int
    last: int

    @property
    def num_stages(self) -> int:
        """``P``."""
        return self.last - self.first + 1


@dataclass(frozen=True, slots=True)
class LayerList:
    """The model's layers by index."""

    num_blocks: int
    num_decode_layers: int

    @property
    def head(self) -> int:
        """Index of the head layer, the ring's last."""
        return EMBED + self.num_blocks + 1

    @property
    def num_layers(self) -> int:
        return self.head + 1 + self.num_decode_layers

    @property
    def ring(self) -> range:
        """Layers that run once per pass."""
        return range(EMBED, self.head + 1)

    @property
    def decode(self) -> range:
        """The decoder's layers."""
        return range(self.head + 1, self.num_layers)

    def name(self, layer: int) -> str:
        """A layer by a name for people."""
        if layer in self.decode:
            return f"decode {layer - self.head - 1}"
        fixed = {ENCODE: "encode", EMBED: "embed", self.head: "head"}
        return fixed.get(layer, f"block {layer - EMBED - 1}")

    def ring_of(self, partition: tuple[int, ...]) -> Ring:
        """The ring of a partition that :meth:`check` passes."""
        return Ring(stage_of(partition, EMBED), stage_of(partition, self.head))

    def check(self, partition: tuple[int, ...]) -> None:
        """Raise :class:`ValueError` unless ``partition`` gives every layer to one stage and every stage a layer."""
        where = f"stages.partition {list(partition)}"
        if len(partition) < 2 or partition[0] != 0 or partition[-1] != self.num_layers:
            covered = partition[-1] if partition else 0
            raise ValueError(
                f"{where} covers {covered} layers but the model has {self.num_layers} (encode, embed, "
                f"{self.num_blocks} blocks, head, {self.num_decode_layers} of the decoder); give boundaries from 0 to "
                f"{self.num_layers}"
            )
        if any(a >= b for a, b in itertools.pairwise(partition)):
            raise ValueError(f"{where} must rise strictly: every stage needs a layer")

    def resolve(self, partition: tuple[int, ...] | Literal["auto"], num_stages: int) -> tuple[int, ...]:
        """Boundaries for ``num_stages`` stages: the given ones, checked, or blocks spread evenly.

        With ``auto``, blocks that do not divide evenly go to the middle stages first, since the outer ones also hold
        the VAE.

        Raises:
            ValueError: too many stages for the model, or the given boundaries are for another number of stages.
        """
        if partition != "auto":
            self.check(partition)
            if len(partition) - 1 != num_stages:
                raise ValueError(
                    f"stream.stages.partition has {len(partition) - 1} stages but {num_stages} ranks were started; "
                    f'start {len(partition) - 1} ranks (deepspeed --num_gpus {len(partition) - 1}) or set it to "auto"'
                )
            return partition
        most = self.num_blocks + 2
        if num_stages > most:
            raise ValueError(
                f"{num_stages} ranks were started but the model has {self.num_blocks} blocks, enough for {most} "
                f"stages at most; start at most {most} (deepspeed --num_gpus {most})"
            )
        blocks = [self.num_blocks // num_stages] * num_stages
        middle_first = sorted(range(num_stages), key=lambda stage: (stage in (0, num_stages - 1), stage))
        for stage in middle_first[: self.num_blocks % num_stages]:
            blocks[stage] += 1
        cuts = [EMBED + 1 + sum(blocks[: stage + 1]) for stage in range(num_stages - 1)]
        return (0, *cuts, self.num_layers)


def stage_of(partition: tuple[int, ...], layer: int) -> int:
    """The stage that holds ``layer``."""
    return bisect.bisect_right(partition, layer) - 1


def stage_layers(partition: tuple[int, ...], stage: int) -> range:
    """The layers that ``stage`` holds."""
    return range(partition[stage], partition[stage + 1])


def describe_role(layers: LayerList, own: range) -> str:
    """What a stage's layers are, in words."""
    num_blocks = sum(EMBED < layer < layers.head for layer in own)
    num_decode = sum(layer in layers.decode for layer in own)
    parts = ["encode"] if ENCODE in own else []
    parts += ["embed"] if layers.ring.start in own else []
    parts += [f"{num_blocks} block{'s' * (num_blocks > 1)}"] if num_blocks else []
    parts += ["head"] if layers.head in own else []
    if num_decode:
        parts.append(
            "decode" if num_decode == layers.num_decode_layers else f"decode {num_decode} of {len(layers.decode)}"
        )
    return ", ".join(parts)
