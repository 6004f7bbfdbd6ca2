"""Read a trace and check its events one by one: as a stream where the file is good, else as a whole."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from .._errors import TraceError
from ..formats.limits import MAX_WHOLE_BYTES
from ..formats.trace_kind import format_of
from ..profiler.trace.trace_file import GZIP_MAGIC, TraceFile
from .json_parse import NotStrictError, parse_leniently, stream_events
from .model import Violation
from .track_layout import TrackLayout

__all__ = ["MAX_WHOLE_BYTES", "read_trace"]


_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_EMPTY = Violation("not-a-trace", "there is nothing in it")


class _Findings(NamedTuple):
    """What reading a file has found: what is wrong with its events, these by track, what is wrong with the file."""

    violations: list[Violation]
    layout: TrackLayout
    file_violations: list[Violation]


def read_trace(
    path: str | os.PathLike[str], progress: Callable[[int], None] | None = None
) -> tuple[list[Violation], TrackLayout]:
    """Return what is wrong with a file and with its single events, and all events by track.

    Args:
        path: the file.
        progress: called with the number of bytes of the file that have been read since the last call.

    Raises:
        TraceError: it cannot be opened.
    """
    try:
        found = _read_stream(path, progress)
    except NotStrictError as error:
        found = _Findings([], TrackLayout(), [error.violation])
    if not found.file_violations:
        return found.violations, found.layout
    # Said more exactly by parsing all of it, where it is not too large.
    return _read_whole(path) or (
        [*found.file_violations, *found.violations],
        found.layout,
    )


def _read_stream(path: str | os.PathLike[str], progress: Callable[[int], None] | None) -> _Findings:
    """Read a file in memory that does not grow with it.

    Raises:
        NotStrictError: no events can be read.
    """
    notes: list[str] = []
    with TraceFile(path) as source:
        head = next(source.blocks(), b"")
    with TraceFile(path, progress) as source:
        if not head.strip():
            raise NotStrictError(_EMPTY.message, _EMPTY.rule)
        if format_of(head) == "perfetto":
            violations, layout = _read_perfetto(source.blocks())
        elif format_of(head) == "chrome":
            from .chrome_rules import ChromeEvents

            events = ChromeEvents()
            for chunk in stream_events(source, notes):
                events.add(chunk)
            violations, layout = events.violations(), events.layout
            if head.startswith(_BYTE_ORDER_MARK):
                notes.append("byte 0: a byte order mark, which JSON forbids")
        else:
            message = f"neither Chrome JSON nor a Perfetto trace: it starts with {head[:8]!r}"
            raise NotStrictError(message, "not-a-trace")
        if source.damage is not None:
            notes.append(source.damage)
        if source.has_garbage:
            notes.append("something else follows the gzip data")
    return _Findings(violations, layout, [Violation("unreadable", note) for note in notes])


def _read_whole(path: str | os.PathLike[str]) -> tuple[list[Violation], TrackLayout] | None:
    """Read a broken file as far as viewers would; None where it is larger than `MAX_WHOLE_BYTES`."""
    violations: list[Violation] = []
    data = _read_bytes(path, violations)
    if data is None:
        return None
    if not data.strip():
        return [*violations, _EMPTY], TrackLayout()
    kind = format_of(data)
    if kind == "perfetto":
        found, layout = _read_perfetto([data])
        return [*violations, *found], layout
    if kind is None:
        message = f"neither Chrome JSON nor a Perfetto trace: it starts with {data[:8]!r}"
        return [*violations, Violation("not-a-trace", message)], TrackLayout()
    from .chrome_rules import ChromeEvents

    raw_events = parse_leniently(data, violations)
    events = ChromeEvents(len(raw_events))
    events.add(raw_events)
    return [*violations, *events.violations()], events.layout


def _read_perfetto(blocks: Iterable[bytes]) -> tuple[list[Violation], TrackLayout]:
    from .packet_sequences import parse_packets  # protobuf is slow to import
    from .perfetto_rules import PerfettoPackets

    violations: list[Violation] = []
    checked = PerfettoPackets()
    for packets in parse_packets(blocks, violations):
        checked.add(packets)
    return [*violations, *checked.violations()], checked.layout


def _read_bytes(path: str | os.PathLike[str], violations: list[Violation]) -> bytes | None:
    """Return a file's bytes, decompressed; None where there are more than `MAX_WHOLE_BYTES`."""
    try:
        if Path(path).stat().st_size > MAX_WHOLE_BYTES:
            return None
        data = Path(path).read_bytes()
    except OSError as error:
        raise TraceError(path, f"cannot be read: {error.strerror}") from error
    return _decompress(data, violations) if data.startswith(GZIP_MAGIC) else data


def _decompress(data: bytes, violations: list[Violation]) -> bytes | None:
    """Decompress every gzip member; on a fault keep what came before it and report the byte offset in the file."""
    whole, rest = bytearray(), data
    while rest:
        member = zlib.decompressobj(wbits=31)
        try:
            whole += member.decompress(rest, MAX_WHOLE_BYTES - len(whole) + 1)
        except zlib.error as error:
            offset = len(data) - len(rest)
            message = f"byte {offset}: not gzip in the member that starts here: {error}"
            violations.append(Violation("unreadable", message))
            break
        if len(whole) > MAX_WHOLE_BYTES:
            return None
        if not member.eof:
            violations.append(Violation("unreadable", f"byte {len(data)}: the gzip stream is cut off"))
            break
        rest = member.unused_data.lstrip(b"\0")
    return bytes(whole)
