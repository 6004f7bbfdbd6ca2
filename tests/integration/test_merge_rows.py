"""Collectives and backward passes of a recording in a merged trace: their places, and reading them back."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import modtrace
from modtrace import Timeline
from modtrace.timeline import Mark, Process
from modtrace.timeline.select import modules_only
from tests.support.forked_python import run_forked
from tests.support.kineto import BASE, PID, PROCESS, TID, trace, x
from tests.support.merged_rows import FIELDS, GROUPS, LATE, NAMES, WORKER, recorded
from tests.support.other_kinds import collectives_of, with_collectives, with_passes
from tests.support.trace_processor import TraceProcessor

SUFFIXES = [".json", ".json.gz", ".pftrace", ".pftrace.gz"]
SYNC_TIMES = range(500, 8000, 500)


def profile(*events: dict[str, Any]) -> bytes:
    """A trace with slices of 0 ns at known times of the recording's clock, and operators on both threads."""
    syncs = [x("cpu_op", f"modtrace.sync#{at}", at, at) for at in SYNC_TIMES]
    operators = [x("cpu_op", "op", 1200, 1300), x("cpu_op", "op", 7000, 7900, tid=WORKER)]
    return trace(*syncs, *operators, *events)


def with_syncs(timeline: Timeline, late: int = LATE) -> Timeline:
    syncs = [Mark(BASE + late + at, "sync", f"modtrace.sync#{at}") for at in SYNC_TIMES]
    return replace(timeline, marks=sorted([*timeline.marks, *syncs], key=lambda mark: mark.time_ns))


def merged(timeline: Timeline, folder: Path, suffix: str, *events: dict[str, Any], **how: Any) -> Path:
    (folder / "profile.json").write_bytes(profile(*events))
    modtrace.merge(folder / "profile.json", with_syncs(timeline), folder / f"merged{suffix}", **how)
    return folder / f"merged{suffix}"


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_collectives_and_passes_are_read_back_in_the_traces_time(tmp_path: Path, suffix: str) -> None:
    loaded = modtrace.load(merged(recorded(), tmp_path, suffix))

    expected = recorded(late=0)
    assert list(loaded.collectives) == list(expected.collectives)
    assert loaded.collectives.groups == GROUPS
    assert loaded.backward_passes == expected.backward_passes
    assert loaded.tracks == expected.tracks
    assert list(loaded.spans) == list(expected.spans)
    assert loaded.marks == expected.marks


def test_the_command_line_keeps_the_collectives_of_a_trace(tmp_path: Path) -> None:
    """A merged trace, loaded and saved, and loaded again."""
    loaded = modtrace.load(merged(recorded(), tmp_path, ".json"))
    loaded.save(tmp_path / "saved.pftrace")
    again = modtrace.load(tmp_path / "saved.pftrace")
    assert list(again.collectives) == list(loaded.collectives)
    assert again.backward_passes == loaded.backward_passes


def test_in_json_collectives_and_passes_are_events_on_rows_of_their_threads(tmp_path: Path) -> None:
    events = json.loads(merged(recorded(), tmp_path, ".json").read_text())["traceEvents"]
    rows = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["ph"] == "M" and event["name"] == "thread_name"
    }

    def slices(category: str) -> list[tuple[str, str, int, int, dict[str, Any]]]:
        return [
            (rows[e["pid"], e["tid"]], e["name"], round(e["ts"] * 1000), round(e["dur"] * 1000), e["args"])
            for e in events
            if e["ph"] == "X" and e["cat"] == category
        ]

    main, worker = "communication · MainThread", "communication · worker"
    assert slices("communication") == [
        (main, "all_reduce", 1500, 200, _args("all_reduce", "0", counter=0, bytes=4096, step=0, done_ns=400)),
        (main, "wait: all_reduce", 1600, 50, _args("all_reduce", "0", counter=0, bytes=0, step=0)),
        (main, "wait", 2200, 400, _args("", "", bytes=0, step=0)),
        (main, "send", 5200, 100, _args("send", "mesh＼ud800", peer=1, counter=3, bytes=20, step=1, complete=False)),
        (worker, "barrier", 5250, 150, _args("barrier", "0", bytes=0, step=1, done_ns=140)),
    ]
    assert slices("backward pass") == [
        ("backward pass · MainThread", "backward", 5900, 600, {}),
        ("backward pass · MainThread", "backward", 6100, 100, {}),
        ("backward pass · worker", "backward", 6600, 100, {"complete": False}),
    ]
    arrows = [(e["ph"], rows[e["pid"], e["tid"]], round(e["ts"] * 1000)) for e in events if e.get("cat") == "launch"]
    assert arrows == [("s", "forward · MainThread", 1500), ("f", main, 1500)]


