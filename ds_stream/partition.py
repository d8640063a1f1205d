"""Which layers each stage holds: boundaries over ``[encode, embed, block x N, head, decode]``.

Integers only. The first and the last stage hold the VAE's halves besides their share of the ring.
"""

import itertools
from typing import Literal

NUM_EXTRA_LAYERS = 4
"""Layers besides the blocks: encode, embed, head, decode."""


def check_partition(partition: tuple[int, ...], num_blocks: int) -> None:
    """Raise :class:`ValueError` unless ``partition`` cuts the layer list into stages that each hold a DiT layer."""
    num_layers = num_blocks + NUM_EXTRA_LAYERS
    where = f"stages.partition {list(partition)}"
    if len(partition) < 2 or partition[0] != 0 or partition[-1] != num_layers:
        covered = partition[-1] if partition else 0
        raise ValueError(
            f"{where} covers {covered} layers but the model has {num_layers}; give boundaries from 0 to {num_layers}"
        )
    if any(a >= b for a, b in itertools.pairwise(partition)):
        raise ValueError(f"{where} must rise strictly: every stage needs a layer")
    if len(partition) > 2 and (partition[1] < 2 or partition[-2] > num_layers - 2):
        raise ValueError(
            f"{where} leaves a stage with the VAE alone; the first stage needs encode and embed (first cut at 2 or "
            f"later), the last one head and decode (last cut at {num_layers - 2} or earlier)"
        )


def resolve_partition(
    partition: tuple[int, ...] | Literal["auto"], num_blocks: int, num_stages: int
) -> tuple[int, ...]:
    """Boundaries for ``num_stages`` stages: the given ones, checked, or blocks spread evenly.

    With ``auto``, blocks that do not divide evenly go to the middle stages first, since the outer ones also hold the
    VAE.

    Raises:
        ValueError: too many stages for the model, or the given boundaries are for another number of stages.
    """
    if partition != "auto":
        check_partition(partition, num_blocks)
        if len(partition) - 1 != num_stages:
            raise ValueError(
                f"stream.stages.partition has {len(partition) - 1} stages but {num_stages} ranks were started; "
                f'start {len(partition) - 1} ranks (deepspeed --num_gpus {len(partition) - 1}) or set it to "auto"'
            )
        return partition
    if num_stages > num_blocks + 2:
        raise ValueError(
            f"{num_stages} ranks were started but the model has {num_blocks} blocks, enough for {num_blocks + 2} "
            f"stages at most; start at most {num_blocks + 2} (deepspeed --num_gpus {num_blocks + 2})"
        )
    blocks = [num_blocks // num_stages] * num_stages
    middle_first = sorted(range(num_stages), key=lambda stage: (stage in (0, num_stages - 1), stage))
    for stage in middle_first[: num_blocks % num_stages]:
        blocks[stage] += 1
    bounds = [0]
    for stage, count in enumerate(blocks):
        bounds.append(bounds[-1] + count + (2 if stage == 0 else 0) + (2 if stage == num_stages - 1 else 0))
    return tuple(bounds)
