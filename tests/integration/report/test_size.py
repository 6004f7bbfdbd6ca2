"""Reports stay below a size limit, and say what they leave out."""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import modtrace
from modtrace import Timeline, WriteError
from modtrace.reporting import MAX_REPORT_BYTES, Report, zip_bytes
from tests.support.gpt_timeline import gpt_timeline
from tests.support.kineto import GPU_TRACES
from tests.support.report_bytes import moved

ALEXNET, DDP, _ = GPU_TRACES


def read_back(report: Report, tmp_path: Path) -> Timeline:
    (tmp_path / "t.pftrace.gz").write_bytes(report.files["trace.pftrace.gz"])
    return modtrace.load(tmp_path / "t.pftrace.gz")


def test_the_limit_is_githubs() -> None:
    assert MAX_REPORT_BYTES == 25_000_000


def test_a_long_trace_is_cut_to_the_last_steps(tmp_path: Path, bare: int) -> None:
    timeline = gpt_timeline(steps=40, layers=8)
    limit = bare + (modtrace.report(timeline).size - bare) // 2

    report = modtrace.report(timeline, max_bytes=limit)

    assert report.size == len(zip_bytes(report.files)) <= limit
    found_steps = re.fullmatch(r"the (\d+) slowest steps of 40", report.cut or "")
    assert found_steps is not None
    kept = int(found_steps[1])
    assert 10 < kept < 40
    # All steps take the same time here; among equal steps the later ones are kept.
    assert list(read_back(report, tmp_path).spans) == moved(timeline)[-len(timeline.steps(40 - kept).spans) :]
    summary = report.files["summary.md"].decode()
    assert (
        f"**Cut to fit:** the trace and the page have the {kept} slowest steps of 40; the table covers all." in summary
    )
    assert "| `GPT2LMHeadModel.lm_head` | `Linear` | 40 |" in summary


def test_the_slowest_steps_are_kept_if_not_all_fit(tmp_path: Path, bare: int) -> None:
    timeline = gpt_timeline(steps=40, layers=8)
    # Steps 7 and 21 take longer: their outermost spans end later, but before the next step starts.
    columns = timeline.columns
    end = columns.end.copy()
    for step in (7, 21):
        end[np.flatnonzero((columns.step == step) & (columns.depth == 0))] += 1
    timeline = replace(timeline, slices=replace(columns, end=end))
    whole = modtrace.report(timeline).size

    report = modtrace.report(timeline, max_bytes=bare + (whole - bare) // 10)

    assert re.fullmatch(r"the \d slowest steps of 40", report.cut or "")
    assert {7, 21} <= {span.step for span in read_back(report, tmp_path).spans}


def test_one_long_step_is_cut_to_its_end(tmp_path: Path, bare: int) -> None:
    timeline = gpt_timeline(steps=1, layers=300)
    limit = bare + (modtrace.report(timeline).size - bare) // 2

    report = modtrace.report(timeline, max_bytes=limit)

    assert report.size <= limit
    assert re.fullmatch(r"the last [\d.,]+ ms of [\d.,]+ ms", report.cut or "")
    rest = read_back(report, tmp_path)
    assert len(timeline.spans) / 4 < len(rest.spans) < len(timeline.spans)
    assert int(rest.columns.end.max()) == max(span.end_ns for span in moved(timeline))


@pytest.mark.usefixtures("gpu_traces")
def test_a_profilers_trace_is_cut_too(tmp_path: Path) -> None:
    source = DDP
    whole = modtrace.report(source)

    report = modtrace.report(source, max_bytes=400_000)

    assert whole.cut is None
    assert whole.size > 600_000
    assert report.size <= 400_000
    assert report.cut == "the profiler's slowest step of 3"
    assert "the page have the profiler's slowest step of 3; " in report.files["summary.md"].decode()


@pytest.mark.usefixtures("gpu_traces")
def test_a_profilers_trace_without_steps_is_cut_to_its_end() -> None:
    source = ALEXNET
    limit = modtrace.report(source).size - 10_000

    report = modtrace.report(source, max_bytes=limit)

    assert report.size <= limit
    assert re.fullmatch(r"the last [\d.,]+ ms of 43,458\.933 ms", report.cut or "")


def test_a_profilers_trace_is_cut_to_its_steps(tmp_path: Path, trace_processor: Any) -> None:
    place = {"pid": 1, "tid": 1}
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "x"}}]
    random = np.random.default_rng(0)
    for step in range(10):
        begin = 1e6 * step
        events.append(
            {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{step}", "ts": begin + 1, "dur": 9e5, **place}
        )
        starts = np.sort(random.integers(10, 800_000, 4_000)).tolist()
        operation = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "dur": 0.5, **place}
        events += [{**operation, "ts": begin + start} for start in starts]
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"baseTimeNanoseconds": 10**18, "traceEvents": events}))
    whole = modtrace.report(path)

    report = modtrace.report(path, max_bytes=whole.size * 2 // 3)

    kept = re.fullmatch(r"the profiler's (\d) slowest steps of 10", report.cut or "")
    assert kept is not None
    trace = trace_processor.open(gzip.decompress(report.files["trace.pftrace.gz"]))
    steps = trace.query("select name from slice where name glob 'ProfilerStep*' order by ts")
    assert [row["name"] for row in steps] == [f"ProfilerStep#{step}" for step in range(10 - int(kept[1]), 10)]


def test_nothing_is_written_if_nothing_fits(tmp_path: Path) -> None:
    out = tmp_path / "bug.zip"
    out.write_bytes(b"before")

    with pytest.raises(WriteError, match="a report of 10,000 bytes cannot hold even one span"):
        modtrace.report(gpt_timeline(2, 1), out, max_bytes=10_000)

    assert out.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [out]


def test_a_cut_report_says_so_on_the_terminal(tmp_path: Path, caplog: pytest.LogCaptureFixture, bare: int) -> None:
    timeline = gpt_timeline(steps=40, layers=8)
    limit = bare + (modtrace.report(timeline).size - bare) // 2

    modtrace.report(timeline, tmp_path / "bug.zip", max_bytes=limit)

    (message,) = (record.message for record in caplog.records if record.name == "modtrace")
    kept = len({span.step for span in modtrace.load(tmp_path / "bug.zip").spans})
    assert 10 < kept < 40
    assert message.startswith(f"{tmp_path / 'bug.zip'} has only the {kept} slowest steps of 40, to stay within")
