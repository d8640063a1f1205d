"""The list of layers, what a stage does with its share of it, and how layers move between stages."""

import gc
import itertools
import weakref
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from ds_stream.core import NUM_WAN_DECODE_LAYERS, Row
from ds_stream.model.layers import BlockLayer, EmbedLayer, HeadLayer, RowBatch, RowContextFactory, latent_shape
from ds_stream.model.light_vae import LightDecodeLayer, LightEncodeLayer
from ds_stream.model.pipeline import (
    StageLayers,
    StreamModule,
    build_all_layers,
    decoder_input_field,
    layer_specs,
    open_weights,
)
from ds_stream.model.vae import DecodeLayer, EncodeLayer
from ds_stream.partition import EMBED, ENCODE, stage_layers, stage_of
from ds_stream.settings import StreamConfig
from rings import CPU, _enter_fake_group, tiny_config

NUM_BLOCKS = 3
MOVES = [
    [(0, 11), (0, 11)],
    [(0, 4, 11), (0, 1, 11), (0, 10, 11), (0, 6, 11)],
    [(0, 3, 5, 11), (0, 1, 6, 11), (0, 6, 8, 11), (0, 8, 9, 11), (0, 1, 2, 11)],
]
"""Boundaries, one after the other: 0 encode, 1 embed, 2 to 4 blocks, 5 head, 6 to 10 decode."""


def config_of(partition: Sequence[int], **sections: dict[str, object]) -> StreamConfig:
    return tiny_config(stages={"partition": list(partition)}, **sections).stream


def stages_of(config: StreamConfig) -> list[StreamModule]:
    """A module for every stage."""
    assert config.stages.partition != "auto"
    num_stages = len(config.stages.partition) - 1
    weights = open_weights(config)
    modules = []
    for stage in range(num_stages):
        _enter_fake_group(stage, num_stages)
        modules.append(StreamModule(config, weights))
    return modules


def move(modules: Sequence[StreamModule], partition: tuple[int, ...]) -> None:
    """Take every module to ``partition``, as engines do."""
    before = modules[0].partition
    arrived: list[dict[int, nn.Module]] = [{} for _ in modules]
    for stage, module in enumerate(modules):
        for index in stage_layers(partition, stage):
            source = modules[stage_of(before, index)]
            if source is not module:
                sent = {name: p.clone() for name, p in source.layers.by_index[index].named_parameters()}
                arrived[stage][index] = module.build_moved(index, sent, CPU)
    for module, layers in zip(modules, arrived, strict=True):
        module.repartition(partition, layers)


@torch.no_grad()
def outputs_of(modules: Sequence[StreamModule], config: StreamConfig) -> tuple[Tensor, Tensor]:
    """Flow of two rows, and pixels of two chunks, through all stages."""
    stages = [module.layers for module in modules]
    blocks = [block for stage in stages for block in stage.blocks]
    (embed,) = [stage.embed for stage in stages if stage.embed is not None]
    generator = torch.Generator().manual_seed(7)
    context = embed.project_text(torch.randn(config.model.num_text_tokens, config.model.text_dim, generator=generator))
    texts = {block.index: block.text_key_value(context) for block in blocks}
    rows = RowContextFactory(config, CPU)
    caches = rows.new_caches([block.index for block in blocks])
    latents = torch.randn(2, *latent_shape(config), generator=generator)
    batch = RowBatch([rows.make(Row(0, 0, step, 0), caches, texts) for step in (0, 1)], latents)
    for module in modules:
        batch = module(batch)
    states = [stage.new_decoder_states() for stage in stages]
    pixels = []
    for hidden in latents:
        for stage, state in zip(stages, states, strict=True):
            hidden = stage.decode_chunk(hidden, state)
        pixels.append(hidden)
    assert batch.flow_RCNhw is not None
    return batch.flow_RCNhw, torch.cat(pixels)


@pytest.mark.parametrize(
    ("use", "encode", "decode"),
    [
        ("no", EncodeLayer, [DecodeLayer] * NUM_WAN_DECODE_LAYERS),
        ("decoder", EncodeLayer, [LightDecodeLayer]),
        ("both", LightEncodeLayer, [LightDecodeLayer]),
    ],
)
def test_the_list_of_layers(use: str, encode: type, decode: list[type]):
    light = {"use": use, "encoder_width": 4, "decoder_widths": [8, 4, 4, 4]}
    config = tiny_config(light_vae=light).stream
    types = [encode, EmbedLayer, *[BlockLayer] * NUM_BLOCKS, HeadLayer, *decode]
    assert [spec.typename for spec in layer_specs(config)] == types
    layers, whole = config.layers, build_all_layers(config, CPU)
    assert [type(layer) for layer in whole.by_index.values()] == types
    assert list(whole.by_index) == list(range(layers.num_layers))
    assert whole.encode is whole.by_index[ENCODE]
    assert whole.embed is whole.by_index[EMBED]
    assert [block.index for block in whole.blocks] == list(range(NUM_BLOCKS))
    assert list(whole.ring) == list(layers.ring)
    assert list(whole.decode) == list(layers.decode)
    assert list(whole.new_decoder_states()) == list(layers.decode)
    assert decoder_input_field(config, 0, is_first_chunk=True) == (latent_shape(config), torch.float32)


