"""What stages have timed as a message of fixed size: it rides on the plans, stage to stage, and back to the first."""

import numpy as np
import torch
from torch import Tensor

from ds_stream.core import LayerTiming, StageTiming
from ds_stream.engine.links import Field

RECORDS_PER_STAGE = 2
"""Launches of a stage that a board has room for: a device's events have passed for none of a plan's, then for two."""
_EMPTY = -1.0


class TimingBoard:
    """Room for the latest timings of every stage and every layer.

    Args:
        num_stages: of the pipeline.
        num_layers: of the model.
    """

    def __init__(self, num_stages: int, num_layers: int):
        self._stages = np.full((num_stages, RECORDS_PER_STAGE, 7), _EMPTY)
        self._layers = np.full((num_layers, 2), _EMPTY)

    @property
    def fields(self) -> list[Field]:
        """Shape and type of :attr:`tensors`."""
        return [(array.shape, torch.float64) for array in (self._stages, self._layers)]

    @property
    def tensors(self) -> list[Tensor]:
        """The board as a message; not a copy."""
        return [torch.from_numpy(self._stages), torch.from_numpy(self._layers)]

    def clear(self) -> None:
        """Take everything off."""
        self._stages.fill(_EMPTY)
        self._layers.fill(_EMPTY)

    def load(self, tensors: list[Tensor]) -> None:
        """Take up what another stage's board held."""
        self._stages[:], self._layers[:] = (tensor.numpy() for tensor in tensors)

    def put(self, stages: list[StageTiming], layers: list[LayerTiming]) -> None:
        """Add one stage's timings, at most two launches of it."""
        for slot, timing in enumerate(stages):
            self._stages[timing.stage, slot] = (
                timing.launch,
                timing.num_rows,
                timing.forward_ms,
                timing.encode_ms,
                timing.decode_ms,
                timing.wait_ms,
                timing.send_ms,
            )
        for timing in layers:
            self._layers[timing.layer] = (timing.num_rows, timing.ms)

    def take(self) -> tuple[list[StageTiming], list[LayerTiming]]:
        """What is on the board."""
        stages = [
            StageTiming(stage, int(launch), int(num_rows), *ms)
            for stage, records in enumerate(self._stages.tolist())
            for launch, num_rows, *ms in records
            if launch != _EMPTY
        ]
        layers = [
            LayerTiming(layer, int(num_rows), ms)
            for layer, (num_rows, ms) in enumerate(self._layers.tolist())
            if num_rows != _EMPTY
        ]
        return stages, layers
