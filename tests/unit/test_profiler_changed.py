"""Profiler traces with odd fields: an error that names the file, or a result that leaves them out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modtrace import ModtraceError, TraceError, load, merge
from modtrace.profiler.event_collector import EventCollector
from modtrace.read import FileKind, file_kind
from tests.support.json_mutations import mutated, mutations
from tests.support.kineto import BASE, PID, TID, evaluate, recording, trace, x
from tests.support.test_scale import scaled

CHANGES = scaled(80, 250, 2_000)
RECORDING = recording(("Net", 0, 1000, 0), ("Net", 2000, 3000, 0, "backward"))

PROFILE: dict[str, Any] = json.loads(
    trace(
        x("cpu_op", "aten::linear", 1, 1000, External_id=1, Sequence_number=1),
        evaluate("AddmmBackward0", 2000, 3000, 1),
        x("python_function", "nn.Module: Linear_0", 1, 1500, Python_id=1, Python_module_id=0),
        {"ph": "s", "id": 1, "cat": "fwdbwd", "name": "fwdbwd", "pid": PID, "tid": TID, "ts": 0.1},
        {"ph": "f", "id": 1, "cat": "fwdbwd", "name": "fwdbwd", "pid": PID, "tid": TID, "ts": 2.0, "bp": "e"},
        {"ph": "M", "name": "process_name", "pid": PID, "tid": 0, "args": {"name": "python"}},
        {"ph": "i", "s": "t", "name": "here", "pid": PID, "tid": TID, "ts": 1.0},
        {"ph": "C", "name": "memory", "pid": PID, "tid": TID, "ts": 1.0, "args": {"bytes": 1}},
        x("cuda_runtime", "cudaLaunchKernel", 10, 20, correlation=5, External_id=1),
        x("kernel", "gemm", 100, 200, pid=0, tid=7, correlation=5, External_id=1, stream=7, device=0),
        distributedInfo={"backend": "nccl", "rank": 0, "world_size": 2},
    )
)

USES: dict[str, Callable[[Path, Path], object]] = {
    "merged in JSON": lambda path, folder: merge(path, RECORDING, folder / "out.json"),
    "merged as packets": lambda path, folder: merge(path, RECORDING, folder / "out.pftrace"),
    "merged with what it knows itself": lambda path, folder: merge(path, None, folder / "out.pftrace"),
    "as a timeline": lambda path, folder: load(path).save(folder / "out.pftrace"),
}


@pytest.mark.parametrize("use", USES)
def test_any_one_change_gives_an_error_of_ours_or_a_trace(tmp_path: Path, use: str) -> None:
    path = tmp_path / "profile.json"
    used = 0
    for changed in mutations(PROFILE, CHANGES):
        path.write_text(json.dumps(changed))
        try:
            USES[use](path, tmp_path)
            used += 1
        except ModtraceError as error:
            assert str(path) in str(error)  # noqa: PT017
    assert used > 0.8 * CHANGES


@pytest.mark.parametrize("value", ["x", -1, 1.5, None, [1], 2**63, True])
@pytest.mark.parametrize("use", USES)
def test_a_base_that_is_no_time_is_named(tmp_path: Path, value: object, use: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(mutated(PROFILE, ("baseTimeNanoseconds",), value)))

    with pytest.raises(TraceError) as raised:
        USES[use](path, tmp_path)
    assert str(raised.value) == (
        f"{path}: its baseTimeNanoseconds is {value!r}, which is not a time in nanoseconds since 1970; "
        "restore the profiler's value, or remove the key if the times count from 1970 themselves"
    )


@pytest.mark.parametrize("odd", [None, "1", 1.5, 2**63, [1]])
def test_a_node_of_which_a_number_is_odd_leaves_no_part_behind(odd: object) -> None:
    good = evaluate("AddmmBackward0", 2000, 3000, 1)
    collector = EventCollector()
    for field in ("Fwd thread id", "Sequence number"):
        collector.add([mutated(good, ("args", field), odd)])
    collector.add([good])
    nodes = collector.events().nodes
    # A node without a number is one too, and null says no more than no arg.
    assert [len(column) for name, column in vars(nodes).items() if name != "names"] == [3 if odd is None else 1] * 5
    assert (nodes.start_ns[-1], nodes.duration_ns[-1], nodes.sequence[-1], nodes.forward_thread[-1]) == (
        2000,
        1000,
        1,
        1,
    )


def test_slices_beyond_all_time_are_no_slices() -> None:
    collector = EventCollector()
    for ts, dur in ((1e300, 1.0), (1.0, 1e300), (float("inf"), 1.0), (float("nan"), 1.0), (1.0, float("nan"))):
        collector.add([{"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": ts, "dur": dur}])
    events = collector.events()
    assert len(events.work) == 0
    assert events.first > events.last


def laid_out_as_merged(document: dict[str, Any]) -> str:
    """A merged trace is known by how its end is laid out."""
    said = dict(document)
    events, merged = said.pop("traceEvents"), said.pop("modtrace")
    lines = ",\n".join(map(json.dumps, events))
    return f'{json.dumps(said)[:-1]},"traceEvents":[\n{lines}\n],\n"modtrace":{json.dumps(merged)}\n}}\n'


def test_a_merged_trace_is_read_whatever_one_of_its_events_is(tmp_path: Path) -> None:
    path = tmp_path / "merged.json"
    (tmp_path / "profile.json").write_text(json.dumps(PROFILE))
    merge(tmp_path / "profile.json", RECORDING, path)
    document = json.loads(path.read_text())
    path.write_text(laid_out_as_merged(document))
    assert file_kind(path) is FileKind.MERGED_JSON
    spans = len(load(path).spans)
    assert spans >= 1

    inside = [(*place, key) for place, said in _events(document) for key in said]
    for changed in mutations(document, CHANGES, inside):
        path.write_text(laid_out_as_merged(changed))
        timeline = load(path)
        assert spans - 1 <= len(timeline.spans) <= spans + 1
        timeline.save(tmp_path / "out.pftrace")
        timeline.save(tmp_path / "out.json")


def _events(document: dict[str, Any]) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    events = [(("traceEvents", index), event) for index, event in enumerate(document["traceEvents"])]
    return events + [((*place, "args"), event["args"]) for place, event in events if "args" in event]


def test_times_are_as_the_profile_says(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(PROFILE))
    assert load(path).spans[0].start_ns == BASE + 1
