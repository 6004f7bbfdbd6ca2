"""Content of a report: the whole trace, and the same report each time."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import modtrace
from modtrace import Timeline
from modtrace.reporting import zip_bytes
from modtrace.reporting.clean_timeline import REPORT_START_NS
from tests.support.gpt_timeline import gpt_timeline
from tests.support.kineto import GPU_TRACES
from tests.support.report_bytes import FILES, moved, words_in

ALEXNET, DDP, _ = GPU_TRACES


def test_the_trace_in_a_report_is_whole(run: Path, tmp_path: Path) -> None:
    (tmp_path / "t.pftrace.gz").write_bytes(modtrace.report(run / "run.ring").files["trace.pftrace.gz"])

    there, here = modtrace.load(tmp_path / "t.pftrace.gz"), modtrace.load(run / "run.ring")

    first = int(here.slices.start.min()) - REPORT_START_NS
    assert [(span.phase, span.start_ns, span.end_ns, span.depth, *span[8:11]) for span in there.spans] == [
        (span.phase, span.start_ns - first, span.end_ns - first, span.depth, *span[8:11]) for span in here.spans
    ]  # all but names, tracks, processes and the start
    assert [span.module_class for span in there.spans] == [span.module_class for span in here.spans]
    assert there.stats == here.stats
    assert "host" not in there.metadata


@pytest.mark.usefixtures("gpu_traces")
def test_the_profilers_kernels_are_in_a_report(trace_processor: Any, tmp_path: Path) -> None:
    files = modtrace.report(DDP).files
    trace = trace_processor.open(gzip.decompress(files["trace.pftrace.gz"]))
    count = "select category, count(*) as n from slice group by 1"
    clean = {row["category"]: row["n"] for row in trace.query(count)}
    problems = trace.import_problems()
    modtrace.merge(DDP, None, tmp_path / "all.pftrace")
    all_ = {row["category"]: row["n"] for row in trace_processor.open(tmp_path / "all.pftrace").query(count)}

    assert problems == {}
    assert clean == all_
    assert clean["kernel"] == 2700


def test_a_report_of_a_merged_trace_has_the_modules_and_the_profilers_events(run: Path, trace_processor: Any) -> None:
    files = modtrace.report(run / "merged.json").files
    trace = trace_processor.open(gzip.decompress(files["trace.json.gz"]))
    spans = len(modtrace.load(run / "run.ring").spans)

    assert trace.import_problems() == {}
    rows = trace.query("select category, count(*) as n from slice group by 1")
    counts = {row["category"]: row["n"] for row in rows}
    assert counts["forward"] + counts["backward"] >= spans / 2
    assert counts["cpu_op"] > 100
    assert b"| module | class | calls | " in files["summary.md"]


@pytest.mark.usefixtures("gpu_traces")
def test_a_report_of_a_merged_gpu_trace_has_gpu_times(tmp_path: Path) -> None:
    modtrace.merge(ALEXNET, None, tmp_path / "merged.json")

    summary = modtrace.report(tmp_path / "merged.json").files["summary.md"].decode()
    assert "| kernels | GPU forward ms | GPU self ms |" in summary
    # The trace's record_function ranges count as modules; the user's names for them are left out.
    assert "| `annotation 1` | `record_function` | 1 | 43425.283 | 30584.847 | 1 | 66.203 | 55.574 |" in summary


def test_aliases_keep_every_time_and_place(tmp_path: Path) -> None:
    timeline = gpt_timeline(steps=2, layers=2)

    def read(files: dict[str, bytes]) -> Timeline:
        (tmp_path / "t.pftrace.gz").write_bytes(files["trace.pftrace.gz"])
        return modtrace.load(tmp_path / "t.pftrace.gz")

    plain = read(dict(modtrace.report(timeline).files))
    aliased = read(dict(modtrace.report(timeline, anonymize=True).files))

    assert list(plain.spans) == moved(timeline)
    pairs = [(old, new) for old, new in zip(plain.spans, aliased.spans, strict=True)]
    assert [old[3:] for old, _ in pairs] == [new[3:] for _, new in pairs]
    for part in ("name", "fqn", "module_class"):
        alias = dict.fromkeys((getattr(old, part), getattr(new, part)) for old, new in pairs)
        assert len(alias) == len({old for old, _ in alias}) == len({new for _, new in alias})
    words = (
        "gpt2",
        "conv1d",
        "embedding",
        "layernorm",
        "gelu",
        "c_attn",
        "c_proj",
        "ln_1",
        "lm_head",
        "transformer",
        "wte",
    )
    assert words_in(zip_bytes(modtrace.report(timeline, anonymize=True).files), words) == []


def test_a_report_is_the_same_for_the_same_trace() -> None:
    timeline = gpt_timeline(steps=2, layers=1)

    for anonymize in (False, True):
        first, second = (zip_bytes(modtrace.report(timeline, anonymize=anonymize).files) for _ in range(2))
        assert first == second


def test_an_empty_timeline_has_a_report_too() -> None:
    report = modtrace.report(
        replace(gpt_timeline(1, 1), slices=gpt_timeline(1, 1).columns.take(np.array([], np.int64)))
    )

    assert list(report.files) == FILES
    assert "- No module spans." in report.files["summary.md"].decode()
