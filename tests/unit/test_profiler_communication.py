"""Collectives are distinguished from compute, and still show whose backward launched them."""

from __future__ import annotations

from typing import Any

import pytest

from modtrace.profiler.event_collector import collective_of_annotation, collective_of_kernel
from modtrace.timeline.summary import summarize
from tests.support.kineto import TID, evaluate, recording, x
from tests.support.overlaid import overlaid

COMM_THREAD = 150


def op(start: int, end: int, number: int) -> dict[str, Any]:
    return x("cpu_op", "aten::op", start, end, Sequence_number=number, Fwd_thread_id=0)


def launch(at: int, correlation: int, name: str = "cudaLaunchKernel") -> dict[str, Any]:
    return x("cuda_runtime", name, at, at + 5, correlation=correlation)


def kernel(name: str, start: int, end: int, correlation: int, stream: int, kind: str = "kernel") -> dict[str, Any]:
    return x(kind, name, start, end, pid=0, tid=stream, correlation=correlation)


#  Net 1000──────5000, in it a and b; their nodes run in b's order, and each launches an all-reduce.
CALLS = recording(("Net", 1000, 5000, 0), ("a: Linear", 1100, 2000, 1), ("b: Linear", 2500, 4500, 1))
MADE = (op(1200, 1300, 0), op(2600, 2900, 1), evaluate("N1", 6000, 6400, 1), evaluate("N0", 6500, 6900, 0))
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
LAUNCHED = (
    *(launch(2700, 1), launch(6100, 2), launch(6200, 3), launch(6600, 4)),
    x("user_annotation", "nccl:all_reduce", 6190, 6300),
    x("cpu_op", "record_param_comms", 6700, 6800),
    launch(6750, 5, "cudaMemcpyAsync"),
    kernel("gemm", 10_000, 10_100, 1, 7),
    kernel("gemm", 10_200, 10_500, 2, 7),
    kernel(NCCL, 10_400, 11_000, 3, 20),
    kernel("gemm", 10_900, 11_200, 4, 7),
    kernel("Memcpy DtoD", 11_100, 11_150, 5, 20, "gpu_memcpy"),
    kernel("ncclKernel_Broadcast_RING_LL", 12_000, 12_040, 77, 20),
)


def test_communication_is_in_no_other_gpu_time_and_its_overlap_is_known() -> None:
    summary = summarize(overlaid(CALLS, *MADE, *LAUNCHED).unique_thread_timeline)
    rows = {row.fqn: row for row in summary.rows}
    b, a = rows["Net.b"], rows["Net.a"]
    # b's all-reduce of 600 ns runs beside gemms for 100 ns at its start and 100 ns at its end.
    assert (b.collectives, b.communication_ns, b.communication_overlap_ns) == (1, 600, 200)
    assert (b.kernels, b.gpu_forward_self_ns, b.gpu_backward_self_ns, b.kernel_ns) == (2, 100, 300, 400)
    # The copy of a's collective runs beside a's own gemm.
    assert (a.collectives, a.communication_ns, a.communication_overlap_ns) == (1, 50, 50)
    assert (a.kernel_ns, a.memcpy_ns, a.gpu_backward_ns) == (300, 0, 300)
    assert (rows["Net"].communication_ns, rows["Net"].gpu_backward_ns) == (0, 600)
    no_module = rows["(no module: launch not in the trace)"]
    assert (no_module.communication_ns, no_module.kernels) == (40, 0)
    assert summary.gpu is not None
    assert tuple(summary.gpu) == (700, 0, 0, 690, 250)
    assert [tuple(step) for step in summary.gpu_steps] == [(0, 700, 690, 250)]
    assert str(summary).splitlines()[-1].endswith("; communication 0.001 ms, 36.2 % of it while computing")


def test_a_collective_is_a_span_of_its_own_class_below_its_launching_module() -> None:
    overlay = overlaid(CALLS, *MADE, *LAUNCHED)
    devices = overlay.stream_spans
    columns = (devices.start, devices.end, devices.depth, devices.name, devices.track)
    above = [
        (start, end, depth, overlay.stream_names[name].fqn)
        for start, end, depth, name, track in zip(*(column.tolist() for column in columns), strict=True)
        if track == 2
    ]
    assert above[:3] == [
        (10_400, 11_150, 0, "Net"),
        (10_400, 11_000, 1, "Net.b"),
        (10_400, 11_000, 2, "Net.b.all_reduce"),
    ]


def test_profiler_steps_divide_gpu_time_if_none_were_recorded() -> None:
    steps = [x("user_annotation", f"ProfilerStep#{n}", *times) for n, times in ((4, (900, 6050)), (5, (6060, 9000)))]
    summary = summarize(overlaid(CALLS, *MADE, *LAUNCHED, *steps).unique_thread_timeline)
    assert [tuple(step) for step in summary.gpu_steps] == [(4, 100, 0, 0), (5, 600, 690, 250)]
    assert [step.step for step in summary.steps] == [4, 5]


def test_collectives_of_gloo_count_to_the_calls_that_launched_them() -> None:
    events = [
        x("cpu_op", "c10d::allreduce_", 6100, 6150),
        x("cpu_op", "c10d::allreduce_", 6600, 6650),
        x("user_annotation", "gloo:all_reduce", 6300, 6700, tid=COMM_THREAD),
        x("user_annotation", "gloo:all_reduce", 6800, 7000, tid=COMM_THREAD),
    ]
    summary = summarize(overlaid(CALLS, *MADE, *events).unique_thread_timeline)
    rows = {row.fqn: row for row in summary.rows}
    assert (rows["Net.b"].communication_ns, rows["Net.a"].communication_ns) == (400, 200)
    # Backward runs from 6000 to 6900.
    assert (rows["Net.b"].communication_overlap_ns, rows["Net.a"].communication_overlap_ns) == (400, 100)
    assert summary.gpu is not None
    assert tuple(summary.gpu) == (0, 0, 0, 600, 500)


@pytest.mark.parametrize(
    ("name", "collective"),
    [
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)", "all_reduce"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "reduce_scatter"),
        ("ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", "collective"),
        ("void at::native::reduce_kernel<512, 1>", None),
        ("void cub::DeviceScatterKernel", None),
    ],
)
def test_a_kernel_is_communication_by_its_library(name: str, collective: str | None) -> None:
    assert collective_of_kernel(name) == collective


def test_annotations_of_libraries_name_collectives() -> None:
    assert collective_of_annotation("nccl:_all_gather_base") == ("all_gather", False)
    assert collective_of_annotation("gloo:all_reduce") == ("all_reduce", True)
    assert collective_of_annotation("my:all_reduce") is None
    assert TID != COMM_THREAD
