"""Text embeddings on disk, so that a prompt met before needs no text encoder."""

import hashlib
import os
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from ds_stream.model.text.umt5 import Umt5TextEncoder, clean_prompt

TENSOR_NAME = "embedding"


def text_cache_key(fingerprint: str, prompt: str, num_tokens: int) -> str:
    """32 hex digits for what an embedding depends on: the encoder's fingerprint, the prompt, its positions."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (fingerprint.encode(), prompt.encode(), str(num_tokens).encode()):
        # With its length in front, no part can run over into the next one.
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


class TextCache:
    """A folder of embeddings, one safetensors file a key. Several processes may share it.

    Trouble with the folder costs time, never a run: it is a warning, and the embedding is computed again.
    """

    def __init__(self, folder: Path):
        self.folder = folder

    def load(self, key: str) -> Tensor | None:
        """The embedding stored under ``key``, fp32 ``[num_tokens, dim]``, or None if there is none to be read."""
        path = self._path(key)
        try:
            tensors = load(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, SafetensorError) as error:
            warnings.warn(f"text cache file {path} cannot be read and is ignored: {error}", stacklevel=2)
            return None
        embedding = tensors.get(TENSOR_NAME)
        if embedding is None or embedding.ndim != 2 or embedding.dtype != torch.float32:
            warnings.warn(f"text cache file {path} holds no embedding and is ignored", stacklevel=2)
            return None
        return embedding

    def store(self, key: str, embedding: Tensor) -> None:
        """Write ``embedding``, fp32 ``[num_tokens, dim]``, under ``key``: all of it, or nothing and a warning."""
        assert embedding.ndim == 2 and embedding.dtype == torch.float32
        path = self._path(key)
        # Named after the process: two that write the same key do not share a temporary file.
        temporary = self.folder / f".{key}.{os.getpid()}.tmp"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(save({TENSOR_NAME: embedding.contiguous()}))
            os.replace(temporary, path)
        except OSError as error:
            warnings.warn(f"text embedding is not cached in {self.folder}: {error}", stacklevel=2)
            self._discard(temporary)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.safetensors"

    def _discard(self, temporary: Path) -> None:
        try:
            temporary.unlink(missing_ok=True)
        except OSError:
            # Whatever kept the file from being written is reported already.
            return


def encode_prompts(encoder: Umt5TextEncoder, cache: TextCache | None, prompts: Sequence[str]) -> list[Tensor]:
    """Embeddings of prompts, fp32 ``[num_tokens, dim]`` on the CPU; only those that the cache lacks are encoded.

    With all of them cached the model does not load. Prompts that are equal once cleaned share one tensor.
    """
    # Cleaning twice is not cleaning once (entities of entities), so the encoder gets the prompt as written.
    written = {clean_prompt(prompt): prompt for prompt in prompts}
    fingerprint = encoder.fingerprint if cache is not None else ""
    keys = {clean: text_cache_key(fingerprint, clean, encoder.num_tokens) for clean in written}
    found: dict[str, Tensor] = {}
    if cache is not None:
        stored = {clean: cache.load(key) for clean, key in keys.items()}
        found = {clean: embedding for clean, embedding in stored.items() if embedding is not None}
        for clean, embedding in found.items():
            if embedding[-1].any():
                warnings.warn(
                    f"prompt {clean[:40]!r}... fills all {len(embedding)} tokens and may have been cut", stacklevel=2
                )
    missing = [clean for clean in written if clean not in found]
    # The encoder loads its model even for an empty list.
    encoded = encoder.encode([written[clean] for clean in missing]) if missing else []
    for clean, embedding in zip(missing, encoded, strict=True):
        found[clean] = embedding
        if cache is not None:
            cache.store(keys[clean], embedding)
    return [found[clean_prompt(prompt)] for prompt in prompts]
