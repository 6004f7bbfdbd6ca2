"""Slices that are no modules' in a written trace: events in JSON, packets in a Perfetto trace, rows of the page."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import orjson
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TracePacket, TrackEvent

from .._numbering import Numbering
from .._typing import Int64Array
from ..formats.slice_args import CALLS_NAME, LAUNCH_CATEGORY, LAUNCH_NAME, FileSlice, file_slices
from ..timeline import Name, Timeline
from ..timeline.contents import range_name
from ..timeline.slices import MODULE, sort_by_start
from .flows import CollectiveFlows
from .lanes import Lanes
from .perfetto_descriptors import sequence_start, serialize

_PACKETS_PER_PART = 4096


def chrome_slices(timeline: Timeline, lanes: Lanes, base: int) -> Iterator[bytes]:
    """Yield the slices that are no modules', and the flows of collectives, as events in JSON.

    Args:
        timeline: what is written.
        lanes: its rows.
        base: nanoseconds from which `ts` counts.
    """
    rows = lanes.by_track()
    flows = CollectiveFlows(timeline)
    first = len(timeline.columns)
    for index, found in enumerate(file_slices(timeline), first):
        row = lanes.lanes[rows[found.track]]
        where = {"pid": row.pid, "tid": row.tid}
        ts = microseconds(found.start - base)
        event = {"ph": "X", **where, "cat": found.category, "name": found.name, "args": found.args}
        yield orjson.dumps(event)[:-1] + b',"ts":%b,"dur":%b}' % (ts, microseconds(found.end - found.start))
        for flow in _chrome_flows(flows, index - flows.first_row, where, found.category, lanes):
            yield orjson.dumps(flow)[:-1] + b',"ts":%b}' % ts


def _chrome_flows(
    flows: CollectiveFlows, index: int, where: Mapping[str, int | str], category: str, lanes: Lanes
) -> Iterator[dict[str, object]]:
    """Yield the flow events of a collective, by its index among collectives and waits; none of other slices."""
    if not 0 <= index < len(flows.launched_by):
        return
    if flows.flow[index] >= 0:
        phase = "s" if flows.is_first[index] else "f" if flows.is_last[index] else "t"
        yield {"ph": phase, **where, "cat": category, "name": CALLS_NAME, "id": int(flows.flow[index]), "bp": "e"}
    span = int(flows.launched_by[index])
    if span >= 0:
        launcher = lanes.lanes[int(lanes.of_span[span])]
        flow = {"cat": LAUNCH_CATEGORY, "name": LAUNCH_NAME, "id": index}
        yield {"ph": "s", "pid": launcher.pid, "tid": launcher.tid, **flow}
        yield {"ph": "f", "bp": "e", **where, **flow}


def perfetto_slices(
    timeline: Timeline, flows: CollectiveFlows, rows: Int64Array, track: int, sequence: int
) -> Iterator[bytes]:
    """Yield the packets of the slices of one track that holds no modules.

    Args:
        timeline: what is written.
        flows: the timeline's.
        rows: indices of the slices, in order.
        track: uuid of the row in the trace.
        sequence: the id of its packet sequence.
    """
    time: int | None = None
    packets: list[TracePacket] = []
    open_ends: list[int] = []

    def add(moment: int) -> TracePacket:
        nonlocal time
        packets.append(TracePacket(trusted_packet_sequence_id=sequence, timestamp=moment - (time or 0)))
        time = moment
        return packets[-1]

    for index, found in zip(rows.tolist(), file_slices(timeline, rows), strict=True):
        if time is None:
            time = found.start
            yield serialize(sequence_start(sequence, track, time))
        while open_ends and open_ends[-1] <= found.start:
            add(open_ends.pop()).track_event.type = TrackEvent.TYPE_SLICE_END
        # A slice that is cut off cannot outlast what is around it.
        open_ends.append(min([found.end, *open_ends[-1:]]))
        _fill_begin(add(found.start).track_event, found, *flows.of_row(index - flows.first_row))
        if len(packets) >= _PACKETS_PER_PART:
            yield serialize(*packets)
            packets.clear()
    while open_ends:
        add(open_ends.pop()).track_event.type = TrackEvent.TYPE_SLICE_END
    if packets:
        yield serialize(*packets)


def _fill_begin(event: TrackEvent, found: FileSlice, going_on: Sequence[int], ending: Sequence[int]) -> None:
    event.type = TrackEvent.TYPE_SLICE_BEGIN
    event.name = found.name
    event.categories.append(found.category)
    event.flow_ids_old.extend(going_on)
    event.terminating_flow_ids_old.extend(ending)
    for name, value in found.args.items():
        annotation = event.debug_annotations.add(name=name)
        if isinstance(value, bool):
            annotation.bool_value = value
        elif isinstance(value, int):
            annotation.int_value = value
        else:
            annotation.string_value = value


def all_as_modules(timeline: Timeline) -> Timeline:
    """Return the timeline with every slice as one of a module, for the page, which draws all that is on a track alike.

    What the slices of modules have no field for is in their args. Their phase says nothing.
    """
    first = len(timeline.columns)
    if first == len(timeline.slices):
        return timeline
    names = Numbering[Name](len(timeline.names))
    seen: Counter[str] = Counter()
    name, call = timeline.slices.name.copy(), timeline.slices.call.copy()
    span_args = {row: args for row, args in timeline.span_args.items() if row < first}
    for row, found in enumerate(file_slices(timeline), first):
        what = f"{found.args['operator'] or 'wait'} · group {found.args['group']}" if "operator" in found.args else None
        category = found.args.get("category")
        shown = range_name(found.name, category) if category else Name(found.name, what or found.category, found.name)
        name[row] = names[shown]
        call[row] = found.args.get("counter", 0) if what else seen[found.category]
        seen[found.category] += 1
        args = {key: str(value) for key, value in found.args.items() if what or key != "complete"}
        span_args |= {row: args} if args else {}
    slices = replace(timeline.slices, kind=np.full_like(timeline.slices.kind, MODULE), name=name, call=call)
    slices, position = sort_by_start(slices)
    return replace(
        timeline,
        slices=slices,
        names=[*timeline.names, *names],
        span_args={int(position[row]): args for row, args in span_args.items()},
    )


def microseconds(nanoseconds: int) -> bytes:
    """Return a time or a duration as JSON has it: µs with three decimals."""
    return b"%b%d.%03d" % (b"-" if nanoseconds < 0 else b"", *divmod(abs(nanoseconds), 1000))
