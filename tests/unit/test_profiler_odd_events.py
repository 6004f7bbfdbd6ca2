"""A profile says the same whatever wrote it: other ids, times as text, begins and ends, keys in another order."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modtrace import load, merge
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


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        ({"ph": "X", "cat": "cpu_op", "name": "op", "pid": 100, "tid": 101, "ts": 3}, "have no dur"),
        ({"ph": "X", "cat": "cpu_op", "name": "op", "pid": 100, "tid": 101, "ts": "soon", "dur": 1}, "are no events"),
        ({"ph": "X", "cat": "cpu_op", "name": "op", "pid": 100, "tid": 101, "ts": None, "dur": 1}, "are no events"),
        ({"ph": "X", "cat": "cpu_op", "name": "op", "pid": 100, "tid": 101, "ts": 3, "dur": -1}, "are no events"),
        ({"ph": "B", "cat": "cpu_op", "name": "op", "pid": 100, "tid": 101, "ts": 3}, "begin and never end"),
        ({"ph": "E", "pid": 100, "tid": 101, "ts": 3}, "are no events"),
        ([1], "are no events"),
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
