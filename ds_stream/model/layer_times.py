"""What each layer costs on one device, measured before anything streams: to cut stages, and to plan ahead."""

import bisect
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ds_stream.core import ChunkGeometry, Row
from ds_stream.model.layers import RowBatch, RowContextFactory, latent_shape
from ds_stream.model.pipeline import FilledLayerSpec, StageLayers, layer_specs
from ds_stream.model.weights.load import ModelWeights
from ds_stream.partition import EMBED, ENCODE
from ds_stream.settings import StreamConfig

_WARM_UP, _REPEATS = 2, 5
# Far enough for the window to be full, whatever its size.
_CHUNK = 10_000


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Milliseconds of each layer of a model on one device."""

    by_rows: dict[int, list[float]]
    """For a number of rows, every layer in order: of the ring for a pass of so many rows with a full window, of the
    VAE for one chunk."""
    device: str
    """What they were measured on, for people."""

    def at(self, num_rows: int) -> list[float]:
        """Every layer's time with ``num_rows`` rows; what was not measured lies on a line between what was."""
        if num_rows in self.by_rows:
            return self.by_rows[num_rows]
        measured = sorted(self.by_rows)
        if len(measured) == 1:
            return self.by_rows[measured[0]]
        # The neighbours, or the nearest two.
        place = min(max(bisect.bisect(measured, num_rows), 1), len(measured) - 1)
        low, high = measured[place - 1], measured[place]
        share = (num_rows - low) / (high - low)
        return [max(a + share * (b - a), 0.0) for a, b in zip(self.by_rows[low], self.by_rows[high], strict=True)]

    def save(self, path: Path) -> None:
        """Write it as JSON, for :meth:`load`."""
        path.write_text(json.dumps({"device": self.device, "by_rows": self.by_rows}, indent=2) + "\n")

    @staticmethod
    def load(path: Path) -> "LayerTimes":
        """What :meth:`save` wrote.

        Raises:
            ValueError: there is no such file, or it is something else.
        """
        try:
            raw = json.loads(path.read_text())
            by_rows = {int(rows): [float(ms) for ms in layers] for rows, layers in raw["by_rows"].items()}
            return LayerTimes(by_rows, str(raw["device"]))
        except OSError as error:
            raise ValueError(f"layer times {path} cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{path} does not hold layer times; let --save-layer-times write such a file") from None


@torch.no_grad()
def measure_layers(
    config: StreamConfig, weights: ModelWeights, device: torch.device, row_counts: Sequence[int]
) -> LayerTimes:
    """Time one of each kind of layer on ``device``: blocks are alike.

    Args:
        row_counts: numbers of rows to time passes with.
    """
    layers = config.layers
    # One block stands for all.
    kinds = [ENCODE, EMBED, EMBED + 1, layers.head, *layers.decode]
    specs = layer_specs(config)
    stage = StageLayers(
        layers, {index: FilledLayerSpec(specs[index], index, weights, device).build() for index in kinds}
    )
    timer = _LayerTimer(device)
    vae_ms = _time_vae(config, stage, timer)
    by_rows = {}
    for num_rows in row_counts:
        ring_ms = _time_pass(config, stage, timer, num_rows)
        of_block = ring_ms[EMBED + 1]
        all_ms = vae_ms | ring_ms | dict.fromkeys(range(EMBED + 1, layers.head), of_block)
        by_rows[num_rows] = [all_ms[index] for index in range(layers.num_layers)]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    if device.type == "cuda":
        del stage
        torch.cuda.empty_cache()
    return LayerTimes(by_rows, name)


class _LayerTimer:
    """Marks the ends of layers, with the device in step."""

    def __init__(self, device: torch.device):
        self.device = device
        self._samples: dict[int, list[float]] = {}
        self._this_round: dict[int, float] = {}
        self._last = 0.0

    def start(self) -> None:
        self._this_round = {}
        self._last = self._now()

    def mark(self, layer: int) -> None:
        now = self._now()
        # With exact rows a layer runs once for each row.
        self._this_round[layer] = self._this_round.get(layer, 0.0) + 1000 * (now - self._last)
        self._last = now

    def stop(self, keep: bool) -> None:
        for layer, ms in self._this_round.items() if keep else ():
            self._samples.setdefault(layer, []).append(ms)

    def take(self) -> dict[int, float]:
        """Medians of the rounds since the last call."""
        samples, self._samples = self._samples, {}
        return {layer: statistics.median(of_layer) for layer, of_layer in samples.items()}

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def _time_vae(config: StreamConfig, stage: StageLayers, timer: _LayerTimer) -> dict[int, float]:
    assert stage.encode is not None
    geometry = ChunkGeometry(config.context.num_latent_frames_per_chunk)
    encoder, decoders = stage.encode.new_state(), stage.new_decoder_states()
    device = timer.device
    for chunk in range(1 + _WARM_UP + _REPEATS):
        frames = torch.zeros(
            (geometry.num_frames(chunk), config.video.height, config.video.width, 3), dtype=torch.uint8, device=device
        )
        timer.start()
        latents = stage.encode(frames, encoder)
        timer.mark(ENCODE)
        stage.decode_chunk(latents, decoders, timer.mark)
        # The first chunk of a session is shorter than the others.
        timer.stop(keep=chunk > _WARM_UP)
    return timer.take()


def _time_pass(config: StreamConfig, stage: StageLayers, timer: _LayerTimer, num_rows: int) -> dict[int, float]:
    assert stage.embed is not None
    device, model = timer.device, config.model
    rows = RowContextFactory(config, device)
    caches = rows.new_caches([block.index for block in stage.blocks])
    context = stage.embed.project_text(torch.zeros((model.num_text_tokens, model.text_dim), device=device))
    texts = {block.index: block.text_key_value(context) for block in stage.blocks}
    contexts = [
        rows.make(Row(0, _CHUNK, index % config.noise.num_passes, 0, config.noise.strength), caches, texts)
        for index in range(num_rows)
    ]
    latents: Tensor = torch.zeros((num_rows, *latent_shape(config)), device=device)
    exact_rows = config.batch.runs_exact_rows(device.type == "cpu")
    for repeat in range(_WARM_UP + _REPEATS):
        timer.start()
        stage.forward(RowBatch(contexts, latents), exact_rows, timer.mark)
        timer.stop(keep=repeat >= _WARM_UP)
    return timer.take()
