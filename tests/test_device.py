"""What is settled about a process before it computes."""

import resource
import sys

import pytest
import torch

from ds_stream.device import prepare_device
from forked import start_forked, wait_for
from rings import tiny_config

NUM_BYTES = 40 * 2**20


def pages_asked_for(num_times: int) -> int:
    """By tensors that are filled and freed again, each larger than what an allocator keeps of its own accord."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(num_times):
        torch.empty(NUM_BYTES, dtype=torch.uint8).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_memory_that_a_layer_frees_serves_the_next_one():
    def run(_: int) -> None:
        prepare_device(tiny_config())
        pages_asked_for(10)
        once = NUM_BYTES // resource.getpagesize()
        assert pages_asked_for(10) < once

    assert not wait_for(start_forked(1, run, join=False), 30)
