import pytest
import torch

from ds_stream.model.noise import NoiseSchedule, keyed_noise
from ds_stream.settings import NoiseConfig
from rings import CPU


def schedule(**values: object) -> NoiseSchedule:
    return NoiseSchedule(NoiseConfig.model_validate({"steps": [1000, 500], **values}))


def timesteps(levels: NoiseSchedule, num_passes: int, strength: float | None = None) -> list[float]:
    return [levels.timestep(step, strength) for step in range(num_passes)]


def sigmas(levels: NoiseSchedule, num_steps: int, strength: float | None = None) -> list[float]:
    return [levels.sigma(step, strength) for step in range(num_steps)]


def test_levels_worked_out_by_hand():
    """Shift 5: the table at s = i/1000 is 5 s / (1 + 4 s); at s = 0.2 it is 1 / 1.8 = 0.5556."""
    plain = schedule(shift=5.0, steps=[1000, 556])
    assert timesteps(plain, 2) == [1000.0, 556.0]
    assert sigmas(plain, 2) == pytest.approx([1.0, 0.55556], abs=1e-4)


def test_warped_steps_are_indices_into_the_table():
    """Shift 5, index 500: s = 0.5, so 2.5 / 3 = 0.8333."""
    warped = schedule(shift=5.0, steps=[1000, 500], warp=True)
    assert timesteps(warped, 2) == pytest.approx([1000.0, 833.333], abs=1e-3)
    assert sigmas(warped, 2) == pytest.approx([1.0, 0.833333], abs=1e-5)


def test_without_shift_a_timestep_is_its_level():
    assert sigmas(schedule(shift=1.0, steps=[1000, 400]), 2) == pytest.approx([1.0, 0.4])


def test_video_starts_between_noise_and_latents_and_tells_a_timestep_of_its_own():
    levels = schedule(steps=[900, 500])
    noise, latents = torch.full((1, 1, 1, 1), 2.0), torch.full((1, 1, 1, 1), 10.0)
    assert levels.start(noise, latents, 0.8).item() == pytest.approx(0.8 * 2 + 0.2 * 10)
    # int(1000 s) - 100, chunk by chunk; the later steps stay.
    assert timesteps(levels, 2, 0.8) == [700.0, 500.0]
    assert timesteps(levels, 2, 0.6789) == [578.0, 500.0]
    assert timesteps(levels, 2, None) == [900.0, 500.0]
    assert levels.start(noise, None, None) is noise


def test_a_dynamic_first_level_is_the_nearest_of_the_table():
    """Shift 1: the table is 1000, 999, ...; told 678, the level is 0.678, and x0 = x - 0.678 v."""
    levels = schedule(shift=1.0, steps=[900, 500])
    assert levels.sigma(0, 0.7785) == pytest.approx(0.678)
    x, flow, noise = (torch.full((1, 1, 1, 1), value) for value in (3.0, 2.0, 5.0))
    assert levels.step(x, flow, 0, noise, 0.7785).item() == pytest.approx(0.5 * (3 - 0.678 * 2) + 0.5 * 5)


def test_a_first_timestep_equal_to_a_later_one_is_still_the_first():
    levels = schedule(steps=[700, 500], shift=1.0)
    assert timesteps(levels, 2, 0.6) == [500.0, 500.0]
    ones = torch.ones(1, 1, 1, 1)
    assert levels.needs_noise(0)
    assert not levels.needs_noise(1)
    assert levels.step(ones, 0 * ones, 0, 3 * ones, 0.6).item() == pytest.approx(0.5 + 0.5 * 3)
    assert levels.step(ones, 0 * ones, 1, None, 0.6).item() == 1


def test_steps_worked_out_by_hand():
    levels = schedule(shift=1.0, steps=[1000, 400], context_pass=True)
    x, flow, noise = (torch.full((1, 1, 1, 1), value) for value in (3.0, 2.0, 5.0))
    # x0 = 3 - 1.0 * 2 = 1; next = 0.6 * 1 + 0.4 * 5 = 2.6
    assert levels.step(x, flow, 0, noise, None).item() == pytest.approx(2.6)
    # x0 = 3 - 0.4 * 2
    assert levels.step(x, flow, 1, None, None).item() == pytest.approx(2.2)
    # The context pass changes nothing.
    assert levels.step(x, flow, 2, None, None).item() == 3.0
    assert timesteps(levels, 3) == [1000.0, 400.0, 0.0]


def test_noise_depends_on_its_key_alone():
    shape = (16, 1, 4, 4)
    first = keyed_noise(shape, 1, 2, 3, CPU)
    torch.manual_seed(123)
    torch.randn(100)
    assert torch.equal(keyed_noise(shape, 1, 2, 3, CPU), first)
    others = [keyed_noise(shape, *key, CPU) for key in [(2, 2, 3), (1, 3, 3), (1, 2, 4), (12, 3, 3), (1, 23, 3)]]
    assert all(not torch.equal(other, first) for other in others)


def test_keying_noise_leaves_the_global_generator_alone():
    torch.manual_seed(7)
    expected = torch.randn(3)
    torch.manual_seed(7)
    keyed_noise((4,), 0, 0, 0, CPU)
    assert torch.equal(torch.randn(3), expected)


def test_keys_of_long_streams_and_large_seeds_do_not_overflow():
    noise = keyed_noise((1000,), 2**63 - 1, 10**9, 5, CPU)
    assert abs(noise.mean()) < 0.2
    assert 0.8 < noise.std() < 1.2
