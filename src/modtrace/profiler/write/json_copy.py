"""Adding to a trace without reading its events: copied by the kernel, looked through only for sync marks."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from typing import Any, NamedTuple

import orjson

from ..._errors import TraceError
from ..._system.files import read_at, read_into_at
from ...formats.limits import MAX_HEAD_BYTES, MAX_TAIL_BYTES, LimitError, check_nested_json
from ..trace.envelope import Head, HeadError, find_head, find_tail
from ..trace.event_collector import EventCollector
from ..trace.event_columns import ProfilerEvents
from ..trace.event_kinds import SYNC
from ..trace.event_repair import BOUNDARY, recover_events
from ..trace.trace_file import TraceFile
from .invalid_utf8 import InvalidUtf8

__all__ = ["CopyThread", "EventBounds", "copy_range", "find_event_bounds", "find_syncs"]

_WINDOW_BYTES = 1 << 20
"""How much of the beginning and of the end of a file is parsed at first."""
_BOUNDARIES_TRIED = 16
_COPIED_BYTES = 32 << 20
"""Bytes that the kernel copies at once."""
_BLOCK_BYTES = 1 << 20
"""Bytes that are looked through, or copied, at once."""
_OVERLAP_BYTES = 4096
"""Bytes of a block that are looked at again with the next, so that nothing is missed between two."""

_BYTES_BEFORE_NAME, _BYTES_BEHIND_NAME = 512, 1024
"""How far an event reaches to both sides of a sync mark's name."""


class EventBounds(NamedTuple):
    """Where a trace's events begin and end.

    Attributes:
        head: what stands before them.
        end: the offset of the `]` after them.
        keys: all top-level keys.
        sample: some of the events, from the beginning and the end of the file.
        empty: whether there are none.
    """

    head: Head
    end: int
    keys: dict[str, Any]
    sample: ProfilerEvents
    empty: bool


def find_event_bounds(source: TraceFile) -> EventBounds | None:
    """Find where the events of a plain file begin and end; None where its end is broken.

    Raises:
        TraceError: the file is no trace.
    """
    collector = EventCollector()
    window = _WINDOW_BYTES
    while True:
        data = read_at(source.fileno(), window, 0)
        try:
            head = find_head(data)
            break
        except HeadError as error:
            if not error.more or len(data) < window or window >= MAX_HEAD_BYTES:
                raise TraceError(source.path, str(error), error.offset) from None
            window *= 4
    first, _ = _parse_whole_events(data[head.length : head.length + _WINDOW_BYTES])
    collector.add(first)
    window = _WINDOW_BYTES
    while True:
        begin = max(source.size - window, head.length)
        data = read_at(source.fileno(), source.size - begin, begin)
        try:
            check_nested_json(data)
            found = _find_end(data, head.bare, begin == head.length)
        except LimitError as error:
            raise TraceError(source.path, str(error), begin) from None
        if found is not None:
            offset, keys, last = found
            end = begin + offset
            collector.add(last)
            before = max(head.length, end - _OVERLAP_BYTES)
            empty = not read_at(source.fileno(), end - before, before).strip()
            return EventBounds(head, end, head.keys | keys, collector.events(), empty)
        if begin == head.length or window >= MAX_TAIL_BYTES:
            return None
        window *= 4


def _find_end(data: bytes, bare: bool, whole: bool) -> tuple[int, dict[str, Any], list[Any]] | None:
    """Find the `]` behind the events in the last bytes of a file.

    Args:
        data: these bytes.
        bare: whether the file is the array alone.
        whole: whether the first event begins where `data` does; else one may be cut off there.

    Returns:
        The offset in `data`, the top-level keys behind the events, and the events that were parsed on the way.
    """
    begins = [0] if whole else []
    for match, _ in zip(BOUNDARY.finditer(data), range(_BOUNDARIES_TRIED), strict=False):
        begins.append(match.end())
    for begin in begins:
        rest = data[begin:]
        events, length = _parse_whole_events(rest)
        if not events and not whole:
            continue
        found = find_tail(rest[length:], bare=bare)
        if found is not None:
            return begin + length + found[0], found[1], events + _parse_last_event(rest[length : length + found[0]])
    return None


def _parse_last_event(data: bytes) -> list[Any]:
    """Parse what lies between the comma behind the last but one event and the `]`."""
    try:
        last: list[Any] = orjson.loads(b"[" + data + b"]")
    except orjson.JSONDecodeError:
        return [recovered.event for recovered in recover_events(data, final=True).events if recovered.event is not None]
    return last


