"""The profiler's flows in merged traces from GPU machines, compared with its own JSON, read in file order."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import modtrace
from modtrace.checking import check
from tests.support.kineto import GPU_TRACES
from tests.support.python_process import run_python
from tests.support.trace_processor import TraceProcessor

DRAWN = """
    select begin.name as begins, begin.dur as begin_dur, begin.category as category,
        end.name as ends, end.dur as end_dur, end.ts - begin.ts as apart
    from flow join slice begin on begin.id = slice_out join slice end on end.id = slice_in
"""


def ns(microseconds: float) -> int:
    """Round only the part below a microsecond: since 1970, products with a double lie 256 ns apart."""
    return int(microseconds) * 1000 + round(microseconds % 1 * 1000)


def flows_of(events: list[dict[str, Any]]) -> Counter[tuple[str, int, str, int, int]]:
    """Each flow that starts before it ends, by time and then in the file: its slices, and how far they are apart.

    The profiler writes each end of a flow directly after the slice that it belongs to. The name and the duration in ns
    identify a slice.
    """
    ends = {
        (event["ph"], event["cat"], event["id"]): (event["ts"], position, events[position - 1])
        for position, event in enumerate(events)
        if event.get("ph") in ("s", "f")
    }
    flows: Counter[tuple[str, int, str, int, int]] = Counter()
    for (phase, *flow), (begin_time, begin_position, begin) in ends.items():
        end_time, end_position, end = ends.get(("f", *flow), (-1, -1, {}))
        if phase == "s" and (begin_time, begin_position) < (end_time, end_position):
            apart = ns(end_time) - ns(begin_time)
            flows[begin["name"], ns(begin["dur"]), end["name"], ns(end["dur"]), apart] += 1
    return flows


@pytest.mark.usefixtures("gpu_traces")
@pytest.mark.parametrize(
    ("path", "count"), list(zip(GPU_TRACES, (117, 4317, 7000), strict=True)), ids=lambda value: str(value)
)
def test_perfetto_draws_flows_with_two_ends(
    path: Path, count: int, tmp_path: Path, trace_processor: type[TraceProcessor]
) -> None:
    out = tmp_path / "out.pftrace"
    modtrace.merge(path, None, out)
    opened = trace_processor.open(out)
    drawn = Counter(
        (row["begins"], row["begin_dur"], row["ends"], row["end_dur"], row["apart"])
        for row in opened.query(DRAWN)
        if row["category"] != "forward"  # these are modtrace's
    )
    expected = flows_of(json.loads(gzip.decompress(path.read_bytes()))["traceEvents"])
    assert expected.total() == count
    assert drawn == expected
    assert opened.import_problems() == {}


@pytest.mark.usefixtures("gpu_traces")
@pytest.mark.parametrize("path", GPU_TRACES, ids=lambda path: path.name)
def test_no_fault_of_a_merged_trace_is_ours(path: Path, tmp_path: Path) -> None:
    for suffix in (".json", ".pftrace"):
        out = tmp_path / f"out{suffix}"
        modtrace.merge(path, None, out)
        assert [violation for violation in check(out).faults if not violation.of_profiler] == []
        run_python("-m", "modtrace", "check", out)
    run_python("-m", "modtrace", "check", "--strict", tmp_path / "out.pftrace")
