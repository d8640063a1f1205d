"""The rolling key/value cache of one session and one block. All bookkeeping is host integers.

Shapes: L tokens of a chunk, T tokens of a latent frame, H heads, D head channels, S tokens of a store.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_stream.model.adaptive_sinks import NO_SINK, least_similar_sink
from ds_stream.model.rope import Angles, apply_rope
from ds_stream.model.window import ContextWindow


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What all caches of a model share."""

    window: ContextWindow
    """The context rule."""
    tokens_per_frame: int
    num_heads: int
    head_dim: int
    sliding_sinks: bool
    """Whether sinks sit right before the window instead of at their true positions."""
    adaptive_sink_threshold: float | None
    """Similarity below which a sink is replaced; ``None``: sinks never change."""

    @property
    def num_unrotated_sinks(self) -> int:
        """Sinks whose unrotated keys are kept beside the rotated ones."""
        return self.window.num_sinks if self.sliding_sinks or self.adaptive_sink_threshold is not None else 0

    def num_elements(self) -> int:
        """Numbers that one cache holds."""
        keys_and_values = 2 * self.window.capacity
        unrotated = self.num_unrotated_sinks + (self.adaptive_sink_threshold is not None)
        per_frame = self.tokens_per_frame * self.num_heads * self.head_dim
        return len(self.window.levels) * (keys_and_values + unrotated) * per_frame


