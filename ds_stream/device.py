"""What is settled about a process before DeepSpeed is imported: where it computes, and how memory is kept there."""

import ctypes
import os
import sys

from ds_stream.config import Config

# Names of glibc's mallopt(3).
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_NEVER = 2**31 - 1


def prepare_device(config: Config) -> None:
    """Make this process ready to compute where ``config`` says; to be called before DeepSpeed is imported."""
    import torch

    if config.stream.device.kind == "cpu" or not torch.cuda.is_available():
        # DeepSpeed would look for an accelerator and complain.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        _keep_freed_memory()


def _keep_freed_memory() -> None:
    """Let what a layer frees serve the next one, as it does on a GPU.

    By default glibc gives every large block back to the kernel, which zeroes its pages when they are asked for again:
    a third of the time of the VAE.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, _NEVER)
