"""Draws the schedule as text: stages down, ticks across, ``2b`` for chunk 2 at step 1."""

from collections.abc import Sequence

from ds_stream.core import Plan, Row
from ds_stream.partition import Ring
from ds_stream.schedule.planner import RingPlanner, backlogged_chunks_per_tick


def plan_backlog(
    num_stages: int, num_passes: int, lead: int, max_rows: int, num_chunks: int, num_ticks: int
) -> list[Plan]:
    """Plans of the first ``num_ticks`` launches of one session whose ``num_chunks`` chunks are all waiting."""
    planner = RingPlanner(num_stages, num_passes, lead, max_rows)
    planner.open(0)
    return [Plan(planner.tick, planner.next_rows({0: num_chunks})) for _ in range(num_ticks)]


def render_grid(plans: Sequence[Plan], ring: Ring, num_passes: int) -> str:
    """The grid of ``plans``, one line per stage of the ring and one of the chunks that finish."""
    num_stages = ring.num_stages
    ticks = range(len(plans))
    lines = [["tick", *map(str, ticks)]]
    for stage in range(num_stages):
        launches = [plans[tick - stage].rows if tick >= stage else () for tick in ticks]
        lines.append([f"stage {ring.first + stage}", *("+".join(map(_label, rows)) or "." for rows in launches)])
    last = [plans[tick - num_stages + 1].rows if tick >= num_stages - 1 else () for tick in ticks]
    finished = [[str(row.chunk) for row in rows if row.step == num_passes - 1] for rows in last]
    lines.append(["finished", *("+".join(chunks) or "." for chunks in finished)])
    widths = [max(len(line[column]) for line in lines) + 2 for column in range(len(lines[0]))]
    return "\n".join(
        "".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def describe_schedule(num_stages: int, ring: Ring, num_passes: int, lead: int, max_rows: int) -> str:
    """The grid of a backlogged session until it is in its stride, with latency and throughput in ticks.

    Args:
        num_stages: with those outside ``ring``, which hold the VAE alone.
    """
    others = [stage for stage in range(num_stages) if not ring.first <= stage <= ring.last]
    vae_only = f"\nstages outside the ring, with the VAE alone: {others}" if others else ""
    num_stages = ring.num_stages
    num_ticks = min(2 * num_passes * num_stages + 1, 24)
    plans = plan_backlog(num_stages, num_passes, lead, max_rows, num_ticks, num_ticks)
    rate = backlogged_chunks_per_tick(num_stages, num_passes, lead, max_rows)
    return (
        f"{num_stages} stages in the ring, {num_passes} passes a chunk, at most {max_rows} rows, context lead {lead}; "
        f"every chunk waiting, 2b = chunk 2 at step 1\n{render_grid(plans, ring, num_passes)}\n"
        f"latency {num_passes * num_stages} ticks, throughput {rate:.3g} chunks a tick{vae_only}"
    )


def _label(row: Row) -> str:
    return f"{row.chunk}{chr(ord('a') + row.step) if row.step < 26 else f'.{row.step}'}"
