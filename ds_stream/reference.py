"""The oracle: plain loops over the same layers. No schedule, no ranks, no batches.

Chunk after chunk, pass after pass. What the pipeline puts out must equal this, bit for bit in fp32 on a CPU.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ds_stream.core import Row
from ds_stream.model.layers import RowBatch, RowContextFactory, latent_shape
from ds_stream.model.noise import keyed_noise
from ds_stream.model.pipeline import build_all_layers
from ds_stream.settings import StreamConfig


class Reference:
    """The whole model on one device."""

    def __init__(self, config: StreamConfig, device: torch.device):
        self.config = config
        self.device = device
        self.layers = build_all_layers(config, device)
        self.rows = RowContextFactory(config, device)

    @torch.no_grad()
    def stream(
        self,
        seed: int,
        chunks: Iterator[tuple[Tensor, float] | None],
        prompt_of: Callable[[int], Tensor],
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Run one session.

        Args:
            seed: of the session's noise.
            chunks: uint8 pixels ``[T, H, W, 3]`` and strength of each chunk, or ``None`` for each without video.
            prompt_of: text embedding ``[tokens, text_dim]`` of a chunk.

        Yields:
            For each chunk its clean latents ``[C, N, h, w]`` and its pixels, uint8 ``[T, H, W, 3]``.
        """
        layers, schedule = self.layers, self.rows.noise_schedule
        assert layers.encode is not None and layers.embed is not None
        encoder_state, decoder_states = layers.encode.new_state(), layers.new_decoder_states()
        caches = self.rows.new_caches([block.index for block in layers.blocks])

        def noise(chunk: int, step: int) -> Tensor:
            return keyed_noise(latent_shape(self.config), seed, chunk, step, self.device)

        for chunk, source in enumerate(chunks):
            context = layers.embed.project_text(prompt_of(chunk))
            texts = {block.index: block.text_key_value(context) for block in layers.blocks}
            frames, strength = (None, None) if source is None else source
            video = None if frames is None else layers.encode(frames.to(self.device), encoder_state)
            latents = schedule.start(noise(chunk, 0), video, strength)
            for step in range(self.config.noise.num_passes):
                row = self.rows.make(
                    Row(0, chunk, step, prompt=0, strength=strength),
                    caches,
                    texts,
                    video if self.config.model.takes_source else None,
                )
                flow = layers.forward(RowBatch([row], latents[None]), exact_rows=True).flow_RCNhw
                assert flow is not None
                next_noise = noise(chunk, step + 1) if schedule.needs_noise(step) else None
                latents = schedule.step(latents, flow[0], step, next_noise, strength)
            yield latents, layers.decode_chunk(latents, decoder_states)
