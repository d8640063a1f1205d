"""From a prompt to its text embedding."""

import hashlib
import warnings

import torch
from torch import Tensor


class HashedTextEncoder:
    """Gives every word a fixed Gaussian vector, so that prompts differ and repeat exactly.

    It knows nothing of meaning: it goes with random weights, where no encoder could mean anything.

    Args:
        dim: channels of an embedding.
        num_tokens: positions of an embedding; unused ones are zero.
    """

    def __init__(self, dim: int, num_tokens: int):
        self.dim = dim
        self.num_tokens = num_tokens

    def encode(self, prompt: str) -> Tensor:
        """Embedding ``[num_tokens, dim]``, fp32, of a prompt. A long one is cut, with a warning."""
        words = prompt.lower().split()
        if len(words) > self.num_tokens:
            warnings.warn(
                f"prompt has {len(words)} words; the last {len(words) - self.num_tokens} are cut", stacklevel=2
            )
        embedding = torch.zeros(self.num_tokens, self.dim)
        for position, word in enumerate(words[: self.num_tokens]):
            digest = hashlib.blake2b(word.encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
            embedding[position] = torch.randn(self.dim, generator=generator)
        return embedding