def _parse_whole_events(data: bytes) -> tuple[list[Any], int]:
    """Parse the whole events at the beginning of `data`; return them and where they end."""
    limit = len(data)
    while True:
        brace = data.rfind(b"}", 0, limit)
        while brace >= 0 and not BOUNDARY.match(data, brace):
            brace = data.rfind(b"}", 0, brace)
        if brace < 0:
            return [], 0
        try:
            return orjson.loads(b"[" + data[: brace + 1] + b"]"), data.index(b",", brace) + 1
        except orjson.JSONDecodeError as error:
            limit = min(error.pos, brace)


def find_syncs(source: TraceFile, end: int, invalid: InvalidUtf8) -> dict[str, list[tuple[int, int]]]:
    """Look through the file up to `end` for sync marks; return start and end in ns from the base by the mark's name.

    `invalid` takes what is no UTF-8 on the way.
    """
    syncs: dict[str, list[tuple[int, int]]] = {}
    needle = f'"{SYNC}'.encode()
    buffer = bytearray(_OVERLAP_BYTES + _BLOCK_BYTES)
    view = memoryview(buffer)
    offset, overlap = 0, 0
    while offset < end:
        count = read_into_at(source.fileno(), view[overlap : overlap + min(_BLOCK_BYTES, end - offset)], offset)
        if count == 0:
            break
        offset += count
        filled = overlap + count
        invalid.add(bytes(view[overlap:filled]))
        found = buffer.find(needle, 0, filled)
        while found >= 0:
            around = bytes(buffer[max(found - _BYTES_BEFORE_NAME, 0) : min(found + _BYTES_BEHIND_NAME, filled)])
            _collect_sync(around, min(found, _BYTES_BEFORE_NAME), syncs)
            found = buffer.find(needle, found + 1, filled)
        overlap = min(_OVERLAP_BYTES, filled)
        buffer[:overlap] = buffer[filled - overlap : filled]
        source.advanced(count)
    invalid.finish()
    # What lies where two blocks overlap was found twice.
    return {name: sorted(set(times)) for name, times in syncs.items()}


def _collect_sync(data: bytes, name_offset: int, syncs: dict[str, list[tuple[int, int]]]) -> None:
    """Parse the event around a sync mark's name, and note when it began and ended."""
    begin = data.rfind(b"{", 0, name_offset)
    try:
        event, _ = json.JSONDecoder(strict=False).raw_decode(data[begin:].decode("latin-1"))
    except (ValueError, RecursionError):
        return
    collector = EventCollector()
    collector.add([event])
    for name, times in collector.events().syncs.items():
        syncs.setdefault(name, []).extend(times)


class CopyThread(threading.Thread):
    """Copies a range of a file by the kernel, while the file is looked through."""

    def __init__(self, source: int, target: int, begin: int, end: int) -> None:
        super().__init__(name="modtrace-copy")
        self._files, self._range = (source, target), (begin, end)
        self.error: Exception | None = None

    def run(self) -> None:
        """Copy; `error` says whether it went wrong."""
        try:
            copy_range(*self._files, *self._range)
        except Exception as error:  # whatever it is, the caller must not take the copy for whole
            self.error = error


def _begin_to_store(target: int, count: int) -> None:
    """Let the last bytes go to the disk meanwhile; else the sync at the end takes longer than all the rest."""
    with contextlib.suppress(OSError, AttributeError):  # a pipe; a system without it
        os.posix_fadvise(target, os.lseek(target, 0, os.SEEK_CUR) - count, count, os.POSIX_FADV_DONTNEED)


def copy_range(source: int, target: int, begin: int, end: int) -> None:
    """Copy bytes of one file to where another stands, within the kernel where it can."""
    offset = begin
    if hasattr(os, "copy_file_range"):
        try:
            while offset < end:
                count = os.copy_file_range(source, target, min(end - offset, _COPIED_BYTES), offset)
                if not count:
                    break
                _begin_to_store(target, count)
                offset += count
        except OSError:
            if offset != begin:
                raise
    while offset < end:
        block = read_at(source, min(_BLOCK_BYTES, end - offset), offset)
        if not block:
            raise OSError(None, "the trace became shorter while it was copied")
        offset += len(block)
        while block:
            block = block[os.write(target, block) :]
