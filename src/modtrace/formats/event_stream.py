"""The events of a trace in chunks, and the JSON before and after the events, in bounded memory.

A chunk is cut at a likely end of an event, and parsed as one list. If it parses, the cut was right: a cut inside a
string or inside an event would leave it open. So each byte is read once, and by orjson, not by Python.
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
from .limits import MAX_EVENT_BYTES, MAX_HEAD_BYTES, MAX_TAIL_BYTES, LimitError, check_nested_json, escaped_json
from .trace_file import BYTE_ORDER_MARK, TraceFile


class HeadError(ValueError):
    """The bytes are not the start of a trace.

    Attributes:
        offset: position of the first wrong byte.
        is_incomplete: whether further bytes could make it a trace.
    """

    def __init__(self, message: str, offset: int, *, is_incomplete: bool = False) -> None:
        super().__init__(message)
        self.offset = offset
        self.is_incomplete = is_incomplete


_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_MAX_KEYS = 16
"""Maximum number of matches of the key that are tried: each attempt parses all bytes before it."""


def find_head(data: bytes) -> tuple[int, dict[str, Any], bool]:
    """Return the length of the head, its keys, and whether the file is a bare array.

    The head reaches up to and including the `[` that opens the events. Raises HeadError if `data` is not the beginning
    of a trace, or too short.
    """
    start = len(data) - len(data.removeprefix(BYTE_ORDER_MARK).lstrip())
    if start == len(data):
        raise HeadError("the file is empty", start, is_incomplete=True)
    if data[start] == ord("["):
        return start + 1, {}, True
    if data[start] != ord("{"):
        raise HeadError("not a profiler trace: it begins with neither { nor [", start)
    try:
        check_nested_json(data)
        # A match may be inside an earlier object, which makes the JSON up to the match incomplete.
        for match in itertools.islice(_EVENTS.finditer(data, start), _MAX_KEYS):
            with contextlib.suppress(ValueError):
                keys = _object(data[start : match.end()] + b"]}")
                if keys.pop("traceEvents", None) == []:
                    return match.end(), keys, False
        _object(data[start:])
    except LimitError as error:
        raise HeadError(str(error), 0) from None
    except RecursionError:
        raise HeadError("JSON that is nested too deeply to be read, before the events", 0) from None
    except ValueError as error:  # also raised for a number of thousands of digits
        offset = len(error.doc[: error.pos].encode()) if isinstance(error, json.JSONDecodeError) else 0
        raise HeadError("broken JSON before the events", start + offset, is_incomplete=True) from None
    raise HeadError('not a profiler trace: it has no "traceEvents" that is a list', len(data.rstrip()) - 1)


def _object(data: bytes) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(data.decode("utf-8", "replace"), strict=False)
    return value


def find_tail(data: bytes | bytearray, *, bare: bool) -> tuple[int, dict[str, Any]] | None:
    """Return the offset of the `]` that closes the events, and the keys after it; None if `data` lacks either.

    The data start between two events. Raises LimitError if the keys would need too much memory or are nested too
    deeply.
    """
    if bare:
        offset = len(data.rstrip()) - 1
        return (offset, {}) if offset >= 0 and data[offset : offset + 1] == b"]" else None
    for candidate in re.finditer(rb"\]\s*(?:,\s*\"|\}\s*\Z)", data):
        offset = candidate.start()
        # If a key is duplicated, the decoder uses the last one, as every reader does.
        tail = data[offset:]
        check_nested_json(tail)
        try:
            keys = _object(b'{"traceEvents":[' + tail)
        except RecursionError:
            raise LimitError("JSON that is nested too deeply to be read, after the events") from None
        except ValueError:
            continue
        del keys["traceEvents"]
        return offset, keys
    return None


_BOUNDARY = re.compile(rb"\}\s*,\s*(?=\{)")
"""The text between two objects of a list: between events, or objects inside an event."""
_BEGIN = r'\{\s*"(?:ph|name|cat|pid|tid|ts|dur|id|args|s|bp|bind_id)"\s*:'
_EVENT_BEGIN = re.compile(_BEGIN)
_PHASE = re.compile(r'"ph"\s*:')
_NEXT_EVENTS = (re.compile(rf"(?<=\}}),?[ \t\r]*\n\s*(?={_BEGIN})"), re.compile(rf"(?<=\}})\s*,?\s*(?={_BEGIN})"))
"""The text between two events: at a line break, as Kineto writes them (texts have none), or anywhere."""
_AROUND_EVENTS = " \t\r\n,[]"
_AFTER_EVENTS = re.compile(r'\s*\]\s*(?:,\s*"|\}|\Z)')
_COMMA = re.compile(rb"\s*(?:,|(?=\{))")
_NEAR_BYTES = 1 << 16
_MAX_SEARCHED = 4 * MAX_EVENT_BYTES
"""Characters searched for the next event after damage before giving up; nested events need no more."""
_DECODER = json.JSONDecoder(strict=False)
_BARE_TEXTS = (
    re.compile(r'("name":\s*")(.*?)(?="\s*,\s*"pid":)', re.DOTALL),
    re.compile(r'("(?:Call stack|Module Hierarchy)":\s*")(.*?)(?="\s*(?:,\s*"[A-Z]|\}\s*\}\s*\Z))', re.DOTALL),
)
"""Texts that Kineto writes without escaping: the JSON before the text, the text, and the JSON after it (lookahead)."""


@contextlib.contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Keep the garbage collector from traversing millions of events again and again; none of them is in a cycle."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Chunk(NamedTuple):
    """Complete events."""

    raw: bytes  # bytes of the events, with the commas between them and none after the last
    events: list[Any]  # the parsed events


class EventStream:
    """The events of a trace, and the JSON before and after them.

    Kineto does not escape quotes, control characters and bytes other than UTF-8 in some texts: in the names of ranges,
    and with `with_stack=True` in names of functions and modules. Such a broken event is repaired; if `strict`, it is an
    error.

    Attributes:
        head: the bytes up to and including the `[` that opens the events.
        keys: top-level keys with their values; keys after the events are added once `chunks` is exhausted.
        bare: whether the file is an array without an object around it.
        tail: the bytes from the `]` that closes the events to the end.
        count: number of events that were yielded.
        repaired: number of yielded events that were broken.
        dropped: number of further events that could not be repaired.
        strays: number of gaps between events with something other than one comma.

    Raises:
        TraceError: the file is not a trace, is cut off, or is broken between its events.
    """

    def __init__(self, source: TraceFile, *, strict: bool = False) -> None:
        self.count = self.repaired = self.dropped = self.strays = 0
        self._strict = strict
        self.tail = b""
        self._source = source
        self._blocks = source.blocks()
        data = bytearray()
        while True:
            previous = len(data)
            data += next(self._blocks, b"")
            # The length doubles each time, so that a long head is not parsed over and over.
            while previous and len(data) < min(2 * previous, MAX_HEAD_BYTES) and (block := next(self._blocks, b"")):
                data += block
            try:
                self._offset, self.keys, self.bare = find_head(bytes(data))
                break
            except HeadError as error:
                if error.is_incomplete and len(data) >= MAX_HEAD_BYTES:
                    problem = f"more than {MAX_HEAD_BYTES >> 20} MiB are before the events; move them after the events"
                    raise self._error(problem, 0) from None
                if not error.is_incomplete or len(data) == previous:
                    raise self._error(str(error), error.offset) from None
        self.head = bytes(data[: self._offset])
        # The byte before the first event is overwritten with the `[` that makes a chunk a list.
        self._buffer = data[self._offset - 1 :]

    def chunks(self) -> Iterator[Chunk]:
        """Yield the events in file order."""
        for chunk in self._all():
            if chunk.events:
                self.count += len(chunk.events)
                yield chunk
        if self.dropped and not self.count:
            raise self._error("none of its events can be read", len(self.head))

    def notes(self) -> list[str]:
        """Return notes on broken events, once `chunks` is exhausted."""
        notes = []
        if self.repaired or self.dropped:
            counts = f"{self.repaired:,} were repaired and {self.dropped:,} left out"
            notes.append(f"of the profiler's events {counts}: they are broken JSON")
        if self.strays:
            notes.append(f"something other than a comma was between the profiler's events {self.strays:,} times")
        return notes

    def _all(self) -> Iterator[Chunk]:
        yield from self._cut()
        retry_length, is_at_end = 0, False
        for block in self._blocks:
            self._buffer += block
            if len(self._buffer) >= retry_length and not is_at_end:
                offset = self._offset
                yield from self._cut()
                # An incomplete event is parsed again when the buffer is twice as long.
                retry_length = 0 if self._offset != offset else 2 * len(self._buffer)
            if len(self._buffer) > MAX_EVENT_BYTES and not is_at_end:
                is_at_end = self._is_last()
                if not is_at_end:
                    raise self._fault(f"an event of more than {MAX_EVENT_BYTES >> 20} MiB")
            if len(self._buffer) > MAX_TAIL_BYTES:
                raise self._error(f"more than {MAX_TAIL_BYTES >> 20} MiB follow the events", self._offset)
        yield from self._finish()

    def _cut(self) -> Iterator[Chunk]:
        """Yield the complete events of the buffer, except the last."""
        limit, is_broken = len(self._buffer), False
        while True:
            comma = self._last_comma(limit)
            if comma < 0 and not is_broken:
                if limit >= len(self._buffer):
                    return
                limit = len(self._buffer)
                continue
            result = self._take(comma) if comma >= 0 else self._take_broken(len(self._buffer))
            if result is None:
                return
            if isinstance(result, int):
                limit, is_broken = min(result, self._buffer.rindex(b"}", 0, comma)), True
                continue
            yield result
            # A broken event is often followed by more of them.
            limit, is_broken = _NEAR_BYTES if comma < 0 else len(self._buffer), False

    def _last_comma(self, limit: int) -> int:
        """Return the index of the last comma before `limit` that could separate two events, or -1."""
        index = limit
        while (index := self._buffer.rfind(b"}", 0, index)) >= 0:
            if _BOUNDARY.match(self._buffer, index):
                return self._buffer.index(b",", index)
        return -1

    def _take(self, end: int) -> Chunk | int:
        """Take the buffer up to `end`, which is after an event; return the index of a syntax error instead, if any."""
        buffer = self._buffer
        buffer[0] = ord("[")
        separator = buffer[end]
        buffer[end] = ord("]")
        try:
            with memoryview(buffer) as view:
                events, raw = orjson.loads(view[: end + 1]), bytes(view[1:end])
        except orjson.JSONDecodeError as error:
            return _error_offset(error, buffer[:end])
        finally:
            buffer[end] = separator
        self._drop(end)
        return Chunk(raw, events)

    def _take_broken(self, end: int, *, is_all: bool = False) -> Chunk | None:
        """Take the broken text before the first complete event of the buffer, or this event if no text is before it.

        Return the event or the repaired events; None if the text before `end` may be incomplete, unless it `is_all`.
        """
        text, extent = "", None
        for size in (_NEAR_BYTES, end):
            text = self._buffer[1 : min(size, end)].decode("latin-1")
            if not is_all and _AFTER_EVENTS.match(text):
                return None  # the JSON after the events may also contain lists of objects
            if (extent := self._find_event(text)) is not None or size >= end:
                break
        if not is_all:
            if extent is None:
                return None
            with memoryview(self._buffer) as view:
                try:
                    orjson.loads(b"[" + view[1:end])
                except orjson.JSONDecodeError as error:
                    if _error_offset(error, b"[" + self._buffer[1:end]) >= end:
                        return None
        event_start, event_end = extent or (len(text), len(text))
        if text[:event_start].strip(_AROUND_EVENTS + "{}"):
            return self._repair(event_start)
        if event_start == len(text) - len(text.lstrip()):
            chunk = self._repair(event_end)
            if comma := _COMMA.match(self._buffer, 1):
                end, is_comma = comma.end() - 1, comma[0].endswith(b",")
                del comma  # the match locks the size of the buffer
                if not is_comma:
                    self._note_stray()
                self._drop(end)
            return chunk
        self._note_stray()
        self._drop(event_start)
        return Chunk(b"", [])

    def _note_stray(self) -> None:
        if self._strict:
            raise self._fault("something other than a comma between two events")
        self.strays += 1

    def _find_event(self, text: str) -> tuple[int, int] | None:
        """Return the extent of the first complete event of a text, or None; raises TraceError after a long search."""
        searched = 0
        for match in _EVENT_BEGIN.finditer(text):
            try:
                event, end = _DECODER.raw_decode(text, match.start())
            except json.JSONDecodeError as error:
                searched += error.pos - match.start()
            except (ValueError, RecursionError):
                searched += _NEAR_BYTES
            else:
                if _is_event(event):
                    return match.start(), end
            if searched > _MAX_SEARCHED:
                raise self._fault("no event can be found after one that is broken")
        return None

    def _repair(self, end: int) -> Chunk:
        """Take the events up to and including `end` from the buffer; only the last of them may be valid JSON."""
        text = bytes(self._buffer[1 : end + 1])
        with contextlib.suppress(orjson.JSONDecodeError):
            event = orjson.loads(text)
            self._drop(end)
            return Chunk(text, [event])
        if self._strict:
            raise self._fault("an event that is not JSON")
        events = [*_repaired_events(text.decode("utf-8", "replace"), _NEXT_EVENTS)]
        self._drop(end)
        repaired = [event for event in events if event is not None]
        self.repaired += len(repaired)
        self.dropped += len(events) - len(repaired)
        return Chunk(orjson.dumps(repaired)[1:-1], repaired)

    def _drop(self, end: int) -> None:
        self._offset += end
        del self._buffer[:end]

    def _is_last(self) -> bool:
        """Return whether the first event of the buffer is the last: followed by the `]` that closes the events."""
        text = self._buffer[1:].lstrip().decode("latin-1")
        try:
            _, end = _DECODER.raw_decode(text)
        except (ValueError, RecursionError):
            return False
        return end <= MAX_EVENT_BYTES and _AFTER_EVENTS.match(text, end) is not None

    def _finish(self) -> Iterator[Chunk]:
        """Yield the last events, and read the JSON after them."""
        yield from self._cut()
        if self._source.damage:
            raise self._error("it is incomplete or damaged", self._offset)
        data = bytes(self._buffer[1:])
        try:
            tail = find_tail(data, bare=self.bare)
        except LimitError as error:
            raise self._error(str(error), self._offset) from None
        if tail is None:
            raise self._fault("it is cut off within or after the event that begins here; export it again")
        end, keys = tail
        self.keys |= keys
        self.tail = data[end:]
        closing = self._offset + end
        while (size := closing - self._offset) > 0 and self._buffer[1 : size + 1].strip():
            result = self._take(size + 1)
            if isinstance(result, int):
                result = self._take_broken(size + 1, is_all=True) or Chunk(b"", [])
            yield result

    def _fault(self, message: str) -> TraceError:
        """Return an error with the offset of a JSON syntax error in the buffer, or with `message` if there is none."""
        data, head = bytes(self._buffer[1:]), b"[" if self.bare else b'{"traceEvents":['
        try:
            check_nested_json(data)
            orjson.loads(head + data)
        except LimitError as error:
            return self._error(str(error), self._offset)
        except orjson.JSONDecodeError as error:
            offset = _error_offset(error, head + data) - len(head)
            if offset < len(data):
                return self._error(f"broken JSON: {error.msg}; `merge` may repair it", self._offset + offset)
        if not self.count:
            message = "none of its events can be read: this is not a profiler trace, or it was cut off"
        return self._error(message, self._offset)

    def _error(self, message: str, offset: int) -> TraceError:
        if self._source.damage:
            message = f"{message}; {self._source.damage}"
        if self._source.gzipped:
            message = f"{message} (the offset is in the uncompressed data)"
        return TraceError(self._source.path, message, offset)


def _error_offset(error: orjson.JSONDecodeError, data: bytes | bytearray) -> int:
    """Return the offset in bytes at which JSON is broken; its length if it only ends too early."""
    try:
        return len(data.decode()[: error.pos].encode())
    except UnicodeDecodeError as decode_error:
        return decode_error.start


def _is_event(event: object) -> bool:
    """Return whether a value has the fields that every event has."""
    return isinstance(event, dict) and "ph" in event and (event["ph"] == "M" or event.get("ts") is not None)


def _repaired_events(text: str, boundaries: tuple[re.Pattern[str], ...]) -> Iterator[dict[str, Any] | None]:
    """Yield the repaired events; None for each that cannot be repaired."""
    for piece in boundaries[0].split(text):
        if not (piece := piece.strip(_AROUND_EVENTS)).strip("{}"):
            continue
        event = _repaired_event(piece)
        if event is not None:
            yield event
        elif len(boundaries) > 1:
            yield from _repaired_events(piece, boundaries[1:])
        else:  # if the separators are broken, the piece may be several events
            yield from [None] * max(len(_PHASE.findall(piece)), 1)


def _repaired_event(text: str) -> dict[str, Any] | None:
    """Return the repaired event, with JSON values only; None if it is ambiguous."""
    event = _lenient_event(text)
    if event is None:
        for bare in _BARE_TEXTS:
            text = bare.sub(lambda part: part[1] + json.dumps(part[2])[1:-1], text)
        event = _lenient_event(text)
        name = "" if event is None else str(event.get("name"))
        if '"ts":' in name or ('"ph":' in name and '"name":' in name):
            return None  # the name has swallowed another event
    return event


def _object_of_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; raises ValueError if it is two events that run together."""
    if sum(key == "ph" for key, _ in pairs) > 1:
        raise ValueError("two events")
    return dict(pairs)


def _lenient_event(text: str) -> dict[str, Any] | None:
    """Return the event of a text, with JSON values only; None if it is broken."""
    with contextlib.suppress(ValueError, RecursionError, TypeError):
        value = json.loads(text, strict=False, object_pairs_hook=_object_of_pairs)
        event: dict[str, Any] = orjson.loads(orjson.dumps(escaped_json(value)))
        if not _is_event(event) or event.get("dur", 0) is None:
            return None
        if event["ph"] == "C" and isinstance(values := event.get("args"), dict):
            event["args"] = {name: value for name, value in values.items() if value is not None}
        return event
    return None
