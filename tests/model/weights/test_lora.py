"""LoRA files of either naming change the weights as the paper says; what has no target is an error."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ds_stream.model.pipeline import build_all_layers, open_weights
from published import config_with, original_dit_name, split, states_of
from rings import CPU

CONFIG = config_with()
DIT, _ = states_of(CONFIG)
QUERY, GATE = "blocks.1.attn1.to_q", "blocks.0.ffn.net.0.proj"
RANK = 3


def halves(module: str) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = DIT[f"{module}.weight"].shape
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(RANK, columns, generator=generator), torch.randn(rows, RANK, generator=generator)


def merged(path: Path, scale: float = 1.0, path2: Path | None = None) -> dict[str, torch.Tensor]:
    loras = [{"path": str(path), "scale": scale}]
    if path2 is not None:
        loras.append({"path": str(path2)})
    return split(build_all_layers(config_with(loras=loras).stream, CPU))[0]


def assert_changed(state: dict[str, torch.Tensor], changes: dict[str, torch.Tensor]) -> None:
    for name, value in state.items():
        assert torch.allclose(value, DIT[name] + changes.get(name, 0), atol=1e-5), name


@pytest.mark.parametrize("prefix", ["transformer.", "base_model.model.", "diffusion_model.", ""])
def test_names_of_diffusers(tmp_path: Path, prefix: str):
    state = {}
    for module in (QUERY, GATE):
        down, up = halves(module)
        state |= {f"{prefix}{module}.lora_A.weight": down, f"{prefix}{module}.lora_B.weight": up}
    save_file(state, tmp_path / "style.safetensors")
    changes = {f"{module}.weight": 0.5 * halves(module)[1] @ halves(module)[0] for module in (QUERY, GATE)}
    assert_changed(merged(tmp_path / "style.safetensors", 0.5), changes)


@pytest.mark.parametrize("kinds", [("lora_down", "lora_up"), ("lora_A", "lora_B")])
def test_names_of_the_original_with_alpha_and_whole_differences(tmp_path: Path, kinds: tuple[str, str]):
    original = original_dit_name(f"{QUERY}.weight").removesuffix(".weight")
    down, up = halves(QUERY)
    norm = torch.ones_like(DIT["blocks.0.norm2.weight"])
    bias = torch.full_like(DIT[f"{QUERY}.bias"], 0.25)
    state = {
        f"diffusion_model.{original}.{kinds[0]}.weight": down,
        f"diffusion_model.{original}.{kinds[1]}.weight": up,
        f"diffusion_model.{original}.alpha": torch.tensor(6.0),
        f"diffusion_model.{original}.diff_b": bias,
        "diffusion_model.blocks.0.norm3.diff": norm,
    }
    save_file(state, tmp_path / "style.safetensors")
    changes = {
        f"{QUERY}.weight": 2 * 6 / RANK * up @ down,
        f"{QUERY}.bias": 2 * bias,
        "blocks.0.norm2.weight": 2 * norm,
    }
    assert_changed(merged(tmp_path / "style.safetensors", 2.0), changes)


def test_alpha_in_the_metadata_and_two_files_at_once(tmp_path: Path):
    down, up = halves(QUERY)
    state = {f"transformer.{QUERY}.lora_A.weight": down, f"transformer.{QUERY}.lora_B.weight": up}
    metadata = {"lora_adapter_metadata": '{"transformer.r": 3, "transformer.lora_alpha": 12}'}
    save_file(state, tmp_path / "a.safetensors", metadata=metadata)
    save_file(state, tmp_path / "b.safetensors")
    changes = {f"{QUERY}.weight": (12 / RANK + 1) * up @ down}
    assert_changed(merged(tmp_path / "a.safetensors", path2=tmp_path / "b.safetensors"), changes)


@pytest.mark.parametrize(
    ("settings", "factor"),
    [
        ({"lora_alpha": 12, "r": 3}, 4),
        ({"lora_alpha": 12, "use_rslora": True}, 12 / 3**0.5),
        ({"lora_alpha": 12, "alpha_pattern": {"blocks.1.attn1.to_q": 6}}, 2),
        ({"lora_alpha": 12, "alpha_pattern": {"to_k": 6}}, 4),
        ({"lora_alpha": None}, 1),
    ],
)
@pytest.mark.parametrize("beside", [True, False])
def test_settings_of_peft_in_the_file_and_beside_it(tmp_path: Path, settings: dict, factor: float, beside: bool):
    down, up = halves(QUERY)
    state = {f"{QUERY}.lora_A.weight": down, f"{QUERY}.lora_B.weight": up}
    path = tmp_path / "adapter_model.safetensors"
    if beside:
        save_file(state, path)
        (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    else:
        named = {f"transformer.{key}": value for key, value in settings.items()}
        save_file(state, path, metadata={"lora_adapter_metadata": json.dumps(named)})
    assert_changed(merged(path), {f"{QUERY}.weight": factor * up @ down})


@pytest.mark.parametrize("text", ["[1]", "{", '{"lora_alpha": "much"}', '{"alpha_pattern": [3]}'])
def test_settings_that_are_none(tmp_path: Path, text: str):
    down, up = halves(QUERY)
    path = tmp_path / "adapter_model.safetensors"
    state = {f"{QUERY}.lora_A.weight": down, f"{QUERY}.lora_B.weight": up}
    save_file(state, path, metadata={"lora_adapter_metadata": text})
    with pytest.raises(ValueError, match=r"lora_adapter_metadata is not the settings of a LoRA .*; export"):
        open_weights(config_with(loras=[{"path": str(path)}]).stream)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            {"lora_unet_blocks_0_q.lora_down.weight": torch.zeros(3, 24)},
            r"1 of 1 names have no target.*lora_unet_blocks",
        ),
        ({"blocks.7.attn1.to_q.lora_A.weight": torch.zeros(3, 24)}, "have no target in this model: blocks.7"),
        ({f"{QUERY}.lora_A.weight": torch.zeros(3, 24)}, "has only a part of its LoRA"),
        (
            {f"{QUERY}.lora_A.weight": torch.zeros(3, 20), f"{QUERY}.lora_B.weight": torch.zeros(24, 3)},
            r"lora_B\.weight is \[24, 3\] and .*lora_A\.weight is \[3, 20\], but .* is \[24, 24\]",
        ),
        (
            {f"{QUERY}.lora_A.weight": torch.zeros(2, 24), f"{QUERY}.lora_B.weight": torch.zeros(24, 3)},
            "it is for another model",
        ),
        ({f"{QUERY}.alpha": torch.tensor(3.0)}, "has only a part of its LoRA"),
        (
            {f"{QUERY}.lora_A.weight": torch.zeros(0, 24), f"{QUERY}.lora_B.weight": torch.zeros(24, 0)},
            "it is for another model",
        ),
        (
            {
                f"{QUERY}.lora_A.weight": torch.zeros(3, 24),
                f"{QUERY}.lora_B.weight": torch.zeros(24, 3),
                f"{QUERY}.alpha": torch.zeros(2),
            },
            r"alpha is \[2\], but",
        ),
    ],
)
def test_what_does_not_fit_is_an_error(tmp_path: Path, state: dict[str, torch.Tensor], message: str):
    save_file(state, tmp_path / "style.safetensors")
    config = config_with(loras=[{"path": str(tmp_path / "style.safetensors")}])
    with pytest.raises(ValueError, match=message):
        open_weights(config.stream)


def test_a_missing_file_is_an_error(tmp_path: Path):
    with pytest.raises(ValueError, match=r"lost\.safetensors: there is no such file"):
        open_weights(config_with(loras=[{"path": str(tmp_path / "lost.safetensors")}]).stream)
