"""Limits of the formats and their readers: sizes, depths, and characters that look-alikes replace."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..timeline import Name

UNNAMED = "(unnamed)"
"""The name of a slice without one: readers disagree about an empty name."""

# Perfetto's JSON reader does not decode escapes, and refuses a file with a backslash before a closing quote. It also
# refuses a header with DEL; NUL ends a string in its SQL, and lone surrogates are not UTF-8.
_LOOK_ALIKES = {
    **{code: chr(0x2400 + code) for code in range(0x20)},
    0x7F: "␡",
    ord("\\"): "＼",
    **{code: f"＼u{code:x}" for code in range(0xD800, 0xE000)},
}
_ORIGINALS = {text: chr(code) for code, text in _LOOK_ALIKES.items()}
_LOOK_ALIKE = re.compile("[\u2400-\u241f\u2421]|＼(?:ud[89a-f][0-9a-f]{2})?")


def escaped(text: str) -> str:
    """Return `text` with hostile characters replaced by look-alikes.

    Example:
        >>> escaped("C:\\\\tmp")
        'C:＼tmp'
    """
    return text if text.isprintable() and "\\" not in text else text.translate(_LOOK_ALIKES)


def escaped_json(value: Any) -> Any:
    """Escape all texts of a JSON value, keys included."""
    return _map_texts(value, escaped)


def restore(value: Any) -> Any:
    """Undo `escaped` in a text, or in all texts of a JSON value; look-alikes that the user wrote are replaced too.

    Example:
        >>> restore("C:＼tmp")
        'C:\\\\tmp'
    """
    return _map_texts(
        value, lambda text: text if text.isascii() else _LOOK_ALIKE.sub(lambda match: _ORIGINALS[match[0]], text)
    )


def escaped_name(name: Name) -> Name:
    """Return the name of a module, escaped for a trace; its label is never empty."""
    return Name(escaped(name.label) or UNNAMED, escaped(name.fqn), escaped(name.module_class))


def restored_name(texts: Sequence[str]) -> Name:
    """Undo `escaped_name`."""
    label, fqn, module_class = map(restore, texts)
    return Name("" if label == UNNAMED else label, fqn, module_class)


def _map_texts(value: Any, function: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return function(value)
    if isinstance(value, list | tuple):
        return [_map_texts(item, function) for item in value]
    if isinstance(value, dict):
        return {_map_texts(key, function): _map_texts(item, function) for key, item in value.items()}
    return value


MAX_CHROME_NS = 10**15
"""Maximum time from the base in ns (11.5 days) for which a double of µs in JSON is exact to the nanosecond."""

MAX_LINK = 1 << 62
"""Links from this number on get no flow: it exceeds the maximum flow id of both formats."""

BIND_ID_OFFSET = 1 << 32
"""Offset of a `bind_id` from its link: Perfetto numbers flow events from 0 in the same space of ids."""

MAX_HEAD_BYTES = 64 << 20
"""Maximum size of a JSON trace's part before its events."""

MAX_TAIL_BYTES = 16 << 20
"""Maximum size of a JSON trace's part after its events."""

MAX_EVENT_BYTES = 4 << 20
"""Maximum size of an event in JSON."""

MAX_PACKET_BYTES = 16 << 20
"""Maximum size of a packet of a Perfetto trace."""

MIN_CHECKED_PACKET_BYTES = 2 << 20
"""Minimum size of a packet that `check_packet` examines before it is parsed."""

_FREE_UNPACKED_BYTES = 64 << 20
_MAX_UNPACKED_RATIO = 200
"""Maximum ratio of unpacked to packed size: traces reach 10 to 50, and deflate a thousand."""

_MAX_PARSED_BYTES = 128 << 20
_BYTES_PER_TEXT, _BYTES_PER_VALUE, _BYTES_PER_LIST, _BYTES_PER_OBJECT = 60, 40, 64, 240
"""Minimum sizes of Python's objects."""
_MAX_SHORT_FIELDS = 1 << 20


class LimitError(ValueError):
    """A part of a file exceeds a limit of its reader."""


def check_unpacked(unpacked_bytes: int, packed_bytes: int) -> None:
    """Raise LimitError for data that unpack to more than any trace does: a small file could fill memory or a disk."""
    if unpacked_bytes > _FREE_UNPACKED_BYTES + _MAX_UNPACKED_RATIO * packed_bytes:
        raise LimitError(
            f"its first {packed_bytes:,} bytes unpack to more than {unpacked_bytes - 1:,}, more than "
            f"{_MAX_UNPACKED_RATIO} times as many, which no real trace does; if it is one, decompress it first"
        )


def check_nested_json(data: bytes | bytearray) -> None:
    """Raise LimitError for JSON that would need over 128 MiB of memory, such as many `[],[],[]`."""
    if len(data) * _BYTES_PER_OBJECT <= _MAX_PARSED_BYTES:
        return
    sizes = ((b"{", _BYTES_PER_OBJECT), (b"[", _BYTES_PER_LIST), (b",", _BYTES_PER_VALUE), (b'"', _BYTES_PER_TEXT // 2))
    parsed_bytes = sum(data.count(mark) * size for mark, size in sizes)
    if parsed_bytes > _MAX_PARSED_BYTES:
        raise LimitError(f"{len(data):,} bytes of JSON here would need {parsed_bytes:,} bytes of memory")


def check_packet(data: memoryview) -> None:
    """Raise LimitError for a packet of a Perfetto trace with more than a million short messages.

    Each message needs a hundred bytes of memory, but may have only two bytes in the file. One of these is its length,
    which is a control character if the message is short.
    """
    short_fields = int(np.count_nonzero(np.frombuffer(data, np.uint8) < ord(" ")))
    if short_fields > _MAX_SHORT_FIELDS:
        raise LimitError(
            f"a packet of {len(data):,} bytes has {short_fields:,} fields; packets with so many fields are not read"
        )
