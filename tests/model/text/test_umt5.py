"""Both checkpoint layouts give the embeddings of a direct transformers call; damage is one clear error."""

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer, UMT5EncoderModel

from ds_stream.model.text.umt5 import clean_prompt
from ds_stream.model.weights.locate import ORIGINAL_UMT5
from published import write_shards
from tiny_umt5 import CONFIG, NUM_TOKENS, PROMPTS, edit_diffusers, edit_original, encoder_of


@torch.no_grad()
def direct_call(model: UMT5EncoderModel, tokenizer_folder: Path, prompt: str) -> Tensor:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder, local_files_only=True)
    tokens = tokenizer(prompt, padding="max_length", max_length=NUM_TOKENS, truncation=True, return_tensors="pt")
    output = model(tokens.input_ids, attention_mask=tokens.attention_mask).last_hidden_state[0]
    return output * tokens.attention_mask[0, :, None]


@pytest.mark.parametrize("layout", ["diffusers", "original"])
def test_embeddings_equal_a_direct_call(layout: str, written: Path, model: UMT5EncoderModel):
    embeddings = encoder_of(written / layout).encode(PROMPTS)
    assert len({tuple(embedding.flatten().tolist()) for embedding in embeddings}) == len(PROMPTS)
    for prompt, embedding in zip(PROMPTS, embeddings, strict=True):
        assert embedding.shape == (NUM_TOKENS, CONFIG.d_model)
        assert embedding.dtype == torch.float32
        assert torch.equal(embedding, direct_call(model, written / "diffusers/tokenizer", prompt))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layouts_agree_bit_for_bit(written: Path, dtype: torch.dtype):
    ours, theirs = (encoder_of(written / layout, dtype=dtype).encode(PROMPTS) for layout in ("original", "diffusers"))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_prompt_does_not_depend_on_its_batch(written: Path):
    encoder = encoder_of(written / "original")
    together = encoder.encode(PROMPTS)
    assert all(torch.equal(encoder.encode([p])[0], e) for p, e in zip(PROMPTS, together, strict=True))


def test_positions_past_the_end_token_are_zero(written: Path):
    encoder = encoder_of(written / "original")
    two_words, empty = encoder.encode(["dog cat", ""])
    # Two words of two pieces each (the space is one) and the end token.
    assert (two_words[:5].abs().sum(1) > 0).all() and not two_words[5:].any()
    assert empty[0].any() and not empty[1:].any()


def test_a_long_prompt_is_cut_with_a_warning(written: Path):
    encoder = encoder_of(written / "original", num_tokens=5)
    with pytest.warns(UserWarning, match="prompt has 9 tokens; 4 are cut") as caught:
        (embedding,) = encoder.encode(["dog cat dog cat"])
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert torch.equal(embedding, encoder.encode(["dog cat"])[0])


def test_a_prompt_that_just_fits_does_not_warn(written: Path):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        encoder_of(written / "original", num_tokens=5).encode(["dog cat"])


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        ("  a\n\tcat  ", "a cat"),
        ("cat &amp; dog", "cat & dog"),
        ("cat &amp;lt; dog", "cat < dog"),
        ("a\u00a0cat &nbsp;", "a cat"),
        ("sch\u00c3\u00b6n", "sch\u00f6n"),
        ("\u2018cat\u2019", "'cat'"),
        ("", ""),
    ],
)
def test_prompts_are_cleaned(raw: str, clean: str, written: Path):
    assert clean_prompt(raw) == clean
    encoder = encoder_of(written / "original")
    assert torch.equal(encoder.encode([raw])[0], encoder.encode([clean])[0])


def test_sharded_weights(diffusers: Path, model: UMT5EncoderModel):
    expected = encoder_of(diffusers).encode(["a cat"])[0]
    whole = diffusers / "text_encoder/model.safetensors"
    write_shards(diffusers / "text_encoder", load_file(whole), "model", num_shards=3)
    whole.unlink()
    shards = sorted((diffusers / "text_encoder").glob("model-*.safetensors"))
    assert len(shards) == 3
    assert torch.equal(encoder_of(diffusers).encode(["a cat"])[0], expected)
    shards[1].unlink()
    with pytest.raises(ValueError, match=f"lacks text_encoder/{shards[1].name};"):
        encoder_of(diffusers)


def test_the_embedding_is_tied_even_where_the_config_denies_it(diffusers: Path, written: Path):
    path = diffusers / "text_encoder/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": False}))
    assert torch.equal(*(encoder_of(folder).encode(["dog"])[0] for folder in (diffusers, written / "diffusers")))


def test_release_and_encode_again(written: Path):
    encoder = encoder_of(written / "original")
    before = encoder.encode(["dog"])[0]
    encoder.release()
    assert torch.equal(encoder.encode(["dog"])[0], before)


# Errors


