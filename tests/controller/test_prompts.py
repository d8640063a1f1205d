"""Which prompt a chunk has: at once, fading in, changed again before it was reached."""

import pytest
import torch

from ds_stream.controller.prompts import PromptTimeline, blend_embeddings, chunk_at
from ds_stream.core import ChunkGeometry

OLD, NEW, THIRD = (torch.tensor([[value, 0.0], [0.0, 0.0]]) for value in (1.0, 5.0, 9.0))


def taken(timeline: PromptTimeline, num_chunks: int) -> list[float | None]:
    parts = [timeline.take(chunk) for chunk in range(num_chunks)]
    return [None if part is None else part[0, 0].item() for part in parts]


def test_a_change_is_told_once_at_its_chunk():
    timeline = PromptTimeline(OLD)
    timeline.change(2, NEW)
    assert taken(timeline, 5) == [1.0, None, 5.0, None, None]


def test_a_change_fades_over_the_chunks_in_between():
    timeline = PromptTimeline(OLD, blend_chunks=3)
    timeline.change(1, NEW)
    assert taken(timeline, 7) == [1.0, 2.0, 3.0, 4.0, 5.0, None, None]


def test_a_later_change_starts_from_what_is_in_force():
    timeline = PromptTimeline(OLD, blend_chunks=3)
    timeline.change(1, NEW)
    timeline.change(3, THIRD)
    # At chunk 2 it is 3; then quarter by quarter to 9.
    assert taken(timeline, 8) == [1.0, 2.0, 3.0, 4.5, 6.0, 7.5, 9.0, None]


def test_a_live_change_after_chunks_have_passed():
    timeline = PromptTimeline(OLD, blend_chunks=1)
    assert taken(timeline, 3) == [1.0, None, None]
    timeline.change(3, NEW)
    assert timeline.take(3)[0, 0] == 3.0
    timeline.change(4, THIRD)
    assert timeline.take(4)[0, 0] == 6.0
    assert timeline.take(5)[0, 0] == 9.0


def test_two_changes_before_the_next_chunk_leave_the_last():
    timeline = PromptTimeline(OLD)
    timeline.change(2, NEW)
    timeline.change(2, THIRD)
    assert taken(timeline, 4) == [1.0, None, 9.0, None]


def test_slerp_keeps_to_the_arc():
    east, north = torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 4.0]])
    half = blend_embeddings(east, north, 0.5, "slerp")
    assert torch.allclose(half, torch.full((1, 2), 3 * 0.5**0.5))
    third = blend_embeddings(east, north, 1 / 3, "slerp")
    # 30 degrees, length 2 + 2/3.
    assert torch.allclose(third, torch.tensor([[3**0.5 / 2, 0.5]]) * (8 / 3))
    assert torch.allclose(blend_embeddings(east, north, 0.5, "lerp"), torch.tensor([[1.0, 2.0]]))


def test_slerp_of_padding_and_of_parallel_tokens_is_the_line():
    padding, token = torch.zeros(1, 2), torch.tensor([[2.0, 0.0]])
    assert torch.equal(blend_embeddings(padding, padding, 0.3, "slerp"), padding)
    assert torch.allclose(blend_embeddings(padding, token, 0.25, "slerp"), torch.tensor([[0.5, 0.0]]))
    assert torch.allclose(blend_embeddings(token, 2 * token, 0.5, "slerp"), torch.tensor([[3.0, 0.0]]))


@pytest.mark.parametrize(
    ("seconds", "num_latent_frames", "chunk"),
    # 16 frames a second. One latent frame: chunks begin at frames 0, 1, 5, 9; three: at 0, 9, 21.
    [
        *[(0, 1, 0), (-1, 1, 0), (0.01, 1, 1), (1 / 16, 1, 1), (0.07, 1, 2), (5 / 16, 1, 2), (0.32, 1, 3)],
        *[(3.5, 1, 15), (0, 3, 0), (9 / 16, 3, 1), (0.57, 3, 2), (21 / 16, 3, 2), (1.32, 3, 3)],
    ],
)
def test_media_time_to_chunk(seconds: float, num_latent_frames: int, chunk: int):
    geometry = ChunkGeometry(num_latent_frames)
    assert chunk_at(seconds, 16, geometry) == chunk
    if seconds > 0:
        assert geometry.first_frame(chunk) / 16 >= seconds - 1e-6
        assert geometry.first_frame(chunk - 1) / 16 < seconds
