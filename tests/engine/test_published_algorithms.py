"""Self-Forcing's and StreamDiffusionV2's algorithms walked through by hand, and the engine beside them.

By hand means: an independent DiT, levels and positions written out, keys and values kept in plain lists. The engine
runs the shipped presets on a tiny model and two stages.
"""

import json
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from ds_stream.config import Config, find_config, parse_config
from ds_stream.model.layers import latent_shape
from ds_stream.model.noise import keyed_noise
from ds_stream.model.pipeline import build_all_layers
from published import original_dit, split
from rings import CPU, MockRing, Stream, embed, geometry, random_clip, tiny_config
from wan_by_hand import KeyValues, forward, nearest, timestep_table

SEED, PROMPT = 11, "red boats"


def preset(name: str, **context: object) -> Config:
    """A shipped preset with its algorithm, on a tiny model with random weights."""
    raw = json.loads(find_config(name).read_text())["stream"]
    tiny = json.loads(tiny_config().to_json())["stream"]
    vae = tiny["vae"] | {"normalize_input_latents": raw["vae"]["normalize_input_latents"]}
    kept = {"noise": raw["noise"], "context": raw["context"] | context, "batch": raw["batch"]}
    return parse_config({"stream": tiny | kept | {"vae": vae}})


def run_engine(config: Config, stream: Stream) -> tuple[list[Tensor], list[tuple[int, int, float]]]:
    """Clean latents of each chunk as they reach the decoder; and chunk, step and timestep of each pass."""
    ring = MockRing(config, 2)
    latents: list[Tensor] = []
    told: list[tuple[int, int, float]] = []
    first_decoder_layer = next(iter(ring.engines[-1].module.layers.decode.values()))
    first_decoder_layer.register_forward_pre_hook(lambda _, inputs: latents.append(inputs[0].clone()))

    def note(_module, inputs):
        told.extend((row.row.chunk, row.row.step, row.timestep) for row in inputs[0].rows)

    ring.engines[0].module.layers.embed.register_forward_pre_hook(note)
    ring.run([stream])
    return latents, sorted(told)


def assert_close(latents: Sequence[Tensor], by_hand: Sequence[Tensor]) -> None:
    assert len(latents) == len(by_hand)
    for ours, theirs in zip(latents, by_hand, strict=True):
        assert (ours - theirs).abs().max() < 1e-3
        assert theirs.abs().mean() > 0.1


