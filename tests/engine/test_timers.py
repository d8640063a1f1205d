"""Times are read late, and nothing in the loop asks the device for anything."""

import threading

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ds_stream.core import LayerTiming, StageTiming
from ds_stream.engine.timers import DECODE, ENCODE, FORWARD, SEND, WAIT, StageTimers
from ds_stream.engine.timings import TimingBoard
from rings import CPU, MockRing, Stream, random_clip, tiny_config


class LateClock:
    """A device that is as far behind as it is told to be. Marks are integers, milliseconds apart."""

    def __init__(self) -> None:
        self.next = 0
        self.passed = -1
        self.free: list[int] = []

    def mark(self) -> int:
        self.next += 1
        return self.next

    def has_passed(self, mark: int) -> bool:
        return mark <= self.passed

    def seconds(self, start: int, end: int) -> float:
        assert self.has_passed(end), "read before it has passed"
        return (end - start) / 1000

    def shared_time(self, mark: int) -> float:
        assert self.has_passed(mark), "read before it has passed"
        return 100 + mark / 1000

    def release(self, marks: list[int]) -> None:
        self.free += marks


def timers_on(clock: LateClock) -> StageTimers:
    timers = StageTimers(2, CPU, keep_spans=True)
    timers._clock, timers._on_device = clock, True
    return timers


def run_launch(timers: StageTimers, launch: int, num_rows: int) -> None:
    timers.begin(launch, num_rows)
    waited = timers.start()
    timers.stop(WAIT, waited)
    forward = timers.start()
    mark = timers.layer_marker(forward, num_rows, is_pass=True)
    for layer in (4, 5):
        mark(layer)
    timers.stop(FORWARD, forward)
    encode = timers.start()
    timers.layer_marker(encode, 1, is_pass=False)(0)
    timers.stop(ENCODE, encode)


def test_a_launch_is_read_when_the_device_has_passed_it_and_not_before():
    clock = LateClock()
    timers = timers_on(clock)
    for launch in range(8, 11):
        run_launch(timers, launch, num_rows=2)
    assert timers.read(9) == ([], [])
    clock.passed = 9
    stages, layers = timers.read(9)
    # Launch 8: marks 1 to 9, 1 ms apart; between a forward's start and end lie the marks of its layers.
    assert stages == [StageTiming(2, 8, 2, 3.0, 2.0, 0.0, 1.0, 0.0)]
    assert layers == [LayerTiming(4, 2, 1.0), LayerTiming(5, 2, 1.0), LayerTiming(0, 1, 1.0)]
    assert clock.free == list(range(1, 10))
    clock.passed = 99
    # Passes are sampled on a device; what comes once per chunk is not.
    stages, layers = timers.read(9)
    assert [timing.launch for timing in stages] == [9]
    assert layers == [LayerTiming(0, 1, 1.0)]
    timers.finish()
    assert timers.counts == {WAIT: 3, FORWARD: 3, ENCODE: 3}
    assert timers.totals_s[ENCODE] == pytest.approx(0.006)
    assert [span.phase for span in timers.spans] == [WAIT, FORWARD, ENCODE] * 3
    assert all(span.start_s > 100 for span in timers.spans)


def test_no_more_launches_are_read_at_once_than_a_message_holds():
    timers = StageTimers(0, CPU)
    for launch in range(5):
        run_launch(timers, launch, 1)
    assert [len(timers.read(2)[0]) for _ in range(3)] == [2, 2, 0]


def test_timings_survive_the_ride():
    board, other = TimingBoard(3, 9), TimingBoard(3, 9)
    stages = [StageTiming(1, 10**12, 4, 1.5, 2.5, 3.5, 4.5, 5.5), StageTiming(1, 10**12 + 1, 2, 0.1, 0, 0, 0, 0)]
    layers = [LayerTiming(8, 1, 0.25)]
    board.put(stages, layers)
    other.load([tensor.clone() for tensor in board.tensors])
    other.put([StageTiming(2, 3, 1, 1, 1, 1, 1, 1)], [LayerTiming(0, 2, 7.0)])
    assert other.take() == ([*stages, StageTiming(2, 3, 1, 1, 1, 1, 1, 1)], [LayerTiming(0, 2, 7.0), *layers])
    other.clear()
    assert other.take() == ([], [])


class NoQuestions(TorchDispatchMode):
    """Fails where a tensor's value is asked for: on a device that would wait for it."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert "_local_scalar_dense" not in str(function), f"{function} asks for a value"
        assert "nonzero" not in str(function), f"{function} asks for a shape"
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("num_stages", [1, 3])
def test_nothing_in_the_loop_waits_for_the_device(num_stages: int, monkeypatch: pytest.MonkeyPatch):
    """On a CPU nothing waits, but what would is called all the same."""
    config = tiny_config(
        model={"in_channels": 32},
        context={"num_sink_latent_frames": 2, "adaptive_sinks": True, "adaptive_sink_threshold": 0.9},
        batch={"max_rows": 3},
    )
    ring = MockRing(config, num_stages)
    asked: list[str] = []

    def forbid(owner: object, name: str) -> None:
        original = getattr(owner, name)

        def ask(*args, **kwargs):
            asked.append(f"{name} in {threading.current_thread().name}")
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, ask)

    for name in ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "nonzero"):
        forbid(torch.Tensor, name)
    forbid(torch.cuda, "synchronize")
    forbid(torch.cuda.Event, "synchronize")
    forbid(torch.cpu, "synchronize")
    for engine in ring.engines:
        run = engine._exec_schedule

        def watched(schedule, run=run):
            with NoQuestions():
                run(schedule)

        monkeypatch.setattr(engine, "_exec_schedule", watched)
    (frames,) = ring.run([Stream(5, random_clip(29))])
    assert len(frames) == 29
    assert asked == []


def test_such_a_question_is_noticed():
    with NoQuestions(), pytest.raises(AssertionError, match="asks for a value"):
        torch.ones(1).item()


def test_a_run_times_every_phase_and_layer():
    config = tiny_config(batch={"max_rows": 2})
    seen: list[StageTiming] = []
    layers: list[LayerTiming] = []

    ring = MockRing(config, 3)
    for engine in ring.engines:
        if engine.on_timings is not None:
            engine.on_timings = lambda board: (seen.extend(board.take()[0]), layers.extend(board.take()[1]))
    ring.run([Stream(5, random_clip(29))])
    assert {timing.layer for timing in layers} == set(range(config.stream.layers.num_layers))
    by_stage = [[timing for timing in seen if timing.stage == stage] for stage in range(3)]
    for stage, timings in enumerate(by_stage):
        launches = [timing.launch for timing in timings]
        # All but the last few, in order.
        assert launches == list(range(len(launches)))
        assert len(launches) > 15
        assert all(timing.forward_ms > 0 for timing in timings if timing.num_rows)
        assert any(timing.wait_ms > 0 for timing in timings)
        assert any(timing.encode_ms > 0 for timing in timings) == (stage == 0)
        assert any(timing.decode_ms > 0 for timing in timings) == (stage == 2)
    # A stage's layers make up its forward.
    forward_ms = np.sum([timing.forward_ms for timings in by_stage for timing in timings])
    ring_layers = config.stream.layers.ring
    layer_ms = np.sum([timing.ms for timing in layers if timing.layer in ring_layers])
    assert 0.5 * forward_ms < layer_ms < 1.05 * forward_ms
    assert ring.engines[0].stage_timers.counts[SEND] > 0
    assert ring.engines[2].stage_timers.counts[DECODE] == 8
