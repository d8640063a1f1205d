"""What the inspect command says of files."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ds_stream.config import find_config, load_config
from ds_stream.model.pipeline import part_shapes
from ds_stream.model.weights.__main__ import main
from ds_stream.model.weights.checkpoint import Part
from published import config_with, original_dit, states_of, write_diffusers, write_original

DIT, VAE = states_of(config_with())


def say(capsys: pytest.CaptureFixture[str], *paths: Path, code: int = 0) -> str:
    assert main(["inspect", *map(str, paths)]) == code
    captured = capsys.readouterr()
    return captured.out if code == 0 else captured.err


def empty_of(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor of any size that takes no memory."""
    return torch.zeros(1, dtype=dtype).expand(shape)


def real_dit(name: str) -> dict[str, torch.Tensor]:
    shapes = part_shapes(load_config(find_config(name)).stream, Part.DIT)
    return original_dit({key: empty_of(shape) for key, shape in shapes.items()})


@pytest.mark.parametrize(
    ("preset", "says"),
    [
        (
            "sdv2_v2v_1_3b",
            ["1,419.0 M", "num_layers 30", "T2V-1.3B", "causvid_1_3b, sdv2_v2v_1_3b, self_forcing_1_3b"],
        ),
        ("sdv2_v2v_14b", ["14,288.5 M", "num_layers 40", "T2V-14B", "fits the config sdv2_v2v_14b"]),
    ],
)
def test_a_published_size_fits_its_presets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], preset: str, says: list[str]
):
    torch.save({"generator": real_dit(preset)}, tmp_path / "model.pt")
    said = say(capsys, tmp_path / "model.pt")
    for words in ["DiT, names of the original model, entry generator of generator", "complete", *says]:
        assert words in said


def test_what_is_missing_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    state = real_dit("sdv2_v2v_1_3b")
    del state["blocks.7.ffn.0.bias"]
    torch.save(state, tmp_path / "model.pt")
    said = say(capsys, tmp_path / "model.pt")
    assert "1 missing: blocks.7.ffn.net.0.proj.bias" in said
    assert "complete" not in said


def test_all_entries_and_all_parts_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    torch.save({"generator": original_dit(DIT), "generator_ema": DIT}, tmp_path / "model.pt")
    said = say(capsys, tmp_path / "model.pt")
    assert "names of the original model, entry generator of" in said
    assert "names of diffusers, entry generator_ema of" in said
    assert "stream.model.weights_entry" in said
    said = say(capsys, write_original(tmp_path / "original", DIT, VAE), write_diffusers(tmp_path / "new", DIT, VAE))
    assert said.count("DiT, names of") == said.count("Wan VAE, names of") == 2


def test_a_training_checkpoint_with_more_than_models_in_a_folder_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    optimizer = {"state": {"exp_avg": torch.zeros(2)}}
    torch.save(
        {"generator": original_dit(DIT), "optimizer": optimizer, "step": torch.tensor(3)}, tmp_path / "model.pt"
    )
    said = say(capsys, tmp_path)
    assert "DiT, names of the original model, entry generator of" in said
    assert "entry optimizer.state: 1 tensors that are no part of a model" in said
    assert "entry outside of all others: 1 tensors" in said


def test_a_lora_and_files_that_are_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    state = {
        "blocks.0.attn1.to_q.lora_A.weight": torch.zeros(3, 24),
        "blocks.0.attn1.to_q.lora_B.weight": torch.zeros(24, 3),
    }
    save_file(state, tmp_path / "style.safetensors")
    assert "LoRA, names of diffusers, 1 targets, rank 3" in say(capsys, tmp_path / "style.safetensors")
    (tmp_path / "bad.pt").write_bytes(b"x")
    assert "bad.pt: not a PyTorch file" in say(capsys, tmp_path / "bad.pt", code=2)
    assert "there is no such file" in say(capsys, tmp_path / "lost.pt", code=2)
    (tmp_path / "empty").mkdir()
    assert "holds no .safetensors" in say(capsys, tmp_path / "empty", code=2)
