"""A recording over hand-made traces: nodes and kernels find their calls, and backward is cut to its nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from modtrace import Timeline, TraceError
from modtrace.profiler.device_work import NO_MODULE
from modtrace.profiler.overlay import Overlay
from modtrace.timeline import PHASES, Process, Track
from modtrace.timeline.slices import DTYPES
from modtrace.timeline.summary import summarize
from tests.support.kineto import BASE, NET, PID, TID, Span, evaluate, recording, x
from tests.support.overlaid import overlaid


def slices(overlay: Overlay, kind: str = "backward") -> list[tuple[str, int, int, int, str]]:
    """(label, start, end, depth, phase) of the tracks of a kind, in start order."""
    columns, tracks = overlay.timeline.columns, overlay.timeline.tracks
    return [
        (
            overlay.timeline.names[columns.name[at]].label,
            int(columns.start[at]),
            int(columns.end[at]),
            int(columns.depth[at]),
            PHASES[columns.phase[at]],
        )
        for at in range(len(columns))
        if tracks[columns.track[at]].kind == kind
    ]


def device_slices(overlay: Overlay) -> list[tuple[str, int, int, int, str]]:
    devices = overlay.stream_spans
    columns = (devices.name, devices.start, devices.end, devices.depth, devices.phase)
    return [
        (
            overlay.stream_names[name].label if name >= 0 else NO_MODULE,
            start,
            end,
            depth,
            PHASES[phase] if name >= 0 else "",
        )
        for name, start, end, depth, phase in zip(*(column.tolist() for column in columns), strict=True)
    ]


def op(start: int, end: int, number: int, *, tid: int = TID) -> dict[str, Any]:
    return x("cpu_op", "aten::op", start, end, tid=tid, Sequence_number=number, Fwd_thread_id=0)


#  Net 1000────────────────────────5000
#     a 1100──2000    b 2500────────4500
#       op0 op1          op2  c 3000─4000
#                               op3
FORWARD: tuple[Span, ...] = (
    ("Net", 1000, 5000, 0),
    ("a: Linear", 1100, 2000, 1),
    ("b: Linear", 2500, 4500, 1),
    ("c: ReLU", 3000, 4000, 2),
)
OPS = (op(1200, 1300, 0), op(1400, 1900, 1), op(2600, 2900, 2), op(3100, 3900, 3), op(4600, 4900, 4))
NODES = (
    evaluate("N4", 6000, 6100, 4),
    evaluate("N3", 6200, 6300, 3),
    evaluate("N2", 6400, 6500, 2),
    evaluate("torch::autograd::AccumulateGrad", 6550, 6600, None),
    evaluate("N1", 6700, 6800, 1),
    evaluate("N0", 6850, 6900, 0),
)
CUT = [
    ("Net", 6000, 6900, 0, "backward"),
    ("b: Linear", 6200, 6600, 1, "backward"),
    ("c: ReLU", 6200, 6300, 2, "backward"),
    ("a: Linear", 6700, 6900, 1, "backward"),
]


def test_backward_begins_and_ends_with_its_nodes() -> None:
    # What was recorded is late and overlaps its neighbours by a few ns.
    recorded = (
        ("Net", 6003, 6903, 0, "backward"),
        ("b: Linear", 6150, 6702, 1, "backward"),
        ("c: ReLU", 6203, 6450, 2, "backward"),
        ("a: Linear", 6704, 6903, 1, "backward"),
    )
    overlay = overlaid(recording(*FORWARD, *recorded), *OPS, *NODES)
    assert slices(overlay) == CUT
    assert (overlay.node_count, overlay.attributed_count) == (6, 6)
    assert (overlay.straddling_count, overlay.max_straddle_ns) == (0, 0)


def test_backward_is_made_from_the_nodes_where_none_was_recorded_and_is_linked() -> None:
    overlay = overlaid(recording(*FORWARD), *OPS, *NODES)
    assert slices(overlay) == CUT
    columns = overlay.timeline.columns
    for name in range(len(NET)):
        links = columns.link[columns.name == name].tolist()
        assert len(links) == 2
        assert links[0] == links[1] >= 0
    assert sorted(set(columns.link.tolist())) == [0, 1, 2, 3]


def test_an_interleaved_call_is_several_slices() -> None:
    order = [(4, 6000), (3, 6200), (1, 6300), (2, 6400)]
    nodes = [evaluate(f"N{number}", start, start + 50, number) for number, start in order]
    assert slices(overlaid(recording(*FORWARD), *OPS, *nodes))[1:] == [
        ("b: Linear", 6200, 6250, 1, "backward"),
        ("c: ReLU", 6200, 6250, 2, "backward"),
        ("a: Linear", 6300, 6350, 1, "backward"),
        ("b: Linear", 6400, 6450, 1, "backward"),
    ]


def test_recorded_backward_stays_where_the_trace_has_no_nodes() -> None:
    recorded = (("Net", 5500, 5700, 0, "backward"), ("a: Linear", 5600, 5650, 1, "backward"))
    overlay = slices(overlaid(recording(*FORWARD, *recorded), *OPS, *NODES))
    assert overlay[:2] == [("Net", 5500, 5700, 0, "backward"), ("a: Linear", 5600, 5650, 1, "backward")]
    assert overlay[2:] == CUT


def test_a_node_whose_forward_is_not_in_the_trace_goes_by_the_recorded_slice() -> None:
    recorded = (("Net", 5900, 7000, 0, "backward"), ("a: Linear", 6190, 6310, 1, "backward"))
    overlay = overlaid(recording(*FORWARD, *recorded), evaluate("N", 6200, 6300, 77), evaluate("M", 6400, 6450, 76))
    assert slices(overlay)[:2] == [("Net", 6200, 6450, 0, "backward"), ("a: Linear", 6200, 6300, 1, "backward")]


def test_recompute_lies_in_its_node_and_its_nodes_in_their_call() -> None:
    # b was checkpointed: its node 3 runs it again (op 10), reentrantly, with a node of its own.
    again = (("b: Linear", 6190, 6260, 0, "recompute"), ("c: ReLU", 6230, 6255, 1, "recompute"))
    timeline = recording(*FORWARD, *again)
    inner = [op(6240, 6250, 10), evaluate("N10", 6270, 6290, 10)]
    overlay = overlaid(timeline, *OPS, *NODES, *inner)
    assert slices(overlay) == [
        ("Net", 6000, 6900, 0, "backward"),
        ("b: Linear", 6200, 6600, 1, "backward"),
        ("c: ReLU", 6200, 6300, 2, "backward"),
        ("b: Linear", 6200, 6260, 3, "recompute"),
        ("c: ReLU", 6230, 6255, 4, "recompute"),
        ("a: Linear", 6700, 6900, 1, "backward"),
    ]
    assert overlay.attributed_count == 7


def test_sequence_numbers_of_two_threads_are_kept_apart_by_the_arrows() -> None:
    other = TID + 1
    process = Process(PID)
    two = recording(*FORWARD)
    more = recording(("a: Linear", 1100, 2000, 0))
    columns = {
        field: [*getattr(two.columns, field).tolist(), *getattr(more.columns, field).tolist()] for field in DTYPES
    }
    columns["track"] = [0] * 4 + [1]
    columns["call"] = [0] * 4 + [1]
    from modtrace.timeline.slices import Slices, sort_by_start

    tracks = (Track("forward", "MainThread", TID, process), Track("forward", "Other", other, process))
    timeline = Timeline(sort_by_start(Slices.of(None, **columns)), NET, tracks)
    backward = other + 1
    nodes = [
        evaluate("N", 6000, 6100, 2, tid=backward, thread=1),
        evaluate("N", 6200, 6300, 2, tid=backward, thread=5),
    ]
    inner = [
        x("cpu_op", "N", start + 1, start + 9, tid=backward, Sequence_number=2, Fwd_thread_id=f)
        for start, f in ((6000, 1), (6200, 5))
    ]
    arrows = [
        {"ph": ph, "cat": "fwdbwd", "name": "fwdbwd", "id": number, "pid": PID, "tid": tid, "ts": ts / 1000}
        for number, (where, begin, end) in enumerate([(TID, 2600, 6001), (other, 1200, 6201)])
        for ph, tid, ts in (("s", where, begin), ("f", backward, end))
    ]
    overlay = overlaid(timeline, *OPS, op(1200, 1300, 2, tid=other), *nodes, *inner, *arrows)
    assert slices(overlay) == [
        ("Net", 6000, 6100, 0, "backward"),
        ("b: Linear", 6000, 6100, 1, "backward"),
        ("a: Linear", 6200, 6300, 0, "backward"),
    ]
    assert overlay.timeline.columns.call[overlay.timeline.columns.start == 6200].tolist() == [1]


def kernel(start: int, end: int, correlation: int, *, stream: int = 7, kind: str = "kernel") -> dict[str, Any]:
    return x(kind, "k", start, end, pid=0, tid=stream, correlation=correlation, stream=stream)


def launch(at: int, correlation: int, *, tid: int = TID) -> dict[str, Any]:
    return x("cuda_runtime", "cudaLaunchKernel", at, at + 5, tid=tid, correlation=correlation)


def test_kernels_belong_to_the_call_that_launched_them() -> None:
    launches = [launch(1250, 1), launch(1800, 2), launch(3200, 3), launch(4550, 4), launch(6450, 5), launch(9000, 6)]
    work = [
        kernel(10_000, 10_100, 1),
        kernel(10_150, 10_200, 2, kind="gpu_memcpy"),
        kernel(10_300, 10_400, 3),
        kernel(10_400, 10_450, 4),
        kernel(10_500, 10_600, 5),
        kernel(10_700, 10_800, 6),
        kernel(10_900, 10_907, 99, kind="gpu_memset"),
        kernel(10_320, 10_380, 3, stream=8),
    ]
    overlay = overlaid(recording(*FORWARD), *OPS, *NODES, *launches, *work)
    assert device_slices(overlay) == [
        ("Net", 10_000, 10_450, 0, "forward"),
        ("a: Linear", 10_000, 10_200, 1, "forward"),
        ("b: Linear", 10_300, 10_400, 1, "forward"),
        ("c: ReLU", 10_300, 10_400, 2, "forward"),
        ("Net", 10_500, 10_600, 0, "backward"),
        ("b: Linear", 10_500, 10_600, 1, "backward"),
        (NO_MODULE, 10_700, 10_800, 0, ""),
        (NO_MODULE, 10_900, 10_907, 0, ""),
        ("Net", 10_320, 10_380, 0, "forward"),
        ("b: Linear", 10_320, 10_380, 1, "forward"),
        ("c: ReLU", 10_320, 10_380, 2, "forward"),
    ]
    assert (overlay.work, overlay.attributed_work) == (8, 6)
    rows = {row.fqn: row for row in summarize(overlay.unique_thread_timeline).rows}
    assert [
        (r.kernels, r.gpu_forward_ns, r.gpu_forward_self_ns, r.gpu_backward_ns, r.gpu_self_ns) for r in rows.values()
    ] == [
        (1, 100 + 50 + 100 + 50 + 60, 50, 100, 50),
        (1, 150, 150, 0, 150),
        (1, 160, 0, 100, 100),
        (2, 160, 160, 0, 160),
        (1, 0, 0, 0, 100),  # of unknown phase
        (0, 0, 0, 0, 7),
    ]
    reasons = ["(no module: launched outside modules)", "(no module: launch not in the trace)"]
    assert list(rows) == ["Net", "Net.a", "Net.b", "Net.b.c", *reasons]
    assert overlay.unattributed == {"launched outside modules": 1, "launch not in the trace": 1}
    gpu = summarize(overlay.unique_thread_timeline).gpu
    assert gpu is not None
    assert (gpu.kernel_ns, gpu.memcpy_ns, gpu.memset_ns) == (510, 50, 7)
    for kind in ("kernel_ns", "memcpy_ns", "memset_ns"):
        assert sum(getattr(row, kind) for row in rows.values()) == getattr(gpu, kind)
    assert (rows["Net.b"].forward_ns, rows["Net.b"].forward_self_ns, rows["Net.b"].calls) == (2000, 1000, 1)


def test_kernels_of_a_recomputed_call_say_so() -> None:
    again = (("b: Linear", 6210, 6290, 0, "recompute"),)
    overlay = overlaid(recording(*FORWARD, *again), *OPS, *NODES, launch(6250, 1), kernel(10_000, 10_100, 1))
    assert device_slices(overlay) == [
        ("Net", 10_000, 10_100, 0, "backward"),
        ("b: Linear", 10_000, 10_100, 1, "backward"),
        ("c: ReLU", 10_000, 10_100, 2, "backward"),
        ("b: Linear", 10_000, 10_100, 3, "recompute"),
    ]
    row = next(row for row in summarize(overlay.unique_thread_timeline).rows if row.fqn == "Net.b")
    assert (row.gpu_recompute_ns, row.gpu_backward_ns, row.gpu_backward_self_ns, row.gpu_recompute_self_ns) == (
        100,
        100,
        0,
        100,
    )


def test_a_recording_of_another_time_is_refused() -> None:
    with pytest.raises(TraceError, match=r"no moment in common: they are 3600\.000 s apart by wall clock"):
        overlaid(recording(*FORWARD, base=BASE + 3600 * 10**9 + 6900 - 1000), *OPS, *NODES, late_ns=None)


def test_events_at_time_zero_are_not_the_beginning() -> None:
    zero = x("cpu_op", "zero", 0, 5)
    overlay = overlaid(recording(*FORWARD), zero, *OPS, *NODES)
    assert slices(overlay) == CUT
    assert overlay.notes == []


def test_a_badly_aligned_recording_is_told_by_the_operations_it_cuts() -> None:
    late = tuple((label, start + 130, end + 130, depth) for label, start, end, depth in FORWARD)  # type: ignore[misc]
    overlay = overlaid(recording(*late), *OPS, *NODES)
    # Operations 0, 2 and 3 begin 30 ns before their call, operation 4 within the one before it.
    assert (overlay.straddling_count, overlay.max_straddle_ns) == (4, 30)


def test_another_pid_than_the_traces_is_laid_over_the_traces_process() -> None:
    timeline = recording(*FORWARD)
    tracks = tuple(track._replace(process=Process(4242)) for track in timeline.tracks)
    overlay = overlaid(Timeline(timeline.columns, timeline.names, tracks), *OPS, *NODES)
    assert overlay.pid == PID
    assert {track.process.pid for track in overlay.timeline.tracks} == {PID}


def module(name: str, start: int, end: int, number: int = 0) -> dict[str, Any]:
    return x("python_function", f"nn.Module: {name}", start, end, Python_module_id=number)


MODULES = (
    module("Net_0", 1000, 5000),
    module("Linear_0", 1100, 2000),
    module("Linear_1", 2500, 4500, 1),
    module("ReLU_0", 3000, 4000),
)


def test_modules_are_reconstructed_from_the_trace_alone() -> None:
    steps = [x("user_annotation", "ProfilerStep#3", 1, 900)]
    overlay = overlaid(None, *MODULES, *OPS, *NODES, *steps)
    assert slices(overlay, "forward") == [
        ("Net", 1000, 5000, 0, "forward"),
        ("Linear_0: Linear", 1100, 2000, 1, "forward"),
        ("Linear_1: Linear", 2500, 4500, 1, "forward"),
        ("ReLU_0: ReLU", 3000, 4000, 2, "forward"),
    ]
    assert [(start, end, depth) for _, start, end, depth, _ in slices(overlay)] == [c[1:4] for c in CUT]
    assert [name.fqn for name in overlay.timeline.names] == [
        "Net_0",
        "Net_0.Linear_0",
        "Net_0.Linear_1",
        "Net_0.Linear_1.ReLU_0",
    ]
    assert set(overlay.timeline.columns.step.tolist()) == {3}
    assert overlay.alignment is None
    assert "not by attribute" in overlay.notes[0]


def test_reconstructed_recompute_repeats_its_call() -> None:
    again = (module("Linear_1", 6420, 6480, 1), module("ReLU_0", 6430, 6440))
    overlay = overlaid(None, *MODULES, *again, *OPS, *NODES)
    assert [s for s in slices(overlay) if s[4] == "recompute"] == [
        ("Linear_1: Linear", 6420, 6480, 2, "recompute"),
        ("ReLU_0: ReLU", 6430, 6440, 3, "recompute"),
    ]
    columns = overlay.timeline.columns
    assert columns.call.tolist() == [0] * len(columns)


def test_without_module_slices_nothing_is_made_up() -> None:
    overlay = overlaid(None, *OPS, *NODES, kernel(10_000, 10_100, 1))
    assert len(overlay.timeline.columns) == 0
    gpu = summarize(overlay.unique_thread_timeline).gpu
    assert gpu is not None
    assert gpu.kernel_ns == 100
    assert "profile with with_stack=True" in overlay.notes[0]


def test_ranges_of_torch_alone_are_no_modules() -> None:
    loading = x("user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 100, 900)
    own = (loading, x("user_annotation", "Optimizer.step#AdamW.step", 7000, 8000))
    overlay = overlaid(None, *OPS, *own)
    assert len(overlay.timeline.columns) == 0
    assert "profile with with_stack=True, or merge a recording" in overlay.notes[0]

    beside = overlaid(None, *OPS, *own, x("user_annotation", "mine", 1000, 6000))
    assert {name.label for name in beside.timeline.names} == {"mine", *(each["name"] for each in own)}


def test_sync_marks_move_everything() -> None:
    shifted = tuple((label, start - 500_000, end - 500_000, depth) for label, start, end, depth in FORWARD)  # type: ignore[misc]
    overlay = overlaid(recording(*shifted), *OPS, *NODES, late_ns=-500_000)
    assert slices(overlay, "forward") == [(*span, "forward") for span in FORWARD]
    assert slices(overlay) == CUT


def test_without_sync_marks_operators_move_everything() -> None:
    shifted = tuple((label, start - 730, end - 730, depth) for label, start, end, depth in FORWARD)  # type: ignore[misc]
    overlay = overlaid(recording(*shifted), *OPS, *NODES, late_ns=None)
    # Between op 4, 100 ns before the end of Net, and op 3, 100 ns after the begin of c: the offset was 730.
    assert slices(overlay, "forward") == [(*span, "forward") for span in FORWARD]
    assert (overlay.straddling_count, overlay.max_straddle_ns) == (0, 0)
    assert overlay.alignment is not None
    told = "aligned to about ±0.1 µs, typically ±0.1 µs, by 5 operators; no sync mark is in both files"
    assert str(overlay.alignment).startswith(told)


def test_data_path_is_named_in_errors() -> None:
    with pytest.raises(TraceError) as error:
        overlaid(recording(*FORWARD, base=BASE + 10**12), *OPS)
    assert Path(error.value.path).name == "trace.json"
