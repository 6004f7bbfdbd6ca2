"""Text that every reader of a trace shows alike."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

__all__ = ["UNNAMED", "Originals", "restore", "shown"]

UNNAMED = "(unnamed)"
"""What a slice without a name is called: readers disagree about an empty one."""

# Perfetto's JSON reader does not undo escapes, and a backslash before a closing quote makes it refuse the whole file.
# DEL makes it refuse a header, NUL ends a string in its SQL, and lone surrogates are no UTF-8.
_HOSTILE = re.compile("[\x00-\x1f\x7f\\\\\ud800-\udfff]")

Originals = dict[str, str]
"""Texts that were changed, by what they were changed to; the original as hexadecimal digits of its UTF-8."""


def shown(text: str, originals: Originals | None = None) -> str:
    """Return `text` with what readers cannot take replaced by a look-alike; note the original if it was changed."""
    if text.isprintable() and "\\" not in text:
        return text
    safe = _HOSTILE.sub(_look_alike, text)
    if originals is not None and safe != text:
        originals[safe] = text.encode("utf-8", "surrogatepass").hex()
    return safe


def restore(value: Any, originals: Mapping[str, str]) -> Any:
    """Undo `shown` in a text, or in all texts of a JSON value."""
    if isinstance(value, str):
        digits = originals.get(value)
        return value if digits is None else bytes.fromhex(digits).decode("utf-8", "surrogatepass")
    if isinstance(value, list):
        return [restore(item, originals) for item in value]
    if isinstance(value, dict):
        return {restore(key, originals): restore(item, originals) for key, item in value.items()}
    return value


def _look_alike(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "␡"
    return "＼" if match[0] == "\\" else f"＼u{code:x}"
