"""The profiler's events as packets of track events: the content of each is a message, the rest is columns.

A slice of a track event has no duration but a begin and an end, and an end closes the innermost open slice. So the
slices of a track are sorted before they are written; a slice that partly overlaps another goes to a row beside it.

A slice names its flows. In the profiler's JSON an end of a flow is an event of its own, written right after its slice
and beginning when it does. The profiler writes only one end of many flows, and some end before they begin: readers of
its JSON draw neither, so they are left out here.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
import orjson
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TracePacket, TrackEvent

from .._interrupts import cached_property
from .._numbering import Numbering
from .._typing import Int64Array
from ..formats.chrome_values import MAX_TIME_US, TrackKey, is_track_key, microseconds_to_ns
from ..formats.escape import UNNAMED, escaped
from ..formats.perfetto_ids import PROFILER_FLOW, PROFILER_SEQUENCE
from ..write.perfetto_descriptors import following_packet, interned_packets, serialize
from ..write.slices import order_slices, slice_packets

_MAX_MESSAGES = 1000
_SLICE_PHASES, _FLOW_PHASES = ("X", "i", "I"), ("s", "f")


class EventEncoder:
    """Encodes what events say; texts that occur again and again are in the trace once, and events have their ids."""

    def __init__(self) -> None:
        self._names = Numbering[str](first=1)
        self._categories = Numbering[str](first=1)
        self._arg_names = Numbering[str](first=1)
        self._messages: dict[tuple[str | None, tuple[str, ...]], tuple[TrackEvent, list[Any]]] = {}

    def fields(self, name: str, category: object, args: Mapping[str, Any]) -> bytes:
        """Return the name, the category and the args of an event as fields of a TrackEvent.

        Raises:
            AttributeError: the args are not a mapping.
            TypeError: a value is not JSON.
        """
        values = args.values()
        event_kind = (category if category is None else str(category), tuple(args))
        event, annotations = self._messages.get(event_kind) or self._new_message(event_kind)
        for annotation, value in zip(annotations, values, strict=True):
            kind = type(value)
            if kind is int:
                # Not comparing every number with its bounds saves a tenth of the time.
                try:
                    annotation.int_value = value
                except ValueError:
                    annotation.string_value = str(value)
            elif kind is float:
                annotation.double_value = value
            elif kind is bool:
                annotation.bool_value = value
            elif kind is str:
                annotation.string_value = escaped(value)
            else:
                annotation.string_value = escaped(orjson.dumps(value, default=str).decode())
        event.name_iid = self._names[name]
        serialized: bytes = event.SerializeToString()
        return serialized

    def _new_message(self, event_kind: tuple[str | None, tuple[str, ...]]) -> tuple[TrackEvent, list[Any]]:
        """Return an event of a category with args of given names, and the args, whose values are to be set.

        Most events are of a few kinds: one message for each is made, and used again for the next event.
        """
        if len(self._messages) == _MAX_MESSAGES:
            self._messages.clear()
        category, names = event_kind
        event = TrackEvent()
        if category is not None:
            event.category_iids.append(self._categories[category])
        annotations = [event.debug_annotations.add(name_iid=self._arg_names[name]) for name in names]
        message = self._messages[event_kind] = event, annotations
        return message

    def interned_packets(self) -> Iterator[TracePacket]:
        """Yield the packets that say what the ids mean; they come before all events."""
        names = {iid: escaped(name) or UNNAMED for name, iid in self._names.items()}
        return interned_packets(PROFILER_SEQUENCE, names, map(escaped, self._categories), map(escaped, self._arg_names))


@dataclass
class SliceFlows:
    """Takes the ends of flows in file order; columns of equal length."""

    _flow: array[int] = field(default_factory=lambda: array("q"))
    _ends: bytearray = field(default_factory=bytearray)
    _time: array[float] = field(default_factory=lambda: array("d"))
    _track: array[int] = field(default_factory=lambda: array("q"))
    _slice: array[int] = field(default_factory=lambda: array("q"))

    def add(self, flow: int, time: float, track: int, of_slice: int, *, ends: bool) -> None:
        """Take the begin or the end of a flow.

        Args:
            flow: number of the flow.
            time: µs from the trace's base.
            track: index of its track.
            of_slice: index of its slice on that track.
            ends: whether the flow ends here.
        """
        self._flow.append(flow)
        self._ends.append(ends)
        self._time.append(time)
        self._track.append(track)
        self._slice.append(of_slice)

    def by_track(self, tracks: int) -> list[Int64Array]:
        """Return for each of so many tracks the ends of those flows that lead from a slice to a slice.

        int64[n, 2]: the index of a slice, ascending, and the number of a flow that begins or ends there.
        A number may come again for another flow, once the flow before has ended; here each has one of its own, from 1.
        """
        ends_of_track: list[list[tuple[int, int]]] = [[] for _ in range(tracks)]
        begun: dict[int, int] = {}
        pairs = 0
        # In file order where they are of one time.
        for row in np.lexsort((np.frombuffer(self._time, np.float64), np.frombuffer(self._flow, np.int64))).tolist():
            flow = self._flow[row]
            if not self._ends[row]:
                begun.setdefault(flow, row)  # a begin of what has begun already is none
            elif flow in begun:
                pairs += 1
                for end in (begun.pop(flow), row):
                    ends_of_track[self._track[end]].append((self._slice[end], pairs))
        return [np.array(sorted(own), np.int64).reshape(-1, 2) for own in ends_of_track]


@dataclass
class TrackSlices:
    """The slices and instants of one track.

    Attributes:
        start: µs from the trace's base.
        duration: µs; -1 for an instant.
        fields: what else each says, see `EventEncoder.fields`.
    """

    start: array[float] = field(default_factory=lambda: array("d"))
    duration: array[float] = field(default_factory=lambda: array("d"))
    fields: list[bytes] = field(default_factory=list)


@dataclass
class ProfilerSlices:
    """Takes the profiler's events chunk by chunk.

    Attributes:
        tracks: the slices of each track, by its pid and tid in the trace.
        flows: the ends of flows.
        skipped: events that a Perfetto trace has no place for.
    """

    encoder: EventEncoder = field(default_factory=EventEncoder)
    tracks: dict[TrackKey, TrackSlices] = field(default_factory=dict)
    flows: SliceFlows = field(default_factory=SliceFlows)
    skipped: int = 0
    _flow_numbers: Numbering[str] = field(default_factory=Numbering)
    _flow_tracks: Numbering[TrackKey] = field(default_factory=Numbering)

    def add(self, events: Sequence[Any]) -> None:
        """Take some events; malformed ones are skipped."""
        fields, tracks = self.encoder.fields, self.tracks
        for event in events:
            try:
                phase = event["ph"]
                if phase == "M":
                    continue
                key, start = (event["pid"], event["tid"]), float(event["ts"])
                duration = float(event["dur"]) if phase == "X" else -1.0
                if phase in _SLICE_PHASES and start > 0:
                    # NaN is not a time either.
                    if not (start < MAX_TIME_US and start + duration < MAX_TIME_US):
                        raise ValueError(start)
                    own = fields(str(event["name"]), event.get("cat"), event.get("args") or {})
                    if key not in tracks:
                        if not is_track_key(key):
                            raise ValueError(key)
                        tracks[key] = TrackSlices()
                    track = tracks[key]
                    track.start.append(start)
                    track.duration.append(duration)
                    track.fields.append(own)
                elif phase in _FLOW_PHASES:
                    flow = self._flow_numbers[f"{event.get('cat')} {event['name']} {event['id']}"]
                    if key in tracks and tracks[key].start[-1] == start:
                        of_slice = len(tracks[key].start) - 1
                        self.flows.add(flow, start, self._flow_tracks[key], of_slice, ends=phase == "f")
                else:
                    self.skipped += 1
            except (KeyError, TypeError, ValueError, AttributeError):
                self.skipped += 1

    def packets(self, key: TrackKey, base: int, uuid: int, row_beside: Callable[[int], TracePacket]) -> Iterator[bytes]:
        """Yield the packets of a track, see `profiler_packets`; `base` is what its times count from, in Unix ns."""
        track = self.tracks[key]
        start, duration = np.frombuffer(track.start, np.float64), np.frombuffer(track.duration, np.float64)
        fields = track.fields
        if key in self._flows_by_track:
            fields = list(fields)
            for index, own in groupby(self._flows_by_track[key].tolist(), key=itemgetter(0)):
                flows = [flow + PROFILER_FLOW for _, flow in own]
                fields[index] += TrackEvent(flow_ids=flows).SerializeToString()
        start_ns, duration_ns = microseconds_to_ns(start) + base, microseconds_to_ns(duration)
        yield from profiler_packets(start_ns, duration_ns, fields, uuid, row_beside)

    @cached_property
    def _flows_by_track(self) -> dict[TrackKey, Int64Array]:
        return dict(zip(self._flow_tracks, self.flows.by_track(len(self._flow_tracks)), strict=True))


def profiler_packets(
    start: Int64Array, duration: Int64Array, fields: Sequence[bytes], uuid: int, beside: Callable[[int], TracePacket]
) -> Iterator[bytes]:
    """Yield the packets of a track's slices and instants on the profiler's sequence, see `slice_packets`.

    Args:
        start: int64[n], Unix ns.
        duration: int64[n], ns; negative for an instant.
        fields: what else they say, see `EventEncoder.fields`.
        uuid: of the track.
        beside: returns the descriptor of a row, from 1 on, for slices that partly overlap those of the rows before.
    """
    ordered = order_slices(start, duration)
    uuids = [uuid]
    for row in range(1, int(ordered.row.max(initial=0)) + 1):
        descriptor = beside(row)
        uuids.append(descriptor.track_descriptor.uuid)
        yield serialize(descriptor)
    sequence = following_packet(PROFILER_SEQUENCE).SerializeToString()
    yield from slice_packets(ordered, ordered.time, lambda some: [fields[index] for index in some], sequence, uuids)
