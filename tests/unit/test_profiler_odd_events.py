"""A profile says the same whatever wrote it: other ids, times as text, begins and ends, keys in another order."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modtrace import load, merge
from modtrace.checking import check
from tests.support.kineto import BASE, x

Event = dict[str, Any]
EVENTS: list[Event] = [
    x("python_function", "nn.Module: Net_0", 1000, 9000, Python_module_id=0),
    x("python_function", "nn.Module: Linear_0", 2000, 5000, Python_module_id=1),
    x("cpu_op", "aten::linear", 2100, 4900, External_id=1),
    x("cuda_runtime", "cudaLaunchKernel", 2200, 2300, correlation=1, External_id=1),
    x("kernel", "gemm", 3000, 4000, pid=0, tid=7, correlation=1, External_id=1),
]


def as_halves(events: list[Event]) -> list[Event]:
    """Each slice as a begin and an end, in the order of time."""
    halves = [{**{k: v for k, v in e.items() if k != "dur"}, "ph": "B"} for e in events]
    halves += [{"ph": "E", "pid": e["pid"], "tid": e["tid"], "ts": round(e["ts"] + e["dur"], 3)} for e in events]
    return sorted(halves, key=lambda e: e["ts"])


def each(change: Callable[[Event], Event]) -> Callable[[list[Event]], list[Event]]:
    return lambda events: [change(event) for event in events]


WRITERS: dict[str, Callable[[list[Event]], list[Event]]] = {
    "times as text": each(lambda e: e | {"ts": str(e["ts"]), "dur": str(e["dur"])}),
    "start as text": each(lambda e: e | {"ts": f"{e['ts']:.3f}"}),
    "begins and ends": as_halves,
    "ids of floats": each(lambda e: e | {"pid": float(e["pid"]), "tid": float(e["tid"])}),
    "processes of texts": each(lambda e: e | {"pid": f"p{e['pid']}"}),
    "processes of lists": each(lambda e: e | {"pid": [e["pid"]]}),
    "no ids of the process": each(lambda e: {k: v for k, v in e.items() if e["cat"] == "kernel" or k != "pid"}),
    "keys in another order": each(lambda e: dict(sorted(e.items()))),
    "events in another order": lambda events: events[::-1],
}


@pytest.mark.parametrize("suffix", [".json", ".pftrace"])
@pytest.mark.parametrize("writer", WRITERS)
def test_whatever_wrote_a_profile_it_has_the_same_calls_and_kernels(tmp_path: Path, writer: str, suffix: str) -> None:
    path = tmp_path / "profile.json"
    events = WRITERS[writer](EVENTS)
    path.write_text(json.dumps({"schemaVersion": 1, "baseTimeNanoseconds": BASE, "traceEvents": events}))
    merged = merge(path, None, tmp_path / f"out{suffix}")
    assert (merged.spans, merged.gpu_spans) == (2, 2)
    assert not [note for note in merged.notes if "profiler's events" in note]
    spans = [(span.name, span.start_ns - BASE, span.end_ns - BASE) for span in load(path).spans]
    on_thread, on_stream = [(1000, 9000), (2000, 5000)], [(3000, 4000)] * 2
    names = ("Net", "Linear_0: Linear") * 2
    assert spans == [(name, *times) for name, times in zip(names, on_thread + on_stream, strict=True)]


@pytest.mark.parametrize("suffix", [".json", ".pftrace"])
def test_an_end_ends_the_innermost_begin_of_its_name(tmp_path: Path, suffix: str) -> None:
    path, thread = tmp_path / "profile.json", {"pid": 100, "tid": 101}
    odd = [
        {"ph": "E", "name": "no such", **thread, "ts": 2.05},  # ends nothing
        {"ph": "B", "cat": "cpu_op", "name": "unended", **thread, "ts": 2.15},  # does not end where its module does
    ]
    named = {round(e["ts"] + e["dur"], 3): e["name"] for e in EVENTS}
    halves = [e | {"name": named[e["ts"]]} if e["ph"] == "E" else e for e in as_halves(EVENTS)]
    events = sorted([*halves, *odd], key=lambda e: e["ts"])
    path.write_text(json.dumps({"schemaVersion": 1, "baseTimeNanoseconds": BASE, "traceEvents": events}))
    merge(path, None, tmp_path / f"out{suffix}")
    for read in (path, tmp_path / f"out{suffix}"):
        spans = [(span.start_ns - BASE, span.end_ns - BASE) for span in load(read).spans]
        assert spans[:2] == [(1000, 9000), (2000, 5000)]
    rules = [fault.rule for fault in check(path).faults]
    assert [rules.count(rule) for rule in ("end-without-begin", "begin-without-end")] == [1, 1]
    notes = str(load(path).metadata["notes"])
    assert "1 of the profiler's events are malformed" in notes
    assert "1 of the profiler's events begin and never end" in notes


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        ({"ph": "X", "cat": "cpu_op", "name": "op", "pid": 100, "tid": 101, "ts": 3}, "have no dur"),
        ({"ph": "X", "cat": "cpu_op", "name": "op", "pid": 100, "tid": 101, "ts": "soon", "dur": 1}, "are malformed"),
        ({"ph": "X", "cat": "cpu_op", "name": "op", "pid": 100, "tid": 101, "ts": None, "dur": 1}, "are malformed"),
        ({"ph": "X", "cat": "cpu_op", "name": "op", "pid": 100, "tid": 101, "ts": 3, "dur": -1}, "are malformed"),
        ({"ph": "B", "cat": "cpu_op", "name": "op", "pid": 100, "tid": 101, "ts": 3}, "begin and never end"),
        ({"ph": "E", "pid": 100, "tid": 101, "ts": 3}, "are malformed"),
        ([1], "are malformed"),
    ],
)
@pytest.mark.parametrize("suffix", [".json", ".pftrace"])
def test_an_event_that_is_none_is_counted_and_the_others_stay(tmp_path: Path, odd: Any, said: str, suffix: str) -> None:
    path = tmp_path / "profile.json"
    events = [*EVENTS[:2], odd, *EVENTS[2:]]
    path.write_text(json.dumps({"schemaVersion": 1, "baseTimeNanoseconds": BASE, "traceEvents": events}))
    merged = merge(path, None, tmp_path / f"out{suffix}")
    assert (merged.spans, merged.gpu_spans) == (2, 2)
    assert [note.partition(" of the profiler's events ")[0] for note in merged.notes if said in note] == ["1"]
    assert said in str(load(path).metadata["notes"])
    if said == "are malformed":
        for read in (path, tmp_path / f"out{suffix}"):
            assert "lost: 1 events of the profiler left out" in str(load(read).summary())


def on_stream(*work: tuple[int, int], window: tuple[int, int] | None = None) -> list[Event]:
    """A module that launches kernels, each with its start and end, ns."""
    events = [x("python_function", "nn.Module: Net_0", 1000, 9000, Python_module_id=0)]
    for number, (start, end) in enumerate(work, 1):
        events += [
            x("cuda_runtime", "cudaLaunchKernel", 1000 + 20 * number, 1010 + 20 * number, correlation=number),
            x("kernel", f"k{number}", start, end, pid=0, tid=7, correlation=number),
        ]
    return events + (
        [x("Trace", "PyTorch Profiler (0)", *window, pid="Spans", tid="PyTorch Profiler")] if window else []
    )


@pytest.mark.parametrize(
    ("work", "window", "kernel_ns", "cut_ns"),
    [
        (((3000, 4000), (4000, 5000)), None, 2000, 0),
        (((3000, 4500), (4000, 5000)), None, 2500, 0),  # a device may begin the next one early
        (((3000, 1_600_000), (4000, 5000)), None, 2000, 1_596_000),
        (((3000, 1_600_000), (4000, 1_500_000), (5000, 6000)), None, 3000, 1_596_000 + 1_495_000),
        (((3000, 1_600_000), (3000, 3000), (3000, 4000)), None, 1000, 1_597_000),
        (((3000, 4000), (5000, 1_600_000)), (500, 9500), 1000 + 4500, 1_590_500),
        (((3000, 4000), (5000, 1_600_000)), (500, 1_700_000), 1000 + 1_595_000, 0),
    ],
)
def test_device_times_that_cannot_be_are_left_out_of_sums_and_said(
    tmp_path: Path, work: tuple[tuple[int, int], ...], window: tuple[int, int] | None, kernel_ns: int, cut_ns: int
) -> None:
    path = tmp_path / "profile.json"
    events = on_stream(*work, window=window)
    path.write_text(json.dumps({"schemaVersion": 1, "baseTimeNanoseconds": BASE, "traceEvents": events}))
    for suffix in (".json", ".pftrace"):
        merged = merge(path, None, tmp_path / f"out{suffix}")
        said = [note for note in merged.notes if "which no device does" in note]
        assert [f"{cut_ns / 1e6:,.3f} ms were cut off" in note for note in said] == [True] * bool(cut_ns)
        gpu_work = load(tmp_path / f"out{suffix}").gpu_work
        assert gpu_work is not None
        assert int(gpu_work.duration.sum()) == kernel_ns
    overlaps = [fault for fault in check(path).faults if fault.rule == "device-overlap"]
    assert bool(overlaps) == bool(cut_ns)
    after = [re.findall(r"(\d+) of them after", fault.message) for fault in overlaps]
    assert sum(int(number) for numbers in after for number in numbers) == cut_ns


@pytest.mark.parametrize(
    ("work", "overlapping"),
    [
        (((3000, 4000), (4000, 5000)), 0),
        (((3000, 4500), (4000, 5000)), 1),
        (((3000, 4500), (4000, 5000), (4200, 5200)), 2),
        (((3000, 4500), (4000, 5000), (4600, 6000)), 1),  # the second one is not drawn
    ],
)
def test_kernels_that_overlap_are_said_where_viewers_drop_them(
    tmp_path: Path, work: tuple[tuple[int, int], ...], overlapping: int
) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"schemaVersion": 1, "baseTimeNanoseconds": BASE, "traceEvents": on_stream(*work)}))
    notes = [note for note in merge(path, None, tmp_path / "out.json").notes if "extra row" in note]
    assert [note.split()[0] for note in notes] == [str(overlapping)] * bool(overlapping)
    assert not [note for note in merge(path, None, tmp_path / "out.pftrace").notes if "extra row" in note]
    assert [fault.rule for fault in check(path).faults] == ["partial-overlap"] * overlapping
    assert check(tmp_path / "out.pftrace").faults == []


@pytest.mark.parametrize("first", [True, False])
def test_a_profile_is_recognized_wherever_its_keys_are(tmp_path: Path, first: bool) -> None:
    path = tmp_path / "profile.json"
    keys, events = {"schemaVersion": 1}, {"traceEvents": on_stream((3000, 4500), (4000, 5000))}
    path.write_text(json.dumps(keys | events if first else events | keys))
    faults = check(path).faults
    assert [(fault.rule, fault.of_profiler) for fault in faults] == [("partial-overlap", True)]


@pytest.mark.parametrize("value", [None, "a", [1], True, 1, 1.5, "2.5"])
def test_a_counter_whose_value_no_viewer_reads_is_a_fault(tmp_path: Path, value: Any) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps([{"ph": "C", "name": "CPU", "pid": 1, "ts": 3, "args": {"sys": value}}]))
    assert [fault.rule for fault in check(path).faults] == (
        [] if value in (1.5, "2.5") or type(value) is int else ["not-a-number"]
    )


@pytest.mark.parametrize("suffix", [".json", ".pftrace"])
@pytest.mark.parametrize("pids", [(100, 200), ("[TP00] 100", "[TP01] 200"), (100, 200, 300), (100, "p")])
def test_modules_and_kernels_of_every_process_are_shown(tmp_path: Path, pids: tuple[Any, ...], suffix: str) -> None:
    """Their threads have one id, and each has a device of its own."""
    path, out = tmp_path / "profile.json", tmp_path / f"out{suffix}"
    devices = {pid: device for device, pid in enumerate(pids)}
    events = [
        event | {"pid": devices[pid] if event["cat"] == "kernel" else pid, "ts": event["ts"] + devices[pid] * 20}
        for pid in pids
        for event in EVENTS
    ]
    path.write_text(json.dumps({"schemaVersion": 1, "baseTimeNanoseconds": BASE, "traceEvents": events}))
    merged = merge(path, None, out)
    assert (merged.spans, merged.gpu_spans) == (2 * len(pids), 2 * len(pids))
    assert check(out).faults == []
    for timeline in (load(path), load(out)):
        processes = [track.process for track in timeline.tracks if track.kind == "forward"]
        assert len(set(processes)) == len(pids)
        assert [process.pid for process in processes if process.pid] == [pid for pid in pids if isinstance(pid, int)]
        starts = [span.start_ns - BASE for span in timeline.spans if span.name == "Net" and "stream" not in span.track]
        assert starts == [1000 + 20_000 * number for number in range(len(pids))]
        assert {row.fqn: row.calls for row in timeline.summary().rows} == dict.fromkeys(
            ("Net_0", "Net_0.Linear_0"), len(pids)
        )
    drawn = {pid for pid, _ in _named_rows(out)} if suffix == ".json" else set(pids)
    assert drawn == set(pids)


def _named_rows(path: Path) -> set[tuple[Any, str]]:
    events = json.loads(path.read_text())["traceEvents"]
    return {
        (e["pid"], e["args"]["name"]) for e in events if e["name"] == "thread_name" and "forward" in e["args"]["name"]
    }
