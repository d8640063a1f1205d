"""Where a rank runs, and the process groups and links between ranks."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe import p2p

from ds_stream.core import RankInfo
from ds_stream.engine.links import (
    Channel,
    GroupChannel,
    HostStagedChannel,
    Link,
    LoopbackChannel,
    RingLinks,
    StageLinks,
)
from ds_stream.engine.moves import group_moves
from ds_stream.partition import Ring
from ds_stream.schedule.planner import num_message_buffers
from ds_stream.settings import StreamConfig

Transport = Literal["gloo", "nccl", "host_staged"]

# Waiting for the next plan is waiting for input, which may take any time; a dead peer ends it at once, and a stopped
# or hung one is the watchdog's to find.
_NO_TIMEOUT = timedelta(days=30)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where this rank computes and how its tensors travel."""

    device: torch.device
    transport: Transport


def num_gpus(config: StreamConfig) -> int:
    """GPUs of this machine that ``config`` lets ranks use."""
    return torch.cuda.device_count() if config.device.kind != "cpu" else 0


def choose_placement(config: StreamConfig, info: RankInfo) -> Placement:
    """Resolve ``auto`` device and transport.

    Raises:
        ValueError: CUDA or NCCL was asked for and cannot be had.
    """
    gpus = num_gpus(config)
    if config.device.kind == "cuda" and gpus == 0:
        raise ValueError("stream.device.kind is cuda but no GPU is visible; set it to cpu or auto")
    asked = config.device.transport
    if gpus == 0:
        if asked not in ("auto", "gloo"):
            raise ValueError(f"stream.device.transport is {asked} but ranks run on the CPU; set it to gloo or auto")
        return Placement(torch.device("cpu"), "gloo")
    shared = info.num_local_ranks > gpus
    if asked == "gloo" or (asked == "nccl" and shared):
        reason = "gloo cannot carry CUDA tensors" if asked == "gloo" else f"{info.num_local_ranks} ranks share GPUs"
        raise ValueError(f"stream.device.transport is {asked} but {reason}; set it to auto or host_staged")
    transport: Transport = "host_staged" if asked == "host_staged" or shared else "nccl"
    return Placement(torch.device("cuda", info.local_rank % gpus), transport)


def init_process_groups(placement: Placement, info: RankInfo, start_timeout_s: float) -> None:
    """Meet the other ranks, and let DeepSpeed know.

    Raises:
        ValueError: the port is taken.
    """
    # DeepSpeed would compile a CPU all-reduce that the pipeline never uses. The switch is not public: without it the
    # start is slow, not wrong.
    if hasattr(deepspeed.ops, "__compatible_ops__"):
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    # DeepSpeed moves its module to the device of this number.
    os.environ["LOCAL_RANK"] = str(placement.device.index or 0)
    uses_nccl = placement.transport == "nccl"
    if placement.device.type == "cuda":
        get_accelerator().set_device(placement.device.index)
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if uses_nccl else "gloo",
            timeout=timedelta(seconds=start_timeout_s),
            device_id=placement.device if uses_nccl else None,
        )
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise ValueError(
            f"port {os.environ['MASTER_PORT']} is taken, perhaps by another run; give this one another "
            "(deepspeed --master_port N)"
        ) from None
    deepspeed.init_distributed(dist_backend="nccl" if uses_nccl else "gloo", verbose=False)


@dataclass(frozen=True, slots=True)
class RankLinks:
    """All links of one rank. Frames and timings have none where the last stage is on the controller's rank."""

    stage: StageLinks
    frames_in: Link | None
    """Controller's rank, from the last stage."""
    frames_out: Link | None
    """Last stage, to the controller's rank."""
    timings_in: Link | None
    """Controller's rank, from the last stage."""
    timings_out: Link | None
    """Last stage, to the controller's rank."""
    ranks: dist.ProcessGroup | None
    """All of them, on the CPU, for what is not urgent; ``None`` where there is one."""


