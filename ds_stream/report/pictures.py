"""The report's pictures, each as SVG text. Where there is nothing to show, there is no picture."""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ds_stream.core import Span

_COLOURS = {
    "forward": "#3b6fb6",
    "encode": "#4a9d5b",
    "decode": "#d9822b",
    "send": "#8e5bb0",
    "wait": "#dddddd",
}
_WIDTH_INCHES = 9.0
# More are neither seen nor quickly drawn.
_MOST_SPANS = 1500
_MOST_POINTS = 2000


def occupancy(spans: Sequence[Span], num_stages: int) -> str | None:
    """What each stage did when, at the start and at the end of the stream."""
    if not spans:
        return None
    ordered = sorted(spans, key=lambda span: span.start_s)
    began_s = ordered[0].start_s
    count = min(_MOST_SPANS, len(ordered))
    parts = [("the whole run", ordered)]
    if len(ordered) > count:
        parts = [("the start", ordered[:count]), ("the end", ordered[-count:])]
    figure = Figure(figsize=(_WIDTH_INCHES, len(parts) * (0.9 + 0.45 * num_stages) + 0.4), layout="constrained")
    for axes, (name, part) in zip(figure.subplots(len(parts), 1, squeeze=False)[:, 0], parts, strict=True):
        for phase, colour in _COLOURS.items():
            for stage in range(num_stages):
                bars = [
                    (span.start_s - began_s, span.seconds)
                    for span in part
                    if span.stage == stage and span.phase == phase
                ]
                axes.broken_barh(bars, (stage - 0.4, 0.8), facecolors=colour, linewidth=0)
        axes.set(title=name, xlabel="time (s)", ylabel="stage", ylim=(num_stages - 0.5, -0.5))
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    figure.legend(
        handles=[_patch(colour, phase) for phase, colour in _COLOURS.items()],
        loc="outside upper center",
        ncols=len(_COLOURS),
        frameon=False,
    )
    return _svg(figure)


def latency(chunks: Sequence[dict[str, Any]], deadline_ms: float | None) -> str | None:
    """Chunk latency: how often which, and when."""
    if not chunks:
        return None
    latency_ms = [chunk["latency_ms"] for chunk in chunks]
    shown = _thinned(chunks)
    figure = Figure(figsize=(_WIDTH_INCHES, 3.2), layout="constrained")
    histogram, over_time = figure.subplots(1, 2, width_ratios=[1, 2])
    histogram.hist(latency_ms, bins=min(30, max(len(latency_ms), 5)), color=_COLOURS["forward"])
    histogram.set(xlabel="chunk latency (ms)", ylabel="chunks")
    histogram.yaxis.set_major_locator(MaxNLocator(integer=True))
    over_time.plot(
        [chunk["delivered_s"] for chunk in shown],
        [chunk["latency_ms"] for chunk in shown],
        ".",
        label="chunk latency",
        color=_COLOURS["forward"],
    )
    intervals = [chunk for chunk in shown if chunk["interval_ms"] is not None]
    over_time.plot(
        [chunk["delivered_s"] for chunk in intervals],
        [chunk["interval_ms"] for chunk in intervals],
        ".",
        label="since the chunk before",
        color=_COLOURS["decode"],
    )
    if deadline_ms is not None:
        histogram.axvline(deadline_ms, color="crimson", linestyle="--")
        over_time.axhline(deadline_ms, color="crimson", linestyle="--", label="target")
    over_time.set(xlabel="time (s)", ylabel="ms")
    over_time.set_ylim(bottom=0)
    _legend_above(over_time)
    return _svg(figure)


