"""Traces unlike today's CUDA traces: categories from before torch 1.13, HIP's names; and files that are not traces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import modtrace
from modtrace import TraceError
from modtrace.timeline.summary import summarize
from tests.support.kineto import evaluate, recording, trace, x
from tests.support.overlaid import overlaid

CALLS = recording(("Net", 1000, 5000, 0), ("a: Linear", 1100, 2000, 1), ("b: Linear", 2050, 4500, 1))
OLD = {
    "cpu_op": "Operator",
    "cuda_runtime": "Runtime",
    "kernel": "Kernel",
    "gpu_memcpy": "Memcpy",
    "gpu_memset": "Memset",
}


def step() -> list[dict[str, Any]]:
    """An operator and a launch in each call, one call's backward, and GPU work of 100, 30 and 7 ns."""
    return [
        x("cpu_op", "aten::linear", 1200, 1900, Sequence_number=1),
        x("cuda_runtime", "cudaLaunchKernel", 1300, 1310, correlation=1),
        x("cuda_runtime", "cudaMemcpyAsync", 2100, 2110, correlation=2),
        x("cuda_runtime", "cudaMemsetAsync", 2200, 2210, correlation=3),
        evaluate("AddmmBackward0", 6000, 6500, 1),
        x("kernel", "gemm", 3000, 3100, pid=0, tid=7, correlation=1),
        x("gpu_memcpy", "Memcpy", 3100, 3130, pid=0, tid=7, correlation=2),
        x("gpu_memset", "Memset", 3200, 3207, pid=0, tid=7, correlation=3),
    ]


def test_old_categories_are_read_like_those_of_today() -> None:
    old = [event | {"cat": OLD[event["cat"]]} for event in step()]

    of_old, today = overlaid(CALLS, *old), overlaid(CALLS, *step())

    for overlay in (of_old, today):
        assert (overlay.node_count, overlay.attributed_count) == (1, 1)
        assert (overlay.work, overlay.attributed_work) == (3, 3)
        times = {
            row.fqn: (row.kernel_ns, row.memcpy_ns, row.memset_ns)
            for row in summarize(overlay.unique_thread_timeline).rows
        }
        assert times == {"Net": (0, 0, 0), "Net.a": (100, 0, 0), "Net.b": (0, 30, 7)}


def test_replays_of_hip_graphs_belong_to_the_modules_of_the_capture() -> None:
    """Like MI300 traces: no ids of graphs or nodes, and the work in the order of its times."""
    overlay = overlaid(
        CALLS,
        x("cuda_runtime", "hipStreamBeginCapture", 1150, 1155, correlation=1),
        x("cuda_runtime", "hipLaunchKernel", 1200, 1205, correlation=2),
        x("cuda_runtime", "hipExtModuleLaunchKernel", 2100, 2105, correlation=3),
        x("cuda_runtime", "hipStreamEndCapture", 2200, 2205, correlation=4),
        x("cuda_runtime", "hipGraphLaunch", 8000, 8005, correlation=5),
        x("kernel", "second", 9200, 9240, pid=2, tid=0, correlation=5),
        x("kernel", "first", 9000, 9100, pid=2, tid=0, correlation=5),
    )

    rows = summarize(overlay.unique_thread_timeline).rows
    assert {row.fqn: row.kernel_ns for row in rows} == {"Net": 0, "Net.a": 100, "Net.b": 40}
    assert overlay.unattributed == {}


@pytest.mark.parametrize("correlation", [None, "1", 1.5, [], 1 << 63])
def test_a_kernel_with_an_odd_correlation_id_counts_with_a_reason_for_no_module(correlation: Any) -> None:
    odd = x("kernel", "odd", 4000, 4050, pid=0, tid=7, correlation=correlation)

    overlay = overlaid(CALLS, *step(), odd)

    assert (overlay.work, overlay.attributed_work) == (4, 3)
    assert overlay.unattributed == {"no correlation id": 1}
    assert sum(row.gpu_self_ns for row in summarize(overlay.unique_thread_timeline).rows) == 100 + 30 + 7 + 50


@pytest.mark.parametrize("suffix", [".json", ".pftrace"])
def test_a_module_name_with_a_lone_surrogate_is_merged_under_a_similar_name(tmp_path: Path, suffix: str) -> None:
    path, out = tmp_path / "trace.json", tmp_path / f"out{suffix}"
    events = trace(x("python_function", "nn.Module: HALF_0", 1000, 2000), x("cpu_op", "aten::linear", 1200, 1900))
    path.write_bytes(events.replace(b"HALF", b"\\ud800"))

    modtrace.merge(path, None, out)

    assert "＼ud800_0".encode() in out.read_bytes()
    assert [span.fqn for span in modtrace.load(out).spans] == ["＼ud800_0"]


@pytest.mark.parametrize("suffix", [".json", ".pftrace"])
@pytest.mark.parametrize("events", ["[1, 2, 3]", '["a", null]', "[[]]"])
def test_a_trace_without_valid_events_is_refused(tmp_path: Path, suffix: str, events: str) -> None:
    path, out = tmp_path / "trace.json", tmp_path / f"out{suffix}"
    path.write_text(f'{{"traceEvents": {events}}}')

    with pytest.raises(
        TraceError, match=r"none of its (3|2|1) events can be used: an event of torch.profiler is an object"
    ):
        modtrace.merge(path, CALLS, out)

    assert not out.exists()


def test_a_trace_without_events_does_not_fit_the_recording(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(trace())

    modtrace.merge(path, CALLS, tmp_path / "out.json")

    assert len(modtrace.load(tmp_path / "out.json").spans) == 3
