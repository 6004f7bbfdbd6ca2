"""The judges of `scripts/bench gpu`, on profiles written by hand; and the program, with simulated kernels."""

from __future__ import annotations

import json
from typing import Any

import pytest
from scripts.benches.gpu import overhead
from scripts.benches.gpu.attribution import MIN_SHARE, Share, judge
from scripts.benches.gpu.pretended_kernels import with_kernels
from scripts.benches.gpu.profile_truth import Work, works_of
from scripts.benches.gpu.times import Compared, Edges, compare, edge_errors

from modtrace.timeline import Phase, Process, Span
from tests.support.forked_python import run_forked
from tests.support.kineto import TID, evaluate, x

AUTOGRAD_TID = 102
ROW = (0, 7)
A, NET = ("Net.a", 0), ("Net", 0)


def launched(correlation: int, at: int, start: int, end: int, tid: int = TID) -> list[dict[str, Any]]:
    return [
        x("cuda_runtime", "cudaLaunchKernel", at, at + 10, tid=tid, correlation=correlation),
        x("kernel", f"kernel {correlation}", start, end, pid=0, tid=7, correlation=correlation),
    ]


PROFILE = {
    "traceEvents": [
        x("user_annotation", "truth#0#Net", 1000, 9000),
        x("user_annotation", "truth#1#Net.a", 2000, 4000),
        # Two operators start with number 5: the later one makes the node.
        x("cpu_op", "aten::detach", 1500, 1600, Sequence_number=5),
        x("cpu_op", "aten::mul", 2500, 3000, Sequence_number=5),
        *launched(1, 2600, 10_000, 11_000),
        x("cpu_op", "aten::sum", 5000, 5500, Sequence_number=6),
        *launched(2, 5100, 11_000, 13_000),
        *launched(3, 9500, 13_000, 14_000),
        evaluate("SumBackward0", 20_000, 21_000, 6, tid=AUTOGRAD_TID),
        *launched(4, 20_500, 30_000, 31_000, AUTOGRAD_TID),
        evaluate("MulBackward0", 22_000, 24_000, 5, tid=AUTOGRAD_TID),
        *launched(5, 22_500, 31_000, 33_000, AUTOGRAD_TID),
        evaluate("torch::autograd::AccumulateGrad", 24_000, 25_000, None, tid=AUTOGRAD_TID),
        *launched(6, 24_500, 33_000, 34_000, AUTOGRAD_TID),
        evaluate("CheckpointBackward", 26_000, 29_000, 6, tid=AUTOGRAD_TID),
        x("user_annotation", "truth#2#Net.a", 26_500, 28_000, tid=AUTOGRAD_TID),
        *launched(7, 27_000, 34_000, 35_000, AUTOGRAD_TID),
        # A kernel whose launch is not in the trace, and a node that was made before the trace.
        x("kernel", "kernel 8", 35_000, 36_000, pid=0, tid=7, correlation=8),
        evaluate("OldBackward", 29_000, 29_900, 4, tid=AUTOGRAD_TID),
        *launched(9, 29_500, 36_000, 38_000, AUTOGRAD_TID),
    ]
}
THREADS = {"truth#0#Net": 1, "truth#1#Net.a": 1, "truth#2#Net.a": 2}
WORKS = [
    Work(ROW, 10_000, 11_000, (NET, A), "forward"),
    Work(ROW, 11_000, 13_000, (NET,), "forward"),
    Work(ROW, 13_000, 14_000, (), "forward"),
    Work(ROW, 30_000, 31_000, (NET,), "backward"),
    Work(ROW, 31_000, 33_000, (NET, A), "backward"),
    Work(ROW, 33_000, 34_000, (NET, A), "backward"),
    Work(ROW, 34_000, 35_000, (("Net.a", 1),), "recompute"),
    Work(ROW, 35_000, 36_000, (), "", is_known=False),
    Work(ROW, 36_000, 38_000, (), "", is_known=False),
]


def merged(*slices: tuple[str, str, int, int]) -> dict[str, Any]:
    """A merged trace with these rows of modules: name, phase, start, end."""
    named = {"ph": "M", "name": "thread_name", "pid": 0, "tid": 99, "args": {"name": "modules · stream 7"}}
    return {"traceEvents": [named, *(x(phase, name, a, b, pid=0, tid=99, fqn=name) for name, phase, a, b in slices)]}


RIGHT = (
    ("Net", "forward", 10_000, 13_000),
    ("Net.a", "forward", 10_000, 11_000),
    ("Net", "backward", 30_000, 34_000),
    ("Net.a", "backward", 31_000, 34_000),
    ("Net.a", "recompute", 34_000, 35_000),
)


def test_each_kernel_belongs_to_the_call_of_its_launch_or_of_its_node() -> None:
    assert works_of(PROFILE, THREADS) == WORKS


def test_kernels_under_their_modules_are_right_and_unknown_ones_are_not() -> None:
    share = judge(WORKS, merged(*RIGHT))

    assert share == Share(right=9000, wrong=0, unknown=3000, kernels=9)
    assert share.ratio == 0.75


