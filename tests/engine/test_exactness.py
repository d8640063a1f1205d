"""The pipeline never changes the answer: any ring equals the plain loops of the oracle, bit for bit."""

import functools
import itertools
import json
import os
import random
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from ds_stream.config import Config, parse_config
from ds_stream.controller.prompts import PromptTimeline
from ds_stream.core import Plan
from ds_stream.engine.plans import MAX_EVENTS
from ds_stream.model.pipeline import FilledLayerSpec
from rings import MockRing, Stream, embed, geometry, make_controller, random_clip, reference_frames, tiny_config

# Every ring with every length, instead of every ring with two lengths: minutes instead of seconds.
FULL_SWEEP = os.environ.get("DS_STREAM_FULL_SWEEP") == "1"
LONGEST = 5


def config_of(lead: int, context_pass: bool, max_rows: int = 1, exact_rows: bool = True) -> Config:
    return tiny_config(
        noise={"steps": [700, 400], "context_pass": context_pass},
        context={"lead": lead, "num_window_latent_frames": 2, "num_sink_latent_frames": 1},
        batch={"max_rows": max_rows, "exact_rows": exact_rows},
    )


def clip_of(num_chunks: int, num_latent_frames: int = 1, seed: int = 0) -> np.ndarray:
    config = tiny_config(context={"num_latent_frames_per_chunk": num_latent_frames, "num_window_latent_frames": 9})
    return random_clip(geometry(config).first_frame(num_chunks), seed)


@functools.cache
def oracle(lead: int, context_pass: bool) -> np.ndarray:
    """Frames of the longest clip; those of a shorter one are its beginning."""
    return reference_frames(config_of(lead, context_pass), Stream(5, clip_of(LONGEST)))


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize("context_pass", [False, True])
def test_ranks_rows_and_lead_do_not_change_the_video(num_stages: int, context_pass: bool):
    num_passes = 2 + context_pass
    short = itertools.cycle(range(LONGEST))
    for lead, max_rows in itertools.product(range(num_passes), range(1, num_passes + 1)):
        # Zero chunks, fewer than stages, than rows, than the window: every length meets some ring.
        few = (next(short), LONGEST) if num_stages == 4 else (LONGEST,)
        for num_chunks in range(LONGEST + 1) if FULL_SWEEP else few:
            config = config_of(lead, context_pass, max_rows)
            clip = clip_of(num_chunks)
            (frames,) = MockRing(config, num_stages).run([Stream(5, clip)])
            assert len(frames) == len(clip)
            if num_chunks:
                assert np.array_equal(frames, oracle(lead, context_pass)[: len(clip)]), (lead, max_rows, num_chunks)


@pytest.mark.parametrize(("num_stages", "sink_positions"), [(1, "sliding"), (3, "sliding"), (3, "absolute")])
@pytest.mark.parametrize("num_latent_frames", [1, 3])
@pytest.mark.parametrize("from_video", [True, False])
def test_chunk_sizes_starts_and_sink_positions(
    num_stages: int, num_latent_frames: int, from_video: bool, sink_positions: str
):
    config = tiny_config(
        context={
            "num_latent_frames_per_chunk": num_latent_frames,
            "num_window_latent_frames": 4,
            "num_sink_latent_frames": 2,
            "sink_positions": sink_positions,
        },
        batch={"max_rows": 2},
    )
    # Neither the first nor the last chunk is full.
    num_frames = geometry(config).first_frame(6) + 2
    stream = Stream(9, random_clip(num_frames) if from_video else None, num_frames)
    (frames,) = MockRing(config, num_stages).run([stream])
    assert np.array_equal(frames, reference_frames(config, stream))


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_everything_that_follows_the_content_at_once(num_stages: int):
    """Noise by motion, adaptive sinks, source channels and a fading prompt: each decided once, obeyed everywhere."""
    config = tiny_config(
        model={"in_channels": 32},
        noise={"steps": [700, 500, 200], "motion_aware": True},
        context={
            "lead": 1,
            "num_window_latent_frames": 2,
            "num_sink_latent_frames": 2,
            "adaptive_sinks": True,
            "adaptive_sink_threshold": 0.9,
        },
        batch={"max_rows": 3, "exact_rows": True},
    )
    clip = clip_of(8)
    clip[10:20] //= 4
    prompts, wanted = PromptTimeline(embed(config, "red boats"), blend_chunks=2), {}
    prompts.change(3, embed(config, "harbour at night"))
    copy = PromptTimeline(embed(config, "red boats"), blend_chunks=2)
    copy.change(3, embed(config, "harbour at night"))
    for chunk in range(8):
        changed = copy.take(chunk)
        wanted[chunk] = wanted[chunk - 1] if changed is None else changed
    ring = MockRing(config, num_stages)
    (frames,) = ring.run([Stream(5, clip, prompts=prompts)])
    expected = reference_frames(config, Stream(5, clip), embedding_of=wanted.__getitem__)
    assert np.array_equal(frames, expected)
    # What was asked for changes the video at all.
    for section, change in [("noise", {"motion_aware": False}), ("context", {"adaptive_sinks": False})]:
        other = parse_config({"stream": json.loads(config.to_json())["stream"]})
        other = other._with(section, **change)
        assert not np.array_equal(reference_frames(other, Stream(5, clip), embedding_of=wanted.__getitem__), expected)


