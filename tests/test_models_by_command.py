"""Published files, prompts over time and the memory plan, from the command line."""

import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from commands import Command, comment_of, read_clip, write_clip
from ds_stream.config import find_config, load_config
from ds_stream.controller.prompts import blend_embeddings
from ds_stream.model.pipeline import part_shapes
from ds_stream.model.text.umt5 import Umt5TextEncoder
from ds_stream.model.weights.checkpoint import Part
from published import config_with, original_dit, original_dit_name, states_of, write_original
from rings import CPU, Stream, embed, random_clip, reference_frames, tiny_config
from tiny_umt5 import make_umt5, write_umt5


def test_a_published_checkpoint_with_an_embedding_from_a_file(tmp_path: Path):
    config = config_with()
    dit, vae = states_of(config)
    folder = write_original(tmp_path / "wan", dit, vae)
    torch.save({"generator": original_dit(dit)}, tmp_path / "model.pt")
    (tmp_path / "config.json").write_text(config_with(weights_seed=99).to_json())
    embedding = embed(config, "red boats")
    save_file({"prompt_embeds": embedding[None, :3].bfloat16()}, tmp_path / "prompt.safetensors")
    clip = write_clip(tmp_path / "clip.mp4", random_clip(9))
    command = Command(
        tmp_path,
        3,
        *("--input", str(clip), "--seed", "3", "--prompt-embeds", str(tmp_path / "prompt.safetensors")),
        *("--set", f"stream.model.weights={tmp_path / 'model.pt'}", "--set", f"stream.vae.weights={folder}"),
    )
    assert command.wait() == {}, command.said
    rounded = embedding[:3].bfloat16().float()
    padded = torch.cat((rounded, torch.zeros_like(embedding[3:])))
    expected = reference_frames(config, Stream(3, read_clip(clip)), embedding_of=lambda _chunk: padded)
    assert np.array_equal(read_clip(command.output), read_clip(write_clip(tmp_path / "expected.mp4", expected)))
    assert "random" not in command.said
    assert "prompt embeds: prompt.safetensors " in comment_of(command.output)
    assert command.said.count("memory in MiB") == 1


def test_prompts_change_at_their_time_and_fade(tmp_path: Path):
    """25 frames a second; chunks begin at 0, 0.04, 0.2, 0.36, 0.52, 0.68 s: 0.3 s is chunk 3, 0.52 s is chunk 4."""
    clip = write_clip(tmp_path / "clip.mp4", random_clip(21), Fraction(25))
    changes = ["--prompt-at", "9=never", "--prompt-at", "0.52=snow", "--prompt-at", " 0.3 = green hills = far"]
    arguments = ["--input", str(clip), "--seed", "3", "--prompt", "red boats", *changes]
    command = Command(
        tmp_path, 2, *arguments, "--set", "stream.text.blend_chunks=1", "--set", "stream.text.blend=slerp"
    )
    assert command.wait() == {}, command.said
    assert "--prompt-at 9='never' comes after the end of the video, which is 0.84 s long" in command.said
    config = tiny_config()
    boats, hills, snow = (embed(config, prompt) for prompt in ("red boats", "green hills = far", "snow"))
    halfway = blend_embeddings(boats, hills, 0.5, "slerp")
    later = blend_embeddings(halfway, snow, 0.5, "slerp")
    wanted = [boats, boats, boats, halfway, later, snow]
    expected = reference_frames(config, Stream(3, read_clip(clip)), embedding_of=wanted.__getitem__)
    expected_file = write_clip(tmp_path / "expected.mp4", expected, Fraction(25))
    assert np.array_equal(read_clip(command.output), read_clip(expected_file))


def test_umt5_encodes_on_one_rank_and_its_cache_spares_it_the_next_time(tmp_path: Path):
    model = make_umt5()
    folder = write_umt5(tmp_path / "wan", model) / "original"
    config = tiny_config(
        model={"text_dim": 16, "num_text_tokens": 12},
        text={"encoder": str(folder), "cache_dir": str(tmp_path / "cache")},
    )
    (tmp_path / "config.json").write_text(config.to_json())
    arguments = ["--text-only", "--num-frames", "6", "--seed", "3", "--prompt", "a  cat", "--prompt-at", "0.3=dog"]
    first = Command(tmp_path, 2, *arguments)
    assert first.wait() == {}, first.said
    assert first.said.count("text encoder:") == 1
    cat, dog = Umt5TextEncoder(folder, 12, CPU).encode(["a cat", "dog"])
    wanted = [cat, cat, dog]
    expected = reference_frames(config, Stream(3, None, 6), embedding_of=wanted.__getitem__)
    assert np.array_equal(read_clip(first.output), read_clip(write_clip(tmp_path / "expected.mp4", expected)))
    # With all prompts known, the model is not asked again.
    assert len(list((tmp_path / "cache").glob("*.safetensors"))) == 2
    whole = first.output.read_bytes()

    def no_model(_rank: int) -> None:
        Umt5TextEncoder.encode = None

    second = Command(tmp_path, 2, *arguments, before=no_model)
    assert second.wait() == {}, second.said
    assert second.output.read_bytes() == whole


def test_an_encoder_of_another_width_is_an_error(tmp_path: Path):
    folder = write_umt5(tmp_path / "wan", make_umt5()) / "original"
    settings = ["--set", f"stream.text.encoder={folder}", "--set", "stream.text.cache_dir=null"]
    command = Command(tmp_path, 1, "--text-only", "--num-frames", "1", *settings)
    assert command.wait() == {0: 2}
    assert "gives 16 channels but stream.model.text_dim is 8" in command.said
    folder = tmp_path / "empty"
    folder.mkdir()
    command = Command(tmp_path, 1, "--text-only", "--num-frames", "1", "--set", f"stream.text.encoder={folder}")
    assert command.wait() == {0: 2}
    assert f"stream.text.encoder {folder} holds neither text_encoder nor models_t5" in command.said


