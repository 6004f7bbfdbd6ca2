"""Merged traces in Perfetto's format: the recording's packets, and the spans above the streams of GPUs."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TracePacket, TrackEvent

from .._errors import TraceError
from ..formats.merge_metadata import END_PACKET, MERGED_PACKET, gpu_work_in, with_annotated_ranges
from ..formats.trace_file import TraceFile
from ..timeline import PHASES, Name, Timeline
from .saved_perfetto import load_perfetto
from .stream_rows import ROW_PREFIX, StreamSpan, add_stream_spans, stream_number


def load_merged_perfetto(path: Path) -> Timeline:
    """Read the recording out of a merged trace.

    Raises:
        TraceError: it cannot be read, is cut off, or is no such trace.
    """
    rows = _StreamRows(path)
    with TraceFile(path) as source:
        timeline = load_perfetto(path, source.whole_blocks(), rows.take, rows.check_end)
    timeline = with_annotated_ranges(add_stream_spans(timeline, rows.spans), str(path), rows.metadata)
    return replace(timeline, gpu_work=gpu_work_in(str(path), rows.metadata))


@dataclass
class _StreamRows:
    """Takes the packets of the profiler's sequence, and picks out the spans above streams.

    Attributes:
        path: the trace, for errors.
        spans: those that have ended.
        metadata: what the trace says of how it was made.
    """

    path: Path
    spans: list[StreamSpan] = field(default_factory=list)
    metadata: object = None
    _has_end: bool | None = None
    _device_names: dict[int, str] = field(default_factory=dict)
    _rows: dict[int, tuple[int, int]] = field(default_factory=dict)
    _names: dict[int, str] = field(default_factory=dict)
    _categories: dict[int, str] = field(default_factory=dict)
    _arg_names: dict[int, str] = field(default_factory=dict)
    _open: dict[int, list[tuple[int, TrackEvent]]] = field(default_factory=dict)

    def take(self, packet: TracePacket) -> None:
        """Take a packet, in file order."""
        for entry in packet.chrome_events.metadata:
            if entry.name == MERGED_PACKET:
                self.metadata = orjson.loads(entry.string_value)
                self._has_end = False if f'"end":"{END_PACKET}"' in entry.string_value else None
            if entry.name == END_PACKET:
                if not entry.bool_value:
                    raise ValueError(f"{END_PACKET} is {entry.WhichOneof('value') or 'empty'} and not true")
                self._has_end = True
        if packet.HasField("interned_data"):
            interned = packet.interned_data
            self._names.update((entry.iid, entry.name) for entry in interned.event_names)
            self._categories.update((entry.iid, entry.name) for entry in interned.event_categories)
            self._arg_names.update((entry.iid, entry.name) for entry in interned.debug_annotation_names)
        if packet.HasField("track_descriptor"):
            track = packet.track_descriptor
            if track.name.startswith(ROW_PREFIX):
                device = stream_number(self._device_names.get(track.parent_uuid, ""))
                self._rows[track.uuid] = (device, stream_number(track.name))
            elif not track.parent_uuid:
                self._device_names[track.uuid] = track.name
        if packet.HasField("track_event") and packet.track_event.track_uuid in self._rows:
            event = packet.track_event
            stack = self._open.setdefault(event.track_uuid, [])
            if event.type == TrackEvent.TYPE_SLICE_BEGIN:
                stack.append((packet.timestamp, event))
            elif event.type == TrackEvent.TYPE_SLICE_END:
                self._close(*stack.pop(), packet.timestamp)

    def check_end(self) -> None:
        """Raise if the packet that ends a merged trace is missing, where the trace says that there is one."""
        if self._has_end is False:
            raise TraceError(self.path, "it is cut off: the packet that ends it is missing")

    def _close(self, start: int, event: TrackEvent, end: int) -> None:
        categories = [*event.categories, *(self._categories[iid] for iid in event.category_iids)]
        if not categories or categories[0] not in PHASES:
            return  # work that no module asked for
        args = {arg.name or self._arg_names[arg.name_iid]: _value(arg) for arg in event.debug_annotations}
        device, stream = self._rows[event.track_uuid]
        name = Name(event.name or self._names[event.name_iid], str(args["fqn"]), str(args["module_class"]))
        self.spans.append(
            StreamSpan(device, stream, start, end, name, categories[0], int(args["call"]), int(args["step"]))
        )


def _value(annotation: Any) -> Any:
    return getattr(annotation, annotation.WhichOneof("value"))
