"""Sinks that follow the content: the decision by hand, and the cache against a naive list."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from ds_stream.model.adaptive_sinks import NO_SINK, least_similar_sink
from ds_stream.model.cache import CacheShape, RollingCache
from ds_stream.model.rope import Rope, apply_rope
from ds_stream.model.window import ContextWindow
from rings import CPU

HEADS, HEAD_DIM, GRID = 2, 12, (1, 2)
TOKENS = GRID[0] * GRID[1]
ROPE = Rope(HEAD_DIM, *GRID, CPU)


def test_similarity_worked_out_by_hand():
    """Two tokens, one head, two channels; means of the sinks' keys: (1, 0), (0, 1), (1, 1); of the new: (1, 0)."""
    keys = torch.tensor([[[2.0, 0.0], [0.0, 0.0]], [[0.0, 1.0], [0.0, 1.0]], [[1.0, 0.0], [1.0, 2.0]]])[:, :, None]
    new_key = torch.tensor([[3.0, 1.0], [3.0, -1.0]])[:, None]
    # Values: cosines 1, 0.6 and -1 to the new one, so similarities are 1, 0.3 and (0.7071 - 1) / 2 = -0.146.
    values = torch.tensor([[[1.0, 0.0]] * 2, [[3.0, 4.0]] * 2, [[-2.0, 0.0]] * 2])[:, :, None]
    new_value = torch.tensor([[1.0, 0.0]] * 2)[:, None]
    assert least_similar_sink(keys, values, new_key, new_value, 0.2) == 2
    assert least_similar_sink(keys, values, new_key, new_value, -0.14) == 2
    assert least_similar_sink(keys, values, new_key, new_value, -0.15) == NO_SINK
    assert least_similar_sink(keys[:2], values[:2], new_key, new_value, 0.2) == NO_SINK
    assert least_similar_sink(keys[:2], values[:2], new_key, new_value, 0.31) == 1


@pytest.mark.parametrize("sliding", [True, False])
@pytest.mark.parametrize(("frames", "size", "sinks"), [(1, 3, 2), (1, 1, 3), (2, 3, 3), (3, 3, 2)])
@pytest.mark.parametrize(("lead", "num_passes"), [(0, 1), (0, 3), (1, 3), (2, 3)])
@pytest.mark.parametrize("threshold", [-1.0, 0.0, 1.0])
def test_reads_what_a_naive_list_would(
    frames: int, size: int, sinks: int, lead: int, num_passes: int, sliding: bool, threshold: float
):
    window = ContextWindow(frames, size, sinks, lead, num_passes)
    deciding, obeying = (
        RollingCache(CacheShape(window, TOKENS, HEADS, HEAD_DIM, sliding, threshold), torch.float32, CPU)
        for _ in range(2)
    )
    generator = torch.Generator().manual_seed(0)
    log: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    sink_frames = list(range(sinks))
    num_replaced = 0
    for chunk in range(14):
        replaced = None
        for step in range(num_passes):
            key, value = torch.randn(2, frames * TOKENS, HEADS, HEAD_DIM, generator=generator).unbind()
            own = window.frames(chunk)
            for frame, k, v in zip(own, key.split(TOKENS), value.split(TOKENS), strict=True):
                log[frame, step] = (k, v)
            if step == lead and own.start >= sinks:
                similarities = [similarity(log[f, lead], log[own[-1], lead]) for f in sink_frames]
                least = min(range(sinks), key=similarities.__getitem__)
                replaced = least if similarities[least] < threshold else None
            angles = ROPE.angles(own.start, len(own))
            at = window.sliding_sink_position(chunk)
            sink_angles = ROPE.angles(at, sinks) if sliding else None
            found = deciding.update(chunk, step, key, value, angles, sink_angles)
            choice = deciding.sink_choice(chunk, step)
            assert choice == (NO_SINK if replaced is None else replaced)
            obeyed = obeying.update(chunk, step, key, value, angles, sink_angles, choice)
            assert all(torch.equal(a, b) for a, b in zip(found, obeyed, strict=True))

            filled = min(sinks, own.stop)
            wanted = [(f, at + i if sliding else f) for i, f in enumerate(sink_frames[:filled])]
            wanted += [(f, f) for f in range(window.window_start(chunk), own.stop)]
            assert len(found[0]) == len(wanted) * TOKENS
            found_frames = list(zip(found[0].split(TOKENS), found[1].split(TOKENS), strict=True))
            for frame, position in wanted:
                level = step if frame in own else window.level_read(step)
                k, v = log[frame, level]
                rotated = apply_rope(k, ROPE.angles(position, 1))
                assert any(torch.equal(v, b) and torch.allclose(rotated, a, atol=1e-6) for a, b in found_frames)
        if replaced is not None:
            sink_frames[replaced] = window.frames(chunk)[-1]
            num_replaced += 1
    assert not deciding._sink_choices
    assert num_replaced > 0 if threshold > -1 else num_replaced == 0


def similarity(old: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor]) -> float:
    cosines = [
        cosine_similarity(a.mean(0).flatten(), b.mean(0).flatten(), dim=0) for a, b in zip(old, new, strict=True)
    ]
    return (sum(cosines) / 2).item()


def test_no_sink_is_replaced_before_all_are_filled():
    window = ContextWindow(1, 2, 3, 0, 1)
    cache = RollingCache(CacheShape(window, TOKENS, HEADS, HEAD_DIM, True, 1.0), torch.float32, CPU)
    choices = []
    for chunk in range(5):
        key, value = torch.randn(2, TOKENS, HEADS, HEAD_DIM).unbind()
        sinks = ROPE.angles(window.sliding_sink_position(chunk), 3)
        cache.update(chunk, 0, key, value, ROPE.angles(chunk, 1), sinks)
        choices.append(cache.sink_choice(chunk, 0).item())
    assert choices[:3] == [NO_SINK] * 3
    assert all(choice in range(3) for choice in choices[3:])
