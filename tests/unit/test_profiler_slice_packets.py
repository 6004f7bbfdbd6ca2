"""The profiler's events as packets, read with the perfetto package instead of our reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent

from modtrace import merge
from modtrace.checking import check
from modtrace.write.perfetto_descriptors import PROFILER_SEQUENCE
from tests.support.kineto import BASE, PID, TID, recording, trace, x

KINDS = {TrackEvent.TYPE_SLICE_BEGIN: "begin", TrackEvent.TYPE_SLICE_END: "end", TrackEvent.TYPE_INSTANT: "instant"}
VALUES = {
    "int": -7,
    "largest": 2**63 - 1,
    "beyond": 2**63,
    "bool": True,
    "float": 0.5,
    "text": "a\\b",
    "list": [128, 1, 1],
    "nothing": None,
}


def merged_packets(folder: Path, *events: Any) -> list[Any]:
    """The packets of the profiler's events in a merged trace."""
    (folder / "profile.json").write_bytes(trace(*events))
    merge(folder / "profile.json", recording(("Net", 0, 100_000, 0)), folder / "out.pftrace")
    packets = Trace.FromString((folder / "out.pftrace").read_bytes()).packet
    return [packet for packet in packets if packet.trusted_packet_sequence_id == PROFILER_SEQUENCE]


def texts(packets: list[Any], kind: str) -> dict[int, str]:
    return {entry.iid: entry.name for packet in packets for entry in getattr(packet.interned_data, kind)}


def told(packets: list[Any]) -> list[tuple[str, str, int, str]]:
    """Return each event: the name of its track, its kind, its time (ns from the base), and its name."""
    names = texts(packets, "event_names")
    tracks = {
        packet.track_descriptor.uuid: packet.track_descriptor.name or packet.track_descriptor.thread.thread_name
        for packet in packets
    }
    return [
        (
            tracks[packet.track_event.track_uuid],
            KINDS[packet.track_event.type],
            packet.timestamp - BASE,
            names.get(packet.track_event.name_iid, ""),
        )
        for packet in packets
        if packet.HasField("track_event")
    ]


def test_ends_close_their_own_slices_and_overlaps_get_another_track(tmp_path: Path) -> None:
    packets = merged_packets(
        tmp_path,
        x("cpu_op", "outer", 1000, 5000),
        x("cpu_op", "across", 4000, 6000),
        x("cpu_op", "inner", 2000, 3000),
        x("cpu_op", "next", 5000, 7000),
        {"ph": "i", "s": "t", "name": "moment", "pid": PID, "tid": TID, "ts": 2.5},
        {"ph": "M", "name": "thread_name", "pid": PID, "tid": TID, "args": {"name": "main"}},
    )

    assert told(packets) == [
        ("main", "begin", 1000, "outer"),
        ("main", "begin", 2000, "inner"),
        ("main", "instant", 2500, "moment"),
        ("main", "end", 3000, ""),
        (f"{TID} · overlapping slices", "begin", 4000, "across"),
        ("main", "end", 5000, ""),
        ("main", "begin", 5000, "next"),
        ("main", "end", 7000, ""),
        (f"{TID} · overlapping slices", "end", 6000, ""),
    ]


def test_args_keep_their_types_and_categories_their_text(tmp_path: Path) -> None:
    packets = merged_packets(
        tmp_path,
        x("cpu_op", "op", 1000, 2000) | {"args": VALUES},
        x("cuda_runtime", "launch", 3000, 4000) | {"args": {**VALUES, "int": "now a text"}},
        {key: value for key, value in x("", "bare", 5000, 6000).items() if key not in ("cat", "args")},
    )

    names, categories = texts(packets, "debug_annotation_names"), texts(packets, "event_categories")
    begins = []
    for packet in packets:
        if packet.track_event.type == TrackEvent.TYPE_SLICE_BEGIN:
            args = {}
            for annotation in packet.track_event.debug_annotations:
                kind = annotation.WhichOneof("value")
                args[names[annotation.name_iid]] = (kind, getattr(annotation, kind))
            begins.append(([categories[iid] for iid in packet.track_event.category_iids], args))
    expected = {
        "int": ("int_value", -7),
        "largest": ("int_value", 2**63 - 1),
        "beyond": ("string_value", "9223372036854775808"),
        "bool": ("bool_value", True),
        "float": ("double_value", 0.5),
        "text": ("string_value", "a＼b"),
        "list": ("string_value", "[128,1,1]"),
        "nothing": ("string_value", "null"),
    }
    assert begins == [
        (["cpu_op"], expected),
        (["cuda_runtime"], {**expected, "int": ("string_value", "now a text")}),
        ([], {}),
    ]


def test_flows_join_the_slices_that_start_at_their_ends(tmp_path: Path) -> None:
    flow = {"id": 5, "cat": "fwdbwd", "name": "fwdbwd", "pid": PID, "tid": TID}
    packets = merged_packets(
        tmp_path,
        x("cpu_op", "forward", 1000, 2000),
        {"ph": "s", **flow, "ts": 1.0},
        x("cpu_op", "between", 3000, 4000),
        x("cpu_op", "backward", 5000, 6000),
        {"ph": "f", "bp": "e", **flow, "ts": 5.0},
    )

    begins = [packet for packet in packets if packet.track_event.type == TrackEvent.TYPE_SLICE_BEGIN]
    first, second, third = (list(packet.track_event.flow_ids) for packet in begins)
    assert (first, second) == (third, [])
    assert len(first) == 1