def test_sources_do_not_outlive_their_chunk_and_a_stream_without_video_has_none():
    """A model that takes the source's latents, run beside and after a stream that has no video."""
    config = tiny_config(model={"in_channels": 32}, batch={"max_rows": 2})
    with_video, without = Stream(5, clip_of(4)), Stream(6, None, num_frames=13)
    ring = MockRing(config, 2)
    sources = []

    def plans(controller_plans: Iterator[Plan]) -> Iterator[Plan]:
        for plan in controller_plans:
            yield plan
            sources.append({s: len(state.sources) for s, state in ring.engines[0].state.sessions.items()})

    inner = ring.controller.plans
    ring.controller.plans = lambda: plans(inner())
    together = ring.run([with_video, without])
    for frames, stream in zip(together, (with_video, without), strict=True):
        assert np.array_equal(frames, reference_frames(config, stream))
    assert max(counts.get(0, 0) for counts in sources) > 1
    assert all(counts.get(1, 0) == 0 for counts in sources)
    assert [counts[0] for counts in sources if 0 in counts][-1] == 0
    plain = reference_frames(tiny_config(), Stream(6, None, num_frames=13))
    assert not np.array_equal(together[1], plain)


@pytest.mark.parametrize("num_steps", [1, 4, 6])
def test_more_steps_than_stages_and_fewer(num_steps: int):
    config = tiny_config(noise={"steps": [900, 800, 700, 500, 300, 100][-num_steps:]}, batch={"max_rows": 2})
    stream = Stream(5, clip_of(5))
    (frames,) = MockRing(config, 4).run([stream])
    assert np.array_equal(frames, reference_frames(config, stream))


def test_stages_exchange_bf16_and_fp32_in_one_message():
    config = tiny_config(device={"dtype": "bfloat16"}, batch={"max_rows": 3})
    stream = Stream(5, clip_of(5))
    (frames,) = MockRing(config, 3).run([stream])
    assert np.array_equal(frames, reference_frames(config, stream))
    (exact,) = MockRing(tiny_config(batch={"max_rows": 3}), 3).run([stream])
    assert not np.array_equal(frames, exact)


def test_batched_rows_agree_within_rounding():
    """What a GPU does by default: all rows of a launch in one forward."""
    batched = config_of(0, True, 3, exact_rows=False)
    stream = Stream(5, clip_of(LONGEST))
    (frames,) = MockRing(batched, 2).run([stream])
    difference = np.abs(frames.astype(int) - oracle(0, True))
    assert difference.mean() < 0.1


