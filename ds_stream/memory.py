"""Whether the stages fit where they are going to run."""

import psutil
import torch

from ds_stream.controller.stage_balancer import MemoryLimit
from ds_stream.core import RankInfo
from ds_stream.engine.groups import num_gpus
from ds_stream.model.memory_plan import MIB, StageMemory, check_fits, describe_plan, layer_bytes, plan_memory
from ds_stream.schedule.planner import num_message_buffers
from ds_stream.settings import StreamConfig

# The rest is for activations, messages and the VAE's working memory, which check_memory adds up.
_SHARE_FOR_LAYERS = 0.7


def print_memory_plan(config: StreamConfig, text_encoder_bytes: int) -> list[StageMemory]:
    """Work the plan of all stages out, and print it.

    Args:
        text_encoder_bytes: what the text encoder takes on the first rank before the stages load.
    """
    partition = config.stages.partition
    assert partition != "auto", "resolve the config first"
    num_buffers = num_message_buffers(len(partition) - 1, config.limits.max_queued_chunks)
    plan = plan_memory(config, config.batch.runs_exact_rows(on_cpu=num_gpus(config) == 0), num_buffers)
    print(describe_plan(plan, partition), flush=True)
    if text_encoder_bytes:
        size = f"{text_encoder_bytes / MIB:,.1f}"
        print(
            f"text encoder: {size} on the first rank, gone before the stages load; none if its cache has the prompts"
        )
    return plan


def memory_limit(config: StreamConfig, info: RankInfo) -> MemoryLimit:
    """What layers take, and what a stage of this machine may hold of them."""
    gpus = num_gpus(config)
    available = float(torch.cuda.mem_get_info()[0]) if gpus else float(psutil.virtual_memory().available)
    sharing = -(-info.num_local_ranks // max(gpus, 1))
    return MemoryLimit(layer_bytes(config), _SHARE_FOR_LAYERS * available / sharing)


def check_memory(plan: list[StageMemory], config: StreamConfig, info: RankInfo) -> None:
    """Raise :class:`ValueError` if this machine's stages do not fit its memory, saying which setting to lower."""
    # Ranks are numbered machine by machine, and the first machine is this one.
    here = plan[: info.num_local_ranks] if info.num_ranks > 1 else plan
    gpus = num_gpus(config)
    if gpus == 0:
        check_fits(here, psutil.virtual_memory().available, "this machine")
    for gpu in range(gpus):
        # What another GPU has free is its own ranks' to ask: asking takes memory of it.
        is_own = gpu == info.local_rank % gpus
        total = torch.cuda.get_device_properties(gpu).total_memory
        check_fits(here[gpu::gpus], torch.cuda.mem_get_info(gpu)[0] if is_own else total, f"GPU {gpu}")
