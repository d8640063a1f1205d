"""The plan says what stages then hold."""

import pytest
import torch

from ds_stream.config import find_config, load_config
from ds_stream.model.cache import RollingCache
from ds_stream.model.layers import cache_shape
from ds_stream.model.memory_plan import GIB, check_fits, describe_plan, plan_memory
from rings import CPU, MockRing, Stream, random_clip, tiny_config


@pytest.mark.parametrize("num_stages", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("adaptive", [False, True])
def test_weights_and_caches_are_exact(num_stages: int, dtype: str, adaptive: bool):
    config = tiny_config(
        device={"dtype": dtype}, context={"adaptive_sinks": adaptive, "num_sink_latent_frames": 2}
    ).resolve(num_stages)
    plan = plan_memory(config.stream, exact_rows=True, num_message_buffers=4)
    ring = MockRing(config, num_stages)
    ring.run([Stream(1, random_clip(5))])
    for memory, engine in zip(plan, ring.engines, strict=True):
        parameters = engine.module.parameters()
        assert memory.weights == sum(p.numel() * p.element_size() for p in parameters)
        assert memory.cache == engine.peak_cache_bytes


def test_a_cache_allocates_what_its_shape_says():
    shape = cache_shape(tiny_config(context={"adaptive_sinks": True}).stream)
    cache = RollingCache(shape, torch.float32, CPU)
    assert cache.num_bytes == 4 * shape.num_elements()


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
