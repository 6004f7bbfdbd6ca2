"""Replaces the characters that some reader of traces cannot take by look-alikes, and puts them back."""

import re
from collections.abc import Callable, Sequence
from typing import Any

from ..timeline import Name

UNNAMED = "(unnamed)"
"""What a slice without a name is called: readers disagree about an empty name."""

# Perfetto's JSON reader does not undo escapes, and a backslash before a closing quote makes it refuse the whole file.
# DEL makes it refuse a header, NUL ends a string in its SQL, and lone surrogates are not UTF-8.
_HOSTILE = re.compile("[\x00-\x1f\x7f\\\\\ud800-\udfff]")
_LOOK_ALIKE = re.compile("[\u2400-\u241f\u2421]|＼(?:u(d[89a-f][0-9a-f]{2}))?")


def escaped(text: str) -> str:
    """Return `text` with hostile characters replaced by look-alikes.

    Example:
        >>> escaped("C:\\\\tmp")
        'C:＼tmp'
    """
    return text if text.isprintable() and "\\" not in text else _HOSTILE.sub(_look_alike, text)


def escaped_json(value: Any) -> Any:
    """Escape all texts of a JSON value, keys included."""
    return _map_texts(value, escaped)


def restore(value: Any) -> Any:
    """Undo `escaped` in a text, or in all texts of a JSON value; a look-alike of the user's own is replaced too.

    Example:
        >>> restore("C:＼tmp")
        'C:\\\\tmp'
    """
    return _map_texts(value, lambda text: text if text.isascii() else _LOOK_ALIKE.sub(_original, text))


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


def _look_alike(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "␡"
    return "＼" if match[0] == "\\" else f"＼u{code:x}"


def _original(match: re.Match[str]) -> str:
    if match[0] == "␡":
        return "\x7f"
    if match[0].startswith("＼"):
        return chr(int(match[1], 16)) if match[1] else "\\"
    return chr(ord(match[0]) - 0x2400)
