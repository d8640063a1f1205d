"""The light VAE's published files, alone and beside the Wan encoder."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from ds_stream.model.light_vae import LightDecodeLayer, LightEncodeLayer
from ds_stream.model.pipeline import StageLayers, build_all_layers, open_weights
from ds_stream.model.vae import EncodeLayer
from rings import CPU, tiny_config

SIZES = {"encoder_width": 6, "decoder_widths": [10, 8, 6, 4]}


def state_of(layers: StageLayers) -> dict[str, Tensor]:
    (decode,) = layers.decode.values()
    return {**layers.encode.state_dict(), **decode.state_dict()}


@pytest.mark.parametrize("name", ["taew2_1.pth", "taew2_1.safetensors"])
def test_both_file_types_load(tmp_path: Path, name: str):
    random = build_all_layers(tiny_config(light_vae={"use": "both", **SIZES}).stream, CPU)
    state = state_of(random)
    (torch.save if name.endswith(".pth") else save_file)(state, tmp_path / name)
    for use, encoder in (("both", LightEncodeLayer), ("decoder", EncodeLayer)):
        light = {"use": use, "weights": str(tmp_path / name), **SIZES}
        loaded = build_all_layers(tiny_config(model={"weights_seed": 99}, light_vae=light).stream, CPU)
        assert isinstance(loaded.encode, encoder)
        (decode,) = loaded.decode.values()
        assert isinstance(decode, LightDecodeLayer)
        halves = [decode] if use == "decoder" else [loaded.encode, decode]
        for half in halves:
            for key, value in half.state_dict().items():
                assert torch.equal(value, state[key]), key


def test_another_width_is_an_error(tmp_path: Path):
    random = build_all_layers(tiny_config(light_vae={"use": "both", **SIZES}).stream, CPU)
    torch.save(state_of(random), tmp_path / "taew2_1.pth")
    light = {"use": "decoder", "weights": str(tmp_path / "taew2_1.pth"), **SIZES, "encoder_width": 8}
    with pytest.raises(
        ValueError, match=r"encoder\.0\.weight is \[6, 3, 3, 3\] but the config makes it \[8, 3, 3, 3\]"
    ):
        open_weights(tiny_config(light_vae=light).stream)
