"""Readers and writers in their threads: chunking, padding, bounds, errors; and the figures that come of it."""

import queue
import time

import numpy as np
import pytest

from ds_stream.config import Config
from ds_stream.controller.metrics import SessionMetrics
from ds_stream.controller.prompts import PromptTimeline
from ds_stream.controller.session import ChunkArrived, ChunkReader, ChunkWriter, ChunkWritten, InputEnded
from ds_stream.core import ChunkGeometry, Frames, Plan, StreamError
from rings import ArrayReader, ArrayWriter, MockRing, embed, random_clip, tiny_config


def prompts(config: Config) -> PromptTimeline:
    return PromptTimeline(embed(config, "boats"))


def half(_frames: Frames) -> float:
    return 0.5


def arrivals(reader: ChunkReader, inbox: queue.SimpleQueue) -> list[ChunkArrived | InputEnded]:
    reader.start()
    messages = [inbox.get(timeout=5)]
    while not isinstance(messages[-1], InputEnded):
        reader.admitted()
        messages.append(inbox.get(timeout=5))
    return messages


@pytest.mark.parametrize("num_latent_frames", [1, 3])
@pytest.mark.parametrize("num_frames", [1, 2, 4, 5, 6, 17])
def test_a_clip_is_cut_into_chunks_and_its_tail_padded(num_latent_frames: int, num_frames: int):
    geometry, clip, inbox = ChunkGeometry(num_latent_frames), random_clip(num_frames), queue.SimpleQueue()
    *chunks, end = arrivals(ChunkReader(0, ArrayReader(clip), half, geometry, None, 2, inbox), inbox)
    assert end == InputEnded(0)
    assert [chunk.chunk for chunk in chunks] == list(range(geometry.num_chunks(num_frames)))
    assert all(len(chunk.frames) == geometry.num_frames(chunk.chunk) for chunk in chunks)
    assert sum(chunk.num_frames for chunk in chunks) == num_frames
    assert np.array_equal(np.concatenate([chunk.frames[: chunk.num_frames] for chunk in chunks]), clip)
    assert all((chunk.frames[chunk.num_frames :] == clip[-1]).all() for chunk in chunks)


def test_a_reader_takes_no_more_frames_than_asked():
    clip, inbox = random_clip(20), queue.SimpleQueue()
    *chunks, _ = arrivals(ChunkReader(0, ArrayReader(clip), half, ChunkGeometry(1), 7, 2, inbox), inbox)
    assert [chunk.num_frames for chunk in chunks] == [1, 4, 2]


def test_a_reader_stays_a_bounded_number_of_chunks_ahead():
    inbox: queue.SimpleQueue = queue.SimpleQueue()
    reader = ChunkReader(0, ArrayReader(random_clip(100)), half, ChunkGeometry(1), None, 3, inbox)
    reader.start()
    time.sleep(0.2)
    assert inbox.qsize() == 3
    reader.admitted()
    time.sleep(0.1)
    assert inbox.qsize() == 4


class BrokenReader(ArrayReader):
    def read(self, num_frames: int) -> Frames:
        if self._position >= 5:
            raise StreamError("the cable is out")
        return super().read(num_frames)


def test_a_source_that_breaks_off_is_told_after_its_frames():
    inbox: queue.SimpleQueue = queue.SimpleQueue()
    reader = ChunkReader(0, BrokenReader(random_clip(20)), half, ChunkGeometry(1), None, 2, inbox)
    *chunks, end = arrivals(reader, inbox)
    assert sum(chunk.num_frames for chunk in chunks) == 5
    assert str(end.error) == "the cable is out"


def test_a_broken_source_does_not_lose_what_it_gave():
    config = tiny_config()
    ring = MockRing(config, 2)
    writer = ArrayWriter()
    ring.controller.open_session(
        0, 1, PromptTimeline(embed(config, "boats")), BrokenReader(random_clip(20)), writer, half
    )
    ring.run_engines()
    assert len(writer.frames) == 5
    assert "the cable is out" in str(ring.controller.errors[0])


class FullDisk(ArrayWriter):
    def write(self, frames: Frames) -> None:
        raise OSError("no space left")


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_writer_that_fails_ends_the_run(num_stages: int):
    config = tiny_config()
    ring = MockRing(config, num_stages)
    ring.controller.open_session(
        0, 1, PromptTimeline(embed(config, "boats")), ArrayReader(random_clip(20)), FullDisk(), half
    )
    with pytest.raises(StreamError, match="writing the output failed: no space left"):
        next(iter(plan for plan in ring.controller.plans() if feed_back(ring, plan)))


def feed_back(ring: MockRing, plan: Plan) -> bool:
    """Deliver what a plan finishes at once, as if the ring took no time."""
    for row in plan.rows:
        if row.step == ring.controller.planner.num_passes - 1:
            ring.controller.deliver(row.session, row.chunk, random_clip(4))
    return False


def test_chunks_are_written_in_order():
    inbox: queue.SimpleQueue = queue.SimpleQueue()
    kept = ArrayWriter()
    writer = ChunkWriter(0, kept, inbox)
    writer.start()
    clip = random_clip(9)
    for chunk, (start, stop) in enumerate([(0, 1), (1, 5), (5, 9)]):
        writer.put(chunk, clip[start:stop])
    writer.close()
    assert np.array_equal(kept.frames, clip)
    written = [inbox.get() for _ in range(3)]
    assert [(message.chunk, message.num_frames) for message in written] == [(0, 1), (1, 4), (2, 4)]
    assert all(isinstance(message, ChunkWritten) for message in written)


def test_figures_worked_out_by_hand():
    metrics = SessionMetrics()
    assert metrics.summary()["frames_per_second"] is None
    for chunk, (accepted, delivered, frames) in enumerate([(10.0, 11.0, 1), (10.5, 12.0, 4), (11.0, 15.0, 4)]):
        metrics.accepted(chunk, accepted)
        metrics.delivered(chunk, frames, delivered)
    figures = metrics.summary()
    assert figures["frames"] == 9
    assert figures["seconds"] == 5
    assert figures["frames_per_second"] == pytest.approx(9 / 5)
    assert figures["frames_per_second_after_first_chunk"] == pytest.approx(8 / 4)
    assert figures["ttff_ms"] == 1000
    assert figures["chunk_latency_ms_p50"] == 1500
    assert figures["chunk_latency_ms_max"] == 4000
    assert figures["chunk_interval_ms_p50"] == 2000
    assert figures["chunk_interval_ms_by_quarter"] is None


def test_intervals_by_quarter_of_the_stream():
    metrics = SessionMetrics()
    at = 0.0
    for chunk, interval in enumerate([0.0, *[1.0] * 2, *[2.0] * 2, *[3.0] * 2, *[4.0] * 2]):
        at += interval
        metrics.accepted(chunk, at)
        metrics.delivered(chunk, 4, at)
    assert metrics.summary()["chunk_interval_ms_by_quarter"] == [1000, 2000, 3000, 4000]
