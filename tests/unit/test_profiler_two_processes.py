"""Traces of two processes: each numbers its own sequence numbers, forward threads and arrows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import modtrace
from tests.support.kineto import PID, TID, evaluate, trace, x

Event = dict[str, Any]


def process(later_ns: int = 0) -> list[Event]:
    """One call of a Linear, and its node on autograd's thread with an arrow to it."""
    forward = [
        x("python_function", "nn.Module: Linear_0", 1000, 5000, Python_id=1, Python_module_id=0),
        x("cpu_op", "aten::addmm", 2000, 3000, Sequence_number=7),
    ]
    backward = [
        evaluate("AddmmBackward0", 8000, 9000, 7, tid=TID + 1),
        x("cpu_op", "AddmmBackward0", 8100, 8900, tid=TID + 1, Sequence_number=7, Fwd_thread_id=1),
    ]
    arrow = {"cat": "fwdbwd", "name": "fwdbwd", "id": 3, "pid": PID}
    arrows: list[Event] = [
        {**arrow, "ph": "s", "tid": TID, "ts": 2.0},
        {**arrow, "ph": "f", "bp": "e", "tid": TID + 1, "ts": 8.1},
    ]
    return [{**event, "ts": event["ts"] + later_ns / 1000} for event in [*forward, *backward, *arrows]]


def of_another_pid(event: Event) -> Event:
    return {**event, "pid": event["pid"] + 1, "tid": event["tid"] + 1000}


@pytest.mark.parametrize("later_ns", [-500, 0, 4000])
def test_a_process_beside_another_keeps_its_own_backward(tmp_path: Path, later_ns: int) -> None:
    beside = [of_another_pid(event) for event in process(later_ns)]
    for events, count in ((process(), 1), ([*process(), *beside], 2), ([*beside, *process()], 2)):
        (tmp_path / "t.json").write_bytes(trace(*events))
        modtrace.merge(tmp_path / "t.json", None, tmp_path / "m.json")
        merged = json.loads((tmp_path / "m.json").read_bytes())["modtrace"]
        timeline = modtrace.load(tmp_path / "m.json")
        (row,) = timeline.summary().rows
        assert (merged["attributed_nodes"], merged["nodes"]) == (count, count)
        assert row.backward_self_ns == 1000 * count
        backward = [track.process.pid for track in timeline.tracks if track.kind == "backward"]
        assert sorted(backward) == [PID, PID + 1][:count]
