"""A merged trace in Perfetto's own format: the profiler's events as track events, the recording as it always is.

A slice of a track event has no duration but a begin and an end, and an end closes the innermost open slice. So the
slices of a track are sorted before they are written; what partly overlaps another goes to a track of its own beside.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import orjson
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TracePacket, TrackDescriptor, TrackEvent

from ...formats.escape import UNNAMED, escaped
from ...formats.perfetto_ids import PROFILER_SEQUENCE as SEQUENCE
from ...formats.perfetto_ids import REALTIME_CLOCK
from ...timeline import PHASES, Timeline
from ...write.atomic_file import Sink, atomic_writer
from ...write.perfetto import perfetto_packets
from ...write.perfetto_descriptors import serialize
from ..attribute.gpu_times import NO_MODULE
from ..attribute.overlay import Overlay, overlay
from ..result import MERGED, MergeResult, refuse_merged
from ..trace.event_columns import (
    MAX_TIME_US,
    EventCollector,
    ProfilerEvents,
    TrackKey,
    is_track_key,
    microseconds_to_ns,
)
from ..trace.event_stream import EventStream
from ..trace.trace_file import TraceFile, base_time_ns
from .json_merge import describe
from .wire import arguments, categories, end_packet, event_packet, flow, sized, utf8, varint

__all__ = ["write_packets"]


def write_packets(source: TraceFile, timeline: Timeline | None, out: str) -> MergeResult:
    """Merge into a `.pftrace`.

    Raises:
        TraceError: the trace cannot be read, or has no moment in common with the recording.
        WriteError: `out` cannot be written.
    """
    stream = EventStream(source)
    collector, profile = EventCollector(), _Profile()
    for chunk in stream.chunks():
        collector.add(chunk.events)
        profile.add(chunk.events)
    refuse_merged(stream.keys, source.path)
    events = collector.events()
    overlaid = overlay(timeline, events, stream.keys, source.path)
    if profile.skipped:
        overlaid.notes.append(
            f"{profile.skipped} of the profiler's events are of a kind that .pftrace has no place for"
        )
    merged = describe(overlaid, stream, out)
    base = base_time_ns(stream.keys, source.path)
    with atomic_writer(out) as sink:
        _write(sink, profile, events, overlaid, base, merged.metadata)
    return merged


@dataclass
class _Track:
    """The slices and instants of one of the trace's tracks."""

    start: array[float] = field(default_factory=lambda: array("d"))
    duration: array[float] = field(default_factory=lambda: array("d"))
    name: array[int] = field(default_factory=lambda: array("q"))
    body: list[bytes] = field(default_factory=list)

    def add(self, start: float, duration: float, name: int, body: bytes) -> None:
        self.start.append(start)
        self.duration.append(duration)
        self.name.append(name)
        self.body.append(body)


@dataclass
class _Profile:
    """The profiler's events on their way."""

    tracks: dict[TrackKey, _Track] = field(default_factory=dict)
    texts: dict[str, int] = field(default_factory=dict)
    arrows: dict[tuple[TrackKey, float], list[int]] = field(default_factory=dict)
    skipped: int = 0

    def add(self, events: list[Any]) -> None:
        for event in events:
            try:
                phase = event["ph"]
                if phase == "M":
                    continue
                key, start = (event["pid"], event["tid"]), float(event["ts"])
                duration = float(event["dur"]) if phase == "X" else -1.0
                if phase in ("X", "i", "I") and start > 0:
                    if (key not in self.tracks and not is_track_key(key)) or not max(
                        start, start + duration
                    ) < MAX_TIME_US:
                        raise ValueError(key)
                    body = categories(event.get("cat")) + arguments(event.get("args") or {})
                    track = self.tracks.setdefault(key, _Track())
                    track.add(start, duration, self._text(str(event["name"])), body)
                elif phase in ("s", "f"):
                    arrow = f"{event.get('cat')} {event['name']} {event['id']}"
                    self.arrows.setdefault((key, start), []).append(_hash(arrow))
                else:
                    self.skipped += 1
            except (KeyError, TypeError, ValueError, AttributeError):
                self.skipped += 1

    def _text(self, text: str) -> int:
        return self.texts.setdefault(text, len(self.texts) + 1)


