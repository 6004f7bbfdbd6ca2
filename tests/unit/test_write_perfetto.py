"""Perfetto's protobuf, packet by packet: the spliced bytes are what the package itself would have written."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf.unknown_fields import UnknownFieldSet
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TracePacket, TrackEvent

from modtrace import Timeline, WriteError
from modtrace.formats.table_bytes import pack_table
from modtrace.timeline import Slices
from modtrace.write.perfetto import write_perfetto
from modtrace.write.protobuf_columns import BytesColumn, ByteTable, interleave, record_lengths, repeat, varint
from tests.support.small_timelines import call_of_net
from tests.support.test_scale import scaled
from tests.support.timelines import EPOCH, gpt2_timeline, timeline_of, timelines

BEGIN, END = TrackEvent.TYPE_SLICE_BEGIN, TrackEvent.TYPE_SLICE_END


def packets(timeline: Timeline, folder: Path) -> list[Any]:
    write_perfetto(timeline, folder / "trace.pftrace")
    return list(Trace.FromString((folder / "trace.pftrace").read_bytes()).packet)


class Decoded:
    """The events of a trace by what its packets say, without our own reader."""

    def __init__(self, trace: list[Any]) -> None:
        described = trace[0].extension_descriptor.extension_set.file[0]
        self.number = described.extension[0].number
        self.enums = [[value.name for value in enum.value] for enum in described.enum_type]
        self.clock: dict[int, int] = {}
        self.labels: dict[tuple[int, int], str] = {}
        self.categories: dict[tuple[int, int], str] = {}
        self.events: list[tuple[int, int, int, Any]] = []
        for packet in trace:
            sequence = packet.trusted_packet_sequence_id
            if packet.clock_snapshot.clocks:
                self.clock[sequence] = packet.clock_snapshot.clocks[0].timestamp
            for entry in packet.interned_data.event_names:
                self.labels[sequence, entry.iid] = entry.name
            for entry in packet.interned_data.event_categories:
                self.categories[sequence, entry.iid] = entry.name
            if packet.HasField("track_event"):
                self.clock[sequence] += packet.timestamp
                event = packet.track_event
                said = self.args(event) if event.type == BEGIN else None
                self.events.append(
                    (sequence, self.clock[sequence], event.type, said and self.named(sequence, event, said))
                )

    def args(self, event: Any) -> dict[int, int]:
        unknown: Any = UnknownFieldSet(event)  # types-protobuf does not know that it is iterable
        (own,) = (field for field in unknown if field.field_number == self.number)
        return (
            {field.field_number: field.data for field in own.data}
            if not isinstance(own.data, bytes)
            else unpacked(own.data)
        )

    def named(self, sequence: int, event: Any, said: dict[int, int]) -> dict[str, Any]:
        return {
            "name": self.labels[sequence, event.name_iid],
            "category": self.categories[sequence, event.category_iids[0]],
            "fqn": self.enums[0][said[1]],
            "module_class": self.enums[1][said[2]],
            "call": said[3],
            "step": said[4],
            "link": said.get(5),
            "complete": said.get(6),
            "leaves": list(event.flow_ids_old),
            "arrives": list(event.terminating_flow_ids_old),
            "correlation": event.correlation_id,
        }


def unpacked(data: bytes) -> dict[int, int]:
    """Read a message of varints."""
    fields: dict[int, int] = {}
    numbers = []
    value = shift = 0
    for byte in data:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            numbers.append(value)
            value = shift = 0
    for tag, number in zip(numbers[::2], numbers[1::2], strict=True):
        fields[tag >> 3] = number
    return fields


def test_a_small_trace_event_by_event(tmp_path: Path) -> None:
    decoded = Decoded(packets(call_of_net(), tmp_path))
    net = {"name": "Net", "fqn": "Net", "module_class": "Net", "call": 0, "step": 5, "link": None, "complete": None}
    layer = {**net, "name": "fc: Linear", "fqn": "Net.fc", "module_class": "Linear", "call": 3}
    forward, backward = {"category": "forward", "arrives": []}, {"category": "backward", "leaves": []}
    # The layer is used three times and the net twice, so it has the shorter numbers.
    net["correlation"], layer["correlation"] = 2, 1
    assert [event for event in decoded.events if event[0] in (1, 2)] == [
        (1, EPOCH, BEGIN, {**net, **forward, "leaves": [7]}),
        (1, EPOCH + 1, BEGIN, {**layer, **forward, "leaves": [8]}),
        (1, EPOCH + 1_000, END, None),
        (1, EPOCH + 1_000_001, END, None),
        (2, EPOCH + 2_000_000, BEGIN, {**net, **backward, "arrives": [7]}),
        (2, EPOCH + 2_000_000, BEGIN, {**layer, **backward, "arrives": [8]}),
        (2, EPOCH + 2_000_999, END, None),
        (2, EPOCH + 2_400_000, BEGIN, {**layer, **backward, "arrives": [], "link": 8, "complete": 0}),
        (2, EPOCH + 2_500_000, END, None),
        (2, EPOCH + 2_500_000, END, None),
    ]


def test_marks_and_samples(tmp_path: Path) -> None:
    trace = packets(call_of_net(), tmp_path)
    (mark,) = (packet for packet in trace if packet.track_event.type == TrackEvent.TYPE_INSTANT)
    assert (mark.track_event.name, list(mark.track_event.categories)) == ("step 5", ["step"])
    samples = [packet.track_event for packet in trace if packet.track_event.type == TrackEvent.TYPE_COUNTER]
    assert [event.counter_value for event in samples if event.HasField("counter_value")] == [2**40]
    in_ms = [event.double_counter_value for event in samples if event.HasField("double_counter_value")]
    assert in_ms == [1.000001, 0, 0.999999, 0, 0.5, 0, 1e-6, 0], "forward, loss, backward and other of the step"


@settings(max_examples=scaled(20, 60, 1000), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(timeline=timelines())
def test_every_packet_is_as_the_package_writes_it(tmp_path: Path, timeline: Timeline) -> None:
    """Parsed and serialized again it has the same length: no field twice, no number longer than it must be."""
    write_perfetto(timeline, tmp_path / "trace.pftrace")
    data = (tmp_path / "trace.pftrace").read_bytes()
    trace = Trace.FromString(data)
    assert trace.ByteSize() == len(data)
    counts = dict.fromkeys((packet.trusted_packet_sequence_id for packet in trace.packet), 0)
    for packet in trace.packet:
        if packet.HasField("track_event"):
            kind = packet.track_event.type
            counts[packet.trusted_packet_sequence_id] += {BEGIN: 1, END: -1}.get(kind, 0)
            assert counts[packet.trusted_packet_sequence_id] >= 0
    assert set(counts.values()) <= {0}


def test_spans_that_overlap_partly_are_refused(tmp_path: Path) -> None:
    for rows in ([(0, 10, "a"), (5, 15, "b")], [(0, 10, "a"), (5, 15, "b"), (6, 7, "c"), (20, 30, "a")]):
        columns = timeline_of(*rows).columns
        timeline = dataclasses.replace(timeline_of(*rows), slices=columns)
        with pytest.raises(WriteError, match="forward · MainThread overlap"):
            write_perfetto(timeline, tmp_path / "trace.pftrace")
    assert list(tmp_path.iterdir()) == []


def test_names_used_most_have_the_shortest_numbers(tmp_path: Path) -> None:
    rows = [(at, at + 1, "rare" if at == 0 else "often") for at in range(0, 40, 2)]
    trace = packets(timeline_of(*rows), tmp_path)
    names = {entry.iid: entry.name for packet in trace for entry in packet.interned_data.event_names}
    assert names == {1: "often", 2: "rare"}


def test_bytes_of_a_span(tmp_path: Path) -> None:
    """A training step of a GPT-2 takes less than 50 bytes a span, and 7 for the table."""
    timeline = gpt2_timeline(100_000)
    size = {}
    for suffix in (".json", ".pftrace"):
        timeline.save(tmp_path / f"trace{suffix}")
        size[suffix] = (tmp_path / f"trace{suffix}").stat().st_size
    table = len(pack_table(timeline)) / len(timeline.columns)
    assert table < 7
    assert size[".pftrace"] / len(timeline.columns) - table < 50
    # As much as a sixth without the table.
    assert size[".json"] / size[".pftrace"] >= 5.5


def test_an_empty_timeline_is_a_trace(tmp_path: Path) -> None:
    trace = packets(Timeline(slices=Slices.empty()), tmp_path)
    assert not any(packet.HasField("track_event") for packet in trace)


Numbers = st.lists(st.one_of(st.integers(0, 300), st.integers(-(2**63), 2**63 - 1)), min_size=1, max_size=30)


@given(Numbers)
def test_varints_are_the_packages(numbers: list[int]) -> None:
    field = varint(np.array(numbers, np.int64), b"\x20")
    expected = [TrackEvent(thread_time_delta_us=number).SerializeToString()[1:] for number in numbers]
    sizes = record_lengths([field])
    assert [field.data[row, 1 : sizes[row]].tobytes() for row in range(len(numbers))] == expected


@given(st.data())
def test_joined_records_are_the_fields_in_order(data: st.DataObject) -> None:
    kinds = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=30))
    strings = data.draw(st.lists(st.binary(max_size=5), min_size=1, max_size=4))
    table = ByteTable(strings)
    parts, expected = [], [b""] * len(kinds)
    for kind in (0, 1):
        places = np.flatnonzero(np.array(kinds) == kind)
        if not len(places):
            continue
        picks = data.draw(st.lists(st.integers(0, len(strings) - 1), min_size=len(places), max_size=len(places)))
        present = data.draw(st.lists(st.booleans(), min_size=len(places), max_size=len(places)))
        fields: list[BytesColumn] = [
            varint(places),
            repeat(b"ab", len(places)),
            table.pick(np.array(picks)).where(np.array(present)),
            repeat(b"%d" % kind, len(places)).where(~np.array(present)),
        ]
        parts.append((places, fields))
        for place, pick, there in zip(places.tolist(), picks, present, strict=True):
            expected[place] = bytes([place]) + b"ab" + (strings[pick] if there else b"%d" % kind)
    assert interleave(parts, len(kinds)) == b"".join(expected)


def test_packets_of_a_sequence_name_it(tmp_path: Path) -> None:
    trace = packets(gpt2_timeline(300), tmp_path)
    assert all(packet.trusted_packet_sequence_id for packet in trace[1:] if packet.ListFields())  # else of the table
    started: set[int] = set()
    for packet in trace[1:]:
        if packet.sequence_flags == TracePacket.SEQ_INCREMENTAL_STATE_CLEARED | TracePacket.SEQ_NEEDS_INCREMENTAL_STATE:
            started.add(packet.trusted_packet_sequence_id)
        if packet.HasField("track_event"):
            assert packet.trusted_packet_sequence_id in started
