"""Embeddings kept on disk: what the key follows, and what happens to a folder that is damaged."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from ds_stream.model.text.cache import TextCache, encode_prompts, text_cache_key
from ds_stream.model.text.umt5 import Umt5TextEncoder
from ds_stream.model.weights.locate import ORIGINAL_UMT5
from tiny_umt5 import edit_original, encoder_of


@pytest.mark.parametrize("layout", ["diffusers", "original"])
def test_fingerprint_follows_the_contents_and_not_the_place(layout: str, written: Path, tmp_path: Path):
    before = encoder_of(written / layout).fingerprint
    assert len(before) == 32 and int(before, 16)
    copy = Path(shutil.copytree(written / layout, tmp_path / "copy"))
    assert encoder_of(copy).fingerprint == before
    assert encoder_of(copy, dtype=torch.bfloat16).fingerprint != before
    tokenizer = copy / ("tokenizer" if layout == "diffusers" else "google/umt5-xxl") / "tokenizer_config.json"
    tokenizer.write_text(tokenizer.read_text() + " ")
    other_tokenizer = encoder_of(copy).fingerprint
    weights = copy / ("text_encoder/model.safetensors" if layout == "diffusers" else ORIGINAL_UMT5)
    contents = bytearray(weights.read_bytes())
    contents[-1] ^= 1
    weights.write_bytes(contents)
    assert len({before, other_tokenizer, encoder_of(copy).fingerprint}) == 3


def test_key_depends_on_every_part():
    parts = [("f", "ab", 12), ("fa", "b", 12), ("f", "ab1", 2), ("f", "ab", 13), ("g", "ab", 12)]
    assert len({text_cache_key(*part) for part in parts}) == len(parts)


@pytest.fixture
def encoded_counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of prompts in each call of the encoder, as a list that grows."""
    counts: list[int] = []
    encode = Umt5TextEncoder.encode

    def counted(encoder: Umt5TextEncoder, prompts: list[str]) -> list[Tensor]:
        counts.append(len(prompts))
        return encode(encoder, prompts)

    monkeypatch.setattr(Umt5TextEncoder, "encode", counted)
    return counts


def test_cache_encodes_only_what_it_lacks(written: Path, tmp_path: Path, encoded_counts: list[int]):
    cache = TextCache(tmp_path / "cache")
    first = encode_prompts(encoder_of(written / "original"), cache, ["dog", "cat", " dog "])
    again = encode_prompts(encoder_of(written / "original"), cache, ["cat", "dog"])
    assert encoded_counts == [2]
    more = encode_prompts(encoder_of(written / "original"), cache, ["on", "cat"])
    assert encoded_counts == [2, 1]
    assert torch.equal(first[0], again[1]) and torch.equal(first[1], again[0]) and torch.equal(first[0], first[2])
    assert torch.equal(more[1], first[1]) and not torch.equal(more[0], first[0])
    assert torch.equal(first[0], encoder_of(written / "original").encode(["dog"])[0])
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".safetensors"] * 3


def test_no_cache_and_no_prompts(written: Path, encoded_counts: list[int]):
    encoder = encoder_of(written / "original")
    assert encode_prompts(encoder, None, []) == []
    assert encoded_counts == []
    assert torch.equal(encode_prompts(encoder, None, ["dog"])[0], encoder.encode(["dog"])[0])


def test_other_positions_and_other_weights_miss(
    original: Path, diffusers: Path, tmp_path: Path, encoded_counts: list[int]
):
    cache = TextCache(tmp_path / "cache")
    for encoder in (encoder_of(original), encoder_of(original, num_tokens=6), encoder_of(diffusers)):
        (embedding,) = encode_prompts(encoder, cache, ["dog"])
        assert len(embedding) == encoder.num_tokens
    edit_original(original, lambda s: s["norm.weight"].mul_(2))
    encode_prompts(encoder_of(original), cache, ["dog"])
    assert encoded_counts == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-9]), "cannot be read and is ignored"),
        (lambda path: path.write_bytes(b""), "cannot be read and is ignored"),
        (lambda path: save_file({"other": torch.zeros(2)}, path), "holds no embedding"),
    ],
)
def test_a_damaged_entry_is_computed_again(
    written: Path, tmp_path: Path, damage: Callable[[Path], object], message: str, encoded_counts: list[int]
):
    cache = TextCache(tmp_path / "cache")
    encoder = encoder_of(written / "original")
    (expected,) = encode_prompts(encoder, cache, ["dog"])
    (entry,) = (tmp_path / "cache").iterdir()
    damage(entry)
    with pytest.warns(UserWarning, match=message):
        assert torch.equal(encode_prompts(encoder, cache, ["dog"])[0], expected)
    encode_prompts(encoder, cache, ["dog"])
    assert encoded_counts == [1, 1]


def test_an_unwritable_folder_is_a_warning(written: Path, tmp_path: Path):
    (tmp_path / "file").write_text("")
    encoder = encoder_of(written / "original")
    # Not by permissions, which root passes over: a file is where the folder should be.
    with pytest.warns(UserWarning, match="is not cached in") as caught:
        (embedding,) = encode_prompts(encoder, TextCache(tmp_path / "file"), ["dog"])
    assert len(caught) == 2 and "cannot be read and is ignored" in str(caught[0].message)
    assert torch.equal(embedding, encoder.encode(["dog"])[0])
