"""Replays of CUDA graphs belong to the modules in which the graphs were captured; unknown modules have a reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import modtrace
from modtrace.profiler.event_collector import EventCollector
from modtrace.profiler.overlay import Overlay, Trace
from modtrace.timeline.summary import summarize
from tests.support.kineto import BASE, recording, trace, x
from tests.support.overlaid import overlaid


def read(*events: Any) -> Trace:
    collector = EventCollector()
    collector.add(json.loads(json.dumps(events)))
    return Trace(collector.events(), {"baseTimeNanoseconds": BASE}, "trace.json")


def api(name: str, at: int, correlation: int) -> dict[str, Any]:
    return x("cuda_runtime", name, at, at + 5, correlation=correlation)


def captured(at: int, number: int) -> list[dict[str, Any]]:
    """Return the capture of a graph: a kernel in the call that runs at `at`, and 1000 later a copy and a kernel."""
    return [
        api("cudaStreamBeginCapture", at - 50, number),
        api("cudaLaunchKernel", at, number + 1),
        api("cudaMemcpyAsync", at + 1000, number + 2),
        api("cudaLaunchKernelExC", at + 1100, number + 3),
        api("cudaStreamEndCapture", at + 1200, number + 4),
    ]


def replay(at: int, launched: int, correlation: int, **args: Any) -> list[dict[str, Any]]:
    """Return a launch of the graph and its work: 100, 20 and 300 ns."""
    work = (("kernel", "gemm", 0, 100), ("gpu_memcpy", "Memcpy", 100, 120), ("kernel", "relu", 150, 450))
    return [
        api("cudaGraphLaunch", launched, correlation),
        *(
            x(kind, name, at + begin, at + end, pid=0, tid=7, correlation=correlation, **args)
            for kind, name, begin, end in work
        ),
    ]


CALLS = recording(("Net", 1000, 5000, 0), ("a: Linear", 1100, 2000, 1), ("b: Linear", 2050, 4500, 1))


def gpu_times(overlay: Overlay) -> dict[str, tuple[int, int]]:
    """Return the kernel and copy time of each module itself."""
    return {
        row.fqn: (row.kernel_ns, row.memcpy_ns)
        for row in summarize(overlay.unique_thread_timeline).rows
        if row.gpu_self_ns
    }


def test_replays_belong_to_the_modules_of_the_capture() -> None:
    overlay = overlaid(CALLS, *captured(1500, 1), *replay(10_000, 8000, 50), *replay(20_000, 9000, 51))
    assert gpu_times(overlay) == {"Net.a": (200, 0), "Net.b": (600, 40)}
    assert overlay.unattributed == {}
    spans = overlay.stream_spans
    outermost = np.flatnonzero(spans.depth == 0)
    assert spans.start[outermost].tolist() == [10_000, 20_000]
    assert spans.end[outermost].tolist() == [10_450, 20_450]


def test_a_capture_in_a_second_trace_shows_the_modules_of_a_replay() -> None:
    here = [*replay(10_000, 8000, 50)]
    late = recording(("Net", 8100, 8200, 0))
    capture = read(
        x("python_function", "nn.Module: Net_0", 1000, 5000),
        x("python_function", "nn.Module: Linear_0", 1100, 2000),
        x("python_function", "nn.Module: Linear_1", 2050, 4500),
        *captured(1500, 1),
    )
    overlay = overlaid(late, *here, capture=capture)
    assert gpu_times(overlay) == {"Net_0.Linear_0": (100, 0), "Net_0.Linear_1": (300, 20)}
    assert gpu_times(overlaid(late, *here)) == {"(no module: graph launch, capture not known)": (400, 20)}


def test_a_replay_that_fits_no_capture_has_a_reason() -> None:
    """The captured graph has one operation more."""
    more = api("cudaMemsetAsync", 1600, 9)
    overlay = overlaid(CALLS, *captured(1500, 1), more, *replay(10_000, 8000, 50))
    assert overlay.unattributed == {"graph launch, capture not known": 3}


def test_a_graph_of_unknown_capture_belongs_to_the_call_that_launched_it() -> None:
    assert gpu_times(overlaid(CALLS, *replay(10_000, 4800, 50))) == {"Net": (400, 20)}


def test_identical_graphs_are_distinguished_by_id() -> None:
    calls = recording(("Net", 1000, 9000, 0), ("a: Linear", 1100, 3000, 1), ("b: Linear", 4000, 8000, 1))
    captures = [*captured(1500, 1), *captured(5000, 11)]
    ids = [*replay(20_000, 9100, 51, graph_id=8), *replay(30_000, 9200, 52, graph_id=3)]
    assert gpu_times(overlaid(calls, *captures, *ids)) == {"Net.a": (400, 20), "Net.b": (400, 20)}
    without = [*replay(20_000, 9100, 51), *replay(30_000, 9200, 52)]
    assert overlaid(calls, *captures, *without).unattributed == {"graph launch, capture not known": 6}


def test_each_reason_is_counted_and_printed() -> None:
    work = [
        x("kernel", "k", 10_000, 10_100, pid=0, tid=7, correlation=1),
        x("kernel", "k", 11_000, 11_010, pid=0, tid=7, correlation=2),
        x("kernel", "k", 12_000, 12_001, pid=0, tid=7),
    ]
    ran = x("cpu_op", "aten::op", 1000, 1010)
    overlay = overlaid(CALLS, ran, api("cudaLaunchKernel", 7000, 1), *work, *replay(20_000, 8000, 50))
    assert {row.fqn: row.gpu_self_ns for row in summarize(overlay.unique_thread_timeline).rows if row.gpu_self_ns} == {
        "(no module: launched outside modules)": 100,
        "(no module: launch not in the trace)": 10,
        "(no module: graph launch, capture not known)": 420,
        "(no module: no correlation id)": 1,
    }


@pytest.mark.parametrize("suffix", [".json", ".pftrace"])
def test_merge_uses_the_capture_and_reports_the_rest(tmp_path: Path, suffix: str) -> None:
    profile, capture = tmp_path / "profile.json", tmp_path / "capture.json"
    profile.write_bytes(trace(*replay(10_000, 8000, 50), x("cpu_op", "aten::op", 7000, 7100)))
    capture.write_bytes(trace(x("python_function", "nn.Module: Net_0", 1000, 5000), *captured(1500, 1)))
    plain = modtrace.merge(profile, None, tmp_path / f"plain{suffix}")
    assert "3 of 3 kernels, memcpys and memsets have no module: 3 graph launch, capture not known" in plain.notes
    known = modtrace.merge(profile, None, tmp_path / f"known{suffix}", capture=capture)
    assert known.metadata["attributed_gpu_work"] == 3
    spans = [(span.fqn, span.end_ns - span.start_ns) for span in modtrace.load(known.path).spans]
    assert spans == [("Net_0", 450)]
