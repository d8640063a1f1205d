"""The proof that the schedule is right, and that the proof would notice if it were not."""

import itertools
import random
from collections.abc import Callable

import pytest
from deepspeed.runtime.pipe.schedule import PipeInstruction

from ds_stream.model.window import ContextWindow
from ds_stream.partition import LayerList
from ds_stream.schedule import instructions as ins
from ds_stream.schedule.planner import RingPlanner, backlogged_chunks_per_tick
from ds_stream.schedule.simulated_wires import ScheduleFault
from ds_stream.schedule.simulator import Scenario, simulate

# (latent frames a chunk, window, sinks)
CONTEXTS = [(1, 1, 0), (1, 2, 1), (3, 4, 2), (1, 4, 3)]


def arrivals(chance: random.Random, num_chunks: int) -> list[int]:
    """All waiting, spread out, or in bursts."""
    longest = chance.choice([0, num_chunks, 4 * num_chunks])
    return sorted(chance.randint(0, longest) for _ in range(num_chunks))


@pytest.mark.parametrize("num_stages", range(1, 7))
def test_every_ring_delivers_every_chunk_once_in_order_on_time(num_stages: int):
    for num_passes in range(1, 7):
        for lead, max_rows in itertools.product(range(num_passes), range(1, num_passes + 1)):
            chance = random.Random(f"{num_stages}/{num_passes}/{lead}/{max_rows}")
            frames, window, sinks = chance.choice(CONTEXTS)
            # Early end: few chunks, none, or enough to fill the ring and the window.
            num_chunks = chance.choice([0, 1, 2, num_stages, num_stages * max_rows + 1, 2 * num_stages + window + 2])
            result = simulate(
                Scenario.ring_of(
                    num_stages,
                    ContextWindow(frames, window, sinks, lead, num_passes),
                    max_rows,
                    [arrivals(chance, num_chunks)],
                    order_seed=chance.randint(0, 999),
                )
            )
            # That chunks come once, in order and after K * P ticks is checked inside.
            assert len(result.finished) == num_chunks
            assert result.max_rows_seen <= max_rows


