"""The packets of a Perfetto trace that define its tracks, names and numbers; each is defined once."""

from __future__ import annotations

import hashlib
import itertools
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import orjson
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TracePacket, TrackDescriptor

from .._arrays import AnyArray, Numbering
from ..formats.limits import MAX_LINK, UNNAMED, escaped
from ..formats.slice_args import CALL_FIELDS
from ..formats.table_bytes import make_header
from ..timeline import PHASES, Name, Process, Timeline, Track
from .lanes import MARKS_ROW, Lane, Lanes
from .written_parts import COUNTER_UNIT, PartCounter

REALTIME_CLOCK = 1
"""Perfetto's BUILTIN_CLOCK_REALTIME, Unix time: the clock of the traces."""

INCREMENTAL_CLOCK = 64
"""A clock whose times count from the previous packet; each packet sequence has its own clock."""

PROFILER_SEQUENCE = 1 << 24
"""The packet sequence of the profiler's events in a merged trace; the sequences of a recording have small ids."""

PROFILER_FLOW = MAX_LINK + (1 << 61)
"""The first id of the profiler's flows in a merged trace; links and collectives of a recording have smaller ids."""

_NAMES_PER_PACKET = 10_000
_MAX_METADATA_NAME = 100
"""Maximum length of a metadata name in characters; Perfetto v52 crashes on a name of thousands."""


def serialize(*packets: TracePacket) -> bytes:
    """Return packets in a file's form, each with its tag and length."""
    serialized: bytes = Trace(packet=packets).SerializeToString()
    return serialized


class ArgNumbers(NamedTuple):
    """The numbers for the names of arguments, and for their values, in a part of a trace."""

    names: Numbering[str]
    texts: Numbering[str]


class InternTable:
    """The numbers for names in a trace; the most used name of its first part has the shortest number.

    The args of a span are a message of modtrace, an extension of TrackEvent that the trace itself describes. It needs
    half the bytes of debug annotations, which repeat the name of every value. Qualified names and classes are enum
    values. Number and type of the extension depend on the texts, so that traces in one file do not mix up their names.

    Attributes:
        label: int64[names], the iid of the label of each name of the timeline; from 1.
        fqn: int64[names], the enum value of the qualified name; from 0.
        module_class: int64[names], the enum value of the class; from 0.
        extension: the field number of the args in a TrackEvent.
    """

    def __init__(self, timeline: Timeline, names: Sequence[Name]) -> None:
        uses = np.bincount(timeline.columns.name, minlength=len(names)).tolist()
        (labels, self.label), (fqns, self.fqn), (classes, self.module_class) = (
            _rank_by_use([name[field] for name in names], uses) for field in range(3)
        )
        self.label += 1
        self._labels = labels
        schema = _schema(fqns, classes)
        check = zlib.crc32(schema.SerializeToString())
        self.extension = 9900 + check % 100  # Perfetto reserves 9900 to 9999 for other programs
        enums = {"fqn": "Fqn", "module_class": "ModuleClass"}
        _add_call_message(schema, f"modtrace_{check:08x}", self.extension, enums)
        self._schema = FileDescriptorSet(file=[schema])

    def description(self) -> TracePacket:
        """Return the packet that describes the args to a reader."""
        packet = TracePacket()
        packet.extension_descriptor.extension_set.ParseFromString(self._schema.SerializeToString())
        return packet

    def packets(self, sequence: int, span_names: AnyArray, args: ArgNumbers) -> Iterator[TracePacket]:
        """Yield the packets that define, on a sequence, the numbers of its spans' names and args."""
        names = {iid: self._labels[iid - 1] for iid in np.unique(self.label[np.unique(span_names)]).tolist()}
        yield from interned_packets(sequence, names, PHASES, *args)


def following_packet(sequence: int) -> TracePacket:
    """Return a packet that uses earlier definitions of its sequence."""
    return TracePacket(trusted_packet_sequence_id=sequence, sequence_flags=TracePacket.SEQ_NEEDS_INCREMENTAL_STATE)


def interned_packets(
    sequence: int,
    names: Mapping[int, str],
    categories: Iterable[str],
    arg_names: Iterable[str],
    texts: Iterable[str] = (),
) -> Iterator[TracePacket]:
    """Yield the packets that define numbers on a sequence; all numbers except the numbers of `names` count from 1."""
    items = iter(names.items())
    while names_of_packet := [*itertools.islice(items, _NAMES_PER_PACKET)]:
        packet = following_packet(sequence)
        for iid, name in names_of_packet:
            packet.interned_data.event_names.add(iid=iid, name=name)
        yield packet
    packet = following_packet(sequence)
    for iid, name in enumerate(categories, 1):
        packet.interned_data.event_categories.add(iid=iid, name=name)
    for iid, name in enumerate(arg_names, 1):
        packet.interned_data.debug_annotation_names.add(iid=iid, name=name)
    for iid, text in enumerate(texts, 1):
        packet.interned_data.debug_annotation_string_values.add(iid=iid, str=text.encode())
    yield packet


