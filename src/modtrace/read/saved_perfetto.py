"""Perfetto's protobuf as modtrace wrote it."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.message import DecodeError
from perfetto.protos.perfetto.trace import perfetto_trace_pb2
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TracePacket, TrackEvent

from .._errors import TraceError
from ..formats.header import EDITED_FILE_ERRORS, WHAT_TO_DO, checked_header
from ..formats.limits import MAX_LINK
from ..formats.packet_stream import read_packet_batches
from ..formats.perfetto_ids import INCREMENTAL_CLOCK, PROFILER_SEQUENCE, SequenceIds, add_call_message
from ..formats.slice_args import CATEGORIES, FileSlice
from ..timeline import Mark, Timeline
from .timeline_builder import SpanColumns, build_timeline_from

BATCH_BYTES = 1 << 19
"""Bytes of packets that are parsed at a time; their objects take many times as much."""

BEGIN, END = TrackEvent.TYPE_SLICE_BEGIN, TrackEvent.TYPE_SLICE_END


def load_perfetto(
    path: Path,
    blocks: Iterable[bytes],
    take_other: Callable[[TracePacket], None] | None = None,
    check: Callable[[], None] = lambda: None,
) -> Timeline:
    """Read the timeline out of a Perfetto trace.

    Args:
        path: the trace, for errors.
        blocks: its bytes, some at a time.
        take_other: of a merged trace, called with each packet of the profiler's sequence.
        check: called when all packets were read.

    Raises:
        TraceError: it is no such trace, is cut off, or was not written by modtrace.
    """
    reader = _Reader(path, take_other)
    try:
        for offset, part in read_packet_batches(path, blocks, BATCH_BYTES):
            reader.take(part, offset)
        check()
        return reader.timeline()
    except EDITED_FILE_ERRORS as error:
        raise TraceError(path, f"its packets are not as modtrace writes them: {error!r}; {WHAT_TO_DO}") from error


class _Reader:
    def __init__(self, path: Path, take_other: Callable[[TracePacket], None] | None) -> None:
        self._path = path
        self._take_other = take_other
        self._parser: Any = Trace
        self._args: Any = None
        self._header: dict[str, Any] | None = None
        self._fqns: list[str] = []
        self._classes: list[str] = []
        self._labels: dict[int, str] = {}
        self._annotations: dict[int, str] = {}
        self._texts: dict[int, str] = {}
        self._clock: dict[int, int] = {}
        self._open: dict[int, list[int]] = {}
        self._lanes = 0
        self._sequences = SequenceIds(0)
        self._rows = SpanColumns()
        # The category of the slices on each sequence that has no modules.
        self._categories: dict[int, str] = {}
        self._start = array("q")
        self._end = array("q")
        self._names: dict[tuple[int, int, int], int] = {}

    def take(self, part: bytes, offset: int) -> None:
        """Take the next packets of the file."""
        if self._args is None:
            self._describe(part)
        try:
            trace = self._parser.FromString(part)
        except DecodeError as error:
            raise TraceError(self._path, f"its packets cannot be parsed: {error}", offset) from error
        for packet in trace.packet:
            if self._take_other is not None and packet.trusted_packet_sequence_id == PROFILER_SEQUENCE:
                self._take_other(packet)
            elif packet.HasField("track_event"):
                self._event(packet)
            else:
                self._define(packet)

    def timeline(self) -> Timeline:
        """Return what has been read."""
        header = checked_header(self._path, self._header)
        return build_timeline_from(header, self._rows, np.array(self._start), np.array(self._end))

    def _describe(self, part: bytes) -> None:
        """Learn what the args are called; another tool's trace does not say it, and a merged one does so later."""
        try:
            packets = Trace.FromString(part).packet
        except DecodeError:
            packets = ()
        described = [file for packet in packets for file in packet.extension_descriptor.extension_set.file]
        if len(described) == 1 and described[0].package.startswith("modtrace") and described[0].extension:
            self._fqns, self._classes = ([value.name for value in enum.value] for enum in described[0].enum_type)
            self._parser, self._args = _parser(described[0].extension[0].number)
        elif self._take_other is None:
            checked_header(self._path, None)

    def _define(self, packet: Any) -> None:
        if packet.HasField("clock_snapshot"):
            for clock in packet.clock_snapshot.clocks:
                if clock.clock_id == INCREMENTAL_CLOCK:
                    self._clock[packet.trusted_packet_sequence_id] = clock.timestamp
        if packet.HasField("interned_data"):
            interned = packet.interned_data
            self._labels.update((entry.iid, entry.name) for entry in interned.event_names)
            self._annotations.update((entry.iid, entry.name) for entry in interned.debug_annotation_names)
            self._texts.update((entry.iid, entry.str.decode()) for entry in interned.debug_annotation_string_values)
        for entry in packet.chrome_events.metadata:
            if entry.name == "modtrace":
                self._header = checked_header(self._path, orjson.loads(entry.string_value))
                self._lanes = len(self._header["lanes"])
                self._sequences = SequenceIds(self._lanes)
                tracks = self._header["tracks"]
                kinds = [tracks[lane["track"]]["kind"] for lane in self._header["lanes"]]
                self._categories = {
                    self._sequences.lane(lane): kind for lane, kind in enumerate(kinds) if kind in CATEGORIES
                }

    def _event(self, packet: Any) -> None:
        sequence, event = packet.trusted_packet_sequence_id, packet.track_event
        time = self._clock[sequence] = self._clock[sequence] + packet.timestamp
        kind = event.type
        if sequence in self._categories:
            self._slice(sequence, event, time)
        elif kind == END:
            self._end[self._open[sequence].pop()] = time
        elif kind == BEGIN:
            self._open.setdefault(sequence, []).append(len(self._start))
            self._start.append(time)
            self._end.append(time)
            self._begin(self._sequences.lane_of(sequence), event)
        elif kind == TrackEvent.TYPE_COUNTER and event.WhichOneof("counter_value_field") == "double_counter_value":
            pass  # of a part of the steps: the slices have it
        elif kind == TrackEvent.TYPE_COUNTER:
            times, values = self._rows.samples.setdefault(self._sequences.counter_of(sequence), ([], []))
            times.append(time)
            values.append(event.counter_value)
        else:
            self._rows.marks.append(Mark(time, event.categories[0], event.name))

    def _slice(self, sequence: int, event: Any, time: int) -> None:
        rows = self._rows.slices
        open_rows = self._open.setdefault(sequence, [])
        if event.type == END:
            row = open_rows.pop()
            rows[row] = rows[row]._replace(end=time)
            return
        args = {entry.name: getattr(entry, entry.WhichOneof("value")) for entry in event.debug_annotations}
        open_rows.append(len(rows))
        lane = self._sequences.lane_of(sequence)
        rows.append(FileSlice(self._categories[sequence], lane, time, time, event.name, args))

    def _begin(self, lane: int, event: Any) -> None:
        rows, call = self._rows, event.Extensions[self._args]
        key = (event.name_iid, call.fqn, call.module_class)
        name = self._names.get(key)
        if name is None:
            texts = (self._labels[key[0]], self._fqns[key[1]], self._classes[key[2]])
            name = self._names[key] = rows.names[texts]
        rows.lane.append(lane)
        rows.phase.append(event.category_iids[0] - 1)
        rows.name.append(name)
        rows.call.append(call.call)
        rows.step.append(call.step)
        # At most one of the three is there; larger ids are of flows to collectives.
        links = [link for link in (*event.flow_ids_old, *event.terminating_flow_ids_old) if link < MAX_LINK]
        rows.link.append(links[0] if links else call.link if call.HasField("link") else -1)
        rows.complete.append(not call.HasField("complete"))
        if event.debug_annotations:
            rows.span_args[len(rows.lane) - 1] = {
                self._annotations[annotation.name_iid]: self._texts[annotation.string_value_iid]
                for annotation in event.debug_annotations
            }


@functools.cache
def _parser(extension: int) -> tuple[Any, Any]:
    """Return a class for traces whose args have this field number, and the extension.

    Its own pool, because the number differs from trace to trace, and an enum's values stay numbers here: texts that
    are no identifiers could not be its names.
    """
    schema = FileDescriptorProto(dependency=[perfetto_trace_pb2.DESCRIPTOR.name])
    add_call_message(schema, "modtrace", extension, {})
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(perfetto_trace_pb2.DESCRIPTOR.serialized_pb)
    pool.AddSerializedFile(schema.SerializeToString())
    trace = message_factory.GetMessageClass(pool.FindMessageTypeByName("perfetto.protos.Trace"))
    return trace, pool.FindExtensionByName("modtrace.debug")