@pytest.mark.parametrize("seed", range(30))
def test_sessions_share_the_ring_and_the_cap_changes_at_any_time(seed: int):
    chance = random.Random(seed)
    num_stages, num_passes = chance.randint(1, 5), chance.randint(1, 5)
    caps = [chance.randint(1, num_passes + 2) for _ in range(7)]
    scenario = Scenario.ring_of(
        num_stages,
        ContextWindow(*chance.choice(CONTEXTS), lead=chance.randrange(num_passes), num_passes=num_passes),
        lambda tick: caps[tick // 3 % len(caps)],
        [arrivals(chance, chance.randint(0, 12)) for _ in range(chance.randint(1, 4))],
        order_seed=seed,
        max_queued_chunks=chance.randint(1, 3),
    )
    simulate(scenario)


def any_partition(chance: random.Random, layers: LayerList, num_stages: int) -> tuple[int, ...]:
    cuts = sorted(chance.sample(range(1, layers.num_layers), num_stages - 1))
    return (0, *cuts, layers.num_layers)


@pytest.mark.parametrize("seed", range(60))
def test_any_partition_and_any_change_of_it(seed: int):
    """Stages of the VAE alone, a decoder over several stages, rings that grow and shrink while sessions run."""
    chance = random.Random(seed)
    layers = LayerList(num_blocks=chance.randint(1, 4), num_decode_layers=chance.choice([1, 5]))
    num_stages = chance.randint(1, min(6, layers.num_layers))
    partitions = [any_partition(chance, layers, num_stages) for _ in range(chance.randint(1, 6))]
    num_passes = chance.randint(1, 4)
    scenario = Scenario(
        layers,
        partitions,
        ContextWindow(*chance.choice(CONTEXTS), lead=chance.randrange(num_passes), num_passes=num_passes),
        chance.randint(1, num_passes),
        [arrivals(chance, chance.randint(6, 14)) for _ in range(chance.randint(1, 2))],
        order_seed=seed,
        ticks_per_partition=chance.randint(1, 9),
        has_video=chance.random() < 0.8,
    )
    # Whether each comes out whole, in order and on time is checked inside.
    result = simulate(scenario)
    assert result.num_partitions >= min(2, len(partitions))


@pytest.mark.parametrize("num_stages", range(1, 6))
def test_backlogged_throughput_is_what_the_formula_says(num_stages: int):
    num_chunks = 240
    for num_passes in range(1, 6):
        for lead, max_rows in itertools.product(range(num_passes), range(1, num_passes + 1)):
            planner = RingPlanner(num_stages, num_passes, lead, max_rows)
            planner.open(0)
            ticks = []
            while len(ticks) < num_chunks:
                rows = planner.next_rows({0: 10 * num_chunks})
                ticks += [planner.tick for row in rows if row.step == num_passes - 1]
            skipped = num_chunks // 3
            rate = (num_chunks - 1 - skipped) / (ticks[-1] - ticks[skipped])
            expected = backlogged_chunks_per_tick(num_stages, num_passes, lead, max_rows)
            assert rate == pytest.approx(expected, rel=0.04), (num_stages, num_passes, lead, max_rows)


def test_exact_mode_is_filled_by_other_sessions():
    """With lead K-1 one stream leaves the ring nearly empty; P streams fill it."""
    num_stages, num_passes = 4, 3
    window = ContextWindow(1, 2, 1, num_passes - 1, num_passes)
    alone = simulate(Scenario.ring_of(num_stages, window, 1, [[0] * 6]))
    together = simulate(Scenario.ring_of(num_stages, window, 1, [[0] * 6] * num_stages))
    num_passes_run = num_passes * len(together.finished)
    assert alone.num_ticks > 2.5 * num_passes * len(alone.finished)
    assert num_passes_run <= together.num_ticks <= num_passes_run + num_passes * num_stages


def test_a_session_does_not_starve_another():
    window = ContextWindow(1, 2, 0, 0, 2)
    result = simulate(Scenario.ring_of(2, window, 1, [[0] * 10, [0] * 10]))
    order = [session for session, _ in result.finished]
    assert order == [0, 1] * 10


Fault = Callable[[int, int, list[PipeInstruction]], list[PipeInstruction]]


def drop(kind: type[PipeInstruction]) -> Fault:
    return lambda stage, launch, todo: [do for do in todo if launch < 5 or not isinstance(do, kind)]


def twice(kind: type[PipeInstruction]) -> Fault:
    return lambda stage, launch, todo: [
        copy for do in todo for copy in ([do, do] if launch >= 5 and isinstance(do, kind) else [do])
    ]


def other_rows(stage: int, launch: int, todo: list[PipeInstruction]) -> list[PipeInstruction]:
    return [
        ins.ForwardPass(do.launch, rows=do.rows[::-1])
        if isinstance(do, ins.ForwardPass) and stage == 1 and len(do.rows) > 1
        else do
        for do in todo
    ]


def other_launch(stage: int, launch: int, todo: list[PipeInstruction]) -> list[PipeInstruction]:
    return [
        ins.RecvActivations(do.launch + 1, num_rows=do.num_rows)
        if isinstance(do, ins.RecvActivations) and launch == 4
        else do
        for do in todo
    ]


@pytest.mark.parametrize(
    "fault",
    [
        drop(ins.SendActivations),
        drop(ins.RecvActivations),
        drop(ins.ReturnLatents),
        drop(ins.RecvLatents),
        drop(ins.DecodeChunk),
        drop(ins.StartChunk),
        drop(ins.SendPlan),
        drop(ins.TakeFinished),
        drop(ins.DeliverChunk),
        drop(ins.EncodeChunk),
        twice(ins.EncodeChunk),
        twice(ins.DeliverChunk),
        twice(ins.SendActivations),
        twice(ins.ReturnLatents),
        twice(ins.ForwardPass),
        twice(ins.DecodeChunk),
        other_rows,
        other_launch,
    ],
)
def test_a_planted_fault_is_caught(fault: Fault):
    scenario = Scenario.ring_of(3, ContextWindow(1, 2, 1, 0, 3), 2, [[0] * 8])
    simulate(scenario)
    with pytest.raises(ScheduleFault):
        simulate(scenario, fault)


@pytest.mark.parametrize("kind", [ins.SendVideo, ins.RecvVideo, ins.SendFinished, ins.RecvFinished, ins.Repartition])
def test_a_fault_around_the_ring_is_caught(kind: type[PipeInstruction]):
    layers = LayerList(2, 2)
    scenario = Scenario(
        layers, [(0, 1, 4, 6, 7), (0, 1, 3, 5, 7)], ContextWindow(1, 2, 1, 0, 3), 2, [[0] * 12], ticks_per_partition=6
    )
    assert simulate(scenario).num_partitions == 2
    # To move to where it is changes nothing.
    for fault in (drop(kind), twice(kind))[: 1 if kind is ins.Repartition else 2]:
        with pytest.raises((ScheduleFault, KeyError)):
            simulate(scenario, fault)


def test_admission_that_ignores_the_context_rule_is_caught(monkeypatch: pytest.MonkeyPatch):
    scenario = Scenario.ring_of(2, ContextWindow(1, 2, 0, 1, 3), 3, [[0] * 8])
    simulate(scenario)
    monkeypatch.setattr(RingPlanner, "_context_is_written", lambda self, state: True)
    with pytest.raises(ScheduleFault, match="reads"):
        simulate(scenario)


def test_a_cache_that_evicts_too_early_is_caught(monkeypatch: pytest.MonkeyPatch):
    scenario = Scenario.ring_of(2, ContextWindow(1, 3, 1, 0, 3), 3, [[0] * 8])
    simulate(scenario)
    monkeypatch.setattr(ContextWindow, "slot", lambda self, frame: frame if frame < 1 else 1 + (frame - 1) % 2)
    with pytest.raises(ScheduleFault, match="reads"):
        simulate(scenario)


def test_a_first_step_that_overwrites_a_final_entry_is_caught(monkeypatch: pytest.MonkeyPatch):
    scenario = Scenario.ring_of(2, ContextWindow(1, 3, 1, 0, 3), 3, [[0] * 8])
    monkeypatch.setattr(ContextWindow, "levels_written", lambda self, step: tuple(self.levels))
    with pytest.raises(ScheduleFault, match="reads"):
        simulate(scenario)


def test_a_controller_without_back_pressure_is_caught(monkeypatch: pytest.MonkeyPatch):
    """Chunks of one pass need no return: only delivery holds the first stage back."""
    scenarios = [
        Scenario.ring_of(3, ContextWindow(1, 1, 0, 0, 1), 1, [[0] * 80], order_seed=seed) for seed in range(20)
    ]
    for scenario in scenarios:
        simulate(scenario)
    monkeypatch.setattr(RingPlanner, "may_launch", True)
    with pytest.raises(ScheduleFault, match="buffers in flight"):
        [simulate(scenario) for scenario in scenarios]
