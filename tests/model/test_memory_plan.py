"""The plan says what stages then hold."""

import pytest
import torch

from ds_stream.config import find_config, load_config
from ds_stream.model.cache import RollingCache
from ds_stream.model.layers import cache_shape, latent_shape
from ds_stream.model.memory_plan import GIB, _decoder_cache_bytes, check_fits, describe_plan, plan_memory
from ds_stream.model.pipeline import build_all_layers, layer_specs
from rings import CPU, MockRing, Stream, random_clip, tiny_config


@pytest.mark.parametrize("partition", [(0, 11), (0, 3, 5, 11), (0, 1, 6, 8, 10, 11), (0, 5, 7, 11)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("adaptive", [False, True])
def test_weights_and_caches_are_exact(partition: tuple[int, ...], dtype: str, adaptive: bool):
    """Whatever a stage holds: encode alone, some blocks, some or one of the decoder's layers."""
    num_stages = len(partition) - 1
    config = tiny_config(
        device={"dtype": dtype},
        context={"adaptive_sinks": adaptive, "num_sink_latent_frames": 2},
        stages={"partition": list(partition)},
    ).resolve(num_stages)
    plan = plan_memory(config.stream, exact_rows=True, num_message_buffers=4)
    ring = MockRing(config, num_stages)
    ring.run([Stream(1, random_clip(5))])
    for memory, engine in zip(plan, ring.engines, strict=True):
        parameters = engine.module.parameters()
        assert memory.weights == sum(p.numel() * p.element_size() for p in parameters)
        assert memory.cache == engine.state.peak_cache_bytes


def test_a_cache_allocates_what_its_shape_says():
    shape = cache_shape(tiny_config(context={"adaptive_sinks": True}).stream)
    cache = RollingCache(shape, torch.float32, CPU)
    assert cache.num_bytes == 4 * shape.num_elements()


def vae_of(partition: list[int], *overrides: str) -> list[float]:
    """What the plan of 1.3B at 480x832 says of the VAE on each stage, in four frames of full size and width."""
    assignments = (f"stream.stages.partition={partition}", *overrides)
    config = load_config(find_config("sdv2_v2v_1_3b"), assignments).resolve(len(partition) - 1).stream
    plan = plan_memory(config, exact_rows=False, num_message_buffers=7)
    return [memory.vae / (4 * 480 * 832 * 96 * 2) for memory in plan]


def test_a_whole_decoder_is_planned_as_measured_and_its_parts_by_the_pictures_they_make():
    """30 blocks: 0 encode, 32 head, 33 to 37 decode."""
    encode, blocks, whole = vae_of([0, 1, 33, 38])
    assert (encode, blocks) == (10, 0)
    assert whole == pytest.approx(17, rel=0.005)
    parts = vae_of([0, 33, 34, 35, 36, 37, 38])[1:]
    # A middle without pictures, a quarter of the width with two frames, half of it, and all of it with four.
    assert parts[0] < 0.06 * whole
    assert parts[0] < parts[1] < parts[2] < parts[3]
    assert parts[1] < 0.1 * whole
    assert all(0.6 * whole < part < whole for part in parts[3:])
    # They work one after the other, so that no sum of them is needed on one stage.
    assert whole < 0.6 * sum(parts)
    assert vae_of([0, 33, 36, 38])[1:] == [pytest.approx(parts[2], rel=0.2), pytest.approx(whole, rel=0.2)]
    longer = vae_of([0, 1, 33, 38], "stream.context.num_latent_frames_per_chunk=3")[2]
    # Features of a chunk wait between parts: those before and after the last growth, of two more latent frames.
    assert longer - whole == pytest.approx(2 * (0.5 + 1))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_convolution_caches_are_what_decoding_leaves(dtype: str):
    config = tiny_config(device={"dtype": dtype}, context={"num_latent_frames_per_chunk": 2}).stream
    layers = build_all_layers(config, CPU)
    states = layers.new_decoder_states()
    for _ in range(3):
        layers.decode_chunk(torch.zeros(latent_shape(config)), states)
    for spec, state in zip(layer_specs(config)[config.layers.decode.start :], states.values(), strict=True):
        caches = [cache for cache in state.features if isinstance(cache, torch.Tensor)]
        assert caches
        assert _decoder_cache_bytes(config, spec.build()) == sum(cache.nbytes for cache in caches)


def test_14b_on_four_stages_adds_up():
    """40 blocks of 5120 in bf16; WAN.md: 7.67 GB of cache for each level of six latent frames, keys and values."""
    config = load_config(find_config("sdv2_v2v_14b"), ("stream.context.adaptive_sinks=false",)).resolve(4).stream
    plan = plan_memory(config, exact_rows=False, num_message_buffers=11)
    assert sum(memory.weights for memory in plan) == pytest.approx(14.29e9 * 2 + 0.127e9 * 2, rel=0.01)
    # Four levels; the three sinks' unrotated keys beside them are another quarter.
    assert sum(memory.cache for memory in plan) == pytest.approx(4 * 7.67e9 * 1.25, rel=0.01)
    assert all(memory.total < 24 * GIB for memory in plan)
    assert plan[3].vae > plan[0].vae > 0 == plan[1].vae == plan[2].vae
    lines = describe_plan(plan, config.stages.partition).splitlines()[2:]
    columns = [[float(cell.replace(",", "")) for cell in line.split()[2:]] for line in lines]
    for row in columns:
        assert sum(row[:-1]) == pytest.approx(row[-1], abs=0.5)
    for column in zip(*columns, strict=True):
        assert sum(column[:-1]) == pytest.approx(column[-1], abs=0.5)


def test_what_does_not_fit_says_what_to_lower():
    config = load_config(find_config("sdv2_v2v_14b")).resolve(2).stream
    plan = plan_memory(config, exact_rows=False, num_message_buffers=7)
    check_fits(plan, 100 * GIB, "GPU 0")
    with pytest.raises(ValueError, match=r"GPU 0 has 24\.0 GiB free, but the stages on it need 7\d\.\d GiB"):
        check_fits(plan, 24 * GIB, "GPU 0")
    with pytest.raises(ValueError, match=r"cache; change stream settings: context\.num_window_latent_frames"):
        check_fits(plan, 24 * GIB, "GPU 0")
