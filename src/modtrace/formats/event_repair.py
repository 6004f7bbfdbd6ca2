"""Bytes that should be events and are not quite: save what can be saved."""

import json
import re
from typing import Any, NamedTuple

import orjson

BOUNDARY = re.compile(rb"\}\s*,\s*(?=\{)")
"""Between two objects of a list: the events, or objects inside one."""

Event = dict[str, Any]

_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_BAD_ESCAPE = re.compile(r'\\(?:u(?![0-9a-fA-F]{4})|(?!["\\/bfnrtu]))|\\\\', re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x1f]")
_NUMBER = re.compile(r"[-+]?\b(?:nan|inf(?:inity)?)\b", re.IGNORECASE)
_NO_VALUE = re.compile(r":\s*(?=[,}\]])")
_LAST_COMMA = re.compile(r",\s*(?=[}\]])")
_LIKE_AN_EVENT = re.compile(rb'\{\s*"(?:ph|name|cat)"\s*:')
_NEXT = re.compile(rb"\s*")
_COMMA = re.compile(rb"\s*,")
_DECODER = json.JSONDecoder(strict=False)

_MAX_PIECES = 16
"""How many pieces an event may fall into, by what looks like a boundary inside it."""


class RecoveredEvent(NamedTuple):
    """What became of an event.

    Attributes:
        begin: where it began in the bytes given.
        end: where it ended.
        raw: its bytes, changed where they had to be.
        event: the event; None if it cannot be saved.
        changed: whether `raw` differs from what stood there.
    """

    begin: int
    end: int
    raw: bytes
    event: Event | None
    changed: bool


def recover_events(data: bytes, *, final: bool) -> tuple[list[RecoveredEvent], bool]:
    """Take events one by one, broken ones among them, as long as they are surely whole.

    Args:
        data: events with commas between them, and perhaps what follows the events.
        final: whether nothing follows `data`.

    Returns:
        What became of the events, behind the last of which a comma follows if there is more; and whether the `]` that
        closes the events follows.
    """
    events: list[RecoveredEvent] = []
    offset = 0
    while True:
        begin = _NEXT.match(data, offset).end()  # type: ignore[union-attr]
        rest = data[begin:]
        length = _first_event(rest)
        following = rest[length:].lstrip()[:1] if length >= 0 else b""
        if following == b"]" or (final and length >= 0 and following == b""):
            events.append(_recovered(begin, rest[:length]))
            return events, following == b"]"
        saved = _recovered(begin, rest[:length]) if following == b"," else _by_boundary(begin, rest, final)
        if saved is None:
            return events, False
        events.append(saved)
        comma = _COMMA.match(data, saved.end)
        if comma is None:
            return events, False
        offset = comma.end()


def _recovered(begin: int, raw: bytes) -> RecoveredEvent:
    repaired = _repair_event(raw)
    return RecoveredEvent(begin, begin + len(raw), *(repaired or (b"", None, True)))


def _by_boundary(begin: int, data: bytes, final: bool) -> RecoveredEvent | None:
    """Save the first event where only what looks like its end says how long it is; None if more may follow."""
    first = None
    for count, match in enumerate(BOUNDARY.finditer(data)):
        end = match.start() + 1
        first = first or end
        repaired = _repair_event(data[:end])
        if repaired is not None:
            return RecoveredEvent(begin, begin + end, *repaired)
        if count == _MAX_PIECES or _LIKE_AN_EVENT.match(data, match.end()):
            final = True
            break
    return RecoveredEvent(begin, begin + first, b"", None, True) if first is not None and final else None


def _first_event(data: bytes) -> int:
    """Return where the first event of `data` ends, names with raw control characters allowed; -1 if it does not."""
    try:
        event, end = _DECODER.raw_decode(data.decode("latin-1"))
    except (ValueError, RecursionError):
        return -1
    return end if isinstance(event, dict) else -1


def has_times(event: Event) -> bool:
    """Whether no time of it is null; a null `dur` makes a reader lose every later event."""
    return event.get("dur", 0) is not None and event.get("ts", 0) is not None


def _repair_event(raw: bytes) -> tuple[bytes, Event, bool] | None:
    """Make one event of `raw`: its bytes, the event, and whether bytes had to be changed; None if it cannot be."""
    changed = raw
    try:
        event = orjson.loads(raw)
    except orjson.JSONDecodeError:
        text = _repaired_text(raw.decode("utf-8", "replace"))
        try:
            event = json.loads(text)
        except (ValueError, RecursionError):
            return None
        changed = text.encode()
    if not isinstance(event, dict) or not event.keys() & {"ph", "name"}:
        return None
    if not has_times(event):
        if event.get("ts", 0) is None:
            return None
        event["dur"] = 0
        changed = _dumped(event)
    return changed, event, changed != raw


def _dumped(event: Event) -> bytes:
    try:
        return orjson.dumps(event)
    except TypeError:  # half a surrogate pair, an integer beyond 64 bits, or more levels than it writes
        return json.dumps(event).encode()


def _repaired_text(text: str) -> str:
    parts: list[str] = []
    offset = 0
    for match in _STRING.finditer(text):
        parts += (_outside(text[offset : match.start()]), _inside(match[0]))
        offset = match.end()
    parts.append(_outside(text[offset:]))
    return "".join(parts)


def _inside(string: str) -> str:
    string = _BAD_ESCAPE.sub(lambda match: match[0] if match[0] == "\\\\" else "\\" + match[0], string)
    return _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", string)


def _outside(text: str) -> str:
    text = _NO_VALUE.sub(": null", _NUMBER.sub("null", text))
    return _LAST_COMMA.sub("", text)
