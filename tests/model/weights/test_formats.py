"""A model saved in each published format loads to equal tensors; what is damaged or unfit is one clear error."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ds_stream.config import Config
from ds_stream.model.pipeline import FilledLayerSpec, build_all_layers, layer_specs, open_weights
from ds_stream.model.weights.tensor_files import open_tensors
from published import (
    State,
    config_with,
    original_dit,
    original_dit_name,
    original_vae,
    split,
    states_of,
    write_diffusers,
    write_original,
    write_shards,
)
from rings import CPU

CONFIG = config_with()
DIT, VAE = states_of(CONFIG)


def pointing_at(weights: Path, vae: Path | None = None, **model: object) -> Config:
    """The config whose weights come from files, with another seed so that no random weight passes for a loaded one."""
    config = config_with(weights=str(weights), weights_seed=99, **model)
    return config if vae is None else config._with("vae", weights=str(vae))


def assert_loads(config: Config, dit: State = DIT, vae: State = VAE) -> None:
    loaded_dit, loaded_vae = split(build_all_layers(config.stream, CPU))
    for loaded, wanted in ((loaded_dit, dit), (loaded_vae, vae)):
        assert loaded.keys() == wanted.keys()
        for name, value in wanted.items():
            assert torch.equal(loaded[name], value), name


def test_diffusers_folder_with_shards(tmp_path: Path):
    folder = write_diffusers(tmp_path / "wan", DIT, VAE)
    assert_loads(pointing_at(folder))
    assert_loads(pointing_at(folder / "transformer"))
    assert_loads(pointing_at(folder / "transformer", folder / "vae"))


def test_original_folder(tmp_path: Path):
    folder = write_original(tmp_path / "wan", DIT, VAE)
    assert_loads(pointing_at(folder))
    assert_loads(pointing_at(folder / "diffusion_pytorch_model.safetensors", folder / "Wan2.1_VAE.pth"))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: {"generator": state},
        lambda state: {"generator_ema": {f"model.{name}": value for name, value in state.items()}},
        lambda state: {"generator": {f"model._fsdp_wrapped_module.{name}": value for name, value in state.items()}},
        lambda state: {"model": {f"module._orig_mod.{name}": value for name, value in state.items()}, "step": 7},
        lambda state: {"state_dict": {f"module.model.{name}": value for name, value in state.items()}},
        lambda state: state,
        lambda state: {
            "generator": {
                "model._fsdp_wrapped_module."
                + name.replace("blocks.0.", "blocks.0._fsdp_wrapped_module._checkpoint_wrapped_module."): value
                for name, value in state.items()
            },
            "critic": {"nothing": torch.zeros(1)},
        },
    ],
)
@pytest.mark.parametrize("names", [original_dit, dict])
def test_training_checkpoints(tmp_path: Path, wrap: Callable[[State], dict], names: Callable[[State], State]):
    folder = write_original(tmp_path / "wan", DIT, VAE)
    torch.save(wrap(names(DIT)), tmp_path / "model.pt")
    assert_loads(pointing_at(tmp_path / "model.pt", folder))


def test_the_entry_is_a_choice(tmp_path: Path):
    folder = write_original(tmp_path / "wan", DIT, VAE)
    other = {name: value + 1 for name, value in DIT.items()}
    path = tmp_path / "model.pt"
    torch.save({"generator_ema": original_dit(other), "generator": original_dit(DIT)}, path)
    assert_loads(pointing_at(path, folder))
    assert_loads(pointing_at(path, folder, weights_entry="generator_ema"), other)
    torch.save({"state_dict": {"generator_ema": original_dit(other), "generator": original_dit(DIT)}}, path)
    assert_loads(pointing_at(path, folder))
    assert_loads(pointing_at(path, folder, weights_entry="generator_ema"), other)
    with pytest.warns(UserWarning, match="has no entries, so 'generator_ema' is not looked for"):
        open_weights(pointing_at(folder, weights_entry="generator_ema").stream)
    torch.save({"generator_ema": original_dit(other), "generator": original_dit(DIT)}, path)
    with pytest.raises(ValueError, match=r"model\.pt: no entry 'ema'; it has 'generator_ema', 'generator'"):
        open_weights(pointing_at(path, folder, weights_entry="ema").stream)


def test_a_bf16_file_loads_to_its_values_and_a_bf16_model_keeps_what_diffusers_keeps_in_fp32(tmp_path: Path):
    rounded = {name: value.bfloat16() for name, value in DIT.items()}
    folder = write_original(tmp_path / "wan", rounded, VAE)
    assert_loads(pointing_at(folder), {name: value.float() for name, value in rounded.items()})
    config = pointing_at(folder)._with("device", dtype="bfloat16")
    dit, vae = split(build_all_layers(config.stream, CPU))
    kept = {name for name, value in dit.items() if value.dtype == torch.float32}
    assert kept == {
        name for name in dit if "scale_shift_table" in name or ".norm2." in name or "time_embedder" in name
    }
    assert all(value.dtype == torch.bfloat16 for value in vae.values())


def test_a_stage_reads_its_own_tensors_only(tmp_path: Path):
    """What one block asks of the files, and nothing else."""
    folder = tmp_path / "wan"
    write_diffusers(folder, DIT, VAE)
    config = pointing_at(folder)
    weights = open_weights(config.stream)
    read: list[str] = []
    for checkpoint in weights.checkpoints.values():
        inner = checkpoint.file.read

        def spy(names, inner=inner):
            for name, tensor in inner(names):
                read.append(name)
                yield name, tensor

        checkpoint.file.read = spy
    specs = layer_specs(config.stream)
    FilledLayerSpec(specs[3], 3, weights, CPU).build()
    assert read
    assert all(name.startswith("blocks.1.") for name in read)


def assert_error(config: Config, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_weights(config.stream)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda s: s.pop("head.head.bias"), r"(?s)does not fit.*1 missing: proj_out\.bias"),
        (lambda s: s.update({"img_emb.proj.0.weight": torch.zeros(2)}), "1 unexpected: condition_embedder.image_emb"),
        (
            lambda s: s.update({"blocks.1.ffn.0.bias": torch.zeros(5)}),
            r"blocks\.1\.ffn\.net\.0\.proj\.bias is \[5\] but the config makes it \[32\]",
        ),
        (
            lambda s: s.update({"patch_embedding.weight": torch.zeros(24, 32, 1, 2, 2)}),
            r"patch_embedding\.weight is \[24, 32, 1, 2, 2\] but the config makes it \[24, 16, 1, 2, 2\]",
        ),
        (lambda s: [s.pop(n) for n in list(s) if n.startswith("blocks.1.")], r"27 missing: .*, and 17 more"),
    ],
)
def test_what_does_not_fit_is_listed(tmp_path: Path, edit: Callable[[State], object], message: str):
    folder = write_original(tmp_path / "wan", DIT, VAE)
    state = original_dit(DIT)
    edit(state)
    torch.save({"generator": state}, tmp_path / "model.pt")
    assert_error(pointing_at(tmp_path / "model.pt", folder), message)


class Code:
    """Unpickles into a call that makes a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_pickle_with_code_is_refused_and_not_run(tmp_path: Path):
    path = tmp_path / "model.pt"
    torch.save({"generator": original_dit(DIT), "extra": Code(tmp_path / "ran")}, path)
    with pytest.raises(ValueError, match=r"model\.pt: it holds code or objects besides tensors, which are not run"):
        open_tensors(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("keep", [0.0, 0.5, 0.999])
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_truncated_file_is_one_error(tmp_path: Path, suffix: str, keep: float):
    path = tmp_path / f"model{suffix}"
    save = torch.save if suffix == ".pt" else save_file
    save(original_dit(DIT), path)
    path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])
    with pytest.raises(ValueError, match=r"model\.(pt|safetensors): not a.* whole .*fetch it again"):
        open_tensors(path)


