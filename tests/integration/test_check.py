"""The validator, compared with the program whose faults it predicts."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as proto

from modtrace.checking import check
from tests.support.trace_processor import TraceProcessor

DATA = Path(__file__).parents[1] / "data" / "check"

slices = st.builds(
    lambda tid, start, length: {"ph": "X", "name": "x", "pid": 1, "tid": tid, "ts": start, "dur": length},
    st.integers(1, 2),
    st.integers(0, 12),
    st.integers(1, 6),
)
flows = st.builds(
    lambda ph, number, ts: {"ph": ph, "id": number, "name": "n", "cat": "c", "bp": "e", "pid": 1, "tid": 1, "ts": ts},
    st.sampled_from("sf"),
    st.integers(1, 3),
    st.integers(0, 18).map(lambda ts: ts + 0.5),
)
bound_flows = st.builds(
    lambda number, ts, **ways: (
        {"ph": "X", "name": "x", "pid": 1, "tid": 1, "ts": ts, "dur": 1, "bind_id": number} | ways
    ),
    st.sampled_from([1, 2, "0x2", "soon"]),
    st.integers(0, 18).map(lambda ts: ts * 2),
    flow_out=st.booleans(),
    flow_in=st.booleans(),
)


def counted(path: Path) -> Counter[str]:
    return Counter(violation.rule for violation in check(path).faults)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(slices, min_size=1, max_size=12))
def test_partial_overlaps_are_those_that_the_trace_processor_drops(
    trace_processor: type[TraceProcessor], tmp_path: Path, events: list[dict[str, Any]]
) -> None:
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"traceEvents": events}))

    dropped = trace_processor.open(trace).import_problems().get("slice_drop_overlapping_complete_event", 0)

    assert counted(trace)["partial-overlap"] == dropped


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(flows, max_size=8, unique_by=lambda flow: flow["ts"]))
def test_flows_are_reported_as_the_trace_processor_counts_them(
    trace_processor: type[TraceProcessor], tmp_path: Path, events: list[dict[str, Any]]
) -> None:
    around = {"ph": "X", "name": "x", "pid": 1, "tid": 1, "ts": 0, "dur": 100}
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"traceEvents": [around, *events]}))

    problems = trace_processor.open(trace).import_problems()

    rules = counted(trace)
    assert rules["flow-without-start"] == problems.get("flow_end_without_start", 0)
    assert rules["duplicate-flow"] == problems.get("flow_duplicate_id", 0)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(bound_flows, max_size=8, unique_by=lambda flow: flow["ts"]))
def test_flows_of_slices_are_reported_as_the_trace_processor_counts_them(
    trace_processor: type[TraceProcessor], tmp_path: Path, events: list[dict[str, Any]]
) -> None:
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"traceEvents": events}))

    problems = trace_processor.open(trace).import_problems()

    rules = counted(trace)
    unstarted = problems.get("flow_end_without_start", 0) + problems.get("flow_step_without_start", 0)
    assert rules["flow-without-start"] == unstarted
    assert rules["duplicate-flow"] == problems.get("flow_duplicate_id", 0)


@pytest.mark.parametrize(
    "name",
    ["good.json", "sibling-threads.json", "flow-to-next-slice.json", "bound-flows.json", "good.textproto"],
)
def test_a_file_without_faults_imports_clean(name: str, trace_processor: type[TraceProcessor]) -> None:
    trace = (DATA / name).read_bytes()
    if name.endswith(".textproto"):
        trace = text_format.Parse(trace.decode(), proto.Trace()).SerializeToString()

    assert trace_processor.open(trace).import_problems() == {}