@pytest.mark.parametrize("suffix", [".json", ".pftrace"])
def test_perfetto_shows_collectives_and_passes_with_their_arrows_and_the_profilers(
    tmp_path: Path, suffix: str, trace_processor: type[TraceProcessor]
) -> None:
    kernel = x("kernel", "gemm", 1300, 1400, pid=0, tid=7, correlation=1)
    arrow = {"cat": "ac2g", "name": "ac2g", "id": 1}
    theirs = [
        x("cuda_runtime", "cudaLaunchKernel", 1210, 1220, correlation=1),
        kernel,
        {"ph": "s", "pid": PID, "tid": TID, "ts": 1.210, **arrow},
        {"ph": "f", "pid": 0, "tid": 7, "ts": 1.300, "bp": "e", **arrow},
    ]
    path = merged(recorded(), tmp_path, suffix, *theirs)
    opened = trace_processor.open(path)
    assert opened.import_problems() == {}
    times = opened.query(
        "select name, dur, category from slice where category in ('communication', 'backward pass') order by ts, dur"
    )
    assert [(row["name"], row["dur"], row["category"]) for row in times] == [
        ("all_reduce", 200, "communication"),
        ("wait: all_reduce", 50, "communication"),
        ("wait", 400, "communication"),
        ("send", 100, "communication"),
        ("barrier", 150, "communication"),
        ("backward", 600, "backward pass"),
        ("backward", 100, "backward pass"),
        ("backward", 100, "backward pass"),
    ]
    arrows = opened.query(
        "select a.name as begins, b.name as ends from flow join slice a on a.id = slice_out "
        "join slice b on b.id = slice_in order by 1"
    )
    assert [(row["begins"], row["ends"]) for row in arrows] == [
        ("a: Linear", "all_reduce"),
        ("cudaLaunchKernel", "gemm"),
    ]


@pytest.mark.parametrize("suffix", [".json", ".pftrace"])
def test_collectives_and_passes_in_the_profiled_window_of_a_long_recording_stay_whole(
    tmp_path: Path, suffix: str
) -> None:

    def in_window(start: int, end: int) -> Timeline:
        window = x("Trace", "PyTorch Profiler (0)", start, end)
        syncs = [x("cpu_op", f"modtrace.sync#{at}", at, at) for at in SYNC_TIMES if start < at < end]
        (tmp_path / "profile.json").write_bytes(trace(window, *syncs))
        out = tmp_path / f"m{suffix}"
        modtrace.merge(tmp_path / "profile.json", with_syncs(recorded()), out)
        return modtrace.load(out)

    loaded = in_window(1620, 6550)
    # The first calls started before the window, and the last pass comes after it.
    assert list(loaded.collectives) == list(recorded(late=0).collectives)
    assert loaded.backward_passes == recorded(late=0).backward_passes[:2]

    loaded = in_window(1660, 5220)
    kept = [row.start_ns - BASE for row in loaded.collectives]
    assert (kept, loaded.backward_passes) == ([1500, 2200, 5200], [])
    assert [track.name for track in loaded.tracks] == ["forward · MainThread", "communication · MainThread"]


def test_steps_of_the_profiler_count_for_collectives_too(tmp_path: Path) -> None:
    unmarked = recorded()
    unmarked = replace(
        unmarked,
        marks=[],
        slices=replace(unmarked.slices, step=np.zeros(11, np.int64)),
    )
    steps = [x("user_annotation", f"ProfilerStep#{n}", *at) for n, at in ((4, (900, 5100)), (5, (5110, 7900)))]
    loaded = modtrace.load(merged(unmarked, tmp_path, ".json", *steps))
    assert [row.step for row in loaded.collectives] == [4, 4, 4, 5, 5]


