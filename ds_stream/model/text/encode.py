"""Embeddings of all prompts of a run, by whichever encoder the config names; the encoder is gone afterwards."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ds_stream.model.text.hashed import HashedTextEncoder
from ds_stream.model.weights.locate import TEXT_NAMES, locate_text_encoder
from ds_stream.model.weights.tensor_files import open_tensors
from ds_stream.settings import StreamConfig


def encode_all(config: StreamConfig, prompts: Sequence[str], device: torch.device) -> list[Tensor]:
    """Embedding ``[num_text_tokens, text_dim]``, fp32 on the CPU, of each prompt.

    UMT5 is loaded only if its disk cache lacks a prompt, and released before this returns.

    Args:
        device: where UMT5 computes.

    Raises:
        ValueError: the encoder's files are missing, damaged, or of another width than the model.
    """
    model = config.model
    folder = locate_text_encoder(config)
    if folder is None:
        hashed = HashedTextEncoder(model.text_dim, model.num_text_tokens)
        return [hashed.encode(prompt) for prompt in prompts]
    # Takes seconds to import, and brings a library that random weights do not need.
    from ds_stream.model.text.cache import TextCache, encode_prompts
    from ds_stream.model.text.umt5 import Umt5TextEncoder

    cache = None if config.text.cache_dir is None else TextCache(Path(config.text.cache_dir).expanduser())
    encoder = Umt5TextEncoder(folder, model.num_text_tokens, device)
    embeddings = encode_prompts(encoder, cache, prompts)
    encoder.release()
    for embedding in embeddings:
        if embedding.shape[1] != model.text_dim:
            raise ValueError(
                f"the text encoder in {folder} gives {embedding.shape[1]} channels but stream.model.text_dim is "
                f"{model.text_dim}; take both from one model"
            )
    return embeddings


def text_encoder_bytes(config: StreamConfig) -> int:
    """Memory that UMT5 takes in bf16 while prompts are encoded; 0 for the hashed encoder.

    Raises:
        ValueError: its files are missing or damaged.
    """
    folder = locate_text_encoder(config)
    if folder is None:
        return 0
    paths = [folder / name for name in TEXT_NAMES if (folder / name).exists()]
    if not paths:
        raise ValueError(f"stream.text.encoder {folder} holds neither {' nor '.join(TEXT_NAMES)}; name another folder")
    tensors = open_tensors(paths[0]).tensors.values()
    return sum(info.num_bytes // info.dtype.itemsize * torch.bfloat16.itemsize for info in tensors)


def read_embedding(path: Path, config: StreamConfig) -> Tensor:
    """The embedding in a file that holds one tensor ``[tokens, text_dim]``, or ``[1, tokens, text_dim]``.

    Returns:
        ``[num_text_tokens, text_dim]``, fp32, padded with zeros.

    Raises:
        ValueError: it cannot be read, holds another number of tensors, or one of another shape.
    """
    file = open_tensors(path)
    if len(file.tensors) != 1:
        raise ValueError(f"--prompt-embeds {path}: holds {len(file.tensors)} tensors; give a file with one embedding")
    ((_, tensor),) = file.read(file.tensors)
    shape = list(tensor.shape)
    embedding = tensor[0] if tensor.ndim == 3 and len(tensor) == 1 else tensor
    model = config.model
    if embedding.ndim != 2 or embedding.shape[1] != model.text_dim or len(embedding) > model.num_text_tokens:
        raise ValueError(
            f"--prompt-embeds {path}: the embedding is {shape}; the model takes up to {model.num_text_tokens} tokens "
            f"of {model.text_dim} channels"
        )
    if len(embedding) == 0 or not embedding.isfinite().all():
        raise ValueError(f"--prompt-embeds {path}: the embedding is {shape} with numbers that are not finite, or none")
    padded = torch.zeros(model.num_text_tokens, model.text_dim)
    padded[: len(embedding)] = embedding
    return padded
