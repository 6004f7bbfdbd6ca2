"""Text of unknown origin made safe to print."""

from __future__ import annotations

__all__ = ["printable"]


def printable(text: str) -> str:
    """Return text with control, format and lone surrogate characters as escapes.

    So a name can neither move the cursor, nor turn the line around, nor begin a new one.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