def test_collectives_and_passes_nest_for_every_reader_of_times_since_1970(
    tmp_path: Path, trace_processor: type[TraceProcessor]
) -> None:
    """Doubles of such times lie 250 ns apart, and Perfetto then drops slices that partly overlap."""
    random = np.random.default_rng(0)
    own = recorded(late=0)
    starts = np.cumsum(random.integers(1, 400, 300))
    calls = [(int(start), int(end), -1, 0, False, n, 8, 2, 0, True) for n, (start, end) in enumerate(pairs(starts))]
    waits = [((start + end) // 2, end, -1, 0, True, n, 0, 2, 0, True) for start, end, *_, n, _, _, _, _ in calls]
    rows = np.array(sorted([*calls, *waits], key=lambda row: (row[0], -row[1])), np.int64)
    rows[:, :2] += BASE
    table = collectives_of(NAMES, GROUPS, FIELDS, rows)
    passes = [own.backward_passes[0]._replace(start_ns=start, end_ns=end) for start, end in rows[:, :2].tolist()]
    (tmp_path / "profile.json").write_bytes(trace(x("user_annotation", "r", BASE, BASE + 90_000), base=None))
    merging = with_passes(with_collectives(own, table), passes)
    modtrace.merge(tmp_path / "profile.json", merging, tmp_path / "merged.json")
    opened = trace_processor.open(tmp_path / "merged.json")
    assert opened.import_problems() == {}
    count = "select count() as slices from slice where category"
    assert opened.query(f"{count} = 'communication'") == [{"slices": len(rows)}]
    assert opened.query(f"{count} = 'backward pass'") == [{"slices": len(rows)}]
    loaded = modtrace.load(tmp_path / "merged.json")
    assert abs(loaded.collectives.start - table.start).max() <= 250 * 4


def pairs(starts: np.ndarray) -> Iterator[tuple[int, int]]:
    """Intervals, some of which touch the next one."""
    return (
        (start, end - (end - start) // 3 * (n % 2))
        for n, (start, end) in enumerate(itertools.pairwise(starts.tolist()))
    )


def test_nothing_of_another_process_is_merged(tmp_path: Path) -> None:
    own, other = recorded(), Process(PID + 1)
    of_worker = [track._replace(process=other) if track.tid == WORKER else track for track in own.tracks]
    both = replace(own, tracks=of_worker)
    loaded = modtrace.load(merged(both, tmp_path, ".pftrace"))
    assert list(loaded.collectives) == list(recorded(late=0).collectives)[:4]
    assert loaded.backward_passes == recorded(late=0).backward_passes[:2]


@pytest.mark.parametrize("suffix", [".json", ".pftrace"])
def test_under_another_pid_collectives_and_passes_belong_to_the_traces_process(tmp_path: Path, suffix: str) -> None:
    """The trace was made in a container, where the process had another pid."""
    own = recorded()
    inner = Process(1)
    moved = replace(
        own,
        tracks=[track._replace(process=inner) for track in own.tracks],
    )
    loaded = modtrace.load(merged(moved, tmp_path, suffix))
    assert loaded.backward_passes == recorded(late=0).backward_passes
    assert {track.process for track in loaded.tracks} == {PROCESS}


def test_no_time_is_counted_twice(tmp_path: Path) -> None:
    """Calls of collectives are spans of the host; the totals of kernels and of gloo's threads stay as they are."""
    work = [
        x("cuda_runtime", "cudaLaunchKernel", 1550, 1560, correlation=1),
        x("kernel", "ncclDevKernel_AllReduce_Sum_f32", 3000, 3600, pid=0, tid=20, correlation=1),
        x("cuda_runtime", "cudaLaunchKernel", 1300, 1310, correlation=2),
        x("kernel", "gemm", 3100, 3200, pid=0, tid=7, correlation=2),
    ]
    (tmp_path / "profile.json").write_bytes(profile(*work))
    only_calls = Timeline.of(modules_only(recorded()))
    told = [
        modtrace.merge(tmp_path / "profile.json", with_syncs(timeline), tmp_path / "out.json").summary
        for timeline in (recorded(), only_calls)
    ]
    assert told[0] is not None
    assert told[1] is not None
    assert told[0].rows == told[1].rows
    assert told[0].gpu == told[1].gpu
    assert told[0].gpu is not None
    assert tuple(told[0].gpu) == (100, 0, 0, 600, 100)
    assert told[0].gpu_steps == told[1].gpu_steps


@pytest.mark.parametrize("suffix", [".json", ".pftrace"])
def test_steps_of_a_merged_trace_say_how_long_backward_was(tmp_path: Path, suffix: str) -> None:
    steps = modtrace.load(merged(recorded(), tmp_path, suffix)).summary().steps
    # A pass inside another one counts once; time after the last span counts for the step, up to the step's end.
    assert [(step.step, step.backward_pass_ns) for step in steps] == [(0, 0), (1, 500)]


def test_a_merged_trace_that_someone_edited_is_read_as_a_profilers_trace(tmp_path: Path) -> None:
    path = merged(recorded(), tmp_path, ".json")
    document, spans = json.loads(path.read_text()), list(modtrace.load(path).spans)
    ours = [e for e in document["traceEvents"] if e.get("cat") == "communication"]
    ours[0]["args"]["counter"] = "x"
    ours[1]["args"] = None
    ours[2]["dur"] = -1
    (tmp_path / "edited.json").write_text(json.dumps(document))
    loaded = modtrace.load(tmp_path / "edited.json")
    assert "its modules are those that modtrace wrote into it" in str(loaded.metadata["notes"])
    assert {(span.fqn, span.start_ns, span.end_ns) for span in loaded.spans} <= {
        (span.fqn, span.start_ns, span.end_ns) for span in spans
    }
    assert len(loaded.spans)
    assert len(loaded.collectives) == 0


def extent(event: dict[str, Any], base: int) -> tuple[int, int]:
    start = base + round(event["ts"] * 1000)
    return start, start + round(event["dur"] * 1000)


def _args(operator: str, group: str, **rest: Any) -> dict[str, Any]:
    return {"operator": operator, "group": group, **rest}


LIVE = """
import json, sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
import modtrace

engine, folder = sys.argv[1:]
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
model = DistributedDataParallel(net, bucket_cap_mb=0.01)
optimizer = torch.optim.SGD(model.parameters(), 0.1)

def step():
    model(torch.ones(8, 64)).sum().backward()
    loss = torch.ones(3)
    dist.all_reduce(loss)
    optimizer.step()

with modtrace.record(engine=engine) as recording:
    step()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(3):
            step()
    step()
profiler.export_chrome_trace(f"{folder}/profile.json")
recording.save(f"{folder}/run.pftrace")
"""


def test_a_live_recording_agrees_with_the_profilers_collectives(tmp_path: Path, engine: str) -> None:
    run_forked("-W", "ignore", "-c", LIVE, engine, str(tmp_path))
    told = modtrace.merge(tmp_path / "profile.json", tmp_path / "run.pftrace", tmp_path / "merged.pftrace")
    loaded = modtrace.load(told.path)
    document = json.loads((tmp_path / "profile.json").read_text())
    base = document["baseTimeNanoseconds"]
    events = [e for e in document["traceEvents"] if e["ph"] == "X"]
    seen = sorted(extent(e, base) for e in events if e["name"] == "c10d::allreduce_")
    calls = [
        (row.start_ns, row.end_ns) for row in loaded.collectives if row.operator == "all_reduce" and not row.is_wait
    ]
    bound = told.metadata["alignment"]["operators"]["bound_ns"]
    if engine == "python":  # collectives launched by DistributedDataParallel's C++ are not seen
        seen = seen[2::3]
    assert len(seen) == 3 * (3 if engine == "native" else 1)
    # The native engine's tap lies inside the operator, the Python engine's patch around it.
    for call, operator in zip(calls, seen, strict=True):
        outer, inner = (operator, call) if engine == "native" else (call, operator)
        assert outer[0] - bound <= inner[0]
        assert inner[1] <= outer[1] + bound
    nodes = [e for e in events if e["name"].startswith("autograd::engine::evaluate_function: ")]
    assert len(loaded.backward_passes) == 3
    for node in nodes:
        begin, end = extent(node, base)
        assert any(run.start_ns - bound <= begin and end <= run.end_ns + bound for run in loaded.backward_passes)
