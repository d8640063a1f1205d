"""Where a rank runs, and the process groups and links between ranks."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe import p2p

from ds_stream.core import RankInfo
from ds_stream.engine.links import Channel, GroupChannel, HostStagedChannel, Link, LoopbackChannel, StageLinks
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
    """All links of one rank."""

    stage: StageLinks
    frames_in: Link | None
    """Controller's rank, from the last stage; ``None`` where they are one."""
    frames_out: Link | None
    """Last stage, to the controller's rank."""


def connect(config: StreamConfig, placement: Placement, info: RankInfo) -> RankLinks:
    """Make the links between the stages; every rank calls it.

    Plans and frames travel on gloo groups of their own, tensors as the placement says.
    """
    last = info.num_ranks - 1
    num_buffers = num_message_buffers(info.num_ranks, config.limits.max_queued_chunks)
    cpu = torch.device("cpu")
    if last == 0:
        latents = Link(LoopbackChannel("latents", config.limits.timeout_s), placement.device, num_buffers)
        return RankLinks(StageLinks(None, None, None, None, latents, latents), None, None)
    # Watchdogs end the run first; this is for a rank that is alive but out of step.
    timeout = timedelta(seconds=2 * config.limits.timeout_s + 10)

    def link(source: int, target: int, what: str, on_device: bool, timeout: timedelta) -> Link | None:
        backend = "nccl" if on_device and placement.transport == "nccl" else "gloo"
        group = dist.new_group(sorted((source, target)), timeout=timeout, backend=backend)
        if info.rank not in (source, target):
            return None
        assert group is not None
        peer = target if info.rank == source else source
        action = f"sending {what}" if info.rank == source else f"waiting for {what}"
        channel: Channel = GroupChannel(group, peer, action)
        if on_device and placement.transport == "host_staged":
            channel = HostStagedChannel(GroupChannel(group, peer, action))
        if backend == "nccl":
            # The first operation of a communicator must not be a lone send or receive.
            dist.all_reduce(torch.zeros(1, device=placement.device), group=group)
        return Link(channel, placement.device if on_device else cpu, num_buffers)

    plans = [link(stage, stage + 1, "a plan", False, _NO_TIMEOUT) for stage in range(last)]
    activations = [link(stage, stage + 1, "activations", True, timeout) for stage in range(last)]
    latents_back = link(last, 0, "latents", True, timeout)
    frames_back = link(last, 0, "frames", False, _NO_TIMEOUT)
    is_first, is_last = info.rank == 0, info.rank == last
    stage_links = StageLinks(
        plans_in=None if is_first else plans[info.rank - 1],
        plans_out=None if is_last else plans[info.rank],
        activations_in=None if is_first else activations[info.rank - 1],
        activations_out=None if is_last else activations[info.rank],
        latents_in=latents_back if is_first else None,
        latents_out=latents_back if is_last else None,
    )
    return RankLinks(stage_links, frames_back if is_first else None, frames_back if is_last else None)


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
