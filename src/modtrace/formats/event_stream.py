"""The events of a trace in chunks, each parsed at once, and what is around them, in memory that does not grow.

A chunk is cut at what looks like the end of an event. That it parses as a list proves the cut right: a cut inside a
string or inside an event would leave something open. So no byte is looked at twice, and none by Python.
"""

import contextlib
import gc
import itertools
import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import orjson

from .._errors import TraceError
from .event_repair import BOUNDARY, RecoveredEvent, has_times, recover_events
from .limits import MAX_EVENT_BYTES, MAX_HEAD_BYTES, MAX_TAIL_BYTES, LimitError, check_nested_json
from .trace_file import BYTE_ORDER_MARK, TraceFile


class HeadError(ValueError):
    """What was read is not the beginning of a trace.

    Attributes:
        offset: where.
        more: whether further bytes could change that.
    """

    def __init__(self, message: str, offset: int, *, more: bool = False) -> None:
        super().__init__(message)
        self.offset = offset
        self.more = more


_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_MAX_KEYS = 16
"""How many places that look like the key are tried: each time the bytes before it are parsed."""


def find_head(data: bytes) -> tuple[int, dict[str, Any], bool]:
    """Find where the events begin.

    Returns:
        How many bytes there are up to and with the `[` that opens the events; the top-level keys before it, with their
        values; and whether the file is the array alone, without an object around it.

    Raises:
        HeadError: this is no trace, or not enough of it.
    """
    begin = len(data) - len(data.removeprefix(BYTE_ORDER_MARK).lstrip())
    if begin == len(data):
        raise HeadError("the file is empty", begin, more=True)
    if data[begin] == ord("["):
        return begin + 1, {}, True
    if data[begin] != ord("{"):
        raise HeadError("not a profiler trace: it begins with neither { nor [", begin)
    try:
        check_nested_json(data)
        # What looks like the key can be in an object before it, which is open then.
        for match in itertools.islice(_EVENTS.finditer(data, begin), _MAX_KEYS):
            with contextlib.suppress(ValueError):
                keys = _object(data[begin : match.end()] + b"]}")
                if keys.pop("traceEvents", None) == []:
                    return match.end(), keys, False
        _object(data[begin:])
    except LimitError as error:
        raise HeadError(str(error), 0) from None
    except RecursionError:
        raise HeadError("JSON that is nested too deeply to be read, before the events", 0) from None
    except ValueError as error:  # also a number of thousands of digits
        place = len(error.doc[: error.pos].encode()) if isinstance(error, json.JSONDecodeError) else 0
        raise HeadError("broken JSON before the events", begin + place, more=True) from None
    raise HeadError('not a profiler trace: it has no "traceEvents" that is a list', len(data.rstrip()) - 1)


def _object(data: bytes) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(data.decode("utf-8", "replace"), strict=False)
    return value


def find_tail(data: bytes | bytearray, *, bare: bool) -> tuple[int, dict[str, Any]] | None:
    """Find the `]` that closes the events, in bytes that begin between two of them.

    Returns:
        Its place and the keys after it; None if it is not there, or the rest is broken.

    Raises:
        LimitError: the keys after it would take too much memory, or are nested too deeply.
    """
    if bare:
        offset = len(data.rstrip()) - 1
        return (offset, {}) if offset >= 0 and data[offset : offset + 1] == b"]" else None
    for candidate in re.finditer(rb"\]\s*(?:,\s*\"|\}\s*\Z)", data):
        offset = candidate.start()
        # Duplicated keys are left to the decoder, which takes the last as every reader does.
        tail = data[offset:]
        check_nested_json(tail)
        try:
            keys = _object(b'{"traceEvents":[' + tail)
        except RecursionError:
            raise LimitError("JSON that is nested too deeply to be read, behind the events") from None
        except ValueError:
            continue
        del keys["traceEvents"]
        return offset, keys
    return None


_WINDOW = 1 << 16
"""Bytes in which broken events are looked for one by one, before whole blocks are tried again."""
_NULL_TIME = re.compile(rb'"(?:dur|ts)"\s*:\s*null')
_MAX_NOTES = 20
"""Places named; a file can be broken at a million."""


@contextlib.contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Keep the garbage collector from looking at millions of events again and again; none of them is in a cycle."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Chunk(NamedTuple):
    """Whole events.

    Attributes:
        raw: their bytes, with the commas between them and none after the last.
        events: the same, parsed.
    """

    raw: bytes
    events: list[Any]


