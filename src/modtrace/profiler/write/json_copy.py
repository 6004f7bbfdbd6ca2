"""Adding to a trace without reading its events: copied by the kernel, looked through only for sync marks."""

from __future__ import annotations

import json
import os
import threading
from typing import Any, NamedTuple

import orjson

from ..._errors import TraceError
from ..trace.envelope import Head, HeadError, find_head, find_tail
from ..trace.event_columns import SYNC, EventCollector, ProfilerEvents
from ..trace.event_repair import BOUNDARY
from ..trace.trace_file import BLOCK_BYTES, TraceFile

__all__ = ["Copy", "EventBounds", "copy_range", "find_event_bounds", "find_syncs"]

_WINDOW = 1 << 20
_WIDEST = 16 << 20
_OVERLAP = 4096
"""Bytes of a block that are looked at again with the next, so that nothing is missed between two."""


class EventBounds(NamedTuple):
    """Where a trace's events begin and end.

    Attributes:
        head: what stands before them.
        end: the place of the `]` after them.
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
    window = _WINDOW
    while True:
        data = os.pread(source.fileno(), window, 0)
        try:
            head = find_head(data)
            break
        except HeadError as error:
            if not error.more or len(data) < window or window >= 4 * _WIDEST:
                raise TraceError(source.path, str(error), error.offset) from None
            window *= 4
    first, _ = _whole(data[head.length :])
    collector.add(first)
    window = _WINDOW
    while True:
        begin = max(source.size - window, head.length)
        found = _end_in(os.pread(source.fileno(), source.size - begin, begin), head.bare, begin == head.length)
        if found is not None:
            at, keys, last = found
            collector.add(last)
            before = max(head.length, begin + at - _OVERLAP)
            empty = not os.pread(source.fileno(), begin + at - before, before).strip()
            return EventBounds(head, begin + at, head.keys | keys, collector.events(), empty)
        if begin == head.length or window >= _WIDEST:
            return None
        window *= 4


def _end_in(data: bytes, bare: bool, whole: bool) -> tuple[int, dict[str, Any], list[Any]] | None:
    """Find the end of the events in the last bytes of a file."""
    begins = [0] if whole else []
    for match, _ in zip(BOUNDARY.finditer(data), range(16), strict=False):
        begins.append(match.end())
    for begin in begins:
        rest = data[begin:]
        events, length = _whole(rest)
        if not events and not whole:
            continue
        found = find_tail(rest[length:], bare=bare)
        if found is not None:
            return begin + length + found[0], found[1], events
    return None


def _whole(data: bytes) -> tuple[list[Any], int]:
    """Parse the whole events at the beginning of `data`; return them and where they end."""
    limit = len(data)
    while True:
        at = data.rfind(b"}", 0, limit)
        while at >= 0 and not BOUNDARY.match(data, at):
            at = data.rfind(b"}", 0, at)
        if at < 0:
            return [], 0
        try:
            return orjson.loads(b"[" + data[: at + 1] + b"]"), data.index(b",", at) + 1
        except orjson.JSONDecodeError as error:
            limit = min(error.pos, at)


def find_syncs(source: TraceFile, end: int) -> dict[str, list[tuple[int, int]]]:
    """Look through the file up to `end` for sync marks; return start and end in ns from the base by the mark's name."""
    syncs: dict[str, list[tuple[int, int]]] = {}
    needle = f'"{SYNC}'.encode()
    buffer = bytearray(_OVERLAP + BLOCK_BYTES)
    view = memoryview(buffer)
    at, kept = 0, 0
    while at < end:
        count = os.preadv(source.fileno(), [view[kept : kept + min(BLOCK_BYTES, end - at)]], at)
        if count == 0:
            break
        at += count
        filled = kept + count
        place = buffer.find(needle, 0, filled)
        while place >= 0:
            _take_sync(bytes(buffer[max(place - 512, 0) : min(place + 1024, filled)]), min(place, 512), syncs)
            place = buffer.find(needle, place + 1, filled)
        kept = min(_OVERLAP, filled)
        buffer[:kept] = buffer[filled - kept : filled]
        source.advanced(count)
    # What lies where two blocks overlap was found twice.
    return {name: sorted(set(found)) for name, found in syncs.items()}


def _take_sync(data: bytes, place: int, syncs: dict[str, list[tuple[int, int]]]) -> None:
    """Read the event around a sync mark's name."""
    begin = data.rfind(b"{", 0, place)
    try:
        event, _ = json.JSONDecoder(strict=False).raw_decode(data[begin:].decode("latin-1"))
    except ValueError:
        return
    collector = EventCollector()
    collector.add([event])
    for name, found in collector.events().syncs.items():
        syncs.setdefault(name, []).extend(found)


class Copy(threading.Thread):
    """Copies a range of a file by the kernel, while the file is looked through."""

    def __init__(self, source: int, target: int, begin: int, end: int) -> None:
        super().__init__(name="modtrace-copy")
        self._files, self._range = (source, target), (begin, end)
        self.error: OSError | None = None

    def run(self) -> None:
        """Copy; `error` says whether it went wrong."""
        try:
            copy_range(*self._files, *self._range)
        except OSError as error:
            self.error = error


def copy_range(source: int, target: int, begin: int, end: int) -> None:
    """Copy bytes of one file to where another stands, within the kernel where it can."""
    at = begin
    if hasattr(os, "copy_file_range"):
        try:
            while at < end and (count := os.copy_file_range(source, target, min(end - at, 1 << 30), at)):
                at += count
        except OSError:
            if at != begin:
                raise
    while at < end:
        block = os.pread(source, min(BLOCK_BYTES, end - at), at)
        if not block:
            raise OSError(None, "the trace became shorter while it was copied")
        at += len(block)
        while block:
            block = block[os.write(target, block) :]
