"""What people read: text of unknown origin made safe to print, and numbers of things."""

from __future__ import annotations

__all__ = ["counted", "printable"]


def counted(number: int, noun: str) -> str:
    """Return `1 span`, `1,200 spans`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def printable(text: str) -> str:
    """Return text with control, format and lone surrogate characters as escapes.

    So a name can neither move the cursor, nor turn the line around, nor begin a new one.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
