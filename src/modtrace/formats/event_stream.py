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
from .limits import MAX_EVENT_BYTES, MAX_HEAD_BYTES, MAX_TAIL_BYTES, LimitError, check_nested_json, escaped_json
from .trace_file import BYTE_ORDER_MARK, TraceFile


class HeadError(ValueError):
    """The bytes are not the beginning of a trace.

    Attributes:
        offset: the first byte that is wrong.
        more: whether further bytes could change that.
    """

    def __init__(self, message: str, offset: int, *, more: bool = False) -> None:
        super().__init__(message)
        self.offset = offset
        self.more = more


_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_MAX_KEYS = 16
"""The number of places that look like the key and are tried: each time the bytes before it are parsed."""


def find_head(data: bytes) -> tuple[int, dict[str, Any], bool]:
    """Return how many bytes come before the events, the keys in them, and whether the file is the array alone.

    The last of these bytes is the `[` that opens the events. Raises HeadError if this is not a trace, or not enough of
    it.
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
    """Return the place of the `]` that closes the events, and the keys after it; None if it, or the rest, is not there.

    The data begin between two events. Raises LimitError if the keys would take too much memory or are nested too
    deeply.
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
            raise LimitError("JSON that is nested too deeply to be read, after the events") from None
        except ValueError:
            continue
        del keys["traceEvents"]
        return offset, keys
    return None


_BOUNDARY = re.compile(rb"\}\s*,\s*(?=\{)")
"""Between two objects of a list: the events, or objects inside one."""
_BEGIN = r'\{\s*"(?:ph|name|cat|pid|tid|ts|dur|id|args|s|bp|bind_id)"\s*:'
_EVENT_BEGIN = re.compile(_BEGIN)
_PHASE = re.compile(r'"ph"\s*:')
_NEXT_EVENTS = (re.compile(rf"(?<=\}}),?[ \t\r]*\n\s*(?={_BEGIN})"), re.compile(rf"(?<=\}})\s*,?\s*(?={_BEGIN})"))
"""Between two events where each begins a line, as Kineto writes them: no text in them has a line break; or anywhere."""
_AROUND_EVENTS = " \t\r\n,[]"
_AFTER_EVENTS = re.compile(r'\s*\]\s*(?:,\s*"|\}|\Z)')
_COMMA = re.compile(rb"\s*(?:,|(?=\{))")
_NEAR_BYTES = 1 << 16
_MAX_TRIED = 4 * MAX_EVENT_BYTES
"""Characters that are read in vain in search of an event after damage: there are no more in events that are nested."""
_DECODER = json.JSONDecoder(strict=False)
_BARE_TEXTS = (
    re.compile(r'("name":\s*")(.*?)(?="\s*,\s*"pid":)', re.DOTALL),
    re.compile(r'("(?:Call stack|Module Hierarchy)":\s*")(.*?)(?="\s*(?:,\s*"[A-Z]|\}\s*\}\s*\Z))', re.DOTALL),
)
"""Texts that Kineto writes as they are, between what comes before and after them."""


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
    """Whole events."""

    raw: bytes  # their bytes, with the commas between them and none after the last
    events: list[Any]  # the same, parsed