def end_of_flow(phase: str, at: int, identifier: int = 5, *, tid: int = TID) -> dict[str, Any]:
    """An end of a flow, at ns from the base."""
    return {"ph": phase, "pid": PID, "tid": tid, "ts": at / 1000, "id": identifier, "cat": "ac2g", "name": "ac2g"}


def flows_by_slice(packets: list[Any]) -> dict[str, list[int]]:
    """Return the flows of each slice, numbered from 1 in order of appearance."""
    names, numbers = texts(packets, "event_names"), dict[int, int]()
    begins = [packet.track_event for packet in packets if packet.track_event.type == TrackEvent.TYPE_SLICE_BEGIN]
    return {
        names[event.name_iid]: [numbers.setdefault(flow, len(numbers) + 1) for flow in event.flow_ids]
        for event in begins
    }


@pytest.mark.parametrize(
    ("flows", "expected"),
    [
        ((("s", 1000),), ([], [], [])),
        ((("f", 3000),), ([], [], [])),
        ((("f", 3000), ("f", 5000)), ([], [], [])),
        ((("s", 1000), ("s", 3000)), ([], [], [])),
        ((("f", 1000), ("s", 3000)), ([], [], [])),
        ((("s", 1500), ("f", 3000)), ([1], [1], [])),
        ((("s", 1000), ("f", 3000), ("f", 5000)), ([1], [1], [])),
        ((("s", 1000), ("s", 3000), ("f", 5000)), ([1], [], [1])),
        ((("s", 1000), ("f", 3000), ("s", 3000), ("f", 5000)), ([1], [1, 2], [2])),
        ((("f", 5000), ("s", 1000)), ([1], [], [1])),
    ],
    ids=["begin", "end", "ends", "begins", "backwards", "inside", "ended", "begun", "again", "any-order"],
)
def test_flows_are_drawn_like_json_readers_draw_them(
    tmp_path: Path, flows: tuple[tuple[str, int], ...], expected: tuple[list[int], ...]
) -> None:
    """A flow leads from its first begin event to the first end after it; a flow with one end draws nothing."""
    names = {1000: "one", 3000: "two", 5000: "three"}
    events: list[dict[str, Any]] = []
    # A slice, followed by the ends of its flows, in the order of the flows.
    for start in dict.fromkeys([*(at // 1000 * 1000 for _, at in flows), *names]):
        events.append(x("kernel", names[start], start, start + 1000))
        events += [end_of_flow(phase, at) for phase, at in flows if at // 1000 * 1000 == start]
    packets = merged_packets(tmp_path, *events)

    assert flows_by_slice(packets) == dict(zip(("one", "two", "three"), expected, strict=True))
    assert check(tmp_path / "out.pftrace").faults == []


def test_the_flow_of_slices_with_one_start_has_the_slice_written_before_its_end(tmp_path: Path) -> None:
    packets = merged_packets(
        tmp_path,
        end_of_flow("s", 1000, 7),  # written first: belongs to the innermost slice open then, like in JSON
        x("cpu_op", "outer", 1000, 2000),
        end_of_flow("s", 1000, 5),
        x("cpu_op", "inner", 1000, 1500),
        end_of_flow("s", 1000, 6),
        x("gpu_user_annotation", "annotation", 4000, 9000, tid=TID + 1),
        x("kernel", "kernel", 4000, 5000, tid=TID + 1),
        *(end_of_flow("f", 4000, identifier, tid=TID + 1) for identifier in (5, 6, 7)),
    )

    assert flows_by_slice(packets) == {"outer": [1], "inner": [2, 3], "annotation": [], "kernel": [2, 1, 3]}


@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("order", [1, -1])
def test_arrows_are_kept_wherever_their_ends_are_written(tmp_path: Path, bound: bool, order: int) -> None:
    launch, kernel = x("cuda_runtime", "launch", 1000, 2000), x("kernel", "kernel", 3000, 5000, tid=TID + 1)
    ends = [end_of_flow("s", 1000), end_of_flow("f", 3000, tid=TID + 1) | {"bp": "e"}]
    if bound:
        launch |= {"bind_id": "0x5", "flow_out": True}
        kernel |= {"bind_id": "0x5", "flow_in": True}
        ends = []
    packets = merged_packets(tmp_path, *[launch, kernel, *ends][::order], x("cpu_op", "op", 6000, 7000))
    assert flows_by_slice(packets) == {"launch": [1], "kernel": [1], "op": []}


def test_arrows_that_touch_no_slice_are_counted(tmp_path: Path) -> None:
    events = [
        x("cpu_op", "one", 1000, 2000),
        x("cpu_op", "two", 3000, 4000),
        end_of_flow("s", 2500),
        end_of_flow("f", 3000),
    ]
    (tmp_path / "profile.json").write_bytes(trace(*events))
    merged = merge(tmp_path / "profile.json", recording(("Net", 0, 3000, 0)), tmp_path / "out.pftrace")
    assert merged.notes == ["1 of the profiler's arrows are left out: they begin or end outside all slices"]


def test_packets_without_a_track_are_counted(tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_bytes(
        trace(
            x("cpu_op", "op", 1000, 2000),
            {"ph": "C", "name": "memory", "pid": PID, "tid": TID, "ts": 1.0, "args": {"bytes": 1}},
        )
    )
    merged = merge(tmp_path / "profile.json", recording(("Net", 0, 3000, 0)), tmp_path / "out.pftrace")

    assert "1 of the profiler's events are of a kind that .pftrace cannot represent" in merged.notes
