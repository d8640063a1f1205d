"""What sessions and prompts keep on one stage, and how a layer's part of it moves to another one."""

from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from ds_stream.core import Row
from ds_stream.engine.moves import to_device
from ds_stream.model.attention import KeyValue
from ds_stream.model.cache import RollingCache
from ds_stream.model.layers import BlockLayer, RowContext, RowContextFactory
from ds_stream.model.light_vae import LightVaeState
from ds_stream.model.pipeline import StageLayers
from ds_stream.model.vae import VaeState
from ds_stream.settings import StreamConfig


@dataclass(slots=True)
class SessionState:
    """What one session keeps."""

    seed: int
    caches: dict[int, RollingCache]
    """For each block of this stage."""
    encoder: VaeState | LightVaeState | None
    decoders: dict[int, VaeState | LightVaeState]
    """For each of the decoder's layers on this stage, by its index in the model."""
    sources: dict[int, Tensor] = field(default_factory=dict)
    """Latents of the source chunks in the ring, for a model that takes them; first ring stage only."""


class StageState:
    """The sessions and prompts of one stage.

    Args:
        layers: of the stage.
    """

    def __init__(self, layers: StageLayers, config: StreamConfig, device: torch.device):
        self.layers = layers
        self.rows = RowContextFactory(config, device)
        self.sessions: dict[int, SessionState] = {}
        self.peak_cache_bytes = 0
        """Most device memory that rolling caches took, all open sessions together."""
        self._last_step = config.noise.num_passes - 1
        self._device = device
        self._texts: dict[int, dict[int, KeyValue]] = {}

    def open(self, session: int, seed: int) -> None:
        layers = self.layers
        blocks = [block.index for block in layers.blocks]
        encoder = layers.encode.new_state() if layers.encode else None
        self.sessions[session] = SessionState(seed, self.rows.new_caches(blocks), encoder, layers.new_decoder_states())
        self._note_peak()

    def close(self, session: int) -> None:
        del self.sessions[session]

    def set_prompt(self, prompt: int, context: Tensor) -> None:
        """Compute a projected text's ``[tokens, D]`` cross-attention keys/values."""
        self._texts[prompt] = {block.index: block.text_key_value(context) for block in self.layers.blocks}

    def drop_prompt(self, prompt: int) -> None:
        # A stage that joined the ring without a block never heard of it.
        self._texts.pop(prompt, None)

    def context(self, row: Row) -> RowContext:
        """What the layers need to know of a row of this launch."""
        session = self.sessions[row.session]
        source = session.sources.get(row.chunk)
        if row.step == self._last_step:
            session.sources.pop(row.chunk, None)
        return self.rows.make(row, session.caches, self._texts.get(row.prompt, {}), source)

    # Moves.

    def give(self, index: int) -> dict[str, Any]:
        """Take a layer's parameters and state off this stage; the layer itself goes when the module is repartitioned.

        Args:
            index: of the layer in the model.
        """
        layer = self.layers.by_index[index]
        state: dict[str, Any] = {"parameters": dict(layer.named_parameters())}
        if isinstance(layer, BlockLayer):
            state["caches"] = {name: s.caches.pop(layer.index).state() for name, s in self.sessions.items()}
            state["texts"] = {name: list(texts.pop(layer.index)) for name, texts in self._texts.items()}
        else:
            state["decoders"] = {
                name: _fields_of(s.decoders.pop(index)) for name, s in self.sessions.items() if index in s.decoders
            }
        return state

    def take(self, index: int, layer: nn.Module, state: dict[str, Any]) -> None:
        """Take in the state of a layer that has come, its parameters excepted."""
        if isinstance(layer, BlockLayer):
            for name, cache in state["caches"].items():
                (new,) = self.rows.new_caches([layer.index]).values()
                new.load(cache)
                self.sessions[name].caches[layer.index] = new
            for name, (key, value) in to_device(state["texts"], self._device).items():
                self._texts.setdefault(name, {})[layer.index] = (key, value)
            self._note_peak()
            return
        for name, of_session in to_device(state["decoders"], self._device).items():
            new_state = layer.new_state()
            for key, value in of_session.items():
                setattr(new_state, key, value)
            self.sessions[name].decoders[index] = new_state

    def _note_peak(self) -> None:
        caches = (cache for state in self.sessions.values() for cache in state.caches.values())
        self.peak_cache_bytes = max(self.peak_cache_bytes, sum(cache.num_bytes for cache in caches))


def _fields_of(state: VaeState | LightVaeState) -> dict[str, Any]:
    return {field.name: getattr(state, field.name) for field in fields(state)}
