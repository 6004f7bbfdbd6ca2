"""Slices that are no modules' in a written trace: events in JSON, packets in a Perfetto trace, rows of the page."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

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
from .protobuf_columns import ByteTable, Column, RaggedColumn, interleave, track_event_packets


def chrome_slices(timeline: Timeline, lanes: Lanes, base: int) -> Iterator[bytes]:
    """Yield the slices that are no modules', and the flows of collectives, as events in JSON.

    Args:
        timeline: what is written.
        lanes: where its slices are drawn.
        base: nanoseconds from which `ts` counts.
    """
    rows = lanes.by_track()
    flows = CollectiveFlows(timeline)
    first = len(timeline.columns)
    for index, file_slice in enumerate(file_slices(timeline), first):
        row = lanes.lanes[rows[file_slice.track]]
        where = {"pid": row.pid, "tid": row.tid}
        ts = microseconds(file_slice.start - base)
        event = {"ph": "X", **where, "cat": file_slice.category, "name": file_slice.name, "args": file_slice.args}
        yield orjson.dumps(event)[:-1] + b',"ts":%b,"dur":%b}' % (ts, microseconds(file_slice.end - file_slice.start))
        for flow in _chrome_flows(flows, index - flows.first_row, where, file_slice.category, lanes):
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
    part = timeline.slices.take(rows)

    def fields(some: list[int]) -> list[bytes]:
        chosen = rows[some]
        shown = zip(chosen.tolist(), file_slices(timeline, chosen), strict=True)
        return [_event_fields(file_slice, *flows.of_row(index - flows.first_row)) for index, file_slice in shown]

    begin = int(part.start[0])
    yield serialize(sequence_start(sequence, track, begin))
    ordered = order_slices(part.start, part.end - part.start, cut_off=True)
    packet = TracePacket(trusted_packet_sequence_id=sequence).SerializeToString()
    yield from slice_packets(ordered, np.diff(ordered.time, prepend=begin), fields, packet)


def _event_fields(file_slice: FileSlice, going_on: Sequence[int], ending: Sequence[int]) -> bytes:
    event = TrackEvent(
        name=file_slice.name, categories=[file_slice.category], flow_ids_old=going_on, terminating_flow_ids_old=ending
    )
    for name, value in file_slice.args.items():
        kind = "bool" if isinstance(value, bool) else "int" if isinstance(value, int) else "string"
        event.debug_annotations.add(name=name, **{f"{kind}_value": value})
    serialized: bytes = event.SerializeToString()
    return serialized


_CHUNK = 1 << 13
"""Packets that are in memory at a time."""
_BEGIN, _END, _INSTANT = TrackEvent.TYPE_SLICE_BEGIN, TrackEvent.TYPE_SLICE_END, TrackEvent.TYPE_INSTANT
_TYPE_BITS = 2
"""Bits that mark these three."""


class OrderedPackets(NamedTuple):
    """The packets of a track's slices and instants in the order of time; arrays of equal length.

    Attributes:
        slice: of the slice or instant, its index.
        kind: whether it begins, ends, or is an instant, as TrackEvent has it.
        row: 0 for the track itself, from 1 on for rows beside it.
        time: int64, when, ns.
    """

    slice: Int64Array
    kind: Int64Array
    row: Int64Array
    time: Int64Array


def order_slices(start: Int64Array, duration: Int64Array, *, cut_off: bool = False) -> OrderedPackets:
    """Sort begins and ends so that every end closes the slice it belongs to.

    Args:
        start: int64[n], ns.
        duration: int64[n], ns; negative for an instant.
        cut_off: what outlasts a slice around it ends with that; else it is on a row beside.
    """
    order = np.lexsort((np.arange(len(start)), -duration, start))
    starts, ends, instants = start[order].tolist(), (start + duration)[order].tolist(), (duration < 0)[order].tolist()
    rows: list[list[tuple[int, int]]] = [[]]  # of each row the end and the index of its open slices
    row_of = np.zeros(len(start), np.int64)
    codes, times = list[int](), list[int]()  # index and type of each packet, and its time
    for index, begin, end, instant in zip(order.tolist(), starts, ends, instants, strict=True):
        if not instant:
            for row, stack in enumerate(rows):  # noqa: B007
                while stack and stack[-1][0] <= begin:
                    times.append(stack[-1][0])
                    codes.append(stack.pop()[1] << _TYPE_BITS | _END)
                end = min(end, stack[-1][0]) if cut_off and stack else end
                if not stack or end <= stack[-1][0]:
                    break
            else:
                row, stack = len(rows), []
                rows.append(stack)
            row_of[index] = row
            stack.append((end, index))
        times.append(begin)
        codes.append(index << _TYPE_BITS | (_INSTANT if instant else _BEGIN))
    for stack in rows:
        times += [end for end, _ in reversed(stack)]
        codes += [index << _TYPE_BITS | _END for _, index in reversed(stack)]
    packets = np.array(codes, np.int64)
    of_packet = packets >> _TYPE_BITS
    return OrderedPackets(of_packet, packets & (1 << _TYPE_BITS) - 1, row_of[of_packet], np.array(times, np.int64))


def slice_packets(
    ordered: OrderedPackets,
    timestamp: Int64Array,
    fields: Callable[[list[int]], list[bytes]],
    sequence: bytes,
    uuids: Sequence[int | None] = (None,),
) -> Iterator[bytes]:
    """Yield packets, some thousand at a time.

    Args:
        ordered: which.
        timestamp: int64[n], when, on the clock of their sequence.
        fields: returns what some slices and instants say beyond that, as fields of a TrackEvent.
        sequence: the fields that all packets of the sequence have.
        uuids: of each row the track; None: the sequence says it.
    """
    tables = {
        kind: ByteTable([TrackEvent(type=kind, track_uuid=uuid).SerializeToString() for uuid in uuids])
        for kind in (_BEGIN, _END, _INSTANT)
    }
    for first in range(0, len(timestamp), _CHUNK):
        index, kinds, rows, _ = (column[first : first + _CHUNK] for column in ordered)
        time, parts = timestamp[first : first + _CHUNK], []
        for kind, table in tables.items():
            positions = np.flatnonzero(kinds == kind)
            if len(positions):
                event: list[Column] = [table.pick(rows[positions])]
                event += [] if kind == _END else [RaggedColumn.from_strings(fields(index[positions].tolist()))]
                parts.append((positions, track_event_packets(time[positions], sequence, event)))
        yield interleave(parts, len(index))


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
    for row, file_slice in enumerate(file_slices(timeline), first):
        text, args = file_slice.name, file_slice.args
        what = f"{args['operator'] or 'wait'} · group {args['group']}" if "operator" in args else None
        category = args.get("category")
        shown = range_name(text, category) if category else Name(text, what or file_slice.category, text)
        name[row] = names[shown]
        call[row] = args.get("counter", 0) if what else seen[file_slice.category]
        seen[file_slice.category] += 1
        texts = {key: str(value) for key, value in args.items() if what or key != "complete"}
        span_args |= {row: texts} if texts else {}
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
