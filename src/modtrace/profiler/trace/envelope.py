"""What stands around the events of a trace: the keys before the array, and the keys after it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

__all__ = ["Head", "HeadError", "find_head", "find_tail"]

MEGA = 1 << 20
MAX_HEAD_BYTES = 64 * MEGA


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
    # One character per byte, so that places in the text are places in the file.
    text = data.decode("latin-1")
    at = _skip(text, 3 if data.startswith(b"\xef\xbb\xbf") else 0)
    if at == len(text):
        raise HeadError("the file is empty", at, more=True)
    if text[at] == "[":
        return Head(at + 1, {}, bare=True)
    if text[at] != "{":
        raise HeadError("not a profiler trace: it begins with neither { nor [", at)
    keys: dict[str, Any] = {}
    at = _skip(text, at + 1)
    while True:
        key, at = _value(text, at)
        if not isinstance(key, str):
            raise HeadError("not a profiler trace: a key is missing", at)
        at = _expect(text, at, ":")
        if key == "traceEvents":
            return Head(_expect(text, at, "["), keys, bare=False)
        value, at = _value(text, at)
        keys[key] = _proper(value)
        at = _skip(text, at)
        if text[at : at + 1] == "}":
            raise HeadError('not a profiler trace: it has no "traceEvents"', at)
        at = _skip(text, _expect(text, at, ","))


def find_tail(data: bytes | bytearray, *, bare: bool) -> tuple[int, dict[str, Any]] | None:
    """Find the `]` that closes the events, in bytes that begin between two of them.

    Returns:
        Its place and the keys after it; None where it is not there, or the rest is broken.
    """
    if bare:
        at = len(data.rstrip()) - 1
        return (at, {}) if at >= 0 and data[at : at + 1] == b"]" else None
    for candidate in re.finditer(rb"\]\s*(?:,\s*\"|\}\s*\Z)", data):
        at = candidate.start()
        # Duplicated keys are left to the decoder, which takes the last as every reader does.
        try:
            keys = json.loads(b'{"traceEvents":[' + data[at:], strict=False)
        except ValueError:
            continue
        del keys["traceEvents"]
        return at, keys
    return None


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None
    return match.end()


def _expect(text: str, at: int, sign: str) -> int:
    at = _skip(text, at)
    if at >= len(text):
        raise HeadError(f"the file ends where {sign} should stand", at, more=True)
    if text[at] != sign:
        raise HeadError(f"not a profiler trace: {sign} expected", at)
    return at + 1


def _value(text: str, at: int) -> tuple[Any, int]:
    at = _skip(text, at)
    try:
        return _DECODER.raw_decode(text, at)
    except (json.JSONDecodeError, RecursionError) as error:
        place = error.pos if isinstance(error, json.JSONDecodeError) else at
        raise HeadError("broken JSON before the events", place, more=True) from None


def _proper(value: Any) -> Any:
    """Undo the reading of UTF-8 as Latin-1 in the strings of a value."""
    if isinstance(value, str):
        return value.encode("latin-1", "replace").decode("utf-8", "replace")
    if isinstance(value, list):
        return [_proper(item) for item in value]
    if isinstance(value, dict):
        return {_proper(key): _proper(item) for key, item in value.items()}
    return value
