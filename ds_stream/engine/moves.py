"""Layers on their way from one stage to another: their parameters, and what sessions and prompts keep in them.

A layer travels through host memory on a CPU group of its own: it happens seldom, and an empty ring waits for it.
"""

import io
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_stream.engine.links import Channel, Departure, GroupChannel


class ChannelMoves:
    """Moves over channels.

    Args:
        channel_to, channel_from: of a stage.
    """

    def __init__(self, channel_to: Callable[[int], Channel], channel_from: Callable[[int], Channel]):
        self._channel_to = channel_to
        self._channel_from = channel_from
        self._in_flight: list[tuple[Departure, Tensor]] = []

    def send(self, stage: int, state: dict[str, Any]) -> None:
        stream = io.BytesIO()
        torch.save(_on_host(state), stream)
        body = torch.frombuffer(stream.getbuffer(), dtype=torch.uint8)
        length = torch.tensor([body.numel()], dtype=torch.int64)
        channel = self._channel_to(stage)
        self._in_flight += [(channel.post(part), part) for part in (length, body)]

    def recv(self, stage: int) -> dict[str, Any]:
        channel = self._channel_from(stage)
        length = torch.empty(1, dtype=torch.int64)
        channel.take(length)
        body = torch.empty(int(length.numpy()[0]), dtype=torch.uint8)
        channel.take(body)
        return torch.load(io.BytesIO(body.numpy()), weights_only=True)

    def drain(self) -> None:
        while self._in_flight:
            departure, _ = self._in_flight.pop()
            departure.wait()


def group_moves(group: dist.ProcessGroup) -> ChannelMoves:
    """Moves over a gloo group of all stages."""
    return ChannelMoves(
        lambda stage: GroupChannel(group, stage, "sending a layer"),
        lambda stage: GroupChannel(group, stage, "waiting for a layer"),
    )


def _on_host(value: Any) -> Any:
    if isinstance(value, Tensor):
        # A copy: a view would take its whole storage along.
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _on_host(item) for key, item in value.items()}
    return [_on_host(item) for item in value] if isinstance(value, list | tuple) else value


def to_device(value: Any, device: torch.device) -> Any:
    """A received state with its tensors on ``device``."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: to_device(item, device) for key, item in value.items()}
    return [to_device(item, device) for item in value] if isinstance(value, list) else value
