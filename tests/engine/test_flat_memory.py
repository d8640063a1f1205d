"""Once the window is full, a chunk costs what the one before it cost, with everything on that keeps something."""

import gc
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional

from ds_stream.controller.motion import strength_rule
from ds_stream.controller.prompts import PromptTimeline
from ds_stream.core import Frames, Plan
from ds_stream.model.layers import EmbedLayer
from rings import ArrayReader, ArrayWriter, MockRing, Stream, embed, geometry, random_clip, tiny_config

NUM_CHUNKS, FULL_AFTER = 42, 18


class Nowhere(ArrayWriter):
    """Keeps nothing."""

    def write(self, frames: Frames) -> None:
        pass


def tensor_bytes() -> int:
    """Of all tensors in this process but pixels, which are on their way to the writer at any time."""
    storages = {
        thing.untyped_storage().data_ptr(): thing.untyped_storage().nbytes()
        for thing in gc.get_objects()
        if type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.dtype != torch.uint8
    }
    return sum(storages.values())


def test_bytes_attended_tokens_and_shapes_are_constant(monkeypatch: pytest.MonkeyPatch):
    config = tiny_config(
        model={"in_channels": 32},
        noise={"motion_aware": True},
        context={
            "lead": 1,
            "num_sink_latent_frames": 2,
            "adaptive_sinks": True,
            "adaptive_sink_threshold": 0.99,
        },
        batch={"max_rows": 3},
    )
    ring = MockRing(config, 1)
    held: dict[int, int] = {}
    attended: dict[int, Counter] = {}
    current = 0
    attend = functional.scaled_dot_product_attention

    def note(query, key, value, **options):
        attended.setdefault(current, Counter())[tuple(key.shape), tuple(query.shape)] += 1
        return attend(query, key, value, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", note)

    def plans(controller_plans: Iterator[Plan]) -> Iterator[Plan]:
        nonlocal current
        for plan in controller_plans:
            yield plan
            done = [row.chunk for row in plan.rows if row.step == 2]
            if done:
                current = done[0] + 1
                if current % 6 == 0:
                    held[current] = tensor_bytes()

    inner = ring.controller.plans
    ring.controller.plans = lambda: plans(inner())
    reader = ArrayReader(random_clip(geometry(config).first_frame(NUM_CHUNKS)))
    prompts = PromptTimeline(embed(config, "red boats"))
    ring.controller.open_session(0, 1, prompts, reader, Nowhere(), strength_rule(config.stream.noise))
    ring.run_engines()
    readings = [held[chunk] for chunk in range(FULL_AFTER, NUM_CHUNKS - 5, 6)]
    assert len(readings) == 4
    assert len(set(readings)) == 1
    assert all(attended[chunk] == attended[FULL_AFTER] for chunk in range(FULL_AFTER, NUM_CHUNKS - 3))
    assert attended[1] != attended[FULL_AFTER]


def test_text_is_projected_once_per_prompt(monkeypatch: pytest.MonkeyPatch):
    projected: list[int] = []
    project = EmbedLayer.project_text

    def note(self, embedding):
        projected.append(1)
        return project(self, embedding)

    monkeypatch.setattr(EmbedLayer, "project_text", note)
    MockRing(tiny_config(), 2).run([Stream(1, random_clip(29))])
    assert len(projected) == 1