def track_uuid(key: str) -> int:
    """Return the uuid of the track with this unique key."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") or 1


def describe_track(
    sequence: int, uuid: int, parent: int | None = None, rank: int | None = None, name: str | None = None
) -> TracePacket:
    """Return the descriptor of a track; `rank` is its position among the tracks of its parent."""
    # Perfetto merges tracks of one name unless the descriptor forbids it.
    unmerged = TrackDescriptor.SIBLING_MERGE_BEHAVIOR_NONE
    track = TrackDescriptor(
        uuid=uuid, parent_uuid=parent, name=name, sibling_order_rank=rank, sibling_merge_behavior=unmerged
    )
    return TracePacket(trusted_packet_sequence_id=sequence, track_descriptor=track)


class TrackParents(NamedTuple):
    """The uuids of process and thread tracks that the file already describes."""

    process: int  # uuid of the process for marks and for unknown processes
    processes: Mapping[Process, int]  # uuid of each process
    threads: Mapping[tuple[Process, int], int]  # uuid of each thread, by process and OS thread id


class TrackDescriptors:
    """The tree of tracks: process → thread → `modules` → forward and backward, and the process's counters.

    The level `modules` is needed for the order: Perfetto keeps an explicit order only below tracks that have no thread
    or process of their own.
    """

    def __init__(self, timeline: Timeline, lanes: Lanes, sequence: int, parents: TrackParents | None) -> None:
        self._sequence, self._parents = sequence, parents
        recording = f"{timeline.slices.start[:1]} {sorted(lanes.pids.items(), key=repr)}"
        self._recording = hashlib.blake2b(recording.encode()).hexdigest()
        self._described_keys: set[object] = set()

    def uuid(self, *key: object) -> int:
        """Return the uuid of a track. Its key is "lane" or "counter" with an index, or "marks", for marks and steps.

        The counters of step parts follow the timeline's counters in the indices.
        """
        return track_uuid(f"{self._recording} {key}")

    def packets(
        self, timeline: Timeline, lanes: Lanes, step_parts: Sequence[PartCounter] | None
    ) -> Iterator[TracePacket]:
        """Yield the descriptors of the tracks that are new in a part, parents first; in the last part also metadata."""
        if step_parts is not None:
            yield self._metadata(timeline)
        for rank, (process, pid) in enumerate(lanes.pids.items()):
            if self._parents is None and self._is_new(process):
                yield self._process(process, pid, rank)
        for index, lane in enumerate(lanes.lanes):
            if self._is_new(index):
                yield from self._lane(index, lane, timeline.tracks[lane.track], lanes.sort_indexes[index])
        if step_parts is None:
            return
        rank = len(lanes.lanes)
        for index, counter in enumerate(timeline.counters):
            parent = self._process_uuid(counter.process)
            yield self._counter(index, parent, rank + index, escaped(counter.name), escaped(counter.unit))
        for index, part in enumerate(step_parts, len(timeline.counters)):
            parent, name = self._process_uuid(next(iter(lanes.pids))), f"{escaped(part.name)} {COUNTER_UNIT}"
            yield self._counter(index, parent, rank + index, name, COUNTER_UNIT)
        if timeline.marks:
            marks_parent = None if self._parents is None else self._parents.process
            yield self._track("marks", parent=marks_parent, rank=0, name=MARKS_ROW)

    def _is_new(self, key: object) -> bool:
        count = len(self._described_keys)
        self._described_keys.add(key)
        return len(self._described_keys) > count

    def _lane(self, index: int, lane: Lane, track: Track, rank: int) -> Iterator[TracePacket]:
        """Yield the descriptor of a lane; the first lane of a thread follows the thread's descriptor."""
        if track.device is not None:
            yield self._track("lane", index, parent=self._process_uuid(track.process), rank=rank, name=lane.name)
            return
        thread = (track.process, track.thread, track.tid)
        if self._is_new(thread):
            if self._parents is None:
                packet = self._track("thread", *thread, parent=self.uuid(track.process), rank=rank)
                name = escaped(track.thread) or UNNAMED
                if _is_tid(track.tid):
                    descriptor = packet.track_descriptor.thread
                    descriptor.pid, descriptor.tid = _int32(lane.pid), _int32(track.tid)
                    descriptor.thread_name = name
                else:  # Perfetto would cut a longer id, which could then be another thread's id
                    packet.track_descriptor.name = name
                yield packet
                parent = self.uuid("thread", *thread)
            else:
                parent = self._parents.threads[track.process, track.tid]
            yield self._track("modules", *thread, parent=parent, rank=0, name="modules")
        yield self._track("lane", index, parent=self.uuid("modules", *thread), rank=rank, name=lane.name)

    def _process_uuid(self, process: Process) -> int:
        if self._parents is None:
            return self.uuid(process)
        return self._parents.processes.get(process, self._parents.process)

    def _metadata(self, timeline: Timeline) -> TracePacket:
        packet = TracePacket(trusted_packet_sequence_id=self._sequence)
        header = make_header(timeline)
        # People see these entries in Perfetto's list of metadata.
        metadata = {name: value for name, value in header["metadata"].items() if len(name) < _MAX_METADATA_NAME}
        entries: dict[str, Any] = {**metadata, **header["stats"], "modtrace": header["modtrace"]}
        for name, value in entries.items():
            text = value if isinstance(value, str) else orjson.dumps(value).decode()
            packet.chrome_events.metadata.add(name=name, string_value=text)
        return packet

    def _process(self, process: Process, pid: int | str, rank: int) -> TracePacket:
        packet = self._track(process, parent=None, rank=rank)
        descriptor = packet.track_descriptor.process
        descriptor.pid, descriptor.process_name = _int32(pid), escaped(process.name) or UNNAMED
        return packet

    def _track(self, *key: object, parent: int | None, rank: int, name: str | None = None) -> TracePacket:
        packet = describe_track(self._sequence, self.uuid(*key), parent, rank, name)
        packet.track_descriptor.child_ordering = TrackDescriptor.EXPLICIT
        return packet

    def _counter(self, index: int, parent: int, rank: int, name: str, unit: str) -> TracePacket:
        packet = self._track("counter", index, parent=parent, rank=rank, name=name)
        packet.track_descriptor.counter.unit_name = unit
        return packet


