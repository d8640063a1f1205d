"""Flow-matching noise: levels, starts, steps, and Gaussians that depend on nothing but their key.

Rectified flow as in Wan 2.1: ``x = (1 - sigma) x0 + sigma eps``, the model predicts ``v = eps - x0``. Latents are fp32
``[channels, latent frames, height, width]``.
"""

import hashlib

import torch
from torch import Tensor

from ds_stream.settings import NoiseConfig, shifted_timestep

NUM_TABLE_ENTRIES = 1000


class NoiseSchedule:
    """Timestep and noise level of each pass.

    A chunk that starts from encoded video (V2V) has a *strength*, the share of noise in its start, which may differ
    from chunk to chunk; ``None`` means that it starts from noise alone (T2V).
    """

    def __init__(self, config: NoiseConfig):
        self.num_denoising_steps = len(config.steps)
        self._table = _timestep_table(config.shift)
        self._sigma_by_timestep: dict[float, float] = {}
        self._first_timestep_offset = config.first_timestep_offset
        self._sigmas = [self._sigma_of(timestep) for timestep in config.timesteps]
        self._timesteps = [*config.timesteps, *[0.0] * config.context_pass]

    def timestep(self, step: int, strength: float | None) -> float:
        """What the model is told at pass ``step``, 0 to 1000. Video moves the first one: ``int(1000 s)`` + offset."""
        if step == 0 and strength is not None:
            return float(max(int(1000 * strength) + self._first_timestep_offset, 1))
        return self._timesteps[step]

    def sigma(self, step: int, strength: float | None) -> float:
        """Noise level of denoising step ``step``: that of the shifted table's entry nearest to its timestep."""
        if step == 0 and strength is not None:
            return self._sigma_of(self.timestep(step, strength))
        return self._sigmas[step]

    def start(self, noise: Tensor, video_latents: Tensor | None, strength: float | None) -> Tensor:
        """Noisy latents of a chunk that enters: ``s eps + (1 - s) z``, or pure noise without video."""
        if video_latents is None or strength is None:
            return noise
        return strength * noise + (1 - strength) * video_latents

    def step(
        self, latents: Tensor, flow: Tensor, step: int, next_noise: Tensor | None, strength: float | None
    ) -> Tensor:
        """Latents for the next pass, given the flow predicted at denoising step ``step``.

        ``x0 = x - sigma v``; then ``(1 - sigma') x0 + sigma' eps'`` with fresh noise, or ``x0`` after the last
        denoising step. After the context pass nothing is left to do.

        Args:
            next_noise: ``eps'``, where :meth:`needs_noise` says that there is a further denoising step.
        """
        if step >= self.num_denoising_steps:
            return latents
        clean = latents - self.sigma(step, strength) * flow
        if next_noise is None:
            return clean
        sigma = self._sigmas[step + 1]
        return (1 - sigma) * clean + sigma * next_noise

    def needs_noise(self, step: int) -> bool:
        """Whether :meth:`step` at ``step`` adds fresh noise."""
        return step + 1 < self.num_denoising_steps

    def _sigma_of(self, timestep: float) -> float:
        # Every chunk of a stream asks for the same few.
        if timestep not in self._sigma_by_timestep:
            self._sigma_by_timestep[timestep] = min(self._table, key=lambda entry: abs(entry - timestep)) / 1000
        return self._sigma_by_timestep[timestep]


def keyed_noise(shape: tuple[int, ...], seed: int, chunk: int, step: int, device: torch.device) -> Tensor:
    """Standard Gaussian fp32 noise that depends only on the session's seed, the chunk and the step.

    A session is known by its seed, so two sessions with one seed and one input give one video, whatever runs beside
    them.
    """
    digest = hashlib.blake2b(f"{seed}/{chunk}/{step}".encode(), digest_size=8).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)
    return torch.randn(shape, generator=generator, device=device)


def _timestep_table(shift: float) -> list[float]:
    """The 1000 shifted timesteps, falling, ``s`` from 1."""
    return [shifted_timestep(1 - index / NUM_TABLE_ENTRIES, shift) for index in range(NUM_TABLE_ENTRIES)]