@torch.no_grad()
def test_self_forcing():
    """Three chunks of three latent frames. Context is what each earlier chunk's pass at timestep 0 wrote."""
    config = preset("self_forcing_1_3b")
    latents, told = run_engine(config, Stream(SEED, None, num_frames=geometry(config).first_frame(3), prompt=PROMPT))

    # Shift 5 at s = 1, 0.75, 0.5, 0.25: 5 s / (1 + 4 s).
    sigmas = [1.0, 0.9375, 0.833333, 0.625]
    timesteps = [1000.0, 937.5, 833.3333, 625.0, 0.0]
    for chunk, step, timestep in told:
        assert timestep == pytest.approx(timesteps[step], abs=1e-3), (chunk, step)
    assert [(chunk, step) for chunk, step, _ in told] == [(c, k) for c in range(3) for k in range(5)]

    weights, text = original_dit(split(build_all_layers(config.stream, CPU))[0]), embed(config, PROMPT)
    heads, shape = config.stream.model.num_heads, latent_shape(config.stream)
    positions = [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    written: list[tuple[KeyValues, list[int]]] = []
    by_hand = []
    for chunk in range(3):
        x = keyed_noise(shape, SEED, chunk, 0, CPU)
        for step in range(4):
            flow, _ = forward(weights, heads, x, timesteps[step], text, positions[chunk], written)
            clean = x - sigmas[step] * flow
            if step < 3:
                noise = keyed_noise(shape, SEED, chunk, step + 1, CPU)
                x = (1 - sigmas[step + 1]) * clean + sigmas[step + 1] * noise
        _, final = forward(weights, heads, clean, 0.0, text, positions[chunk], written)
        written.append((final, positions[chunk]))
        by_hand.append(clean)
    assert_close(latents, by_hand)


@pytest.mark.parametrize("threshold", [0.2, 0.99])
@torch.no_grad()
def test_stream_diffusion_v2(threshold: float):
    """Eight chunks of one latent frame, window 3 after 3 sinks. Context is what chunks wrote at the same step."""
    config = preset("sdv2_v2v_1_3b", adaptive_sink_threshold=threshold)
    clip = random_clip(29)
    clip[9:17] = clip[9] // 2 + np.arange(8, dtype=np.uint8)[:, None, None, None] * 4
    latents, told = run_engine(config, Stream(SEED, clip, prompt=PROMPT))

    # Noise by motion: 4 of 127.5 is 0.0314 in every frame of the slow part, and the cut into it counts.
    strengths, frames, previous = [], [clip[:1], *np.split(clip[1:], 7)], 0.8
    last = None
    for part in frames:
        motion = 0.0
        for frame in part.astype(np.float64) / 127.5 - 1:
            motion = motion if last is None else max(motion, ((frame - last) ** 2).mean() ** 0.5)
            last = frame
        previous = 0.9 * (0.8 - 0.1 * min(motion / 0.2, 1.0)) + 0.1 * previous
        strengths.append(previous)
    assert strengths[0] == pytest.approx(0.8)
    assert strengths[4] == pytest.approx(0.9 * (0.8 - 0.1 * 4 / 127.5 / 0.2) + 0.1 * strengths[3])
    for chunk, step, timestep in told:
        assert timestep == [int(1000 * strengths[chunk]) - 100, 500, 400, 200][step], (chunk, step)

    layers = build_all_layers(config.stream, CPU)
    weights, text = original_dit(split(layers)[0]), embed(config, PROMPT)
    heads, shape, table = config.stream.model.num_heads, latent_shape(config.stream), timestep_table(8.0)
    encoder = layers.encode.new_state()
    written: list[dict[int, KeyValues]] = []
    sinks: list[list[int]] = []
    by_hand = []
    replaced = 0
    for chunk in range(8):
        z = layers.encode(torch.from_numpy(frames[chunk]), encoder)
        own: dict[int, KeyValues] = {}
        x = strengths[chunk] * keyed_noise(shape, SEED, chunk, 0, CPU) + (1 - strengths[chunk]) * z
        # Sinks sit right before the window, which is the chunk and the two before it.
        kept = sinks[-1] if sinks else []
        start = max(3, chunk - 2)
        window = [(earlier, earlier) for earlier in range(start, chunk)]
        seen = [(frame, start - 3 + place) for place, frame in enumerate(kept)] + window
        for step in range(4):
            told_timestep = [int(1000 * strengths[chunk]) - 100, 500, 400, 200][step]
            context = [(written[frame][step], [position]) for frame, position in seen]
            flow, own[step] = forward(weights, heads, x, told_timestep, text, [chunk], context)
            clean = x - nearest(table, told_timestep) * flow
            if step < 3:
                sigma = nearest(table, [500, 400, 200][step])
                x = (1 - sigma) * clean + sigma * keyed_noise(shape, SEED, chunk, step + 1, CPU)
        written.append(own)
        by_hand.append(clean)
        # The first three frames are sinks; then the least similar one goes if it is below the threshold.
        if chunk < 3:
            sinks.append([*kept, chunk])
            continue
        similarities = [similarity(written[frame][0], own[0]) for frame in kept]
        least = min(range(3), key=similarities.__getitem__)
        after = list(kept)
        if similarities[least] < threshold:
            after[least] = chunk
            replaced += 1
        sinks.append(after)
    assert replaced > 0 or threshold == 0.2
    assert_close(latents, by_hand)


def similarity(sink: KeyValues, new: KeyValues) -> float:
    """Of the first block, mean of the cosines of token-averaged keys and values."""
    pairs = zip(sink.blocks[0], new.blocks[0], strict=True)
    return sum(cosine_similarity(a.mean(0).flatten(), b.mean(0).flatten(), dim=0).item() for a, b in pairs) / 2


def test_the_sdv2_preset_feeds_raw_latents():
    config = preset("sdv2_v2v_1_3b")
    raw = build_all_layers(config.stream, CPU).encode
    normal = build_all_layers(config._with("vae", normalize_input_latents=True).stream, CPU).encode
    frames = torch.from_numpy(random_clip(1))
    vae = config.stream.vae
    mean, std = (torch.tensor(values).view(-1, 1, 1, 1) for values in (vae.latent_mean, vae.latent_std))
    with torch.no_grad():
        assert torch.allclose(raw(frames, raw.new_state()), normal(frames, normal.new_state()) * std + mean, atol=1e-5)