@pytest.mark.parametrize("caps", [[1, 3], [3, 1], [2, 3, 1]])
def test_the_row_cap_changes_while_the_ring_is_full(caps: list[int]):
    config = config_of(0, True, max(caps))
    ring = MockRing(config, 2)

    def plans(controller_plans: Iterator[Plan]) -> Iterator[Plan]:
        for count, plan in enumerate(controller_plans):
            ring.controller.planner.max_rows = caps[count // 3 % len(caps)]
            seen.append(len(plan.rows))
            yield plan

    seen: list[int] = []
    inner = ring.controller.plans
    ring.controller.plans = lambda: plans(inner())
    (frames,) = ring.run([Stream(5, clip_of(LONGEST))])
    assert np.array_equal(frames, oracle(0, True))
    assert len(set(seen)) > 2


@pytest.mark.parametrize("seed", range(4))
def test_arrivals_at_any_time(seed: int):
    chance = random.Random(seed)
    config = config_of(0, True, 2)
    stream = Stream(5, clip_of(LONGEST), wait=lambda: time.sleep(chance.random() * 0.05))
    (frames,) = MockRing(config, 3).run([stream])
    assert np.array_equal(frames, oracle(0, True))


@pytest.mark.parametrize("num_stages", [1, 3])
def test_interleaved_sessions_equal_separate_runs(num_stages: int):
    """Caches, VAE state, text and noise of one session do not touch another's."""
    config = config_of(1, True, 3)
    streams = [
        Stream(5, clip_of(5, seed=1), prompt="red boats"),
        Stream(6, clip_of(7, seed=2), prompt="a quiet harbour at night"),
        Stream(5, clip_of(2, seed=3), prompt="red boats"),
    ]
    together = MockRing(config, num_stages).run(streams)
    for frames, stream in zip(together, streams, strict=True):
        assert np.array_equal(frames, reference_frames(config, stream))


def test_more_sessions_than_events_fit_into_a_plan():
    config = config_of(0, False, 4)
    streams = [Stream(seed, clip_of(1, seed=seed)) for seed in range(MAX_EVENTS)]
    together = MockRing(config, 2).run(streams)
    for index in (0, MAX_EVENTS - 1):
        assert np.array_equal(together[index], reference_frames(config, streams[index]))


def test_a_new_session_in_a_used_ring_equals_a_fresh_one():
    config = config_of(0, True, 2)
    ring = MockRing(config, 2)
    first = ring.run([Stream(5, clip_of(4))])[0]
    ring.controller = make_controller(ring.config, 2)
    ring.engines[0].source = ring.controller
    again = ring.run([Stream(5, clip_of(4))])[0]
    assert np.array_equal(first, again)
    assert all(not engine.state.sessions and not engine.state._texts for engine in ring.engines)


@pytest.mark.parametrize("num_stages", [1, 3])
def test_every_chunk_can_have_a_prompt_of_its_own(num_stages: int):
    """Rows of one batch differ in prompt, timestep, noise and position, and none gets another's."""
    from rings import embed, open_streams

    config = config_of(0, True, 3)
    ring = MockRing(config, num_stages)
    names = [f"prompt number {number}" for number in range(LONGEST)]
    stream = Stream(5, clip_of(LONGEST), prompt=names[0])
    admitted: list[str] = []

    def plans(controller_plans: Iterator[Plan]) -> Iterator[Plan]:
        current = 0
        for plan in controller_plans:
            for row in plan.rows:
                if row.step == 0:
                    admitted.append(names[current])
                    current = min(current + 1, LONGEST - 1)
                    # As if a user had changed it right after this chunk entered.
                    ring.controller.set_prompt(0, embed(config, names[current]))
            yield plan

    (writer,) = open_streams(ring.controller, config, [stream])
    inner = ring.controller.plans
    ring.controller.plans = lambda: plans(inner())
    ring.run_engines()
    assert admitted == names
    assert np.array_equal(
        writer.frames, reference_frames(config, stream, embedding_of=lambda chunk: embed(config, names[chunk]))
    )
    assert all(not engine.state._texts for engine in ring.engines)


def test_noise_and_weights_do_not_come_from_the_global_generator():
    config = config_of(0, False, 1)
    torch.manual_seed(1)
    (first,) = MockRing(config, 2).run([Stream(5, clip_of(3))])
    torch.manual_seed(2)
    (second,) = MockRing(config, 2).run([Stream(5, clip_of(3))])
    (other_seed,) = MockRing(config, 2).run([Stream(6, clip_of(3))])
    assert np.array_equal(first, second)
    assert not np.array_equal(first, other_seed)


@pytest.mark.parametrize("num_chunks", [1, 2, 3, 6, 7])
def test_output_i_belongs_to_input_i(num_chunks: int, monkeypatch: pytest.MonkeyPatch):
    """With a model that predicts no flow and a start without noise, the video is the VAE's round trip of the input."""
    from ds_stream.model.layers import HeadLayer, RowBatch
    from ds_stream.model.noise import NoiseSchedule

    monkeypatch.setattr(
        HeadLayer,
        "forward",
        lambda self, batch: RowBatch(batch.rows, batch.latents_RCNhw, flow_RCNhw=0 * batch.latents_RCNhw),
    )
    monkeypatch.setattr(NoiseSchedule, "start", lambda self, noise, video, strength: video)
    monkeypatch.setattr(NoiseSchedule, "step", lambda self, latents, *rest: latents)
    config = config_of(0, False, 2)
    clip = clip_of(num_chunks)
    (frames,) = MockRing(config, 3).run([Stream(5, clip)])
    monkeypatch.undo()
    from ds_stream.model.pipeline import build_all_layers
    from rings import CPU

    layers = build_all_layers(config.stream, CPU)
    states = layers.encode.new_state(), layers.new_decoder_states()
    expected = []
    with torch.no_grad():
        for chunk in range(num_chunks):
            part = clip[geometry(config).first_frame(chunk) :][: geometry(config).num_frames(chunk)]
            latents = layers.encode(torch.from_numpy(part), states[0])
            expected.append(layers.decode_chunk(latents, states[1]).numpy())
    assert np.array_equal(frames, np.concatenate(expected))


def test_parameters_of_the_stages_add_up_and_none_is_built_twice(monkeypatch: pytest.MonkeyPatch):
    config = tiny_config()
    built: list[FilledLayerSpec] = []
    build = FilledLayerSpec.build
    monkeypatch.setattr(
        FilledLayerSpec, "build", lambda spec, *rest, **options: built.append(spec) or build(spec, *rest, **options)
    )
    for num_stages in (1, 2, 3, 4, 5):
        built.clear()
        engines = MockRing(config, num_stages).engines
        # Encode, embed, three blocks, head, five of the decoder: each once, over all stages together.
        assert len(built) == 11
        counts = [engine.module.num_parameters for engine in engines]
        names = [name for engine in engines for name, _ in engine.module.named_parameters()]
        whole = MockRing(config, 1).engines[0].module
        assert sum(counts) == whole.num_parameters
        assert sorted(names) == sorted(name for name, _ in whole.named_parameters())
        assert all(count < whole.num_parameters for count in counts) or num_stages == 1
