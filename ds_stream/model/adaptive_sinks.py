"""Which sink a new latent frame replaces (StreamDiffusionV2, arXiv 2511.07399, sink-token-guided rolling cache).

One decision per session and chunk, taken on the device by the model's first block at the first pass whose keys/values
are kept (pass ``lead``); every other block and every later pass of the chunk obeys. It travels beside the hidden
states as a number, so that no host waits for it.
"""

import torch
from torch import Tensor
from torch.nn import functional

NO_SINK = -1
"""The decision to keep all sinks."""


def least_similar_sink(
    sink_keys_STHD: Tensor, sink_values_STHD: Tensor, key_THD: Tensor, value_THD: Tensor, threshold: float
) -> Tensor:
    """Index of the sink to replace, or :data:`NO_SINK`, as an int64 scalar on the tensors' device.

    Similarity is the mean of the cosines of the token-averaged keys and of the token-averaged values. The least
    similar of the S sinks goes if it is below ``threshold``.

    Args:
        sink_keys_STHD: unrotated keys of S sinks, T tokens each; all of them filled.
        key_THD: unrotated keys of the new latent frame.
    """
    similarity_S = (_cosine(sink_keys_STHD, key_THD) + _cosine(sink_values_STHD, value_THD)) / 2
    least, index = similarity_S.min(dim=0)
    return torch.where(least < threshold, index, NO_SINK)


def _cosine(sinks_STHD: Tensor, new_THD: Tensor) -> Tensor:
    sinks_SC = sinks_STHD.float().mean(dim=1).flatten(1)
    return functional.cosine_similarity(sinks_SC, new_THD.float().mean(dim=0).flatten()[None], dim=1)
