"""Read a trace and check its events one by one: as a stream if the file is good, else as a whole."""

import json
import os
from collections.abc import Callable
from typing import Any

import orjson

from .._errors import TraceError
from ..formats.event_stream import EventStream
from ..formats.limits import MAX_WHOLE_BYTES, LimitError, check_nested_json
from ..formats.trace_file import BYTE_ORDER_MARK, TraceFile, format_of
from .track_layout import Fault, TrackLayout


class UnreadableTraceError(Exception):
    """No events can be read from the file as it is.

    Attributes:
        fault: what is wrong with it.
    """

    def __init__(self, message: str, rule: str = "unreadable") -> None:
        super().__init__(message)
        self.fault = Fault(rule, message)


def parse_leniently(data: bytes, faults: list[Fault]) -> list[Any]:
    """Return a trace's raw events.

    Args:
        data: the JSON text.
        faults: takes what is wrong with the JSON; without any readable events the result is empty.
    """
    try:
        check_nested_json(data)
    except LimitError as error:
        faults.append(Fault("unreadable", str(error)))
        return []
    try:
        return _trace_events(orjson.loads(data), faults)
    except orjson.JSONDecodeError:
        pass  # Python's own parser accepts more (NaN, huge numbers), and its errors name the position
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        faults.append(Fault("unreadable", f"byte {error.start}: not UTF-8"))
        text = data.decode(errors="replace")
        parse_errors: list[Fault] = []  # discarded: replaced characters shift the offsets, and one error is enough
    else:
        parse_errors = faults
    return _trace_events(_parse_text(text, parse_errors), faults)


def _parse_text(text: str, errors: list[Fault]) -> Any:
    """Parse what viewers parse: NaN, control characters in strings, an array that is not closed."""
    try:
        return json.loads(text)
    except RecursionError:
        errors.append(Fault("unreadable", "nested too deeply"))
        return []
    except json.JSONDecodeError as error:
        first_error = error
    except ValueError:
        errors.append(Fault("unreadable", "a number in it has thousands of digits"))
        return []
    if text.lstrip().startswith("["):
        try:
            return json.loads(text.rstrip().removesuffix(",") + "]")
        except (ValueError, RecursionError):
            pass
    reason = first_error.msg.removesuffix(" at").removesuffix(" starting")
    errors.append(Fault("unreadable", f"byte {len(text[: first_error.pos].encode())}: {reason}"))
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return []


def _trace_events(document: Any, faults: list[Fault]) -> list[Any]:
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if isinstance(events, list):
        return events
    faults.append(Fault("not-a-trace", "neither an array of events nor an object with traceEvents"))
    return []


def _kind_of(data: bytes) -> str:
    """Return the format of a trace by its beginning, or by all of it.

    Raises:
        UnreadableTraceError: it is none that can be checked.
    """
    if not data.strip():
        raise UnreadableTraceError("there is nothing in it", "not-a-trace")
    kind = format_of(data)
    if kind is None:
        message = f"neither Chrome JSON nor a Perfetto trace: it starts with {data[:8]!r}"
        raise UnreadableTraceError(message, "not-a-trace")
    return kind


def read_trace(
    path: str | os.PathLike[str], progress: Callable[[int], None] | None = None
) -> tuple[list[Fault], TrackLayout]:
    """Return what is wrong with a file and with its single events, and all events by track.

    Args:
        path: the file.
        progress: called with the number of bytes of the file that have been read since the last call.

    Raises:
        TraceError: it cannot be opened.
    """
    try:
        faults, layout, file_faults = _read_stream(path, progress)
    except UnreadableTraceError as error:
        faults, layout, file_faults = [], TrackLayout(), [error.fault]
    # Parsing all of it says more exactly what is wrong, if it is not too large.
    return (_read_whole(path) if file_faults else None) or ([*file_faults, *faults], layout)


def _read_stream(
    path: str | os.PathLike[str], progress: Callable[[int], None] | None
) -> tuple[list[Fault], TrackLayout, list[Fault]]:
    """Read a file in memory that does not grow with it: faults of its events, these by track, faults of the file.

    Raises:
        UnreadableTraceError: no events can be read.
    """
    notes: list[str] = []
    with TraceFile(path) as source:
        head = next(source.blocks(), b"")
    with TraceFile(path, progress) as source:
        if _kind_of(head) == "perfetto":
            from .perfetto_rules import PerfettoPackets, parse_packets

            file_faults, packets = list[Fault](), PerfettoPackets()
            for some in parse_packets(source.blocks(), file_faults):
                packets.add(some)
            faults, layout = [*file_faults, *packets.faults()], packets.layout
        else:
            from .chrome_rules import ChromeEvents

            events = ChromeEvents()
            try:
                for chunk in EventStream(source).chunks():
                    events.add(chunk.events)
            except TraceError as error:
                raise UnreadableTraceError(str(error)) from error
            faults, layout = events.faults(), events.layout
            if head.startswith(BYTE_ORDER_MARK):
                notes.append("byte 0: a byte order mark, which JSON forbids")
        notes += [] if source.damage is None else [source.damage]
    return faults, layout, [Fault("unreadable", note) for note in notes]


def _read_whole(path: str | os.PathLike[str]) -> tuple[list[Fault], TrackLayout] | None:
    """Read broken JSON as far as viewers would; None if it is larger than `MAX_WHOLE_BYTES`, or no JSON."""
    faults: list[Fault] = []
    unpacked = bytearray()
    with TraceFile(path) as source:
        try:
            for block in source.blocks():
                unpacked += block
                if len(unpacked) > MAX_WHOLE_BYTES:
                    return None
        except TraceError:  # it unpacks to too much
            return None
        faults += [] if source.damage is None else [Fault("unreadable", source.damage)]
    data = bytes(unpacked)
    try:
        if _kind_of(data) == "perfetto":
            return None
    except UnreadableTraceError as error:
        return [*faults, error.fault], TrackLayout()
    from .chrome_rules import ChromeEvents

    raw_events = parse_leniently(data, faults)
    events = ChromeEvents()
    events.add(raw_events)
    return [*faults, *events.faults()], events.layout
