"""Stretches of time as a trace that ui.perfetto.dev and chrome://tracing open."""

from collections.abc import Sequence
from typing import Any

from ds_stream.core import Span


def make_trace(spans: Sequence[Span], roles: Sequence[str]) -> dict[str, Any]:
    """One process per stage, in the Trace Event Format's complete events; times in us from the first span.

    Args:
        roles: what each stage holds.
    """
    began_s = min((span.start_s for span in spans), default=0.0)
    names = [
        {"ph": "M", "name": "process_name", "pid": stage, "args": {"name": f"stage {stage}: {role}"}}
        for stage, role in enumerate(roles)
    ]
    events = [
        {
            "ph": "X",
            "name": span.phase,
            "cat": span.phase,
            "pid": span.stage,
            "tid": 0,
            "ts": 1e6 * (span.start_s - began_s),
            "dur": 1e6 * span.seconds,
            "args": {"launch": span.launch, "rows": span.num_rows},
        }
        for span in spans
    ]
    return {"displayTimeUnit": "ms", "traceEvents": [*names, *events]}
