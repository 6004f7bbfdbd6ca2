"""Adding to a trace without reading its events: copied by the kernel, looked through only for sync marks."""

from __future__ import annotations

import json
import os
import threading
from typing import Any, NamedTuple

import orjson

from .._errors import TraceError
from .events import SYNC, Events, Gatherer
from .frame import Head, HeadError, find_head, find_tail
from .repair import BOUNDARY
from .source import BLOCK, Source
from .tracks import TID_BASES

__all__ = ["Copy", "Ends", "Scan", "copy_range", "find_ends", "scan"]

_WINDOW = 1 << 20
_WIDEST = 16 << 20
_OVERLAP = 4096
"""Bytes of a block that are looked at again with the next, so that nothing is missed between two."""


class Ends(NamedTuple):
    """Where a trace's events begin and end.

    Attributes:
        head: what stands before them.
        end: the place of the `]` after them.
        keys: all top-level keys.
        sample: some of the events, from the beginning and the end of the file.
    """

    head: Head
    end: int
    keys: dict[str, Any]
    sample: Events


class Scan(NamedTuple):
    """What was found on the way.

    Attributes:
        syncs: start and end in ns from the base by the name of the sync mark.
        tid_base: from where on thread ids are free.
    """

    syncs: dict[str, list[tuple[int, int]]]
    tid_base: int


def find_ends(source: Source) -> Ends | None:
    """Find where the events of a plain file begin and end; None where its end is broken.

    Raises:
        TraceError: the file is no trace.
    """
    gatherer = Gatherer()
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
    gatherer.add(first)
    window = _WINDOW
    while True:
        begin = max(source.size - window, head.length)
        found = _end_in(os.pread(source.fileno(), source.size - begin, begin), head.bare, begin == head.length)
        if found is not None:
            at, keys, last = found
            gatherer.add(last)
            return Ends(head, begin + at, head.keys | keys, gatherer.events())
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


def scan(source: Source, end: int, rows: int) -> Scan:
    """Look through the file up to `end` for sync marks, and for thread ids that no number in it begins like.

    Args:
        source: the file.
        end: where the events end.
        rows: how many ids are needed.
    """
    syncs: dict[str, list[tuple[int, int]]] = {}
    prefixes = {base: str(base)[: 10 - len(str(rows))].encode() for base in TID_BASES}
    base, free = TID_BASES[0], set(TID_BASES)
    needle = f'"{SYNC}'.encode()
    buffer = bytearray(_OVERLAP + BLOCK)
    view = memoryview(buffer)
    at, kept = 0, 0
    while at < end:
        count = os.preadv(source.fileno(), [view[kept : kept + min(BLOCK, end - at)]], at)
        if count == 0:
            break
        at += count
        filled = kept + count
        if buffer.find(prefixes[base], 0, filled) >= 0:
            free = {one for one in free if buffer.find(prefixes[one], 0, filled) < 0}
        place = buffer.find(needle, 0, filled)
        while place >= 0:
            _take_sync(bytes(buffer[max(place - 512, 0) : min(place + 1024, filled)]), min(place, 512), syncs)
            place = buffer.find(needle, place + 1, filled)
        kept = min(_OVERLAP, filled)
        buffer[:kept] = buffer[filled - kept : filled]
        source.advanced(count)
    return Scan({name: sorted(set(found)) for name, found in syncs.items()}, _first_free(source, end, prefixes, free))


def _first_free(source: Source, end: int, prefixes: dict[int, bytes], free: set[int]) -> int:
    """Return the first base that occurs nowhere; all but the first are looked for only where the first occurs."""
    if TID_BASES[0] in free:
        return TID_BASES[0]
    for at in range(0, end, BLOCK):
        data = os.pread(source.fileno(), BLOCK + 16, at)
        free = {base for base in free if prefixes[base] not in data}
    left = [base for base in TID_BASES if base in free]
    if not left:
        raise TraceError(source.path, "no free thread ids were found; merge it with attribution")
    return left[0]


def _take_sync(data: bytes, place: int, syncs: dict[str, list[tuple[int, int]]]) -> None:
    """Read the event around a sync mark's name."""
    begin = data.rfind(b"{", 0, place)
    try:
        event, _ = json.JSONDecoder(strict=False).raw_decode(data[begin:].decode("latin-1"))
    except ValueError:
        return
    gatherer = Gatherer()
    gatherer.add([event])
    for name, found in gatherer.events().syncs.items():
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
        block = os.pread(source, min(BLOCK, end - at), at)
        if not block:
            raise OSError(None, "the trace became shorter while it was copied")
        at += len(block)
        while block:
            block = block[os.write(target, block) :]
