"""GPU time of merged traces adds up to the nanosecond, communication and compute apart, by an independent count."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

import modtrace
from modtrace.timeline import Mark, Summary
from tests.support.kineto import BASE, GPU_TRACES, evaluate, recording, trace, x

GPU = ("kernel", "gpu_memcpy", "gpu_memset")


def totals(events: list[dict[str, Any]]) -> dict[str, int]:
    """Nanoseconds of each kind of GPU work, of communication, and of communication that overlaps compute."""
    calls = (e for e in events if e.get("cat") == "cuda_runtime")
    launched = {e["args"]["correlation"]: (e["pid"], e["tid"], e["ts"]) for e in calls}
    ranges = defaultdict(list)
    for e in events:
        if e.get("ph") == "X" and (e["name"] == "record_param_comms" or e["name"].startswith("nccl:")):
            ranges[e["pid"], e["tid"]].append((e["ts"], e["ts"] + e["dur"]))
    sums: defaultdict[str, int] = defaultdict(int)
    compute, communication = defaultdict(set), []
    for e in (e for e in events if e.get("ph") == "X" and e.get("cat") in GPU):
        begin, length = round(e["ts"] % 10**9 * 1000), round(e["dur"] * 1000)
        pid, tid, at = launched.get(e["args"].get("correlation"), (0, 0, -1))
        if "nccl" in e["name"] or any(first <= at < last for first, last in ranges[pid, tid]):
            sums["communication"] += length
            communication.append((e["pid"], begin, begin + length))
        else:
            sums[e["cat"]] += length
            compute[e["pid"]].add((begin, begin + length))
    for pid, begin, end in communication:
        edge = begin
        for first, last in sorted(compute[pid]):
            if last > edge and first < end:
                sums["overlap"] += min(last, end) - max(first, edge)
                edge = min(last, end)
    return {kind: sums[kind] for kind in (*GPU, "communication", "overlap")}


def told(summary: Summary) -> dict[str, int]:
    """The same totals of a summary, whose rows and steps have to add up to them."""
    gpu = summary.gpu
    assert gpu is not None
    for field in gpu._fields:
        assert sum(getattr(row, field) for row in summary.rows) == getattr(gpu, field)
    assert sum(step.gpu_ns for step in summary.gpu_steps) == sum(gpu[:3])
    assert sum(step.communication_ns for step in summary.gpu_steps) == gpu.communication_ns
    assert sum(step.communication_overlap_ns for step in summary.gpu_steps) == gpu.communication_overlap_ns
    return dict(zip((*GPU, "communication", "overlap"), gpu, strict=True))


def op(start: int, end: int, number: int) -> dict[str, Any]:
    return x("cpu_op", "aten::op", start, end, Sequence_number=number, Fwd_thread_id=0)


def api(name: str, at: int, correlation: int) -> dict[str, Any]:
    return x("cuda_runtime", name, at, at + 5, correlation=correlation)


def work(category: str, name: str, start: int, end: int, correlation: int, stream: int = 7) -> dict[str, Any]:
    return x(category, name, start, end, pid=0, tid=stream, correlation=correlation)


ANNOTATED = trace(
    x("user_annotation", "## forward ##", 1000, 2000),
    x("user_annotation", "loss", 1500, 1700),
    *(op(1100, 1200, 0), op(1600, 1650, 1)),
    *(evaluate("N1", 3000, 3100, 1), evaluate("N0", 3200, 3300, 0)),
    *(api("cudaLaunchKernel", 1150, 1), api("cudaLaunchKernel", 3050, 2), api("cudaMemsetAsync", 4000, 3)),
    *(work("kernel", "f", 5000, 5100, 1), work("kernel", "b", 5200, 5230, 2), work("gpu_memset", "m", 5300, 5301, 3)),
)
GRAPH = trace(
    x("python_function", "nn.Module: Net_0", 1000, 3000),
    *(api("cudaStreamBeginCapture", 1100, 1), api("cudaLaunchKernel", 1200, 2), api("cudaMemcpyAsync", 1300, 3)),
    *(api("cudaStreamEndCapture", 1400, 4), api("cudaGraphLaunch", 4000, 5), api("cudaGraphLaunch", 6000, 6)),
    *(work("kernel", "k", 5000, 5070, 5), work("gpu_memcpy", "c", 5080, 5090, 5)),
    *(work("kernel", "k", 7000, 7071, 6), work("gpu_memcpy", "c", 7080, 7093, 6)),
)
DDP = trace(
    x("python_function", "nn.Module: DistributedDataParallel_0", 1000, 2000),
    x("python_function", "nn.Module: Linear_0", 1100, 1900),
    *(op(1150, 1200, 0), evaluate("N0", 3000, 3900, 0)),
    *(api("cudaLaunchKernel", 1180, 1), api("cudaLaunchKernel", 3100, 2), api("cudaLaunchKernelExC", 3250, 3)),
    *(x("user_annotation", "nccl:all_reduce", 3200, 3300), x("cpu_op", "record_param_comms", 3500, 3600)),
    api("cudaMemcpyAsync", 3550, 4),
    *(work("kernel", "gemm", 5000, 5100, 1), work("kernel", "gemm", 5200, 5400, 2)),
    *(work("kernel", "ncclDevKernel_AllReduce", 5300, 5900, 3, 20), work("gpu_memcpy", "c", 5390, 5410, 4, 21)),
)
MADE = {
    "annotations only": (
        ANNOTATED,
        {"kernel": 130, "gpu_memcpy": 0, "gpu_memset": 1, "communication": 0, "overlap": 0},
        {"## forward ##": 100, "## forward ##.loss": 30, "(no module: launched outside modules)": 1},
    ),
    "graph with its capture": (
        GRAPH,
        {"kernel": 141, "gpu_memcpy": 23, "gpu_memset": 0, "communication": 0, "overlap": 0},
        {"Net_0": 164},
    ),
    "DDP": (
        DDP,
        {"kernel": 300, "gpu_memcpy": 0, "gpu_memset": 0, "communication": 620, "overlap": 110},
        {"DistributedDataParallel_0.Linear_0": 300},
    ),
}


@pytest.mark.parametrize("suffix", [".json", ".pftrace"])
@pytest.mark.parametrize("kind", MADE)
def test_totals_of_traces_made_by_hand(tmp_path: Path, kind: str, suffix: str) -> None:
    path, out = tmp_path / "profile.json", tmp_path / f"out{suffix}"
    data, expected, modules = MADE[kind]
    path.write_bytes(data)
    modtrace.merge(path, None, out)
    summary = modtrace.load(out).summary()
    assert told(summary) == expected == totals(json.loads(data)["traceEvents"])
    assert {row.fqn: row.gpu_self_ns for row in summary.rows if row.gpu_self_ns} == modules


@pytest.mark.usefixtures("gpu_traces")
@pytest.mark.parametrize("path", GPU_TRACES, ids=lambda path: path.name)
def test_totals_of_traces_from_gpu_machines(path: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    modtrace.merge(path, None, out)
    summary = modtrace.load(out).summary()
    assert told(summary) == totals(json.loads(gzip.decompress(path.read_bytes()))["traceEvents"])


@pytest.mark.usefixtures("gpu_traces")
def test_communication_names_the_module_whose_backward_launched_it(tmp_path: Path) -> None:
    """NCCL has 46.9 of 162.5 ms of kernels in three steps of DDP on A100."""
    modtrace.merge(GPU_TRACES[1], None, tmp_path / "out.json")
    summary = modtrace.load(tmp_path / "out.json").summary()
    assert summary.gpu is not None
    assert (summary.gpu.communication_ns, summary.gpu.kernel_ns) == (46_876_493, 115_655_847)
    module = "## forward ##.DistributedDataParallel.forward"
    assert {row.fqn: row.collectives for row in summary.rows if row.collectives} == {module: 15 + 6}
    loaded = modtrace.load(tmp_path / "out.json")
    above = {span.fqn: span.phase for span in loaded.spans if span.module_class == "communication"}
    assert above == {f"{module}.all_reduce": "backward", f"{module}.broadcast": "forward"}
    assert [step.step for step in loaded.summary().steps if step.whole] == [4, 5, 6]


def test_a_recording_of_other_steps_is_not_in_the_file(tmp_path: Path) -> None:
    """The profiler saw the second of calls at 1, 2 and 3 ms, and the edge of the third."""
    starts = (1_000_000, 2_000_000, 3_000_000)
    marks = tuple(Mark(BASE + time, "sync", f"modtrace.sync#{time}") for time in (2_050_000, 3_000_005))
    calls = recording(*(("Net", start, start + 500_000, 0) for start in starts), marks=marks)
    path, out = tmp_path / "profile.json", tmp_path / "out.json"
    syncs = (x("cpu_op", mark.text, mark.time_ns - BASE, mark.time_ns - BASE) for mark in marks)
    path.write_bytes(trace(*syncs, x("cpu_op", "aten::op", 2_100_000, 2_200_000)))
    modtrace.merge(path, calls, out)
    merged = modtrace.load(out)
    assert [(span.call, span.end_ns - span.start_ns) for span in merged.spans] == [(1, 500_000), (2, 500_000)]
