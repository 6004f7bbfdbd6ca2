"""Bytes that should be events and are not quite: save what can be saved."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

import orjson

__all__ = ["BOUNDARY", "Event", "Saved", "first_event", "is_sound", "salvage_first", "whole_events"]

BOUNDARY = re.compile(rb"\}\s*,\s*(?=\{)")
"""Between two objects of a list: the events, or objects inside one."""

Event = dict[str, Any]

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_BAD_ESCAPE = re.compile(r'\\(?:u(?![0-9a-fA-F]{4})|(?!["\\/bfnrtu]))|\\\\', re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x1f]")
_NUMBER = re.compile(r"[-+]?\b(?:nan|inf(?:inity)?)\b", re.IGNORECASE)
_NO_VALUE = re.compile(r":\s*(?=[,}\]])")
_LAST_COMMA = re.compile(r",\s*(?=[}\]])")
_DECODER = json.JSONDecoder(strict=False)

_JOINS = 16
"""How many pieces an event may fall into, by what looks like a boundary inside it."""


class Saved(NamedTuple):
    """What became of an event.

    Attributes:
        end: where it ended in the bytes given.
        raw: its bytes, changed where they had to be.
        event: the event; None where it cannot be saved.
        changed: whether `raw` differs from what stood there.
    """

    end: int
    raw: bytes
    event: Event | None
    changed: bool


def salvage_first(data: bytes) -> Saved | None:
    """Save the first of the events in `data`, or give it up; None where it may not be whole yet."""
    begin = len(data) - len(data.lstrip())
    first = None
    for count, match in enumerate(BOUNDARY.finditer(data, begin)):
        end = match.start() + 1
        first = first or end
        saved = _mend(data[begin:end])
        if saved is not None:
            return Saved(end, *saved)
        if count == _JOINS:
            break
    return None if first is None else Saved(first, b"", None, True)


def first_event(data: bytes) -> int:
    """Return where the first event of `data` ends, names with raw control characters allowed; -1 if it does not."""
    text = data.decode("latin-1")
    begin = len(text) - len(text.lstrip())
    try:
        event, end = _DECODER.raw_decode(text, begin)
    except (ValueError, RecursionError):
        return -1
    return end if isinstance(event, dict) else -1


def whole_events(data: bytes) -> list[Saved]:
    """Return the events at the beginning of `data` that are whole; what follows them may be anything."""
    events: list[Saved] = []
    at = 0
    while (length := first_event(data[at:])) > 0:
        raw = data[at : at + length].strip()
        saved = _mend(raw)
        at += length
        events.append(Saved(at, b"", None, True) if saved is None else Saved(at, *saved))
        comma = re.compile(rb"\s*,").match(data, at)
        if comma is None:
            break
        at = comma.end()
    return events


def is_sound(event: Event) -> bool:
    """Whether no time of it is null; a null `dur` makes a reader lose every later event."""
    return event.get("dur", 0) is not None and event.get("ts", 0) is not None


def _mend(raw: bytes) -> tuple[bytes, Event, bool] | None:
    """Make one event of `raw`: its bytes, the event, and whether bytes had to be changed; None where it cannot be."""
    changed = raw
    try:
        event = orjson.loads(raw)
    except orjson.JSONDecodeError:
        text = _mended_text(raw.decode("utf-8", "replace"))
        try:
            event = json.loads(text)
        except (ValueError, RecursionError):
            return None
        changed = text.encode()
    if not isinstance(event, dict) or not event.keys() & {"ph", "name"}:
        return None
    if not is_sound(event):
        if event.get("ts", 0) is None:
            return None
        event["dur"] = 0
        changed = _dumped(event)
    return changed, event, changed is not raw


def _dumped(event: Event) -> bytes:
    try:
        return orjson.dumps(event)
    except TypeError:  # half a surrogate pair, or an integer beyond 64 bits
        return json.dumps(event).encode()


def _mended_text(text: str) -> str:
    parts: list[str] = []
    at = 0
    for match in _STRING.finditer(text):
        parts += (_outside(text[at : match.start()]), _inside(match[0]))
        at = match.end()
    parts.append(_outside(text[at:]))
    return "".join(parts)


def _inside(string: str) -> str:
    string = _BAD_ESCAPE.sub(lambda match: match[0] if match[0] == "\\\\" else "\\" + match[0], string)
    return _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", string)


def _outside(text: str) -> str:
    text = _NO_VALUE.sub(": null", _NUMBER.sub("null", text))
    return _LAST_COMMA.sub("", text)
