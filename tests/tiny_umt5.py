"""A tiny UMT5 with random weights and a tokenizer, written in both layouts that people have."""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from ds_stream.model.text.umt5 import Umt5TextEncoder
from ds_stream.model.weights.locate import ORIGINAL_UMT5
from rings import CPU

NUM_TOKENS = 12
CONFIG = UMT5Config(
    vocab_size=64,
    d_model=16,
    d_kv=8,
    d_ff=24,
    num_layers=2,
    num_heads=2,
    feed_forward_proj="gated-gelu",
    dropout_rate=0.1,
)
PROMPTS = ["a cat", "dog on the cat", "", "dog"]


def write_tokenizer(folder: Path) -> None:
    pieces = ["a", "cat", "the", "dog", "sat", "on", *"bcdefghijklmnopqrstuvwxyz<&'"]
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -3.0)]
    vocabulary += [(piece, -2.0) for piece in pieces]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=2, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)


def to_original_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The table of the Wan authors the other way round, written apart from the one under test."""
    original = {
        "token_embedding.weight": state["shared.weight"],
        "norm.weight": state["encoder.final_layer_norm.weight"],
    }
    for block in range(CONFIG.num_layers):
        old, new = f"encoder.block.{block}.layer", f"blocks.{block}"
        for name in "qkvo":
            original[f"{new}.attn.{name}.weight"] = state[f"{old}.0.SelfAttention.{name}.weight"]
        bias = state[f"{old}.0.SelfAttention.relative_attention_bias.weight"]
        original[f"{new}.pos_embedding.embedding.weight"] = bias
        original[f"{new}.norm1.weight"] = state[f"{old}.0.layer_norm.weight"]
        original[f"{new}.norm2.weight"] = state[f"{old}.1.layer_norm.weight"]
        original[f"{new}.ffn.gate.0.weight"] = state[f"{old}.1.DenseReluDense.wi_0.weight"]
        original[f"{new}.ffn.fc1.weight"] = state[f"{old}.1.DenseReluDense.wi_1.weight"]
        original[f"{new}.ffn.fc2.weight"] = state[f"{old}.1.DenseReluDense.wo.weight"]
    return {name: tensor.clone() for name, tensor in original.items()}


def make_umt5() -> UMT5EncoderModel:
    torch.manual_seed(0)
    model = UMT5EncoderModel(CONFIG).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return model


def write_umt5(folder: Path, model: UMT5EncoderModel) -> Path:
    """A folder with both layouts, in two subfolders."""
    # Not by save_pretrained, which writes nothing on a rank other than 0 of a process group that other tests left.
    encoder = folder / "diffusers/text_encoder"
    encoder.mkdir(parents=True)
    CONFIG.save_pretrained(encoder)
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "encoder.embed_tokens.weight"}
    save_file(state, encoder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder / "diffusers/tokenizer")
    write_tokenizer(folder / "original/google/umt5-xxl")
    torch.save(to_original_names(model.state_dict()), folder / "original" / ORIGINAL_UMT5)
    return folder


def encoder_of(folder: Path, num_tokens: int = NUM_TOKENS, dtype: torch.dtype = torch.float32) -> Umt5TextEncoder:
    return Umt5TextEncoder(folder, num_tokens, CPU, dtype)


def edit_original(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    state = torch.load(folder / ORIGINAL_UMT5, weights_only=True)
    edit(state)
    torch.save(state, folder / ORIGINAL_UMT5)


def edit_diffusers(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    path = folder / "text_encoder/model.safetensors"
    state = {name: tensor.clone() for name, tensor in load_file(path).items()}
    edit(state)
    save_file(state, path, metadata={"format": "pt"})