def _write(
    sink: Sink, profile: _Profile, events: ProfilerEvents, overlaid: Overlay, base: int, metadata: Mapping[str, Any]
) -> None:
    first = TracePacket(trusted_packet_sequence_id=SEQUENCE, sequence_flags=3)
    first.trace_packet_defaults.timestamp_clock_id = REALTIME_CLOCK
    # Without slices of modules nothing else says that the trace's time is this clock, and a reader drops all.
    first.clock_snapshot.primary_trace_clock = REALTIME_CLOCK
    first.clock_snapshot.clocks.add(clock_id=REALTIME_CLOCK, timestamp=base)
    about = TracePacket(trusted_packet_sequence_id=SEQUENCE, sequence_flags=2)
    about.chrome_events.metadata.add(name=MERGED + "_merge", string_value=orjson.dumps(metadata).decode())
    sink.write(serialize(first, about))
    columns = overlaid.timeline.columns
    unix = replace(
        overlaid.timeline,
        columns=replace(columns, start=columns.start + base, end=columns.end + base),
        marks=[mark._replace(time_ns=mark.time_ns + base) for mark in overlaid.timeline.marks if mark.kind != "sync"],
        counters=[replace(counter, time=counter.time + base) for counter in overlaid.timeline.counters],
    )
    for _, part in perfetto_packets(unix):
        sink.write(part)
    names = _Names(profile)
    sink.write(serialize(*_tracks(profile, events, overlaid)))
    for key, track in profile.tracks.items():
        for part in _slices(key, track, profile.arrows, names, base):
            sink.write(part)
    for part in _device_slices(overlaid, events, names, base):
        sink.write(part)


class _Names:
    """Texts that are written once and then meant by number."""

    def __init__(self, profile: _Profile) -> None:
        self._texts = list(profile.texts)
        self._number = profile.texts
        self._written: set[int] = set()

    def number(self, text: str) -> tuple[int, bytes]:
        """Return the number of a text, and what has to stand in the packet that first uses it."""
        if text not in self._number:
            self._texts.append(text)
            self._number[text] = len(self._texts)
        return self.use(self._number[text])

    def use(self, number: int) -> tuple[int, bytes]:
        if number in self._written:
            return number, b""
        self._written.add(number)
        entry = b"\x08" + varint(number) + sized(b"\x12", utf8(self._texts[number - 1] or UNNAMED))
        return number, sized(b"\x62", sized(b"\x12", entry))


def _tracks(profile: _Profile, events: ProfilerEvents, overlaid: Overlay) -> Iterator[TracePacket]:
    """Yield descriptors: of processes and devices, their threads and streams, and ours above the streams."""
    above = {events.tracks[track] for track in set(overlaid.devices.track.tolist())}
    for pid in dict.fromkeys(pid for pid, _ in [*profile.tracks, *above]):
        packet = _descriptor(("process", pid))
        said = packet.track_descriptor
        said.child_ordering = TrackDescriptor.EXPLICIT
        if pid in events.cpu_pids and isinstance(pid, int) and -(2**31) <= pid < 2**31:
            said.process.pid = pid
            said.process.process_name = escaped(events.process_names.get(pid, "python"))
        else:
            said.name = f"GPU {pid}" if isinstance(pid, int) else str(pid) or "profiler"
        yield packet
    for key in dict.fromkeys([*profile.tracks, *above]):
        pid, tid = key
        packet = _descriptor(("track", key))
        said = packet.track_descriptor
        said.parent_uuid = _hash(("process", pid))
        unnamed = f"stream {tid}" if isinstance(pid, int) and pid not in events.cpu_pids else str(tid)
        name = escaped(events.thread_names.get(key, unnamed)).strip() or "profiler"
        if pid in events.cpu_pids and isinstance(pid, int) and isinstance(tid, int) and 0 < tid < 1 << 31:
            said.thread.pid, said.thread.tid, said.thread.thread_name = pid, tid, name
        else:
            said.name = name
            said.sibling_order_rank = 2
        yield packet
        if key in above:
            packet = _descriptor(("modules", key))
            said = packet.track_descriptor
            said.parent_uuid, said.name, said.sibling_order_rank = _hash(("process", pid)), f"modules · {name}", 1
            yield packet


