"""UMT5, the text encoder of Wan: from prompts to embeddings."""

import gc
import hashlib
import html
import re
import warnings
from collections.abc import Sequence
from pathlib import Path

import ftfy
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, UMT5EncoderModel

from ds_stream.model.text.umt5_files import find_umt5_files, load_tokenizer, load_umt5

FINGERPRINT_EDGE_BYTES = 64 * 1024


def clean_prompt(prompt: str) -> str:
    """The prompt as Wan saw it in training: mended Unicode, no HTML entities, single spaces.

    Source: ``prompt_clean`` of diffusers' Wan pipeline, "whitespace" cleaning of the Wan tokenizer.
    """
    text = html.unescape(html.unescape(ftfy.fix_text(prompt))).strip()
    return re.sub(r"\s+", " ", text).strip()


class Umt5TextEncoder:
    """Encodes prompts with the UMT5 encoder of a Wan folder. The model loads at the first :meth:`encode`.

    Args:
        folder: diffusers layout (``text_encoder/``, ``tokenizer/``) or original Wan layout
            (``models_t5_umt5-xxl-enc-bf16.pth``, ``google/umt5-xxl/``).
        num_tokens: positions of an embedding, 512 for Wan.
        device: where the model runs (11.4 GB for UMT5-XXL in bf16).
        dtype: bfloat16 or float32; UMT5 overflows in float16.

    Raises:
        ValueError: files are missing, or an argument is out of range. :meth:`encode` raises it for damaged files.
    """

    def __init__(self, folder: Path, num_tokens: int, device: torch.device, dtype: torch.dtype = torch.bfloat16):
        if num_tokens < 1:
            raise ValueError(f"num_tokens of the text encoder is {num_tokens}; give 1 or more (Wan: 512)")
        if dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"dtype of the text encoder is {dtype}; give torch.bfloat16 or torch.float32")
        self.num_tokens = num_tokens
        self.device = device
        self.dtype = dtype
        self._files = find_umt5_files(folder)
        self._loaded: tuple[UMT5EncoderModel, PreTrainedTokenizerBase] | None = None

    @property
    def fingerprint(self) -> str:
        """32 hex digits that change with weights, tokenizer, type or kind of device, not with the folder's place.

        Of each file it reads the name, the size and the first and last 64 KiB.
        """
        folder = self._files.folder
        tokenizer = (path for path in (folder / self._files.tokenizer).iterdir() if path.is_file())
        digest = hashlib.blake2b(f"{self.dtype} {self.device.type}".encode(), digest_size=16)
        for path in sorted([*(folder / name for name in self._files.weights), *tokenizer]):
            size = path.stat().st_size
            digest.update(f"\n{path.relative_to(folder).as_posix()}\n{size}\n".encode())
            with path.open("rb") as file:
                digest.update(file.read(FINGERPRINT_EDGE_BYTES))
                file.seek(max(0, size - FINGERPRINT_EDGE_BYTES))
                digest.update(file.read(FINGERPRINT_EDGE_BYTES))
        return digest.hexdigest()

    def encode(self, prompts: Sequence[str]) -> list[Tensor]:
        """Embeddings of prompts, each fp32 ``[num_tokens, dim]`` on the CPU, zero past the prompt's end token.

        A prompt of more than ``num_tokens`` tokens is cut, with a warning.
        """
        if self._loaded is None:
            self._loaded = (
                load_umt5(self._files, self.device, self.dtype),
                load_tokenizer(self._files),
            )
        model, tokenizer = self._loaded
        # One by one, so that an embedding does not depend on the other prompts of the call.
        embeddings = []
        for prompt in prompts:
            ids, mask = self._tokenize(tokenizer, clean_prompt(prompt))
            embeddings.append(self._embed(model, ids, mask))
        return embeddings

    def release(self) -> None:
        """Free the model. A later :meth:`encode` loads it again."""
        self._loaded = None
        # Modules of transformers refer to each other in circles; only the collector frees those.
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.no_grad()
    def _embed(self, model: UMT5EncoderModel, ids: Tensor, mask: Tensor) -> Tensor:
        if int(ids.max()) >= model.config.vocab_size:
            raise ValueError(
                f"{self._files.folder / self._files.tokenizer} gives token {int(ids.max())}, but the weights "
                f"beside it know {model.config.vocab_size}; take both from one download"
            )
        output = model(input_ids=ids.to(self.device), attention_mask=mask.to(self.device))
        length = int(mask.sum())
        embedding = torch.zeros(self.num_tokens, model.config.d_model)
        embedding[:length] = output.last_hidden_state[0, :length].to("cpu", torch.float32)
        return embedding

    def _tokenize(self, tokenizer: PreTrainedTokenizerBase, prompt: str) -> tuple[Tensor, Tensor]:
        """Token ids and mask of a clean prompt, ``[1, num_tokens]`` each, the end token included."""
        num_tokens = len(tokenizer(prompt, verbose=False).input_ids)
        if num_tokens > self.num_tokens:
            num_cut = num_tokens - self.num_tokens
            warnings.warn(f"prompt has {num_tokens} tokens; {num_cut} are cut at its end", stacklevel=3)
        tokens = tokenizer(
            prompt,
            padding="max_length",
            padding_side="right",
            max_length=self.num_tokens,
            truncation=True,
            return_tensors="pt",
        )
        return tokens.input_ids, tokens.attention_mask