def test_shards_and_indices_that_are_not_there(tmp_path: Path):
    folder = tmp_path / "wan"
    folder.mkdir()
    write_shards(folder, DIT)
    lost = next(folder.glob("*-00002-*"))
    lost.unlink()
    with pytest.raises(ValueError, match=f"1 of 3 shards are missing: {lost.name}"):
        open_tensors(folder)
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps({"weights": 3}))
    with pytest.raises(ValueError, match="not an index of shards"):
        open_tensors(folder)


def test_places_that_hold_nothing(tmp_path: Path):
    folder = write_original(tmp_path / "wan", DIT, VAE)
    assert_error(pointing_at(tmp_path / "lost.pt"), r"stream\.model\.weights: there is no .*lost\.pt; give the path")
    assert_error(pointing_at(folder, tmp_path / "lost"), r"stream\.vae\.weights: there is no .*lost; give the path")
    (tmp_path / "empty").mkdir()
    assert_error(pointing_at(tmp_path / "empty", folder), r"empty: holds no \.safetensors or \.pt file")
    torch.save(original_dit(DIT), tmp_path / "model.pt")
    assert_error(
        pointing_at(tmp_path / "model.pt"), r"stream\.vae\.weights is auto, but .* holds neither vae nor Wan2"
    )
    assert_error(pointing_at(folder / "Wan2.1_VAE.pth", folder), "holds a Wan VAE, where a DiT is wanted")
    (tmp_path / "model.xyz").write_text("")
    assert_error(pointing_at(tmp_path / "model.xyz", folder), r"tensors are read from \.safetensors")
    torch.save({"a": torch.zeros(1)}, tmp_path / "other.pt")
    assert_error(
        pointing_at(tmp_path / "other.pt", folder), "not a part of a Wan model that is known here; it holds a"
    )
    torch.save({"step": 3}, tmp_path / "none.pt")
    assert_error(pointing_at(tmp_path / "none.pt", folder), "it holds no named tensors")


def test_the_original_names_of_this_test_are_those_of_the_table():
    """A few of WAN.md's rows, so that writer and loader cannot agree on a wrong name."""
    assert original_dit_name("blocks.3.norm2.weight") == "blocks.3.norm3.weight"
    assert original_dit_name("blocks.3.attn1.to_out.0.bias") == "blocks.3.self_attn.o.bias"
    names = set(original_vae(VAE))
    for name in (
        "conv1.weight",
        "conv2.bias",
        "encoder.conv1.weight",
        "encoder.downsamples.0.residual.0.gamma",
        "encoder.downsamples.2.resample.1.weight",
        "encoder.downsamples.5.time_conv.weight",
        "encoder.middle.1.to_qkv.weight",
        "encoder.head.2.weight",
        "decoder.upsamples.3.resample.1.weight",
        "decoder.upsamples.4.shortcut.weight",
        "decoder.upsamples.14.residual.6.bias",
        "decoder.head.0.gamma",
    ):
        assert name in names