def _descriptor(what: object) -> TracePacket:
    packet = TracePacket(trusted_packet_sequence_id=SEQUENCE)
    packet.track_descriptor.uuid = _hash(what)
    packet.track_descriptor.sibling_merge_behavior = TrackDescriptor.SIBLING_MERGE_BEHAVIOR_NONE
    return packet


def _slices(
    key: TrackKey, track: _Track, arrows: Mapping[tuple[TrackKey, float], list[int]], names: _Names, base: int
) -> Iterator[bytes]:
    """Yield the packets of a track, in an order in which every end closes the slice it belongs to."""
    micros = np.frombuffer(track.start, np.float64)
    start = microseconds_to_ns(micros) + base
    duration = microseconds_to_ns(np.frombuffer(track.duration, np.float64))
    order = np.lexsort((np.arange(len(start)), -duration, start))
    lanes: list[list[int]] = [[]]
    for at in order.tolist():
        begin, length = int(start[at]), int(duration[at])
        flows = b"".join(map(flow, arrows.get((key, float(micros[at])), ())))
        body = track.body[at] + flows
        if length < 0:
            yield event_packet(begin, TrackEvent.TYPE_INSTANT, _hash(("track", key)), names.use(track.name[at]), body)
            continue
        lane = 0
        while True:
            stack = lanes[lane]
            uuid = _hash(("track", key) if lane == 0 else ("beside", key, lane))
            while stack and stack[-1] <= begin:
                yield end_packet(stack.pop(), uuid)
            if not stack or begin + length <= stack[-1]:
                break
            lane += 1
            if lane == len(lanes):
                lanes.append([])
                yield serialize(_beside(key, lane))
        stack.append(begin + length)
        yield event_packet(begin, TrackEvent.TYPE_SLICE_BEGIN, uuid, names.use(track.name[at]), body)
    for lane, stack in enumerate(lanes):
        uuid = _hash(("track", key) if lane == 0 else ("beside", key, lane))
        while stack:
            yield end_packet(stack.pop(), uuid)


def _beside(key: TrackKey, lane: int) -> TracePacket:
    packet = _descriptor(("beside", key, lane))
    said = packet.track_descriptor
    said.parent_uuid, said.name = _hash(("process", key[0])), f"{key[1]} · overlapping slices"
    said.sibling_order_rank = 3
    return packet


def _device_slices(overlaid: Overlay, events: ProfilerEvents, names: _Names, base: int) -> Iterator[bytes]:
    slices, timeline = overlaid.devices, overlaid.timeline
    columns = timeline.columns
    stack: list[tuple[int, int]] = []
    rows = zip(
        slices.track.tolist(),
        slices.start.tolist(),
        slices.end.tolist(),
        slices.span.tolist(),
        slices.work.tolist(),
        strict=True,
    )
    for track, start, end, span, work in rows:
        uuid = _hash(("modules", events.tracks[track]))
        while stack and (stack[-1][1] != uuid or stack[-1][0] <= start + base):
            yield end_packet(*stack.pop())
        said: dict[str, Any] = {"gpu_work": work}
        category, label = "gpu", NO_MODULE
        if span >= 0:
            name = timeline.names[columns.name[span]]
            category, label = PHASES[columns.phase[span]], escaped(name.label) or UNNAMED
            said |= {
                "fqn": escaped(name.fqn),
                "module_class": escaped(name.module_class),
                "call": int(columns.call[span]),
                "step": int(columns.step[span]),
            }
        body = categories(category) + arguments(said)
        yield event_packet(start + base, TrackEvent.TYPE_SLICE_BEGIN, uuid, names.number(label), body)
        stack.append((end + base, uuid))
    while stack:
        yield end_packet(*stack.pop())


def _hash(what: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(what).encode(), digest_size=8).digest(), "little") or 1