def connect(config: StreamConfig, placement: Placement, info: RankInfo) -> RankLinks:
    """Make the links between the stages; every rank calls it.

    Plans, timings and frames travel on gloo groups of their own, tensors as the placement says.
    """
    connector = _Connector(config, placement, info)
    last = info.num_ranks - 1
    if last == 0:
        return RankLinks(
            StageLinks(None, None, None, None, None, None, connector.close_ring, None), None, None, None, None, None
        )
    pairs = range(last)
    plans = [connector.host_link(stage, stage + 1, "a plan") for stage in pairs]
    forward = [connector.channel(stage, stage + 1, "activations") for stage in pairs]
    activations = [connector.link(channel) for channel in forward]
    # Chunks of many sessions that finish at once may have to wait for buffers. The stage that frees them is further
    # down, and waits for nothing that this one has not sent.
    parcels = [connector.link(channel) for channel in forward]
    frames = connector.host_link(last, 0, "frames")
    timings = connector.host_link(last, 0, "timings")
    ranks = dist.new_group(backend="gloo", timeout=connector.timeout)
    assert config.stages.partition != "auto", "resolve the config first"
    # Now, while all ranks are here: they load for different times.
    connector.close_ring(config.layers.ring_of(config.stages.partition))
    is_first, is_last = info.rank == 0, info.rank == last
    stage_links = StageLinks(
        plans_in=None if is_first else plans[info.rank - 1],
        plans_out=None if is_last else plans[info.rank],
        activations_in=None if is_first else activations[info.rank - 1],
        activations_out=None if is_last else activations[info.rank],
        parcels_in=None if is_first else parcels[info.rank - 1],
        parcels_out=None if is_last else parcels[info.rank],
        connect_ring=connector.close_ring,
        moves=group_moves(ranks),
    )
    return RankLinks(
        stage_links,
        frames if is_first else None,
        frames if is_last else None,
        timings if is_first else None,
        timings if is_last else None,
        ranks,
    )


class _Connector:
    """Makes links between pairs of ranks. A group is made by all ranks together, whether they are in it or not."""

    def __init__(self, config: StreamConfig, placement: Placement, info: RankInfo):
        self._placement = placement
        self._rank = info.rank
        self._timeout_s = config.limits.timeout_s
        self._num_buffers = num_message_buffers(info.num_ranks, config.limits.max_queued_chunks)
        self._rings: dict[Ring, RingLinks] = {}
        # Watchdogs end the run first; this is for a rank that is alive but out of step.
        self.timeout = timedelta(seconds=2 * self._timeout_s + 10)

    def channel(self, source: int, target: int, what: str) -> Channel | None:
        """Carries tensors of the device; ``None`` on other ranks."""
        if self._placement.transport != "nccl":
            channel = self._gloo_channel(source, target, what, self.timeout)
            is_staged = channel is not None and self._placement.transport == "host_staged"
            return HostStagedChannel(channel) if is_staged else channel
        group = dist.new_group(sorted((source, target)), timeout=self.timeout, backend="nccl")
        if self._rank not in (source, target):
            return None
        # The first operation of a communicator must not be a lone send or receive.
        dist.all_reduce(torch.zeros(1, device=self._placement.device), group=group)
        return self._group_channel(group, source, target, what)

    def link(self, channel: Channel | None) -> Link | None:
        """A link over ``channel``."""
        return None if channel is None else Link(channel, self._placement.device, self._num_buffers)

    def host_link(self, source: int, target: int, what: str) -> Link | None:
        """A link for tensors of the host, which may be silent for any time; ``None`` on other ranks."""
        channel = self._gloo_channel(source, target, what, _NO_TIMEOUT)
        return None if channel is None else Link(channel, torch.device("cpu"), self._num_buffers)

    def close_ring(self, ring: Ring) -> RingLinks:
        """From the ring's last stage to its first. A ring that was closed before keeps its links."""
        if ring not in self._rings:
            if ring.num_stages == 1:
                channel: Channel = LoopbackChannel("latents", self._timeout_s)
                link = self.link(channel) if self._rank == ring.first else None
            else:
                link = self.link(self.channel(ring.last, ring.first, "latents"))
            self._rings[ring] = RingLinks(
                link if self._rank == ring.first else None, link if self._rank == ring.last else None
            )
        return self._rings[ring]

    def _gloo_channel(self, source: int, target: int, what: str, timeout: timedelta) -> GroupChannel | None:
        group = dist.new_group(sorted((source, target)), timeout=timeout, backend="gloo")
        if self._rank not in (source, target):
            return None
        return self._group_channel(group, source, target, what)

    def _group_channel(self, group: Any, source: int, target: int, what: str) -> GroupChannel:
        is_source = self._rank == source
        action = f"sending {what}" if is_source else f"waiting for {what}"
        return GroupChannel(group, target if is_source else source, action)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextmanager
def without_first_exchange() -> Iterator[None]:
    """Keep the parent's ``__init__`` from exchanging a first tensor with the neighbours.

    It goes over the world group, which the ring does not use, and gloo aborts the process when ranks that share a GPU
    hand it a CUDA tensor.
    """
    send, recv = p2p.send, p2p.recv
    p2p.send = p2p.recv = lambda *_args, **_kwargs: None
    try:
        yield
    finally:
        p2p.send, p2p.recv = send, recv