@pytest.mark.parametrize(
    ("fault", "slices", "wrong"),
    [
        ("the parent's, not the module's", [s for s in RIGHT if s[:2] != ("Net.a", "backward")], 3000),
        ("another phase", [(n, "forward" if p == "recompute" else p, a, b) for n, p, a, b in RIGHT], 1000),
        ("another module", [(n.replace(".a", ".b"), p, a, b) for n, p, a, b in RIGHT], 5000),
        ("too long", [*RIGHT, ("Net", "forward", 13_000, 13_400)], 400),
        ("moved by half a kernel", [(n, p, a + 500, b + 500) for n, p, a, b in RIGHT], 3000),
        ("none at all", [], 8000),
    ],
)
def test_kernels_under_a_wrong_module_are_wrong(fault: str, slices: list[Any], wrong: int) -> None:
    share = judge(WORKS, merged(*slices))

    assert (share.right, share.wrong) == (9000 - wrong, wrong), fault
    assert share.ratio < MIN_SHARE


def test_no_kernel_is_no_success() -> None:
    assert judge([], merged(*RIGHT)).ratio == 0


def span(name: str, phase: Phase, start: int, end: int) -> Span:
    return Span(name, name, "", phase, start, end, 0, "gpu 0 · stream 7", 0, 0, True, Process(1))


SPANS = [
    span("Net", "forward", 9_900, 13_000),
    span("Net.a", "forward", 9_700, 11_300),
    span("Net.a", "backward", 31_000, 34_000),
    span("other", "forward", 0, 1),
]


def test_times_are_those_of_the_kernels_of_a_call_and_of_calls_inside_it() -> None:
    assert compare(SPANS, WORKS) == {
        ("Net", "forward"): Compared(1, 3100, 3000, 3000),
        ("Net.a", "forward"): Compared(1, 1600, 1000, 1000),
        ("Net.a", "backward"): Compared(1, 3000, 3000, 3000),
    }


@pytest.mark.parametrize(
    ("compared", "good"),
    [
        (Compared(1, 1_020_000, 1_000_000, 1), True),
        (Compared(1, 1_020_001, 1_000_000, 1), False),
        (Compared(1, 979_999, 1_000_000, 1), False),
        (Compared(10, 40_000, 20_000, 1), True),
        (Compared(10, 40_001, 20_000, 1), False),
    ],
)
def test_a_time_may_be_off_by_a_fiftieth_or_two_microseconds_a_call(compared: Compared, good: bool) -> None:
    assert compared.is_good is good


def test_an_edge_is_off_by_how_far_it_lies_outside_its_gap_between_kernels() -> None:
    before = Work(ROW, 9_000, 9_800, (), "forward")

    edges = edge_errors([span("Net.a", "forward", 109_700, 111_300)], [before, *WORKS], 100_000)

    # The span starts 100 ns before the end of the kernel in front, and ends 300 ns after the start of the next one.
    assert edges == Edges([-100, 300], [200, 0])


def test_a_median_above_its_bound_falls_short() -> None:
    ratios = {"native": [1.0, 1.004, 1.3], "native, ring file": [1.006] * 3, "native, device times": [1.0, 1.03, 1.03]}
    ratios |= {"native, memory": [1.04] * 3, "native, FLOPs": [1.0, 1.0, 1.1]}

    assert overhead.short_of(ratios) == [
        "native, ring file × 1.0060, bound 1.005",
        "native, device times × 1.0300, bound 1.02",
    ]


def test_pretended_kernels_are_launched_by_operators_that_call_no_other() -> None:
    outer, inner = x("cpu_op", "aten::linear", 1000, 9000), x("cpu_op", "aten::addmm", 2000, 5000)

    added = with_kernels({"traceEvents": [outer, inner, x("cpu_op", "aten::sum", 9000, 9500)]})["traceEvents"][3:]

    assert [(e["cat"], e["name"], e["ts"], e["dur"], e["args"]["correlation"]) for e in added] == [
        ("cuda_runtime", "cudaLaunchKernel", 2.0, 0.0, 1),
        ("kernel", "aten::addmm", 7.0, 3.0, 1),
        ("cuda_runtime", "cudaLaunchKernel", 9.0, 0.0, 2),
        ("kernel", "aten::sum", 14.0, 0.5, 2),
    ]


@pytest.mark.usefixtures("native_engine")
def test_the_program_runs_on_the_cpu_and_says_so() -> None:
    options = ["--device", "cpu", "--layers", 1, "--width", 64, "--steps", 1, "--models", "reentrant", "ResNet"]

    out = run_forked("-m", "scripts.benches.gpu", "all", *options).stdout

    assert "THE CPU: this tests the program, and shows nothing about a GPU" in out
    rows = [line.split(" | ") for line in out.splitlines() if line.startswith(("| ResNet", "| Llama"))]
    assert [row[0] for row in rows] == ["| Llama, checkpointed (reentrant)", "| ResNet"]
    assert all(int(row[1]) > 100 and row[2] == "100.0000%" for row in rows), json.dumps(rows)
    assert out.count("as it must be") == 4
    assert out.count("not judged: this is the CPU") == 2
