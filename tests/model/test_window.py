import itertools

import pytest

from ds_stream.model.window import ContextWindow


def naive_visible(window: ContextWindow, chunk: int) -> list[int]:
    """Sinks are the first frames; of the others the newest are seen, the chunk's own among them."""
    frames = range((chunk + 1) * window.num_latent_frames)
    sinks = [frame for frame in frames if frame < window.num_sinks]
    others = [frame for frame in frames if frame >= window.num_sinks]
    return sinks + others[-window.num_window :]


@pytest.mark.parametrize(
    ("frames", "size", "sinks"), [(1, 1, 0), (1, 3, 3), (3, 3, 0), (3, 4, 2), (3, 21, 0), (2, 5, 3), (1, 2, 1)]
)
def test_slots_hold_exactly_the_visible_frames(frames: int, size: int, sinks: int):
    window = ContextWindow(frames, size, sinks, lead=0, num_passes=4)
    slots: dict[int, int] = {}
    for chunk in range(40):
        for frame in window.frames(chunk):
            slots[window.slot(frame)] = frame
        assert window.visible(chunk) == naive_visible(window, chunk)
        assert sorted(slots.values()) == window.visible(chunk)
        assert sorted(slots) == list(range(window.num_filled(chunk)))


def test_sinks_sit_right_before_the_window_without_a_jump():
    window = ContextWindow(1, 3, 2, lead=0, num_passes=1)
    positions = [window.sliding_sink_position(chunk) for chunk in range(9)]
    assert positions == [0, 0, 0, 0, 0, 1, 2, 3, 4]
    for chunk in range(5, 9):
        assert window.sliding_sink_position(chunk) + window.num_sinks == window.window_start(chunk)


def test_levels():
    for num_passes in range(1, 6):
        for lead, step in itertools.product(range(num_passes), range(num_passes)):
            window = ContextWindow(1, 2, 0, lead, num_passes)
            read = window.level_read(step)
            assert read == min(step + lead, num_passes - 1)
            assert read in window.levels
            written = window.levels_written(step)
            assert written[0] == read
            assert (step in written) == (step >= lead or step == read)