def sequence_start(sequence: int, track: int, time: int) -> TracePacket:
    """Return the packet that starts a sequence: its clock at `time` (Unix ns), its events on `track`."""
    packet = TracePacket(trusted_packet_sequence_id=sequence, sequence_flags=3)
    packet.trace_packet_defaults.timestamp_clock_id = INCREMENTAL_CLOCK
    packet.trace_packet_defaults.track_event_defaults.track_uuid = track
    packet.clock_snapshot.primary_trace_clock = REALTIME_CLOCK
    packet.clock_snapshot.clocks.add(clock_id=INCREMENTAL_CLOCK, timestamp=time, is_incremental=True)
    packet.clock_snapshot.clocks.add(clock_id=REALTIME_CLOCK, timestamp=time)
    return packet


def _rank_by_use(texts: list[str], uses: list[int]) -> tuple[list[str], Any]:
    tally: Counter[str] = Counter()
    for text, count in zip(texts, uses, strict=True):
        tally[text] += count
    ordered = [text for text, _ in tally.most_common()]
    number = {text: index for index, text in enumerate(ordered)}
    return ordered, np.array([number[text] for text in texts], np.int64)


def _is_tid(value: int) -> bool:
    """Return whether a thread's id fits into 32 bits, with or without a sign; some systems have longer ids."""
    return -(1 << 31) <= value < 1 << 32


def _int32(number: int | str) -> int:
    """Return a 32-bit id as protobuf's signed int32. Only a JSON trace can have ids that are texts."""
    number = int(number)
    return number if number < 1 << 31 else number - (1 << 32)


def _schema(fqns: list[str], classes: list[str]) -> FileDescriptorProto:
    schema = FileDescriptorProto()
    for name, texts in (("Fqn", fqns), ("ModuleClass", classes)):
        enum = schema.enum_type.add(name=name)
        for number, text in enumerate(texts):
            enum.value.add(name=text, number=number)
    return schema


def _add_call_message(schema: FileDescriptorProto, package: str, extension: int, enums: Mapping[str, str]) -> None:
    """Add the message that holds the args of a span, an extension of TrackEvent; fields are enums or numbers."""
    schema.name, schema.package = f"{package}.proto", package
    kinds = FieldDescriptorProto
    call = schema.message_type.add(name="Call")
    for name, number in CALL_FIELDS.items():
        field = call.field.add(name=name, number=number, label=kinds.LABEL_OPTIONAL)
        field.type = kinds.TYPE_BOOL if name == "complete" else kinds.TYPE_INT64
        if name in enums:
            field.type, field.type_name = kinds.TYPE_ENUM, f".{package}.{enums[name]}"
    # With the name `debug`, queries find `debug.fqn`, which is also the key of a debug annotation.
    schema.extension.add(
        name="debug",
        number=extension,
        label=kinds.LABEL_OPTIONAL,
        type=kinds.TYPE_MESSAGE,
        type_name=f".{package}.Call",
        extendee=".perfetto.protos.TrackEvent",
    )
