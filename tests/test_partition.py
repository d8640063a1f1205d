"""Boundaries of stages: integers alone."""

import itertools

import pytest

from ds_stream.partition import LayerList, Ring, describe_role, stage_layers, stage_of


@pytest.mark.parametrize("num_blocks", range(1, 8))
@pytest.mark.parametrize("num_decode_layers", [1, 5])
def test_auto_gives_every_stage_a_ring_layer_and_spreads_blocks(num_blocks: int, num_decode_layers: int):
    layers = LayerList(num_blocks, num_decode_layers)
    for num_stages in range(1, num_blocks + 3):
        bounds = layers.resolve("auto", num_stages)
        layers.check(bounds)
        assert layers.ring_of(bounds) == Ring(0, num_stages - 1)
        blocks = [sum(1 < layer < layers.head for layer in range(a, b)) for a, b in itertools.pairwise(bounds)]
        assert sum(blocks) == num_blocks
        assert max(blocks) - min(blocks) <= 1


@pytest.mark.parametrize(
    ("partition", "ring"),
    [
        ((0, 11), (0, 0)),
        ((0, 1, 11), (1, 1)),
        ((0, 6, 11), (0, 0)),
        ((0, 1, 4, 6, 8, 11), (1, 2)),
        ((0, 2, 11), (0, 1)),
    ],
)
def test_the_ring_follows_from_the_boundaries(partition: tuple[int, ...], ring: tuple[int, int]):
    """Three blocks: layers 0 encode, 1 embed, 2 to 4, 5 head, 6 to 10 decode."""
    layers = LayerList(3, 5)
    layers.check(partition)
    assert layers.ring_of(partition) == Ring(*ring)


def test_every_layer_has_a_stage_and_a_name():
    layers, partition = LayerList(3, 5), (0, 1, 4, 7, 11)
    assert [stage_of(partition, layer) for layer in range(11)] == [0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 3]
    for stage in range(4):
        assert all(stage_of(partition, layer) == stage for layer in stage_layers(partition, stage))
    roles = [describe_role(layers, stage_layers(partition, stage)) for stage in range(4)]
    assert roles == ["encode", "embed, 2 blocks", "1 block, head, decode 1 of 5", "decode 4 of 5"]
    assert describe_role(layers, range(11)) == "encode, embed, 3 blocks, head, decode"


@pytest.mark.parametrize("partition", [(), (0,), (0, 4), (1, 11), (0, 5, 5, 11), (0, 6, 4, 11)])
def test_what_is_no_partition(partition: tuple[int, ...]):
    with pytest.raises(ValueError, match=r"covers|rise strictly"):
        LayerList(3, 5).check(partition)