def test_synthetic_input(tmp_path: Path):
    command = Command(tmp_path, 2, "--input", "synthetic", "--num-frames", "6", "--seed", "1")
    assert command.wait() == {}, command.said
    assert len(read_clip(command.output)) == 6


def write_sparse(folder: Path, shapes: dict[str, tuple[int, ...]], num_shards: int) -> None:
    """Shards of real size whose numbers are holes on disk."""
    folder.mkdir()
    names, weight_map = list(shapes), {}
    for shard in range(num_shards):
        file = f"diffusion_pytorch_model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        header, end = {}, 0
        for name in names[shard::num_shards]:
            size = 4 * int(torch.Size(shapes[name]).numel())
            header[name] = {"dtype": "F32", "shape": shapes[name], "data_offsets": [end, end + size]}
            weight_map[name], end = file, end + size
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as sparse:
            sparse.write(len(text).to_bytes(8, "little") + text)
            sparse.truncate(8 + len(text) + end)
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_a_14b_layout_in_a_dry_run_on_four_ranks(tmp_path: Path):
    config = load_config(find_config("sdv2_v2v_14b")).stream
    shapes = {original_dit_name(name): shape for name, shape in part_shapes(config, Part.DIT).items()}
    write_sparse(tmp_path / "wan", shapes, num_shards=6)
    arguments = [
        *(
            "--config",
            "sdv2_v2v_14b",
            "--dry-run",
            "--set",
            "stream.vae.weights=random",
            "--set",
            "stream.text.encoder=hashed",
        ),
        *("--set", f"stream.model.weights={tmp_path / 'wan'}"),
    ]
    command = Command(tmp_path, 4, *arguments)
    assert command.wait() == {}, command.said
    rows = [line.split() for line in command.said.splitlines() if line.split()[0] in ("0", "1", "2", "3", "all")]
    assert [row[1] for row in rows] == ["0-11", "12-21", "22-31", "32-47", "0-47"]
    weights = [float(row[2].replace(",", "")) for row in rows]
    # 14.29 B parameters of bf16, and the VAE's 127 M.
    assert weights[-1] == pytest.approx(sum(weights[:4]), abs=0.5)
    assert weights[-1] == pytest.approx((14_288.5e6 + 127e6) * 2 / 2**20, rel=0.01)
    assert not command.output.exists()
    # A shard that is not whole is told before anything loads.
    shard = next((tmp_path / "wan").glob("*-00003-*"))
    with shard.open("r+b") as sparse:
        sparse.truncate(shard.stat().st_size - 4)
    command.log.unlink()
    again = Command(tmp_path, 1, *arguments)
    assert again.wait() == {0: 2}
    assert f"{shard.name}: not a whole .safetensors file" in again.said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ("--config", "self_forcing_1_3b"),
            "model.weights: there is no checkpoints/self_forcing_dmd.pt; give",
        ),
        (("--config", "sdv2"), "--config sdv2: no such file, and no shipped config"),
        (("--prompt-at", "soon=boats"), "--prompt-at 'soon=boats': write seconds from 0 on"),
        (("--prompt-embeds", "e.pt", "--prompt", "boats"), "leave out --prompt and --prompt-at, or it"),
        (("--prompt-embeds", "lost.safetensors"), "lost.safetensors: there is no such file"),
        (("--input", "synthetic"), "--input synthetic has no end: say how long with --num-frames"),
        (("--set", 'stream.model.loras=[{"path": "x", "scal": 2}]'), "scal: not a key; did you mean scale"),
        (("--set", "stream.text.encoder=lost"), "stream.text.encoder: there is no lost"),
        (
            ("--set", "stream.video.width=16000", "--set", "stream.video.height=16000"),
            "change stream settings: the video's size",
        ),
    ],
)
def test_a_mistake_is_told_once_before_anything_starts(tmp_path: Path, arguments: tuple[str, ...], says: str):
    inputs = () if "synthetic" in arguments else ("--text-only", "--num-frames", "1")
    command = Command(tmp_path, 1, *inputs, *arguments)
    assert command.wait() == {0: 2}, command.said
    assert command.said.count(says) == 1, command.said
    assert "Traceback" not in command.said
    assert not command.output.exists()
    assert not command.partial.exists()


def test_an_embedding_of_another_model_is_an_error(tmp_path: Path):
    save_file({"prompt_embeds": torch.zeros(4, 9)}, tmp_path / "prompt.safetensors")
    save_file({"a": torch.zeros(4, 8), "b": torch.zeros(1)}, tmp_path / "two.safetensors")
    save_file({"prompt_embeds": torch.full((4, 8), torch.nan)}, tmp_path / "nan.safetensors")
    for name, says in [
        ("prompt", "the embedding is [4, 9]; the model takes up to 4 tokens of 8 channels"),
        ("two", "holds 2 tensors; give a file with one embedding"),
        ("nan", "with numbers that are not finite, or none"),
    ]:
        embeds = str(tmp_path / f"{name}.safetensors")
        command = Command(tmp_path, 1, "--text-only", "--num-frames", "1", "--prompt-embeds", embeds)
        assert command.wait() == {0: 2}
        assert says in command.said
