"""Replaces the characters that some reader of traces cannot take by look-alikes, and puts back what they replaced."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

__all__ = ["UNNAMED", "EscapedOriginals", "escaped", "escaped_json", "restore"]

UNNAMED = "(unnamed)"
"""What a slice without a name is called: readers disagree about an empty name."""

# Perfetto's JSON reader does not undo escapes, and a backslash before a closing quote makes it refuse the whole file.
# DEL makes it refuse a header, NUL ends a string in its SQL, and lone surrogates are not UTF-8.
_HOSTILE = re.compile("[\x00-\x1f\x7f\\\\\ud800-\udfff]")

EscapedOriginals = dict[str, str]
"""Escaped text → hexadecimal digits of the original's UTF-8; only texts that escaping changed."""


def escaped(text: str, escaped_originals: EscapedOriginals | None = None) -> str:
    """Return `text` with hostile characters replaced by look-alikes; note the original if that changed it.

    Example:
        >>> escaped("C:\\\\tmp")
        'C:＼tmp'
    """
    if text.isprintable() and "\\" not in text:
        return text
    safe = _HOSTILE.sub(_look_alike, text)
    if escaped_originals is not None and safe != text:
        escaped_originals[safe] = text.encode("utf-8", "surrogatepass").hex()
    return safe


def escaped_json(value: Any, escaped_originals: EscapedOriginals) -> Any:
    """Escape all texts of a JSON value, keys included."""
    if isinstance(value, str):
        return escaped(value, escaped_originals)
    if isinstance(value, list | tuple):
        return [escaped_json(item, escaped_originals) for item in value]
    if isinstance(value, dict):
        return {
            escaped_json(key, escaped_originals): escaped_json(item, escaped_originals) for key, item in value.items()
        }
    return value


def restore(value: Any, escaped_originals: Mapping[str, str]) -> Any:
    """Undo `escaped` in a text, or in all texts of a JSON value.

    Raises:
        ValueError: an original is not hexadecimal digits of UTF-8.
        TypeError: an original is not a text.
    """
    if isinstance(value, str):
        digits = escaped_originals.get(value)
        return value if digits is None else bytes.fromhex(digits).decode("utf-8", "surrogatepass")
    if isinstance(value, list):
        return [restore(item, escaped_originals) for item in value]
    if isinstance(value, dict):
        return {restore(key, escaped_originals): restore(item, escaped_originals) for key, item in value.items()}
    return value


def _look_alike(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "␡"
    return "＼" if match[0] == "\\" else f"＼u{code:x}"
