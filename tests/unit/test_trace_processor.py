"""The trace processor of the tests: it must detect every fault in a trace, or the other tests prove nothing."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.support.trace_processor import TraceProcessor, TraceProcessorError

Opener = type[TraceProcessor]


def chrome(*events: dict[str, object]) -> bytes:
    return json.dumps({"traceEvents": [{"pid": 1, "tid": 2, "ph": "X", **event} for event in events]}).encode()


def test_reads_slices_of_a_file(trace_processor: Opener, tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(chrome({"ts": 1.001, "dur": 2, "name": "outer"}, {"ts": 2, "dur": 1, "name": None})))
    opened = trace_processor.open(path)
    rows = opened.query("select name, ts, dur, depth from slice order by ts")
    assert rows == [
        {"name": "outer", "ts": 1001, "dur": 2000, "depth": 0},
        {"name": "[No name]", "ts": 2000, "dur": 1000, "depth": 1},
    ]
    assert opened.import_problems() == {}


def test_counts_partial_overlap_as_a_problem(trace_processor: Opener) -> None:
    opened = trace_processor.open(chrome({"ts": 1, "dur": 2, "name": "a"}, {"ts": 2, "dur": 2, "name": "b"}))
    assert opened.import_problems() == {"slice_drop_overlapping_complete_event": 1}


def test_counts_a_flow_without_a_slice_as_a_problem(trace_processor: Opener) -> None:
    flow = {"ph": "s", "tid": 3, "id": 1, "ts": 9, "cat": "c", "name": "n"}
    opened = trace_processor.open(chrome({"ts": 1, "dur": 2, "name": "a"}, flow))
    assert opened.import_problems() == {"flow_no_enclosing_slice": 1}


def test_refuses_a_bad_trace_and_a_bad_query(trace_processor: Opener) -> None:
    with pytest.raises(TraceProcessorError):
        trace_processor.open(b"this is no trace")
    opened = trace_processor.open(chrome())
    with pytest.raises(TraceProcessorError, match="no such column"):
        opened.query("select nothing_of_the_kind")


def test_an_older_trace_can_no_longer_be_queried(trace_processor: Opener) -> None:
    older = trace_processor.open(chrome())
    trace_processor.open(chrome())
    with pytest.raises(TraceProcessorError, match="another trace"):
        older.query("select 1")


def test_long_results_come_whole(trace_processor: Opener) -> None:
    count = 50_000
    numbers = f"with recursive n(i) as (select 0 union all select i + 1 from n where i < {count - 1})"
    rows = trace_processor.open(chrome()).query(f"{numbers} select i, 'x' || i as s, i / 2.0 as f from n")
    assert rows == [{"i": i, "s": f"x{i}", "f": i / 2} for i in range(count)]
