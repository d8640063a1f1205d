"""The shipped presets say what the published models say, found by name."""

from pathlib import Path

import pytest

from ds_stream.config import find_config, load_config, shipped_configs
from ds_stream.model.noise import NoiseSchedule

# Steps, shift, warp, latent frames a chunk, window (own chunk included) + sinks, context pass, lead, normalised input.
PUBLISHED = {
    "sdv2_v2v_1_3b": ((700, 500, 400, 200), 8.0, False, 1, 3, 3, False, 0, False),
    "sdv2_v2v_14b": ((700, 500, 400, 200), 8.0, False, 1, 3, 3, False, 0, False),
    "self_forcing_1_3b": ((1000, 750, 500, 250), 5.0, True, 3, 21, 0, True, 4, True),
    "causvid_1_3b": ((1000, 757, 522), 8.0, False, 3, 21, 0, True, 3, True),
}
SIZES = {"1_3b": (1536, 12, 30, 8960), "14b": (5120, 40, 40, 13824)}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_is_the_published_algorithm(name: str):
    stream = load_config(find_config(name)).stream
    noise, context, model = stream.noise, stream.context, stream.model
    assert PUBLISHED[name] == (
        noise.steps,
        noise.shift,
        noise.warp,
        context.num_latent_frames_per_chunk,
        context.num_window_latent_frames,
        context.num_sink_latent_frames,
        noise.context_pass,
        context.lead,
        stream.vae.normalize_input_latents,
    )
    size = next(size for key, size in SIZES.items() if name.endswith(key))
    assert size == (model.dim, model.num_heads, model.num_layers, model.ffn_dim)
    assert (model.in_channels, model.out_channels, model.text_dim, model.num_text_tokens) == (16, 16, 4096, 512)
    assert noise.motion_aware is name.startswith("sdv2")
    assert context.adaptive_sinks is name.startswith("sdv2")


def test_levels_of_the_presets_worked_out_by_hand():
    """Self-Forcing, shift 5: step 750 is s = 0.75, so 3.75 / 4 = 0.9375; SDV2 starts at int(800) - 100."""
    levels = NoiseSchedule(load_config(find_config("self_forcing_1_3b")).stream.noise)
    timesteps = [levels.timestep(step, None) for step in range(5)]
    assert timesteps == pytest.approx([1000, 937.5, 833.333, 625, 0], abs=1e-3)
    sdv2 = load_config(find_config("sdv2_v2v_1_3b")).stream.noise
    levels = NoiseSchedule(sdv2)
    assert [levels.timestep(step, sdv2.strength) for step in range(4)] == [700, 500, 400, 200]


def test_names_paths_and_neither(tmp_path: Path):
    assert {path.stem for path in shipped_configs()} == {"tiny", *PUBLISHED}
    own = tmp_path / "mine.json"
    own.write_text("{}")
    assert find_config(str(own)) == own
    with pytest.raises(ValueError, match=r"--config self_forcing: no such file.*mean self_forcing_1_3b"):
        find_config("self_forcing")