def rows_and_ticks(ticks: Sequence[dict[str, Any]]) -> str | None:
    """Rows of the launches, and how long ticks took against what was predicted."""
    if not ticks:
        return None
    shown = _thinned(ticks)
    at_s = [tick["at_s"] for tick in shown]
    figure = Figure(figsize=(_WIDTH_INCHES, 4.2), layout="constrained")
    rows, times = figure.subplots(2, 1, sharex=True, height_ratios=[1, 1.4])
    rows.step(at_s, [tick["max_rows"] for tick in shown], where="post", label="most rows", color="#999999")
    rows.step(at_s, [tick["rows"] for tick in shown], where="post", label="rows", color=_COLOURS["forward"])
    rows.set(ylabel="rows a launch")
    rows.set_ylim(bottom=0)
    rows.yaxis.set_major_locator(MaxNLocator(integer=True))
    measured = [np.nan if tick["measured_ms"] is None else tick["measured_ms"] for tick in shown]
    predicted = [np.nan if tick["predicted_ms"] is None else tick["predicted_ms"] for tick in shown]
    times.plot(at_s, measured, ".", markersize=5, label="measured", color=_COLOURS["forward"])
    times.plot(at_s, predicted, label="predicted", color="crimson")
    times.set(xlabel="time (s)", ylabel="tick (ms)")
    # A wait for input would flatten everything else.
    if np.isfinite(measured).any():
        times.set_ylim(0, 1.5 * max(np.nanpercentile(measured, 98), np.nanmax([*predicted, 0.0])))
    for axes in (rows, times):
        _legend_above(axes)
    return _svg(figure)


def stage_shares(stages: Sequence[dict[str, Any]]) -> str | None:
    """Share of the run that each stage spent in layers, in transfers, and waiting."""
    if any(stage["busy_share"] is None for stage in stages):
        return None
    figure = Figure(figsize=(_WIDTH_INCHES, 1.2 + 0.4 * len(stages)), layout="constrained")
    axes = figure.subplots()
    names = [f"{stage['stage']}: {stage['role']}" for stage in stages]
    left = np.zeros(len(stages))
    for key, colour in (("busy_share", "forward"), ("transfer_share", "send"), ("wait_share", "wait")):
        shares = 100 * np.array([stage[key] for stage in stages])
        axes.barh(names, shares, left=left, color=_COLOURS[colour], label=key.removesuffix("_share"))
        left += shares
    axes.set(xlabel="share of the run (%)", xlim=(0, 100))
    axes.invert_yaxis()
    _legend_above(axes)
    return _svg(figure)


def balance(moves: Sequence[dict[str, Any]]) -> str | None:
    """Time of each stage before and after each cut or move of layers."""
    shown = [move for move in moves if move["after"] is not None]
    if not shown:
        return None
    figure = Figure(figsize=(_WIDTH_INCHES, 2.6 * len(shown)), layout="constrained")
    for axes, move in zip(figure.subplots(len(shown), 1, squeeze=False)[:, 0], shown, strict=True):
        states = [(name, move[name]) for name in ("before", "after") if move[name] is not None]
        width = 0.8 / len(states)
        for index, (name, state) in enumerate(states):
            stage_ms = np.asarray(state["stage_ms"])
            places = np.arange(len(stage_ms)) - 0.4 + width * (index + 0.5)
            colour = _COLOURS["forward"] if name == "after" else "#999999"
            axes.bar(places, stage_ms, width, label=f"{name}: {list(state['partition'])}", color=colour)
        axes.set(title=f"{move['at_s']:.1f} s: {move['reason']}", xlabel="stage", ylabel="ms a tick, predicted")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        _legend_above(axes)
    return _svg(figure)


def _thinned(points: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    return points[:: -(-len(points) // _MOST_POINTS)]


def _legend_above(axes: Axes) -> None:
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, frameon=False, fontsize="small", borderaxespad=0)
    axes.set_title(axes.get_title(), loc="left", fontsize="medium")
    axes.set_title("", loc="center")


def _patch(colour: str, label: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=colour, label=label)


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    FigureCanvasSVG(figure).print_svg(buffer)
    text = buffer.getvalue()
    # Without the XML declaration it may stand within HTML.
    return text[text.index("<svg") :]
