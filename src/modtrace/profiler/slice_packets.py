"""The profiler's events as packets of track events: the content of each is a message, the rest is columns.

A slice of a track event has no duration but a begin and an end, and an end closes the innermost open slice. So the
slices of a track are sorted before they are written; a slice that partly overlaps another goes to a row beside it.

A slice names its flows. In JSON an end of a flow is an event of its own, which the profiler writes right after its
slice and others anywhere, or the slice has a `bind_id`. The profiler writes only one end of many flows, and some end
before they begin: readers of its JSON draw neither, so they are left out here.
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
from .._typing import Float64Array, Int64Array
from ..formats.chrome_values import MAX_TIME_US, microseconds_to_ns
from ..formats.escape import UNNAMED, escaped
from ..formats.odd_events import TrackNumbers
from ..formats.perfetto_ids import PROFILER_FLOW, PROFILER_SEQUENCE
from ..write.perfetto_descriptors import following_packet, interned_packets, serialize
from ..write.slices import order_slices, slice_packets

_MAX_MESSAGES = 1000
_SLICE_PHASES, _FLOW_PHASES = ("X", "i", "I"), ("s", "t", "f")


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


_AT_LAST, _AROUND, _NEXT = range(3)
"""Which slice an end of a flow belongs to: the last one before it in the file, the one around it, or the next one."""
_MAX_LOOKED_AT = 512
"""Slices that are looked at for the one around a moment: so deep viewers draw."""


@dataclass
class SliceFlows:
    """Takes the ends of flows in file order; columns of equal length.

    Attributes:
        lost: arrows with an end that no slice holds, once `by_track` was called.
    """

    lost: int = 0
    _flow: array[int] = field(default_factory=lambda: array("q"))
    _ends: bytearray = field(default_factory=bytearray)
    _binds: bytearray = field(default_factory=bytearray)
    _time: array[float] = field(default_factory=lambda: array("d"))
    _track: array[int] = field(default_factory=lambda: array("q"))
    _slice: array[int] = field(default_factory=lambda: array("q"))

    def add(self, flow: int, time: float, track: int, of_slice: int, *, ends: bool, binds: int = _AT_LAST) -> None:
        """Take the begin or the end of a flow.

        Args:
            flow: number of the flow.
            time: µs from the trace's base.
            track: its track.
            of_slice: index of its slice on that track.
            ends: whether the flow ends here.
            binds: which slice it belongs to, if it is not `of_slice`.
        """
        self._flow.append(flow)
        self._ends.append(ends)
        self._binds.append(binds)
        self._time.append(time)
        self._track.append(track)
        self._slice.append(of_slice)

    def by_track(self, tracks: Mapping[int, TrackSlices]) -> dict[int, list[tuple[int, int]]]:
        """Return for each track the ends of those flows that lead from a slice to a slice.

        The index of a slice, ascending, and the number of a flow that begins or ends there.
        A number may come again for another flow, once the flow before has ended; here each has one of its own, from 1.
        """
        ends_of_track: dict[int, list[tuple[int, int]]] = {}
        sorted_starts: dict[int, tuple[Int64Array, Float64Array]] = {}
        begun: dict[int, int] = {}
        at_last = (np.frombuffer(self._binds, np.uint8) == _AT_LAST).tolist()
        pairs = 0
        # In file order where they are of one time.
        for row in np.lexsort((np.frombuffer(self._time, np.float64), np.frombuffer(self._flow, np.int64))).tolist():
            flow = self._flow[row]
            if not self._ends[row]:
                begun.setdefault(flow, row)  # a begin of what has begun already is none
            elif flow in begun:
                ends = [
                    (self._track[end], self._slice[end] if at_last[end] else self._slice_of(end, tracks, sorted_starts))
                    for end in (begun.pop(flow), row)
                ]
                if ends[0][1] < 0 or ends[1][1] < 0:
                    self.lost += 1
                    continue
                pairs += 1
                for track, of_slice in ends:
                    ends_of_track.setdefault(track, []).append((of_slice, pairs))
        return {track: sorted(own) for track, own in ends_of_track.items()}

    def _slice_of(
        self,
        row: int,
        tracks: Mapping[int, TrackSlices],
        sorted_starts: dict[int, tuple[Int64Array, Float64Array]],
    ) -> int:
        """Return the slice of an end of a flow on its track, as readers of JSON find it; -1 if there is none."""
        if self._track[row] not in tracks:
            return -1
        slices, time = tracks[self._track[row]], self._time[row]
        if self._track[row] not in sorted_starts:
            order = np.lexsort((-np.frombuffer(slices.duration), np.frombuffer(slices.start)))
            sorted_starts[self._track[row]] = order, np.frombuffer(slices.start)[order]
        order, starts = sorted_starts[self._track[row]]
        if self._binds[row] == _NEXT:
            after = int(np.searchsorted(starts, time))
            return int(order[after]) if after < len(order) else -1
        begun = int(np.searchsorted(starts, time, side="right"))
        around = (int(order[at]) for at in range(begun - 1, max(begun - _MAX_LOOKED_AT, 0) - 1, -1))
        return next((at for at in around if slices.start[at] + slices.duration[at] >= time), -1)


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
        tracks: the slices of each track, by its number in the table of events.
        flows: the ends of flows.
        skipped: events that a Perfetto trace has no place for.
    """

    encoder: EventEncoder = field(default_factory=EventEncoder)
    tracks: dict[int, TrackSlices] = field(default_factory=dict)
    flows: SliceFlows = field(default_factory=SliceFlows)
    skipped: int = 0
    _flow_numbers: Numbering[str] = field(default_factory=Numbering)

    def add(self, events: Sequence[Any], numbers: TrackNumbers) -> None:
        """Take some events, as `OddEvents` has them; `numbers` are those of tracks."""
        fields, tracks = self.encoder.fields, self.tracks
        for event in events:
            try:
                phase = event["ph"]
                if phase == "M":
                    continue
                track, start = numbers[event["pid"], event["tid"]], float(event["ts"])
                duration = float(event["dur"]) if phase == "X" else -1.0
                if phase in _SLICE_PHASES and start > 0:
                    # NaN is not a time either.
                    if not (start < MAX_TIME_US and start + duration < MAX_TIME_US):
                        raise ValueError(start)
                    own = fields(str(event["name"]), event.get("cat"), event.get("args") or {})
                    if track not in tracks:
                        tracks[track] = TrackSlices()
                    slices = tracks[track]
                    slices.start.append(start)
                    slices.duration.append(duration)
                    slices.fields.append(own)
                    if "bind_id" in event:
                        self._add_bound(event, start, track)
                elif phase in _FLOW_PHASES:
                    flow = self._flow_numbers[f"{event.get('cat')} {event['name']} {event['id']}"]
                    of_slice, binds = -1, _AROUND
                    if track in tracks and tracks[track].start[-1] == start:
                        of_slice, binds = len(tracks[track].start) - 1, _AT_LAST
                    elif phase == "f" and event.get("bp") != "e":
                        binds = _NEXT
                    if phase != "s":
                        self.flows.add(flow, start, track, of_slice, ends=True, binds=binds)
                    if phase != "f":
                        self.flows.add(flow, start, track, of_slice, ends=False, binds=binds)
                else:
                    self.skipped += 1
            except (KeyError, TypeError, ValueError, AttributeError):
                self.skipped += 1

    def _add_bound(self, event: dict[str, Any], start: float, track: int) -> None:
        """Take the ends of a flow that the last slice of a track carries itself."""
        flow = self._flow_numbers[f"bind_id {event['bind_id']}"]
        for way in ("flow_in", "flow_out"):
            if event.get(way) is True:
                of_slice = len(self.tracks[track].start) - 1
                self.flows.add(flow, start, track, of_slice, ends=way == "flow_in")

    def notes(self) -> list[str]:
        """Return what a Perfetto trace has no place for."""
        _ = self._flows_by_track
        notes = []
        if self.skipped:
            notes.append(f"{self.skipped} of the profiler's events are of a kind that .pftrace has no place for")
        if self.flows.lost:
            what = "of the profiler's arrows are left out: no slice is where they begin or end"
            notes.append(f"{self.flows.lost} {what}")
        return notes

    def packets(self, track: int, base: int, uuid: int, row_beside: Callable[[int], TracePacket]) -> Iterator[bytes]:
        """Yield the packets of a track, see `profiler_packets`; `base` is what its times count from, in Unix ns."""
        slices = self.tracks[track]
        start, duration = np.frombuffer(slices.start, np.float64), np.frombuffer(slices.duration, np.float64)
        fields = slices.fields
        if track in self._flows_by_track:
            fields = list(fields)
            for index, own in groupby(self._flows_by_track[track], key=itemgetter(0)):
                flows = [flow + PROFILER_FLOW for _, flow in own]
                fields[index] += TrackEvent(flow_ids=flows).SerializeToString()
        start_ns, duration_ns = microseconds_to_ns(start) + base, microseconds_to_ns(duration)
        yield from profiler_packets(start_ns, duration_ns, fields, uuid, row_beside)

    @cached_property
    def _flows_by_track(self) -> dict[int, list[tuple[int, int]]]:
        return self.flows.by_track(self.tracks)


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