class EventStream:
    """The events of a trace, and what is before and after them.

    Kineto writes some texts as they are, with quotes, control characters or bytes that are not UTF-8: the names of
    ranges, and with `with_stack=True` of functions and modules. Such an event gets the JSON that was meant. If
    `strict`, a broken event is an error.

    Attributes:
        head: the bytes up to and with the `[` that opens the events.
        keys: top-level keys with their values; those after the events are there once `chunks` is exhausted.
        bare: whether the file is an array without an object around it.
        tail: the bytes from the `]` on that closes the events.
        count: how many events were yielded.
        repaired: how many of them were broken.
        dropped: how many others could not be repaired.
        strays: how often something else than a comma was between events.

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
            before = len(data)
            data += next(self._blocks, b"")
            # Twice as much each time, so that a long head is not read over and over.
            while before and len(data) < min(2 * before, MAX_HEAD_BYTES) and (block := next(self._blocks, b"")):
                data += block
            try:
                self._offset, self.keys, self.bare = find_head(bytes(data))
                break
            except HeadError as error:
                if error.more and len(data) >= MAX_HEAD_BYTES:
                    problem = f"more than {MAX_HEAD_BYTES >> 20} MiB are before the events; move them after the events"
                    raise self._error(problem, 0) from None
                if not error.more or len(data) == before:
                    raise self._error(str(error), error.offset) from None
        self.head = bytes(data[: self._offset])
        # The byte before the first event is where the `[` goes that makes a chunk a list.
        self._buffer = data[self._offset - 1 :]

    def chunks(self) -> Iterator[Chunk]:
        """Yield the events in file order."""
        for chunk in self._all():
            if chunk.events:
                self.count += len(chunk.events)
                yield chunk
        if self.dropped and not self.count:
            raise self._error("no event of it can be read", len(self.head))

    def notes(self) -> list[str]:
        """Return notes on broken events, once `chunks` is exhausted."""
        notes = []
        if self.repaired or self.dropped:
            counts = f"{self.repaired:,} were repaired and {self.dropped:,} left out"
            notes.append(f"of the profiler's events {counts}: they are broken JSON")
        if self.strays:
            notes.append(f"something else than a comma was between the profiler's events {self.strays:,} times")
        return notes

    def _all(self) -> Iterator[Chunk]:
        yield from self._cut()
        enough, ended = 0, False
        for block in self._blocks:
            self._buffer += block
            if len(self._buffer) >= enough and not ended:
                before = self._offset
                yield from self._cut()
                # What was not whole is tried again when there is twice as much of it.
                enough = 0 if self._offset != before else 2 * len(self._buffer)
            if len(self._buffer) > MAX_EVENT_BYTES and not ended:
                ended = self._is_last()
                if not ended:
                    raise self._fault(f"an event of more than {MAX_EVENT_BYTES >> 20} MiB")
            if len(self._buffer) > MAX_TAIL_BYTES:
                raise self._error(f"more than {MAX_TAIL_BYTES >> 20} MiB follow the events", self._offset)
        yield from self._finish()

    def _cut(self) -> Iterator[Chunk]:
        """Yield the whole events of the buffer but the last."""
        limit, is_broken = len(self._buffer), False
        while True:
            comma = self._last_comma(limit)
            if comma < 0 and not is_broken:
                if limit >= len(self._buffer):
                    return
                limit = len(self._buffer)
                continue
            taken = self._take(comma) if comma >= 0 else self._take_broken(len(self._buffer))
            if taken is None:
                return
            if isinstance(taken, int):
                limit, is_broken = min(taken, self._buffer.rindex(b"}", 0, comma)), True
                continue
            yield taken
            # Where one event is broken, others near it mostly are.
            limit, is_broken = _NEAR_BYTES if comma < 0 else len(self._buffer), False

    def _last_comma(self, limit: int) -> int:
        """Return the place of the last comma before `limit` that could part two events, or -1."""
        index = limit
        while (index := self._buffer.rfind(b"}", 0, index)) >= 0:
            if _BOUNDARY.match(self._buffer, index):
                return self._buffer.index(b",", index)
        return -1

    def _take(self, end: int) -> Chunk | int:
        """Take the buffer up to `end`, which is after an event; return the place at which it does not parse, if any."""
        buffer = self._buffer
        buffer[0] = ord("[")
        separator = buffer[end]
        buffer[end] = ord("]")
        try:
            with memoryview(buffer) as view:
                events, raw = orjson.loads(view[: end + 1]), bytes(view[1:end])
        except orjson.JSONDecodeError as error:
            return _place_of(error, buffer[:end])
        finally:
            buffer[end] = separator
        self._drop(end)
        return Chunk(raw, events)

    def _take_broken(self, end: int, *, is_all: bool = False) -> Chunk | None:
        """Take the broken text before the first whole event of the buffer; that event if there is no such text.

        Return the event, or what could be repaired before `end`; None if more of it may follow, unless this `is_all`.
        """
        text, place = "", None
        for size in (_NEAR_BYTES, end):
            text = self._buffer[1 : min(size, end)].decode("latin-1")
            if not is_all and _AFTER_EVENTS.match(text):
                return None  # what follows the events can hold lists of objects too
            if (place := self._find_event(text)) is not None or size >= end:
                break
        if not is_all:
            if place is None:
                return None
            with memoryview(self._buffer) as view:
                try:
                    orjson.loads(b"[" + view[1:end])
                except orjson.JSONDecodeError as error:
                    if _place_of(error, b"[" + self._buffer[1:end]) >= end:
                        return None
        begin, after = place or (len(text), len(text))
        if text[:begin].strip(_AROUND_EVENTS + "{}"):
            return self._repair(begin)
        if begin == len(text) - len(text.lstrip()):
            chunk = self._repair(after)
            if comma := _COMMA.match(self._buffer, 1):
                end, is_comma = comma.end() - 1, comma[0].endswith(b",")
                del comma  # as long as it is there, nothing can be taken from the buffer
                if not is_comma:
                    self._note_stray()
                self._drop(end)
            return chunk
        self._note_stray()
        self._drop(begin)
        return Chunk(b"", [])

    def _note_stray(self) -> None:
        if self._strict:
            raise self._fault("something else than a comma between two events")
        self.strays += 1

    def _find_event(self, text: str) -> tuple[int, int] | None:
        """Return where the first whole event of a text is, None if nowhere; raises TraceError if no trace has that."""
        tried = 0
        for match in _EVENT_BEGIN.finditer(text):
            try:
                event, end = _DECODER.raw_decode(text, match.start())
            except json.JSONDecodeError as error:
                tried += error.pos - match.start()
            except (ValueError, RecursionError):
                tried += _NEAR_BYTES
            else:
                if _is_event(event):
                    return match.start(), end
            if tried > _MAX_TRIED:
                raise self._fault("no event can be found after one that is broken")
        return None

    def _repair(self, end: int) -> Chunk:
        """Take events from the buffer, up to and with `end`, of which at most the last one parses."""
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
        """Return whether the first event of the buffer is the last one: the `]` that closes the events follows it."""
        text = self._buffer[1:].lstrip().decode("latin-1")
        try:
            _, end = _DECODER.raw_decode(text)
        except (ValueError, RecursionError):
            return False
        return end <= MAX_EVENT_BYTES and _AFTER_EVENTS.match(text, end) is not None

    def _finish(self) -> Iterator[Chunk]:
        """Yield the last events, and read what follows them."""
        yield from self._cut()
        if self._source.damage:
            raise self._error("it is not whole, or damaged", self._offset)
        rest = bytes(self._buffer[1:])
        try:
            tail = find_tail(rest, bare=self.bare)
        except LimitError as error:
            raise self._error(str(error), self._offset) from None
        if tail is None:
            raise self._fault("it is cut off within or after the event that begins here; export it again")
        end, keys = tail
        self.keys |= keys
        self.tail = rest[end:]
        closing = self._offset + end
        while (left := closing - self._offset) > 0 and self._buffer[1 : left + 1].strip():
            taken = self._take(left + 1)
            yield self._take_broken(left + 1, is_all=True) or Chunk(b"", []) if isinstance(taken, int) else taken

    def _fault(self, otherwise: str) -> TraceError:
        """Return the error that says where the JSON in the buffer is broken; `otherwise` where it is not."""
        rest, around = bytes(self._buffer[1:]), b"[" if self.bare else b'{"traceEvents":['
        try:
            check_nested_json(rest)
            orjson.loads(around + rest)
        except LimitError as error:
            return self._error(str(error), self._offset)
        except orjson.JSONDecodeError as error:
            place = _place_of(error, around + rest) - len(around)
            if place < len(rest):
                return self._error(f"broken JSON: {error.msg}; `merge` may repair it", self._offset + place)
        if not self.count:
            otherwise = "no event of it can be read: this is no profiler trace, or it was cut off"
        return self._error(otherwise, self._offset)

    def _error(self, message: str, offset: int) -> TraceError:
        if self._source.damage:
            message = f"{message}; {self._source.damage}"
        if self._source.gzipped:
            message = f"{message} (the offset is in the uncompressed data)"
        return TraceError(self._source.path, message, offset)


def _place_of(error: orjson.JSONDecodeError, data: bytes | bytearray) -> int:
    """Return the byte at which JSON is broken; its length if it only ends too early."""
    try:
        return len(data.decode()[: error.pos].encode())
    except UnicodeDecodeError as bad:
        return bad.start


def _is_event(event: object) -> bool:
    """Return whether a value has the fields that every event has."""
    return isinstance(event, dict) and "ph" in event and (event["ph"] == "M" or event.get("ts") is not None)


def _repaired_events(text: str, boundaries: tuple[re.Pattern[str], ...]) -> Iterator[dict[str, Any] | None]:
    """Yield the events that were meant; None for each that is not clear."""
    for piece in boundaries[0].split(text):
        if not (piece := piece.strip(_AROUND_EVENTS)).strip("{}"):
            continue
        event = _repaired_event(piece)
        if event is not None:
            yield event
        elif len(boundaries) > 1:
            yield from _repaired_events(piece, boundaries[1:])
        else:  # where what parts events is broken, it was several
            yield from [None] * max(len(_PHASE.findall(piece)), 1)


def _repaired_event(text: str) -> dict[str, Any] | None:
    """Return the event that was meant, with values of JSON alone; None if that is not clear."""
    event = _lenient_event(text)
    if event is None:
        for bare in _BARE_TEXTS:
            text = bare.sub(lambda part: part[1] + json.dumps(part[2])[1:-1], text)
        event = _lenient_event(text)
        name = "" if event is None else str(event.get("name"))
        if '"ts":' in name or ('"ph":' in name and '"name":' in name):
            return None  # that was another event
    return event


def _object_of_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON; raises ValueError if two events run into one."""
    if sum(key == "ph" for key, _ in pairs) > 1:
        raise ValueError("two events")
    return dict(pairs)


def _lenient_event(text: str) -> dict[str, Any] | None:
    """Return the event of a text, with values of JSON alone; None if it is broken."""
    with contextlib.suppress(ValueError, RecursionError, TypeError):
        value = json.loads(text, strict=False, object_pairs_hook=_object_of_pairs)
        event: dict[str, Any] = orjson.loads(orjson.dumps(escaped_json(value)))
        if not _is_event(event) or event.get("dur", 0) is None:
            return None
        if event["ph"] == "C" and isinstance(values := event.get("args"), dict):
            event["args"] = {name: value for name, value in values.items() if value is not None}
        return event
    return None
