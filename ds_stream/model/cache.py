"""The rolling key/value cache of one session and one block. All bookkeeping is host integers.

Shapes: L tokens of a chunk, H heads, D head channels, S tokens of a store.
"""

import torch
from torch import Tensor

from ds_stream.model.rope import Angles, apply_rope
from ds_stream.model.window import ContextWindow


class RollingCache:
    """One store per level that some pass reads, each of ``window.capacity`` latent frames: sinks, then a ring.

    Keys are stored rotated; those of sinks a second time unrotated, so that they can follow the window.

    Args:
        window: the context rule.
        tokens_per_frame: tokens of one latent frame.
        num_heads, head_dim: attention shape.
        sliding_sinks: whether sinks sit right before the window instead of at their true positions.
    """

    def __init__(
        self,
        window: ContextWindow,
        tokens_per_frame: int,
        num_heads: int,
        head_dim: int,
        sliding_sinks: bool,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.window = window
        self.tokens_per_frame = tokens_per_frame
        self.sliding_sinks = sliding_sinks
        shape = (len(window.levels), window.capacity * tokens_per_frame, num_heads, head_dim)
        self._keys = torch.zeros(shape, dtype=dtype, device=device)
        self._values = torch.zeros_like(self._keys)
        num_sinks = window.num_sinks if sliding_sinks else 0
        self._unrotated_sink_keys = self._keys[:, : num_sinks * tokens_per_frame].clone()
        self._sink_position = [0] * len(window.levels)

    @property
    def num_bytes(self) -> int:
        """Device memory of this cache, in bytes."""
        tensors = (self._keys, self._values, self._unrotated_sink_keys)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def update(
        self, chunk: int, step: int, key_LHD: Tensor, value_LHD: Tensor, angles: Angles, sink_angles: Angles | None
    ) -> tuple[Tensor, Tensor]:
        """Write a pass's own keys/values and return what it attends to, itself included.

        Args:
            key_LHD: keys before rotation.
            angles: of the chunk's own tokens.
            sink_angles: of the sinks at ``window.sliding_sink_position(chunk)``; ``None`` with absolute positions.

        Returns:
            Keys and values ``[S, H, D]``: views of the store, valid until its next update.
        """
        rotated_LHD = apply_rope(key_LHD, angles)
        for level in self.window.levels_written(step):
            self._write(level - self.window.lead, chunk, key_LHD, rotated_LHD, value_LHD)
        store = self.window.level_read(step) - self.window.lead
        if sink_angles is not None:
            self._move_sinks(store, self.window.sliding_sink_position(chunk), sink_angles)
        num_tokens = self.window.num_filled(chunk) * self.tokens_per_frame
        return self._keys[store, :num_tokens], self._values[store, :num_tokens]

    def _write(self, store: int, chunk: int, key_LHD: Tensor, rotated_LHD: Tensor, value_LHD: Tensor) -> None:
        for index, frame in enumerate(self.window.frames(chunk)):
            own = self._tokens(index)
            slot = self._tokens(self.window.slot(frame))
            self._keys[store, slot] = rotated_LHD[own]
            self._values[store, slot] = value_LHD[own]
            if self.sliding_sinks and frame < self.window.num_sinks:
                self._unrotated_sink_keys[store, slot] = key_LHD[own]

    def _move_sinks(self, store: int, position: int, sink_angles: Angles) -> None:
        # Sinks start at their true positions; the window moves them only once all of them are filled.
        if position == self._sink_position[store]:
            return
        sinks = slice(0, self._unrotated_sink_keys.shape[1])
        self._keys[store, sinks] = apply_rope(self._unrotated_sink_keys[store], sink_angles)
        self._sink_position[store] = position

    def _tokens(self, frame: int) -> slice:
        return slice(frame * self.tokens_per_frame, (frame + 1) * self.tokens_per_frame)
