import os
import time

import pytest
import torch
import torch.distributed as dist

from ds_stream.core import Event, EventKind, Plan, Row
from ds_stream.engine.links import GroupChannel, Link, LinkError, LoopbackChannel
from ds_stream.engine.plans import decode_plan, encode_plan
from forked import fork_ranks
from rings import CPU

MIXED = [((2, 3), torch.bfloat16), ((5,), torch.float32), ((1, 7), torch.int64), ((3,), torch.uint8)]


def mixed_tensors(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-100, 100, shape, generator=generator).to(dtype) for shape, dtype in MIXED]


def test_a_message_of_mixed_types_arrives_as_sent():
    link = Link(LoopbackChannel("test", 1), CPU, num_buffers=2)
    for seed in range(5):
        link.send(mixed_tensors(seed))
        assert all(torch.equal(a, b) for a, b in zip(link.recv(MIXED), mixed_tensors(seed), strict=True))


def test_a_message_that_was_never_sent_is_an_error():
    link = Link(LoopbackChannel("waiting for latents", 0.05), CPU, num_buffers=2)
    with pytest.raises(LinkError, match="waiting for latents"):
        link.recv(MIXED)


def test_plans_survive_their_encoding():
    events = (Event(EventKind.OPEN_SESSION, 3, 2**62), Event(EventKind.SET_PROMPT, 3, 7), Event(EventKind.STOP))
    plan = Plan(10**12, (Row(3, 10**9, 2, 7), Row(0, 1, 0, 1, strength=0.1 + 0.2)), events)
    assert decode_plan(encode_plan(plan)) == plan
    assert decode_plan(encode_plan(Plan(0))) == Plan(0)


def test_sends_never_wait_for_receives():
    """Both ends send all they may before either receives: what deadlocks a ring whose sends wait."""
    num_buffers, size = 6, 300_000

    def exchange(rank: int) -> None:
        groups = [dist.new_group([0, 1], backend="gloo") for _ in range(2)]
        out, back = (
            Link(GroupChannel(group, 1 - rank, "test"), CPU, num_buffers) for group in groups[:: 1 - 2 * rank]
        )
        started = time.monotonic()
        for number in range(num_buffers):
            out.send([torch.full((size,), float(10 * rank + number))])
        assert time.monotonic() - started < 5
        dist.barrier()
        for number in range(num_buffers):
            (tensor,) = back.recv([((size,), torch.float32)])
            assert (tensor == 10 * (1 - rank) + number).all()
        out.drain()

    fork_ranks(2, exchange)


def test_mixed_types_cross_three_ranks_and_a_dead_peer_is_named():
    def relay(rank: int) -> None:
        groups = {pair: dist.new_group(list(pair), backend="gloo") for pair in [(0, 1), (1, 2)]}
        if rank > 0:
            incoming = Link(GroupChannel(groups[rank - 1, rank], rank - 1, "waiting for activations"), CPU, 2)
            received = [tensor.clone() for tensor in incoming.recv(MIXED)]
            assert all(torch.equal(a, b) for a, b in zip(received, mixed_tensors(4), strict=True))
        if rank < 2:
            outgoing = Link(GroupChannel(groups[rank, rank + 1], rank + 1, "sending activations"), CPU, 2)
            outgoing.send(received if rank else mixed_tensors(4))
            outgoing.drain()
        dist.barrier()
        if rank == 1:
            os._exit(0)
        if rank == 2:
            with pytest.raises(LinkError, match=r"waiting for activations: the connection is closed \(rank 1\)"):
                incoming.recv(MIXED)

    fork_ranks(3, relay)
