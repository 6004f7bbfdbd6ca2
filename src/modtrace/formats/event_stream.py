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
from .escape import escaped_json
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
        HeadError: this is not a trace, or not enough of it.
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
            raise LimitError("JSON that is nested too deeply to be read, after the events") from None
        except ValueError:
            continue
        del keys["traceEvents"]
        return offset, keys
    return None


_BOUNDARY = re.compile(rb"\}\s*,\s*(?=\{)")
"""Between two objects of a list: the events, or objects inside one."""
_NEXT_EVENT = re.compile(rb'\}\s*,[ \t\r]*\n\s*(?=\{\s*"(?:ph|name|cat)"\s*:)')
"""Between two events as Kineto writes them: each begins a line, and no text in them has a line break."""
_AFTER_EVENTS = re.compile(r'\s*\]\s*(?:,\s*"|\}|\Z)')
_NEAR_BYTES = 1 << 16
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
    """Whole events.

    Attributes:
        raw: their bytes, with the commas between them and none after the last.
        events: the same, parsed.
    """

    raw: bytes
    events: list[Any]


class EventStream:
    """The events of a trace and what stands around them.

    Kineto writes some texts as they are, with quotes, control characters or bytes that are not UTF-8 in them: names of
    ranges, and with `with_stack=True` those of functions and modules. Such an event gets the JSON that was meant.

    Args:
        source: the trace.
        strict: whether a broken event is an error.

    Attributes:
        head: the bytes up to and with the `[` that opens the events.
        keys: top-level keys with their values; those after the events are there once `chunks` is exhausted.
        bare: whether the file is an array without an object around it.
        tail: the bytes from the `]` on that closes the events.
        count: how many events were yielded.
        repaired: how many of them were broken.
        dropped: how many others could not be repaired.

    Raises:
        TraceError: the file is not a trace, is cut off, or is broken between its events.
    """

    def __init__(self, source: TraceFile, *, strict: bool = False) -> None:
        self.count = self.repaired = self.dropped = 0
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
                if not error.more or len(data) == before or len(data) >= MAX_HEAD_BYTES:
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
        """Return what became of broken events, once `chunks` is exhausted."""
        if not (self.repaired or self.dropped):
            return []
        what = f"{self.repaired:,} were repaired and {self.dropped:,} left out"
        return [f"of the profiler's events {what}: they are broken JSON"]

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
            taken = self._take(comma) if comma >= 0 else self._take_broken()
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
        """Take the buffer up to `end`, where what follows an event stands; return where it does not parse, if so."""
        buffer = self._buffer
        buffer[0] = ord("[")
        separator = buffer[end]
        buffer[end] = ord("]")
        try:
            with memoryview(buffer) as view:
                events = orjson.loads(view[: end + 1])
        except orjson.JSONDecodeError as error:
            return _place_of(error, buffer[:end])
        finally:
            buffer[end] = separator
        chunk = Chunk(bytes(buffer[1:end]), events)
        self._drop(end)
        return chunk

    def _take_broken(self) -> Chunk | None:
        """Take the first event of the buffer, which does not parse; None if more of it may follow."""
        end = 1
        while match := _NEXT_EVENT.search(self._buffer, end):
            end = self._buffer.index(b",", match.start())
            del match  # as long as it is there, nothing can be taken from the buffer
            taken = self._take(end)
            if isinstance(taken, Chunk):
                return taken
            if taken < end:
                # What follows the events can hold lists of objects too.
                return None if self._is_last(end) else self._repair(end)
        return None

    def _repair(self, end: int) -> Chunk:
        """Take what should be an event from the buffer: the bytes before `end`."""
        if self._strict:
            raise self._fault("an event that is not JSON")
        event = _repaired_event(bytes(self._buffer[1:end]).decode("utf-8", "replace"))
        self._drop(end)
        self.repaired += event is not None
        self.dropped += event is None
        return Chunk(b"", []) if event is None else Chunk(orjson.dumps(event), [event])

    def _drop(self, end: int) -> None:
        self._offset += end
        del self._buffer[:end]

    def _is_last(self, before: int | None = None) -> bool:
        """Whether the first event of the buffer is the last one: the `]` that closes the events follows it.

        Args:
            before: how much of the buffer is looked at; None: all.
        """
        text = self._buffer[1:before].lstrip().decode("latin-1")
        try:
            event, end = json.JSONDecoder(strict=False).raw_decode(text)
        except (ValueError, RecursionError):
            return False
        if before is not None and not (isinstance(event, dict) and "pid" in event):
            return False  # it ended within its name, after which Kineto writes the pid
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
        if rest[:end].strip():
            taken = self._take(end + 1)
            yield self._repair(end + 1) if isinstance(taken, int) else taken

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


def _repaired_event(text: str) -> dict[str, Any] | None:
    """Return the event that was meant, with values of JSON alone; None if that is not clear."""
    event = _lenient_event(text)
    if event is None:
        for bare in _BARE_TEXTS:
            text = bare.sub(lambda part: part[1] + json.dumps(part[2])[1:-1], text)
        event = _lenient_event(text)
    return event


def _lenient_event(text: str) -> dict[str, Any] | None:
    with contextlib.suppress(ValueError, RecursionError, TypeError):
        event = orjson.loads(orjson.dumps(escaped_json(json.loads(text, strict=False))))
        return event if isinstance(event, dict) else None
    return None
