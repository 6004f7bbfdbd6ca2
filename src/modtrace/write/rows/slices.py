"""Slices of what is no span: events in JSON, packets in a Perfetto trace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import orjson
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TracePacket, TrackEvent

from ..perfetto_descriptors import sequence_start, serialize

__all__ = ["RowSlice", "chrome_slice", "microseconds", "perfetto_slices"]

_PACKETS_PER_PART = 4096


class RowSlice(NamedTuple):
    """One slice.

    Attributes:
        start_ns: Unix nanoseconds.
        end_ns: Unix nanoseconds.
        name: escaped.
        category: which table it is of.
        args: texts escaped.
        going_on: ids of the flows that begin or go on there, in a Perfetto trace.
        ending: ids of the flows that end in it.
    """

    start_ns: int
    end_ns: int
    name: str
    category: str
    args: Mapping[str, str | int | bool]
    going_on: Sequence[int] = ()
    ending: Sequence[int] = ()


def chrome_slice(row_slice: RowSlice, pid: int | str, tid: int, base: int) -> bytes:
    """Return a slice as an event in JSON; `ts` counts from `base`."""
    start, end, name, category, args, *_ = row_slice
    event = {"ph": "X", "pid": pid, "tid": tid, "cat": category, "name": name, "args": args}
    return orjson.dumps(event)[:-1] + b',"ts":%b,"dur":%b}' % (microseconds(start - base), microseconds(end - start))


def perfetto_slices(slices: Iterable[RowSlice], track: int, sequence: int) -> Iterator[bytes]:
    """Yield the packets of a row.

    Args:
        slices: in the order of their starts, outer ones first.
        track: uuid of the row.
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

    for row_slice in slices:
        if time is None:
            time = row_slice.start_ns
            yield serialize(sequence_start(sequence, track, time))
        while open_ends and open_ends[-1] <= row_slice.start_ns:
            add(open_ends.pop()).track_event.type = TrackEvent.TYPE_SLICE_END
        # A slice that is cut off cannot outlast what is around it.
        open_ends.append(min([row_slice.end_ns, *open_ends[-1:]]))
        _fill_begin(add(row_slice.start_ns).track_event, row_slice)
        if len(packets) >= _PACKETS_PER_PART:
            yield serialize(*packets)
            packets.clear()
    while open_ends:
        add(open_ends.pop()).track_event.type = TrackEvent.TYPE_SLICE_END
    if packets:
        yield serialize(*packets)


def _fill_begin(event: TrackEvent, row_slice: RowSlice) -> None:
    event.type = TrackEvent.TYPE_SLICE_BEGIN
    event.name = row_slice.name
    event.categories.append(row_slice.category)
    event.flow_ids_old.extend(row_slice.going_on)
    event.terminating_flow_ids_old.extend(row_slice.ending)
    for name, value in row_slice.args.items():
        annotation = event.debug_annotations.add(name=name)
        if isinstance(value, bool):
            annotation.bool_value = value
        elif isinstance(value, int):
            annotation.int_value = value
        else:
            annotation.string_value = value


def microseconds(nanoseconds: int) -> bytes:
    """Return a time or a duration as JSON has it: µs with three decimals."""
    return b"%b%d.%03d" % (b"-" if nanoseconds < 0 else b"", *divmod(abs(nanoseconds), 1000))