class EventStream:
    """The events of a trace and what stands around them.

    Args:
        source: the trace.
        strict: whether a file that is cut off, or of which an event had to be changed, is an error.

    Attributes:
        head: the bytes up to and with the `[` that opens the events.
        keys: top-level keys with their values; those after the events are there once `chunks` is exhausted.
        bare: whether the file is an array without an object around it.
        tail: the bytes from the `]` on that closes the events; empty if the file is cut off.
        count: how many events were yielded.
        repaired: how many events had to be changed to be readable.
        dropped: how many could not be saved.
        notes: what was wrong with the file, each with its byte offset.
        trailing_comma: whether a comma follows the last event, which JSON forbids and viewers accept.

    Raises:
        TraceError: the file is no trace, or nothing in it can be saved.
    """

    def __init__(self, source: TraceFile, *, strict: bool = False) -> None:
        self.count = 0
        self.repaired = 0
        self.dropped = 0
        self.notes: list[str] = []
        self.trailing_comma = False
        self.tail = b""
        self._source = source
        self._strict = strict
        self._blocks = source.blocks()
        self._ended = False
        data = bytearray()
        while True:
            before = len(data)
            data += next(self._blocks, b"")
            # Twice as much each time, so that a long head is not read over and over.
            while before and len(data) < min(2 * before, MAX_HEAD_BYTES) and (block := next(self._blocks, b"")):
                data += block
            try:
                self._offset, self.keys, self.bare = find_head(bytes(data))
                break
            except HeadError as error:
                if not error.more or len(data) == before or len(data) >= MAX_HEAD_BYTES:
                    raise self._error(str(error), error.offset) from None
        self.head = bytes(data[: self._offset])
        # The byte before the first event is where the `[` goes that makes a chunk a list.
        self._buffer = data[self._offset - 1 :]

    def chunks(self) -> Iterator[Chunk]:
        """Yield the events in file order."""
        found = False
        for chunk in self._all():
            found = True
            self.count += len(chunk.events)
            yield chunk
        if not found and (self.dropped or not self.tail):
            raise self._error("no event of it can be read: this is no profiler trace, or it was cut off", self._offset)

    def _all(self) -> Iterator[Chunk]:
        yield from self._cut()
        enough = 0
        for block in self._blocks:
            self._buffer += block
            if len(self._buffer) >= enough and not self._ended:
                before = self._offset
                yield from self._cut()
                # What was not whole is tried again when there is twice as much of it.
                enough = 0 if self._offset != before else 2 * len(self._buffer)
            if self._ended and len(self._buffer) > MAX_TAIL_BYTES:
                raise self._error(f"more than {MAX_TAIL_BYTES >> 20} MiB follow the events", self._offset)
            if not self._ended and len(self._buffer) > MAX_EVENT_BYTES:
                # Unless it is what follows the last event.
                chunk = self._one_by_one(final=False)
                if chunk is not None and chunk.events:
                    yield chunk
                elif not self._ended:
                    raise self._error(f"an event of more than {MAX_EVENT_BYTES >> 20} MiB", self._offset)
        yield from self._finish()

    def _cut(self, *, final: bool = False) -> Iterator[Chunk]:
        """Yield the whole events of the buffer; `final` says that nothing follows it."""
        limit = len(self._buffer)
        failed = False
        while not self._ended:
            comma = self._last_comma(limit)
            if comma < 0 and not failed:
                return
            if comma < 0:
                # What does not parse begins with the first event: it is broken, or the last one.
                chunk = self._one_by_one(final)
                if chunk is None:
                    return
                if chunk.events:
                    yield chunk
                limit, failed = len(self._buffer), False
                continue
            parsed = self._parse(comma)
            if isinstance(parsed, int):
                limit, failed = min(parsed, self._buffer.rindex(b"}", 0, comma)), True
                continue
            self._drop(comma)
            yield parsed
            limit, failed = len(self._buffer), False

    def _last_comma(self, limit: int) -> int:
        """Return the place of the last comma before `limit` that could part two events, or -1."""
        index = limit
        while (index := self._buffer.rfind(b"}", 0, index)) >= 0:
            if BOUNDARY.match(self._buffer, index):
                return self._buffer.index(b",", index)
        return -1

    def _parse(self, end: int) -> Chunk | int:
        """Parse the buffer up to `end`, where the comma after an event stands; return where it fails, if it does."""
        buffer = self._buffer
        buffer[0] = ord("[")
        separator = buffer[end]
        buffer[end] = ord("]")
        try:
            with memoryview(buffer) as view:
                events = orjson.loads(view[: end + 1])
        except orjson.JSONDecodeError as error:
            return self._place_of(error, end)
        finally:
            buffer[end] = separator
        raw = bytes(buffer[1:end])
        if b"null" in raw and not all(has_times(event) for event in events if isinstance(event, dict)):
            null = _NULL_TIME.search(buffer)
            return null.start() if null else 1
        return Chunk(raw, events)

    def _place_of(self, error: orjson.JSONDecodeError, end: int) -> int:
        if error.pos == 0:
            try:
                self._buffer[:end].decode()
            except UnicodeDecodeError as bad:
                return bad.start
        # Counted in characters, so never beyond the byte where it failed.
        return error.pos

    def _one_by_one(self, final: bool) -> Chunk | None:
        """Take the first events singly; None if the first is not there as a whole, or the events are at an end."""
        length = _WINDOW
        while True:
            whole = length >= len(self._buffer)
            events, closed = recover_events(bytes(self._buffer[1 : 1 + length]), final=final and whole)
            if closed:
                # The last event is left for the tail, which shows whether this is the end.
                self._ended = True
                events.pop()
            if events or whole or self._ended:
                break
            length *= 4
        if not events:
            return None
        chunk = self._keep(events)
        comma = self._buffer.find(b",", events[-1].end + 1)
        self._drop(comma if comma >= 0 else len(self._buffer) - 1)
        return chunk

    def _keep(self, recovered: list[RecoveredEvent]) -> Chunk:
        """Count and note what became of events, and return those that were saved."""
        for event in recovered:
            if event.event is None:
                self.dropped += 1
                self._note(self._offset + event.begin, "an event that cannot be read", "was left out")
            elif event.changed:
                self.repaired += 1
                self._note(self._offset + event.begin, "an event", "was made readable")
        readable = [event for event in recovered if event.event is not None]
        return Chunk(b",\n".join(event.raw for event in readable), [event.event for event in readable])

    def _drop(self, end: int) -> None:
        """Let go of the buffer before `end`."""
        self._offset += end
        del self._buffer[:end]

    def _note(self, offset: int, what: str, done: str) -> None:
        if self._strict:
            raise self._error(f"it is not whole, or damaged: {what}", offset)
        if len(self.notes) < _MAX_NOTES:
            self.notes.append(f"byte {offset}: {what} {done}")

    def _error(self, message: str, offset: int) -> TraceError:
        if self._source.damage:
            message = f"{message}; {self._source.damage}"
        if self._source.gzipped:
            message = f"{message} (the offset is in the uncompressed data)"
        return TraceError(self._source.path, message, offset)

    def _finish(self) -> Iterator[Chunk]:
        """Read what is left: the last events and the tail."""
        yield from self._cut(final=True)
        if self._source.damage:
            if self._strict:
                raise self._error("it is not whole, or damaged", self._offset)
            self.notes.insert(0, self._source.damage)
        rest = bytes(self._buffer[1:])
        try:
            tail = find_tail(rest, bare=self.bare)
        except LimitError as error:
            raise self._error(str(error), self._offset) from None
        end = len(rest)
        if tail is not None:
            end, keys = tail
            self.keys |= keys
            self.tail = rest[end:]
            self.trailing_comma = self._offset > len(self.head) and not rest[:end].strip()
            parsed = self._parse(end + 1) if rest[:end].strip() else Chunk(b"", [])
            if not isinstance(parsed, int):
                if parsed.events:
                    yield parsed
                return
        last, _ = recover_events(rest[:end], final=True)
        chunk = self._keep(last)
        last_end = last[-1].end if last else 0
        lost = rest[last_end:end].strip(b", \t\r\n")
        self.trailing_comma = self.trailing_comma or b"," in rest[last_end:end]
        if tail is None:
            offset = self._offset + last_end
            self._note(offset, "the trace is cut off here;", f"{len(rest) - last_end} bytes were left out")
        elif lost:
            self.dropped += 1
            self._note(self._offset + last_end, "an event that cannot be read", "was left out")
        if chunk.events:
            yield chunk
