"""Read a trace and check its events one by one, in memory that does not grow with the file."""

import os
from collections.abc import Callable
from typing import Any

from .._errors import TraceError
from ..formats.event_stream import EventStream
from ..formats.trace_file import BYTE_ORDER_MARK, TraceFile, format_of
from .track_layout import Fault, TrackLayout


def read_trace(
    path: str | os.PathLike[str], progress: Callable[[int], None] | None = None
) -> tuple[list[Fault], TrackLayout, dict[str, Any]]:
    """Return what is wrong with a file and with its single events, all events by track, and the keys around them.

    Args:
        path: the file.
        progress: called with the number of bytes of the file that have been read since the last call.

    Raises:
        TraceError: it cannot be opened.
    """
    with TraceFile(path) as source:
        head = next(source.blocks(), b"")
    if not head.strip():
        return [Fault("not-a-trace", "there is nothing in it")], TrackLayout(), {}
    kind = format_of(head)
    if kind is None:
        message = f"neither Chrome JSON nor a Perfetto trace: it starts with {head[:8]!r}"
        return [Fault("not-a-trace", message)], TrackLayout(), {}
    with TraceFile(path, progress) as source:
        if kind == "perfetto":
            return *_read_packets(source), {}
        faults, layout, keys = _read_events(source)
        marked = [Fault("unreadable", "byte 0: a byte order mark, which JSON forbids")]
        return (marked if head.startswith(BYTE_ORDER_MARK) else []) + faults, layout, keys


def _read_packets(source: TraceFile) -> tuple[list[Fault], TrackLayout]:
    from .perfetto_rules import PerfettoPackets, parse_packets

    faults, packets = list[Fault](), PerfettoPackets()
    for some in parse_packets(source.blocks(), faults):
        packets.add(some)
    if source.damage is not None:
        faults.append(Fault("unreadable", source.damage))
    return [*faults, *packets.faults()], packets.layout


def _read_events(source: TraceFile) -> tuple[list[Fault], TrackLayout, dict[str, Any]]:
    from .chrome_rules import ChromeEvents

    events = ChromeEvents()
    try:
        stream = EventStream(source, strict=True)
        for chunk in stream.chunks():
            events.add(chunk.events)
    except TraceError as error:
        at = "" if error.offset is None else f"byte {error.offset}: "
        return [Fault("unreadable", source.damage or f"{at}{error.message}")], TrackLayout(), {}
    return events.faults(), events.layout(), stream.keys
