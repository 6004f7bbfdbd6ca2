"""What stands around the events of a trace: the keys before the array, and the keys after it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from .limits import LimitError, check_nested_json


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


@dataclass(frozen=True, slots=True)
class Head:
    """The beginning of a trace.

    Attributes:
        length: bytes up to and with the `[` that opens the events.
        keys: the top-level keys before it, with their values.
        bare: whether the file is the array alone, without an object around it.
    """

    length: int
    keys: dict[str, Any]
    bare: bool


_DECODER = json.JSONDecoder(strict=False)
_SPACE = re.compile(r"[\s\ufeff]*")


def find_head(data: bytes) -> Head:
    """Find where the events begin.

    Raises:
        HeadError: this is no trace, or not enough of it.
    """
    try:
        check_nested_json(data)
        return _find_head(data)
    except LimitError as error:
        raise HeadError(str(error), 0) from None
    except RecursionError:
        raise HeadError("JSON that is nested too deeply to be read, before the events", 0) from None


_NO_EVENTS = 'not a profiler trace: it has no "traceEvents"'


def _find_head(data: bytes) -> Head:
    # One character per byte, so that places in the text are places in the file.
    text = data.decode("latin-1")
    offset = _skip(text, 3 if data.startswith(b"\xef\xbb\xbf") else 0)
    if offset == len(text):
        raise HeadError("the file is empty", offset, more=True)
    if text[offset] == "[":
        return Head(offset + 1, {}, bare=True)
    if text[offset] != "{":
        raise HeadError("not a profiler trace: it begins with neither { nor [", offset)
    keys: dict[str, Any] = {}
    offset = _skip(text, offset + 1)
    if text[offset : offset + 1] == "}":
        raise HeadError(_NO_EVENTS, offset)
    while True:
        key, offset = _value(text, offset)
        if not isinstance(key, str):
            raise HeadError("not a profiler trace: a key is missing", offset)
        offset = _expect(text, offset, ":")
        if key == "traceEvents":
            return Head(_expect(text, offset, "["), keys, bare=False)
        value, offset = _value(text, offset)
        keys[key] = _proper(value)
        offset = _skip(text, offset)
        if text[offset : offset + 1] == "}":
            raise HeadError(_NO_EVENTS, offset)
        offset = _skip(text, _expect(text, offset, ","))


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
            keys = json.loads('{"traceEvents":[' + tail.decode("utf-8", "replace"), strict=False)
        except RecursionError:
            raise LimitError("JSON that is nested too deeply to be read, behind the events") from None
        except ValueError:
            continue
        del keys["traceEvents"]
        return offset, keys
    return None


def _skip(text: str, offset: int) -> int:
    match = _SPACE.match(text, offset)
    assert match is not None
    return match.end()


def _expect(text: str, offset: int, expected: str) -> int:
    offset = _skip(text, offset)
    if offset >= len(text):
        raise HeadError(f"the file ends where {expected} should stand", offset, more=True)
    if text[offset] != expected:
        raise HeadError(f"not a profiler trace: {expected} expected", offset)
    return offset + 1


def _value(text: str, offset: int) -> tuple[Any, int]:
    offset = _skip(text, offset)
    try:
        return _DECODER.raw_decode(text, offset)
    except ValueError as error:  # also a number of thousands of digits
        error_offset = error.pos if isinstance(error, json.JSONDecodeError) else offset
        raise HeadError("broken JSON before the events", error_offset, more=True) from None


def _proper(value: Any) -> Any:
    """Undo the reading of UTF-8 as Latin-1 in the strings of a value."""
    if isinstance(value, str):
        return value.encode("latin-1", "replace").decode("utf-8", "replace")
    if isinstance(value, list):
        return [_proper(item) for item in value]
    if isinstance(value, dict):
        return {_proper(key): _proper(item) for key, item in value.items()}
    return value