class RollingCache:
    """One store per level that some pass reads, each of ``window.capacity`` latent frames: sinks, then a ring.

    Keys are stored rotated; those of sinks a second time unrotated, so that they can follow the window.
    """

    def __init__(self, shape: CacheShape, dtype: torch.dtype, device: torch.device):
        self.shape = shape
        self.window = window = shape.window
        num_levels, frame = len(window.levels), (shape.tokens_per_frame, shape.num_heads, shape.head_dim)

        def frames(count: int) -> Tensor:
            return torch.zeros((num_levels, count * frame[0], *frame[1:]), dtype=dtype, device=device)

        self._keys, self._values = frames(window.capacity), frames(window.capacity)
        self._unrotated_sink_keys = frames(shape.num_unrotated_sinks)
        # Of the latest chunk's last latent frame, which may become a sink.
        self._candidate_keys = frames(int(shape.adaptive_sink_threshold is not None))
        self._sink_position: list[int | None] = [0] * num_levels
        self._sink_choices: dict[int, Tensor] = {}
        self._pending: dict[int, tuple[int, Tensor]] = {}
        self._no_sink = torch.full((), NO_SINK, device=device)
        self._sink_indices = torch.arange(window.num_sinks, device=device)

    @property
    def num_bytes(self) -> int:
        """Device memory of this cache, in bytes."""
        tensors = (self._keys, self._values, self._unrotated_sink_keys, self._candidate_keys)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def state(self) -> dict[str, Any]:
        """All that it holds, for :meth:`load` of another cache of the same shape. Not a copy."""
        return {
            "keys": self._keys,
            "values": self._values,
            "unrotated_sink_keys": self._unrotated_sink_keys,
            "candidate_keys": self._candidate_keys,
            "sink_position": self._sink_position,
            "sink_choices": self._sink_choices,
            "pending": self._pending,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Take up the state of a cache that was on another stage."""
        self._keys.copy_(state["keys"])
        self._values.copy_(state["values"])
        self._unrotated_sink_keys.copy_(state["unrotated_sink_keys"])
        self._candidate_keys.copy_(state["candidate_keys"])
        device = self._keys.device
        self._sink_position = list(state["sink_position"])
        self._sink_choices = {chunk: choice.to(device) for chunk, choice in state["sink_choices"].items()}
        self._pending = {store: (chunk, choice.to(device)) for store, (chunk, choice) in state["pending"].items()}

    def update(
        self,
        chunk: int,
        step: int,
        key_LHD: Tensor,
        value_LHD: Tensor,
        angles: Angles,
        sink_angles: Angles | None,
        sink_choice: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Write a pass's own keys/values and return what it attends to, itself included.

        Args:
            key_LHD: keys before rotation.
            angles: of the chunk's own tokens.
            sink_angles: of the sinks at ``window.sliding_sink_position(chunk)``; ``None`` with absolute positions.
            sink_choice: which sink the chunk replaces, where another block has decided; ``None``: this one decides.

        Returns:
            Keys and values ``[S, H, D]``: views of the store, valid until its next update.
        """
        window = self.window
        rotated_LHD = apply_rope(key_LHD, angles)
        for level in window.levels_written(step):
            self._replace_sink(level - window.lead, chunk)
            self._write(level - window.lead, chunk, key_LHD, rotated_LHD, value_LHD)
        if step in window.levels:
            self._choose_sink(chunk, step, key_LHD, value_LHD, sink_choice)
        store = window.level_read(step) - window.lead
        if sink_angles is not None:
            self._move_sinks(store, window.sliding_sink_position(chunk), sink_angles)
        num_tokens = window.num_filled(chunk) * self.shape.tokens_per_frame
        return self._keys[store, :num_tokens], self._values[store, :num_tokens]

    def sink_choice(self, chunk: int, step: int) -> Tensor:
        """What this block, which decides, has decided for ``chunk``; to be read after :meth:`update`."""
        if step == self.window.num_passes - 1:
            return self._sink_choices.pop(chunk, self._no_sink)
        return self._sink_choices.get(chunk, self._no_sink)

    def _write(self, store: int, chunk: int, key_LHD: Tensor, rotated_LHD: Tensor, value_LHD: Tensor) -> None:
        for index, frame in enumerate(self.window.frames(chunk)):
            own = self._tokens(index)
            slot = self._tokens(self.window.slot(frame))
            self._keys[store, slot] = rotated_LHD[own]
            self._values[store, slot] = value_LHD[own]
            if frame < self.shape.num_unrotated_sinks:
                self._unrotated_sink_keys[store, slot] = key_LHD[own]

    def _move_sinks(self, store: int, position: int, sink_angles: Angles) -> None:
        # Sinks start at their true positions; the window moves them only once all of them are filled.
        if position == self._sink_position[store]:
            return
        sinks = slice(0, self._unrotated_sink_keys.shape[1])
        self._keys[store, sinks] = apply_rope(self._unrotated_sink_keys[store], sink_angles)
        self._sink_position[store] = position

    def _choose_sink(
        self, chunk: int, step: int, key_LHD: Tensor, value_LHD: Tensor, sink_choice: Tensor | None
    ) -> None:
        """Note which sink of the pass's own level its last latent frame will replace, for later chunks."""
        threshold = self.shape.adaptive_sink_threshold
        # Before that some sink is empty, or this chunk's own.
        if threshold is None or self.window.frames(chunk).start < self.window.num_sinks:
            return
        store = step - self.window.lead
        last = self._tokens(self.window.num_latent_frames - 1)
        self._candidate_keys[store] = key_LHD[last]
        if sink_choice is None and step == self.window.lead:
            sinks = (self._per_sink(self._unrotated_sink_keys[store]), self._per_sink(self._values[store]))
            self._sink_choices[chunk] = least_similar_sink(*sinks, key_LHD[last], value_LHD[last], threshold)
        self._pending[store] = (chunk, self._sink_choices[chunk] if sink_choice is None else sink_choice)

    def _replace_sink(self, store: int, chunk: int) -> None:
        """Carry out the choice of a chunk before ``chunk``. Waiting until now, no chunk is its own sink."""
        if store not in self._pending or self._pending[store][0] == chunk:
            return
        earlier, choice = self._pending.pop(store)
        slot = self._tokens(self.window.slot(self.window.frames(earlier)[-1]))
        is_replaced = self._sink_indices == choice

        def replace(tensor_SHD: Tensor, new_THD: Tensor) -> None:
            sinks = self._per_sink(tensor_SHD)
            sinks.copy_(torch.where(is_replaced[:, None, None, None], new_THD, sinks))

        replace(self._unrotated_sink_keys[store], self._candidate_keys[store])
        replace(self._values[store], self._values[store, slot])
        if self.shape.sliding_sinks:
            # Rotated anew where they are read next.
            self._sink_position[store] = None
        else:
            replace(self._keys[store], self._keys[store, slot])

    def _per_sink(self, tensor_SHD: Tensor) -> Tensor:
        """The sinks of a store, as a view ``[sinks, T, H, D]``."""
        num_sinks = self.window.num_sinks
        return tensor_SHD[: num_sinks * self.shape.tokens_per_frame].unflatten(0, (num_sinks, -1))

    def _tokens(self, frame: int) -> slice:
        return slice(frame * self.shape.tokens_per_frame, (frame + 1) * self.shape.tokens_per_frame)
