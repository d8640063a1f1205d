"""Writes a run's report: ``report.json``, ``report.html`` and ``trace.json``."""

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from ds_stream.core import Span, StreamError
from ds_stream.report.trace import make_trace

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
h2 { margin-top: 2.2rem } svg { max-width: 100%; height: auto }
table { border-collapse: collapse; display: block; overflow-x: auto } td, th { padding: .2rem .8rem .2rem 0 }
th { text-align: left } td.number { text-align: right; font-variant-numeric: tabular-nums }
pre { background: #f5f5f5; padding: 1rem; overflow-x: auto } .statement { color: #a00 }
"""
_STAGE_ROWS = {
    "role": "holds",
    "device": "device",
    "forwards": "forwards",
    "rows_per_forward": "rows a forward",
    "forward_ms_mean": "forward (ms)",
    "encode_ms_mean": "encode (ms)",
    "decode_ms_mean": "decode (ms)",
    "busy_share": "busy",
    "transfer_share": "transfer",
    "wait_share": "wait",
    "occupancy": "occupancy",
    "cache_mib": "cache (MiB)",
    "peak_host_memory_mib": "host peak (MiB)",
    "peak_gpu_memory_mib": "GPU peak (MiB)",
}


def write_report(folder: Path, report: dict[str, Any], spans: Sequence[Span]) -> None:
    """Write the three files into ``folder``, which is made if need be.

    Args:
        report: figures, as :func:`ds_stream.summary.make_report` puts them together.
        spans: what stages did when.

    Raises:
        StreamError: the folder cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n")
        trace = make_trace(spans, [stage["role"] for stage in report["stages"]])
        (folder / "trace.json").write_text(json.dumps(trace))
        (folder / "report.html").write_text(make_page(report, spans), encoding="utf-8")
    except OSError as error:
        raise StreamError(
            f"report {folder} cannot be written: {error.strerror or error}; give another folder"
        ) from error


def make_page(report: dict[str, Any], spans: Sequence[Span]) -> str:
    """The report as one HTML page that needs nothing else."""
    # Only who asks for pictures waits for the library.
    from ds_stream.report import pictures

    stream, stages = report["stream"], report["stages"]
    statement, decisions = report["tuning"]["statement"], report["tuning"]["decisions"]
    sections = [
        ("The stream", _summary(stream) + (f'<p class="statement">{escape(statement)}</p>' if statement else "")),
        ("Stages over time", pictures.occupancy(spans, len(stages))),
        ("Latency", pictures.latency(report["chunks"], stream["deadline_ms"])),
        ("Rows and ticks", pictures.rows_and_ticks(report["ticks"])),
        ("Changes of rows", _decisions(decisions) if decisions else None),
        ("What stages spent their time on", pictures.stage_shares(stages)),
        ("Stages", _stages(stages)),
        ("Balance of stages", pictures.balance(report["balance"])),
        ("Hardware and versions", _table([], [*report["hardware"].items(), *report["versions"].items()])),
        ("Configuration", f"<pre>{escape(json.dumps(report['config'], indent=2))}</pre>"),
    ]
    body = "\n".join(f"<section><h2>{title}</h2>\n{content}</section>" for title, content in sections if content)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>ds_stream report</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>'
        f"<h1>ds_stream {escape(report['version'])}: {stream['frames']} frames on {len(stages)} stages</h1>"
        f"<p>config {escape(report['config_digest'])}, seed {stream['seed']}, prompt: "
        f"{escape(report['prompt']) or 'none'}</p>\n{body}\n</body></html>\n"
    )


def _summary(stream: dict[str, Any]) -> str:
    rows = [(key.replace("_", " "), value) for key, value in stream.items() if not isinstance(value, (dict, list))]
    return _table([], rows)


def _stages(stages: Sequence[dict[str, Any]]) -> str:
    rows = [[name, *(stage[key] for stage in stages)] for key, name in _STAGE_ROWS.items()]
    return _table(["", *(f"stage {stage['stage']}" for stage in stages)], rows)


def _decisions(decisions: Sequence[dict[str, Any]]) -> str:
    rows = [[d["at_s"], d["tick"], f"{d['from_rows']} to {d['to_rows']}", d["reason"]] for d in decisions]
    return _table(["at (s)", "tick", "rows", "why"], rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    return f"<table><tr>{top}</tr>{''.join(f'<tr>{_cells(row)}</tr>' for row in rows)}</table>"


def _cells(row: Sequence[Any]) -> str:
    return "".join(
        f"<td{' class=number' if isinstance(value, (int, float)) else ''}>{escape(_shown(value))}</td>"
        for value in row
    )


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
