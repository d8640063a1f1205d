"""UMT5 on disk: the layout of diffusers and the one of Wan, found and loaded."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import init_empty_weights
from transformers import AutoTokenizer, PreTrainedTokenizerBase, UMT5Config, UMT5EncoderModel

from ds_stream.model.weights.checkpoint import check_names
from ds_stream.model.weights.locate import ORIGINAL_UMT5
from ds_stream.model.weights.tensor_files import TensorInfo, first_line, open_tensors, shard_names

ORIGINAL_TOKENIZER = "google/umt5-xxl"
SHARED_NAME, TIED_NAME = "shared.weight", "encoder.embed_tokens.weight"

# Names in Wan's original file -> names in transformers, outside of blocks and inside of `blocks.N`.
OUTER_NAMES = {"token_embedding.weight": "shared.weight", "norm.weight": "encoder.final_layer_norm.weight"}
BLOCK_NAMES = {
    "norm1.weight": "layer.0.layer_norm.weight",
    "attn.q.weight": "layer.0.SelfAttention.q.weight",
    "attn.k.weight": "layer.0.SelfAttention.k.weight",
    "attn.v.weight": "layer.0.SelfAttention.v.weight",
    "attn.o.weight": "layer.0.SelfAttention.o.weight",
    "pos_embedding.embedding.weight": "layer.0.SelfAttention.relative_attention_bias.weight",
    "norm2.weight": "layer.1.layer_norm.weight",
    "ffn.gate.0.weight": "layer.1.DenseReluDense.wi_0.weight",
    "ffn.fc1.weight": "layer.1.DenseReluDense.wi_1.weight",
    "ffn.fc2.weight": "layer.1.DenseReluDense.wo.weight",
}
# Their shapes give the whole config.
SIZING_NAMES = (
    "token_embedding.weight",
    "blocks.0.attn.q.weight",
    "blocks.0.ffn.fc1.weight",
    "blocks.0.pos_embedding.embedding.weight",
)


@dataclass(frozen=True)
class Umt5Files:
    """Files of one text encoder, relative to ``folder``."""

    folder: Path
    weights: tuple[str, ...]
    tokenizer: str
    is_original: bool


def find_umt5_files(folder: Path) -> Umt5Files:
    """Recognise the diffusers layout, else the original Wan one. ``ValueError`` names what each of them lacks."""
    shards = _shard_names(folder)
    candidates = (
        Umt5Files(folder, ("text_encoder/config.json", *shards), "tokenizer", is_original=False),
        Umt5Files(folder, (ORIGINAL_UMT5,), ORIGINAL_TOKENIZER, is_original=True),
    )
    lacks = [_missing_files(files) for files in candidates]
    for files, lacking in zip(candidates, lacks, strict=True):
        if not lacking:
            return files
    raise ValueError(
        f"{folder} holds no complete UMT5 text encoder; the diffusers layout lacks {', '.join(lacks[0])}; "
        f"the original Wan layout lacks {', '.join(lacks[1])}; download either one"
    )


def _shard_names(folder: Path) -> tuple[str, ...]:
    # One file wins over an index, as it does in from_pretrained.
    single, index = "text_encoder/model.safetensors", "text_encoder/model.safetensors.index.json"
    if (folder / single).is_file() or not (folder / index).is_file():
        return (single,)
    names = shard_names(folder / index)
    return (index, *(f"text_encoder/{name}" for name in names))


def _missing_files(files: Umt5Files) -> list[str]:
    missing = [name for name in files.weights if not (files.folder / name).is_file()]
    tokenizer = files.folder / files.tokenizer
    if not (tokenizer / "tokenizer_config.json").is_file():
        missing.append(f"{files.tokenizer}/tokenizer_config.json")
    if not any((tokenizer / name).is_file() for name in ("tokenizer.json", "spiece.model")):
        missing.append(f"{files.tokenizer}/tokenizer.json (or spiece.model)")
    return missing


def load_tokenizer(files: Umt5Files) -> PreTrainedTokenizerBase:
    """The tokenizer. ``ValueError`` if it is damaged."""
    folder = files.folder / files.tokenizer
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # The tokenizers library raises bare Exception.
        raise ValueError(f"{folder} does not load: {first_line(error)}; download it again") from error


def load_umt5(files: Umt5Files, device: torch.device, dtype: torch.dtype) -> UMT5EncoderModel:
    """The model, tensor by tensor. ``ValueError`` if it is damaged."""
    path = files.folder / (ORIGINAL_UMT5 if files.is_original else "text_encoder")
    file = open_tensors(path)
    config = _config_of_shapes(path, file.tensors) if files.is_original else _config_in(path)
    with init_empty_weights():
        model = UMT5EncoderModel(config)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters() if name != TIED_NAME}
    table = {name: name for name in shapes}
    if files.is_original:
        table = dict(OUTER_NAMES)
        for block in range(config.num_layers):
            table |= {f"blocks.{block}.{old}": f"encoder.block.{block}.{new}" for old, new in BLOCK_NAMES.items()}
    elif TIED_NAME in file.tensors:
        # One tensor under two names: some files have the second one, some both.
        table.pop(SHARED_NAME, None)
        table[TIED_NAME] = SHARED_NAME
    found = {name: info for name, info in file.tensors.items() if name != SHARED_NAME or TIED_NAME not in table}
    check_names(str(path), {old: shapes[new] for old, new in table.items()}, found)
    # On a CPU they stay in the map, since the model is soon gone: host memory holds no copy.
    tensors = {table[old]: tensor.to(device, dtype) for old, tensor in file.read(table)}
    model.load_state_dict({**tensors, TIED_NAME: tensors[SHARED_NAME]}, strict=True, assign=True)
    model.encoder.set_input_embeddings(model.shared)
    return model.eval().requires_grad_(False)


def _config_in(folder: Path) -> UMT5Config:
    try:
        return UMT5Config.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # A damaged file can raise nearly anything.
        raise ValueError(f"{folder / 'config.json'} is damaged: {first_line(error)}; download it again") from error


def _config_of_shapes(path: Path, tensors: Mapping[str, TensorInfo]) -> UMT5Config:
    """Config of a checkpoint in original names, from the shapes of ``SIZING_NAMES`` and the highest block."""
    if any(name not in tensors or len(tensors[name].shape) != 2 for name in SIZING_NAMES):
        raise ValueError(f"{path} is no UMT5 encoder of Wan: it lacks {', '.join(SIZING_NAMES)}; download it again")
    vocab_size, d_model = tensors["token_embedding.weight"].shape
    num_buckets, num_heads = tensors["blocks.0.pos_embedding.embedding.weight"].shape
    blocks = [int(match[1]) for match in (re.match(r"blocks\.(\d+)\.", name) for name in tensors) if match]
    return UMT5Config(
        vocab_size=vocab_size,
        d_model=d_model,
        d_kv=tensors["blocks.0.attn.q.weight"].shape[0] // max(num_heads, 1),
        d_ff=tensors["blocks.0.ffn.fc1.weight"].shape[0],
        num_layers=max(blocks) + 1,
        num_heads=num_heads,
        relative_attention_num_buckets=num_buckets,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
    )
