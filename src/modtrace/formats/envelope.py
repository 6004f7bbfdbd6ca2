"""What stands around the events of a trace: the keys before the array, and the keys after it."""

import contextlib
import itertools
import json
import re
from typing import Any

from .limits import LimitError, check_nested_json
from .trace_kind import BYTE_ORDER_MARK


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
"""Of what looks like the key, so many are tried: each time the bytes before it are parsed."""


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
