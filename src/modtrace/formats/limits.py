"""The limits of the formats and their readers: sizes, depths, and characters that are replaced by look-alikes."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..timeline import Name

UNNAMED = "(unnamed)"
"""The name of a slice without one: readers disagree about an empty name."""

# Perfetto's JSON reader does not undo escapes, and a backslash before a closing quote makes it refuse the whole file.
# DEL makes it refuse a header, NUL ends a string in its SQL, and lone surrogates are not UTF-8.
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
    """Undo `escaped` in a text, or in all texts of a JSON value; a look-alike of the user's own is replaced too.

    Example:
        >>> restore("C:＼tmp")
        'C:\\\\tmp'
    """
    return _map_texts(
        value, lambda text: text if text.isascii() else _LOOK_ALIKE.sub(lambda match: _ORIGINALS[match[0]], text)
    )


def escaped_name(name: Name) -> Name:
    """Return the name of a module, escaped for a trace, where a label is never empty."""
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
"""Nanoseconds from the base (11.5 days) below which a double of µs in JSON is exact to the nanosecond."""

MAX_LINK = 1 << 62
"""Links from here on get no flow: neither format has room for a larger flow id."""

BIND_ID_OFFSET = 1 << 32
"""Added to a link to make a `bind_id` of it: Perfetto counts flow events from 0 in the same space of ids."""

MAX_HEAD_BYTES = 64 << 20
"""Bytes that a trace in JSON may have before its events."""

MAX_TAIL_BYTES = 16 << 20
"""Bytes that a trace in JSON may have after its events."""

MAX_EVENT_BYTES = 4 << 20
"""Bytes of one event in JSON."""

MAX_PACKET_BYTES = 16 << 20
"""Bytes of one packet of a Perfetto trace."""

MIN_CHECKED_PACKET_BYTES = 2 << 20
"""Size from which on a packet is looked through by `check_packet` before it is parsed."""

_FREE_UNPACKED_BYTES = 64 << 20
_MAX_UNPACKED_RATIO = 200
"""Traces pack to a tenth or a fiftieth of their size, and what deflate can do at most is a thousandth."""

_MAX_PARSED_BYTES = 128 << 20
_BYTES_PER_TEXT, _BYTES_PER_VALUE, _BYTES_PER_LIST, _BYTES_PER_OBJECT = 60, 40, 64, 240
"""The least sizes of Python's objects, in bytes."""
_MAX_SHORT_FIELDS = 1 << 20


class LimitError(ValueError):
    """A part of a file is larger than anything that is read of it."""


def check_unpacked(unpacked_bytes: int, packed_bytes: int) -> None:
    """Raise LimitError for packed data that grow more than any trace does: a small file could fill memory or a disk."""
    if unpacked_bytes > _FREE_UNPACKED_BYTES + _MAX_UNPACKED_RATIO * packed_bytes:
        raise LimitError(
            f"its first {packed_bytes:,} bytes unpack to more than {unpacked_bytes - 1:,}, more than "
            f"{_MAX_UNPACKED_RATIO} times as many, as those of no trace do; if it is one, unpack it yourself"
        )


def check_nested_json(data: bytes | bytearray) -> None:
    """Raise LimitError for JSON that would take over 128 MiB, far more than it is long: `[],[],[]`."""
    if len(data) * _BYTES_PER_OBJECT <= _MAX_PARSED_BYTES:
        return
    sizes = ((b"{", _BYTES_PER_OBJECT), (b"[", _BYTES_PER_LIST), (b",", _BYTES_PER_VALUE), (b'"', _BYTES_PER_TEXT // 2))
    parsed_bytes = sum(data.count(mark) * size for mark, size in sizes)
    if parsed_bytes > _MAX_PARSED_BYTES:
        raise LimitError(f"{len(data):,} bytes of JSON here would take {parsed_bytes:,} bytes of memory")


def check_packet(data: memoryview) -> None:
    """Refuse a large packet of a Perfetto trace that is not mostly text, which would take far more memory than it has.

    A message in a packet takes a hundred bytes of memory and at least two in the file. One of these is its length: a
    control character if the message is short. Raises LimitError if it holds more than a million short messages.
    """
    short_fields = int(np.count_nonzero(np.frombuffer(data, np.uint8) < ord(" ")))
    if short_fields > _MAX_SHORT_FIELDS:
        raise LimitError(
            f"a packet of {len(data):,} bytes holds {short_fields:,} fields; none is read that has so many"
        )