def test_a_stage_without_some_kinds_of_layers_passes_on_what_it_gets():
    whole = build_all_layers(tiny_config().stream, CPU)
    model = tiny_config().stream.layers
    stage = StageLayers(model, {8: whole.by_index[8]})
    assert (stage.encode, stage.embed, stage.blocks, stage.ring) == (None, None, [], {})
    batch = RowBatch([], torch.zeros(1))
    assert stage.forward(batch, exact_rows=True) is batch
    ring_only = StageLayers(model, {index: whole.by_index[index] for index in (4, 5)})
    latents = torch.zeros(1)
    assert ring_only.decode_chunk(latents, ring_only.new_decoder_states()) is latents


@pytest.mark.parametrize("exact_rows", [False, True])
def test_layers_tell_that_they_have_run(exact_rows: bool):
    config = config_of((0, 7, 11), batch={"exact_rows": exact_rows})
    first, second = stages_of(config)
    told: list[int] = []
    rows = RowContextFactory(config, CPU)
    caches = rows.new_caches([0, 1, 2])
    context = first.layers.embed.project_text(torch.zeros(config.model.num_text_tokens, config.model.text_dim))
    texts = {block.index: block.text_key_value(context) for block in first.layers.blocks}
    latents = torch.zeros(2, *latent_shape(config))
    batch = RowBatch([rows.make(Row(0, 0, step, 0), caches, texts) for step in (0, 1)], latents)
    with torch.no_grad():
        first(batch, told.append)
        assert told == [1, 2, 3, 4, 5] * (2 if exact_rows else 1)
        told.clear()
        hidden = first.layers.decode_chunk(latents[0], first.layers.new_decoder_states(), told.append)
        second.layers.decode_chunk(hidden, second.layers.new_decoder_states(), told.append)
    assert told == [6, 7, 8, 9, 10]


@pytest.mark.parametrize("partitions", MOVES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_after_a_move_modules_are_as_if_built_so(partitions: list[tuple[int, ...]], dtype: str):
    device = {"dtype": dtype}
    config = config_of(partitions[0], device=device)
    modules = stages_of(config)
    before = outputs_of(modules, config)
    for partition in partitions[1:]:
        move(modules, partition)
        for moved, fresh in zip(modules, stages_of(config_of(partition, device=device)), strict=True):
            assert moved.partition == fresh.partition == partition
            assert moved.parts == fresh.parts
            assert (moved._local_start, moved._local_stop) == (fresh._local_start, fresh._local_stop)
            assert moved.fwd_map == fresh.fwd_map
            assert moved.forward_funcs == list(moved.layers.by_index.values())
            assert [type(layer) for layer in moved.forward_funcs] == [type(layer) for layer in fresh.forward_funcs]
            assert list(moved.layers.by_index) == list(fresh.layers.by_index)
            assert moved.num_parameters == fresh.num_parameters
            assert_same_tensors(dict(moved.named_parameters()), dict(fresh.named_parameters()))
            assert_same_tensors(dict(moved.named_buffers()), dict(fresh.named_buffers()))
            assert not any(parameter.requires_grad for parameter in moved.parameters())
            assert not any(parameter.ds_pipe_replicated for parameter in moved.parameters())
            assert [layer.training for layer in moved.modules()] == [layer.training for layer in fresh.modules()]
        assert all(torch.equal(*pair) for pair in zip(outputs_of(modules, config), before, strict=True))
    assert before[0].std() > 0.1


def assert_same_tensors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype, name
        assert torch.equal(tensor, expected[name]), name


def test_what_moved_away_is_freed():
    modules = stages_of(config_of((0, 4, 11)))
    held = [{index: weakref.ref(layer) for index, layer in module.layers.by_index.items()} for module in modules]
    for partition in [(0, 2, 11), (0, 9, 11)]:
        move(modules, partition)
    gc.collect()
    alive = [[index for index, layer in of_stage.items() if layer() is not None] for of_stage in held]
    # A layer that went and came back is another one.
    assert alive == [[0, 1], [9, 10]]


def test_a_move_builds_no_layer_that_stays():
    (first, _) = modules = stages_of(config_of((0, 4, 11)))
    kept = first.layers.by_index[2]
    move(modules, (0, 3, 11))
    assert first.layers.by_index[2] is kept
    assert [first.get_submodule(str(index)) for index in range(3)] == first.forward_funcs


def test_a_moved_layer_must_have_all_its_parameters_and_no_others():
    (module,) = stages_of(config_of((0, 11)))
    for index, layer in module.layers.by_index.items():
        parameters = dict(layer.named_parameters())
        first = next(iter(parameters))
        for wrong in (parameters | {"more": torch.zeros(1)}, {n: p for n, p in parameters.items() if n != first}):
            with pytest.raises(RuntimeError, match=f"more|{first}"):
                module.build_moved(index, wrong, CPU)


def test_parameters_of_the_stages_are_those_of_the_model():
    whole = build_all_layers(tiny_config().stream, CPU)
    for partition in itertools.chain(*MOVES):
        names = [name for module in stages_of(config_of(partition)) for name, _ in module.named_parameters()]
        assert names == [f"{index}.{name}" for index, layer in whole.by_index.items() for name in names_of(layer)]


def names_of(layer: nn.Module) -> list[str]:
    return [name for name, _ in layer.named_parameters()]
