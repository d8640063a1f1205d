"""The report: complete, well formed, with a picture of each thing that there is to show, and safe to open."""

import json
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ds_stream.core import Span, StreamError
from ds_stream.report import pictures
from ds_stream.report.trace import make_trace
from ds_stream.report.write import make_page, write_report

PROMPT = "<script>alert('boats')</script> & more"
PHASES = ("encode", "forward", "send", "wait", "decode")
SPANS = [
    Span(stage, phase, launch, 2, 100 + launch + 0.1 * stage + 0.2 * index, 0.15)
    for stage in range(2)
    for launch in range(5)
    for index, phase in enumerate(PHASES)
]


def stage(index: int) -> dict:
    shares = {"busy_share": 0.6, "transfer_share": 0.1, "wait_share": 0.3, "occupancy": 0.9}
    ms = {"forward_ms_mean": 12.5, "encode_ms_mean": None, "decode_ms_mean": 3.0}
    memory = {"cache_mib": 1.0, "peak_host_memory_mib": 500.0, "peak_gpu_memory_mib": None}
    role = {"stage": index, "role": "embed, 3 blocks", "device": "cpu", "forwards": 5, "rows_per_forward": 2.0}
    return {**role, **ms, **shares, **memory}


def make(num_chunks: int = 12) -> dict:
    ticks = [
        {"tick": t, "at_s": 0.1 * t, "rows": 1 + t % 2, "max_rows": 2, "predicted_ms": None if t < 3 else 9.0,
         "measured_ms": None if t == 0 else 10.0}
        for t in range(num_chunks)
    ]  # fmt: skip
    return {
        "version": "1.2.3",
        "config": {"stream": {"seed": 3}},
        "config_digest": "abcdef",
        "prompt": PROMPT,
        "versions": {"torch": "2.13"},
        "hardware": {"cpu": "a <fast> one", "gpus": []},
        "stream": {"seed": 3, "frames": 45, "chunk_latency_ms_p50": 123.456, "deadline_ms": 150.0, "rows": {"1": 5}},
        "chunks": [
            {"delivered_s": 0.2 * c, "latency_ms": 100.0 + c, "interval_ms": 200.0 if c else None}
            for c in range(num_chunks)
        ],
        "ticks": ticks,
        "tuning": {
            "decisions": [{"tick": 4, "at_s": 0.4, "from_rows": 2, "to_rows": 1, "reason": "fewest rows < need"}],
            "statement": "20 chunks/s cannot be kept",
        },
        "balance": [
            {"at_s": 0.0, "reason": "calibration", "before": None,
             "after": {"partition": [0, 3, 6], "stage_ms": [1, 2]}},
            {"at_s": 1.0, "reason": "uneven", "before": {"partition": [0, 3, 6], "stage_ms": [1, 2]},
             "after": {"partition": [0, 4, 6], "stage_ms": [1.5, 1.5]}},
        ],
        "stages": [stage(0), stage(1)],
    }  # fmt: skip


class Balanced(HTMLParser):
    """Every element that opens, closes, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.append(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_three_files(tmp_path: Path):
    folder = tmp_path / "deep" / "report"
    write_report(folder, make(), SPANS)
    assert json.loads((folder / "report.json").read_text()) == make()
    assert len(json.loads((folder / "trace.json").read_text())["traceEvents"]) == 2 + len(SPANS)
    page = (folder / "report.html").read_text()
    parser = Balanced()
    parser.feed(page)
    assert not parser.open
    # Stages over time, latency, rows, shares, balance.
    assert parser.seen.count("svg") == 5
    assert "script" not in parser.seen, "a prompt is text"
    for text in ("fewest rows &lt; need", "20 chunks/s cannot be kept", "a &lt;fast&gt; one", "123", "2 to 1"):
        assert text in page
    # It opens without a network.
    assert "http://" not in page.replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
        "http://creativecommons.org", ""
    )


def test_a_run_too_short_for_pictures():
    report = make(0)
    report["balance"] = []
    report["tuning"] = {"decisions": [], "statement": None}
    report["stages"] = [{**stage(0), "busy_share": None}]
    page = make_page(report, [])
    assert "<svg" not in page
    assert "Stages over time" not in page


def test_the_trace_keeps_times_and_places():
    trace = make_trace(SPANS, ["embed", "decode"])
    names, events = trace["traceEvents"][:2], trace["traceEvents"][2:]
    assert [name["args"]["name"] for name in names] == ["stage 0: embed", "stage 1: decode"]
    assert min(event["ts"] for event in events) == 0
    for event, span in zip(events, SPANS, strict=True):
        assert (event["pid"], event["name"]) == (span.stage, span.phase)
        assert event["ts"] == pytest.approx(1e6 * (span.start_s - 100))
        assert event["dur"] == pytest.approx(150_000)
        assert event["args"] == {"launch": span.launch, "rows": 2}


def test_pictures_say_what_they_show():
    """Text is drawn as glyphs: axes are told by comments that matplotlib leaves beside them."""
    svg = pictures.latency(make()["chunks"], 150.0)
    ElementTree.fromstring(svg)
    for label in ("chunk latency (ms)", "time (s)", "target"):
        assert f"<!-- {label} -->" in svg
    long = [Span(0, "forward", launch, 1, float(launch), 0.5) for launch in range(10_000)]
    svg = pictures.occupancy(long, 1)
    assert svg.count("<path") < 10_000, "what nobody can see is not drawn"
    assert "<!-- the start -->" in svg
    assert "<!-- the end -->" in svg
    assert "<!-- the whole run -->" in pictures.occupancy(SPANS, 2)


def test_a_folder_that_cannot_be_written(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(StreamError, match="cannot be written"):
        write_report(tmp_path / "file" / "report", make(), SPANS)