def test_missing_files_are_named(original: Path, diffusers: Path, tmp_path: Path):
    (original / ORIGINAL_UMT5).unlink()
    with pytest.raises(ValueError, match=f"original Wan layout lacks {ORIGINAL_UMT5};"):
        encoder_of(original)
    (diffusers / "text_encoder/config.json").unlink()
    shutil.rmtree(diffusers / "tokenizer")
    with pytest.raises(ValueError, match=r"diffusers layout lacks text_encoder/config.json, tokenizer/tokenizer_co"):
        encoder_of(diffusers)
    with pytest.raises(ValueError, match=r"nowhere holds no complete UMT5 .* lacks text_encoder/config.json, text_en"):
        encoder_of(tmp_path / "nowhere")


def test_arguments_out_of_range(written: Path):
    with pytest.raises(ValueError, match="num_tokens of the text encoder is 0"):
        encoder_of(written / "original", num_tokens=0)
    with pytest.raises(ValueError, match=r"is torch.float16; give torch.bfloat16"):
        encoder_of(written / "original", dtype=torch.float16)


BIAS = "blocks.1.pos_embedding.embedding.weight"
WI = "encoder.block.1.layer.1.DenseReluDense.wi_0.weight"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda s: s.pop(BIAS), rf"(?s)enc-bf16\.pth .*1 missing: {BIAS}"),
        (lambda s: s.pop("token_embedding.weight"), r"is no UMT5 encoder of Wan: it lacks token_embedding.weight"),
        (lambda s: s.update(head=torch.zeros(2)), "1 unexpected: head"),
        (lambda s: s.update({BIAS: torch.zeros(32, 3)}), rf"{BIAS} is \[32, 3\] but .* \[32, 2\]"),
        (lambda s: s.update({"token_embedding.weight": torch.zeros(4)}), "it lacks token_embedding.weight"),
        (
            lambda s: s.update({f"extra.{i:02d}": torch.zeros(1) for i in range(12)}),
            "12 unexpected: extra.00, .*, extra.09, and 2 more",
        ),
    ],
)
def test_original_weights_that_do_not_fit(original: Path, edit: Callable[[dict[str, Tensor]], object], message: str):
    edit_original(original, edit)
    with pytest.raises(ValueError, match=message):
        encoder_of(original).encode(["dog"])


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda s: s.pop(WI), rf"(?s)text_encoder .*1 missing: {WI}"),
        (lambda s: s.pop("shared.weight"), "1 missing: shared.weight"),
        (lambda s: s.update(head=torch.zeros(2)), "1 unexpected: head"),
        (lambda s: s.update({WI: torch.zeros(3, 16)}), r"wi_0.weight is \[3, 16\] but the config makes it \[24, 16\]"),
    ],
)
def test_diffusers_weights_that_do_not_fit(diffusers: Path, edit: Callable[[dict[str, Tensor]], object], message: str):
    edit_diffusers(diffusers, edit)
    with pytest.raises(ValueError, match=message):
        encoder_of(diffusers).encode(["dog"])


class Code:
    """Unpickles into a call that makes a file."""

    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self) -> tuple[Callable[..., object], tuple[Path]]:
        return Path.touch, (self.file,)


def test_code_in_the_original_weights_does_not_run(original: Path, tmp_path: Path):
    torch.save({"shared": Code(tmp_path / "ran")}, original / ORIGINAL_UMT5)
    with pytest.raises(ValueError, match=r"enc-bf16\.pth: it holds code"):
        encoder_of(original).encode(["dog"])
    assert not (tmp_path / "ran").exists()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, r"enc-bf16\.pth: not a PyTorch file, or not a whole one; fetch it again"),
        (lambda path: path.write_bytes(b"garbage" * 100), "not a PyTorch file, or not a whole one"),
        (lambda path: path.write_bytes(b""), "not a PyTorch file, or not a whole one"),
    ],
)
def test_damaged_original_weights(original: Path, damage: Callable[[Path], object], message: str):
    damage(original / ORIGINAL_UMT5)
    encoder = encoder_of(original)
    with pytest.raises(ValueError, match=message):
        encoder.encode(["dog"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("text_encoder/model.safetensors", "not a whole .safetensors file .*fetch it again"),
        ("text_encoder/config.json", "config.json is damaged: .*download it again"),
        ("tokenizer/tokenizer.json", "tokenizer does not load: .*download it again"),
    ],
)
def test_truncated_diffusers_files(diffusers: Path, name: str, message: str):
    truncate(diffusers / name)
    with pytest.raises(ValueError, match=message):
        encoder_of(diffusers).encode(["dog"])


def test_damaged_index(diffusers: Path):
    (diffusers / "text_encoder/model.safetensors").unlink()
    (diffusers / "text_encoder/model.safetensors.index.json").write_text("{")
    with pytest.raises(ValueError, match=r"index\.json: not an index of shards"):
        encoder_of(diffusers)


def test_a_tokenizer_of_other_weights(original: Path):
    edit_original(original, lambda s: s.update({"token_embedding.weight": torch.zeros(5, CONFIG.d_model)}))
    with pytest.raises(ValueError, match="but the weights beside it know 5"):
        encoder_of(original).encode(["dog"])
