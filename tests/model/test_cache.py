"""The rolling cache against a plain list of everything ever written."""

import itertools

import pytest
import torch

from ds_stream.model.cache import CacheShape, RollingCache
from ds_stream.model.rope import Rope, apply_rope
from ds_stream.model.window import ContextWindow
from rings import CPU

HEADS, HEAD_DIM, GRID = 2, 12, (2, 3)
TOKENS = GRID[0] * GRID[1]
ROPE = Rope(HEAD_DIM, *GRID, CPU)


def make_cache(window: ContextWindow, sliding: bool, adaptive: float | None = None) -> RollingCache:
    return RollingCache(CacheShape(window, TOKENS, HEADS, HEAD_DIM, sliding, adaptive), torch.float32, CPU)


def update(cache: RollingCache, chunk: int, step: int, key: torch.Tensor, value: torch.Tensor):
    window = cache.window
    own = window.frames(chunk)
    sinks = ROPE.angles(window.sliding_sink_position(chunk), window.num_sinks) if cache.shape.sliding_sinks else None
    return cache.update(chunk, step, key, value, ROPE.angles(own.start, len(own)), sinks)


def by_frame(tokens: torch.Tensor) -> list[torch.Tensor]:
    return list(tokens.split(TOKENS))


def rotate(frame_key: torch.Tensor, position: int) -> torch.Tensor:
    return apply_rope(frame_key, ROPE.angles(position, 1))


@pytest.mark.parametrize("sliding", [True, False])
@pytest.mark.parametrize(
    ("frames", "size", "sinks"), [(1, 1, 0), (1, 3, 2), (3, 3, 0), (3, 4, 2), (2, 3, 3), (1, 2, 4)]
)
@pytest.mark.parametrize(("lead", "num_passes"), [(0, 1), (0, 3), (1, 3), (2, 3)])
def test_reads_what_a_naive_list_would(frames: int, size: int, sinks: int, lead: int, num_passes: int, sliding: bool):
    window = ContextWindow(frames, size, sinks, lead, num_passes)
    cache = make_cache(window, sliding)
    generator = torch.Generator().manual_seed(0)
    log: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
    for chunk, step in itertools.product(range(12), range(num_passes)):
        key, value = torch.randn(2, frames * TOKENS, HEADS, HEAD_DIM, generator=generator).unbind()
        for frame, frame_key, frame_value in zip(window.frames(chunk), by_frame(key), by_frame(value), strict=True):
            log[frame, step] = (frame_key, frame_value)
        found_keys, found_values = update(cache, chunk, step, key, value)

        wanted = []
        for frame in window.visible(chunk):
            level = step if frame in window.frames(chunk) else window.level_read(step)
            position = frame
            if sliding and frame < sinks:
                position = window.window_start(chunk) - sinks + frame
            frame_key, frame_value = log[frame, level]
            wanted.append((rotate(frame_key, position), frame_value))
        assert len(found_keys) == len(wanted) * TOKENS
        # Slots are in another order than time, which attention does not mind.
        found = list(zip(by_frame(found_keys), by_frame(found_values), strict=True))
        for wanted_key, wanted_value in wanted:
            matches = [k for k, v in found if torch.equal(v, wanted_value)]
            assert len(matches) == 1
            assert torch.allclose(matches[0], wanted_key, atol=1e-6)


def test_rerunning_a_step_overwrites_its_own_slot_only():
    window = ContextWindow(1, 3, 1, 0, 2)
    cache = make_cache(window, sliding=True)
    tokens = [torch.randn(2, TOKENS, HEADS, HEAD_DIM).unbind() for _ in range(5)]
    for chunk, (key, value) in enumerate(tokens):
        once = [part.clone() for part in update(cache, chunk, 0, key, value)]
        again = update(cache, chunk, 0, key, value)
        assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


def test_memory_does_not_grow_with_the_stream():
    window = ContextWindow(1, 3, 2, 0, 2)
    cache = make_cache(window, sliding=True)
    before = cache.num_bytes
    shapes = set()
    for chunk in range(2000):
        key, value = torch.randn(2, TOKENS, HEADS, HEAD_DIM).unbind()
        shapes.add(update(cache, chunk, 0, key, value)[0].shape if chunk >= 5 else None)
    assert cache.num_bytes == before
    assert shapes == {None, (5 * TOKENS, HEADS, HEAD_DIM)}


def test_angles_follow_the_formula_at_any_position():
    """Channel pair ``i`` of an axis of ``d`` channels turns by ``position / 10000**(2 i / d)``."""
    position = 1_000_003
    cos, sin = (part.double() for part in ROPE.angles(position, 1))
    space_dim = 2 * (HEAD_DIM // 6)
    time_dim = HEAD_DIM - 2 * space_dim
    for token in range(TOKENS):
        row, column = divmod(token, GRID[1])
        expected = [position / 10000 ** (2 * i / time_dim) for i in range(time_dim // 2)]
        for place in (row, column):
            expected += [place / 10000 ** (2 * i / space_dim) for i in range(space_dim // 2)]
        angles = torch.tensor(expected, dtype=torch.float64)
        assert torch.allclose(cos[token], angles.cos(), atol=1e-6)
        assert torch.allclose(sin[token], angles.sin(), atol=1e-6)
