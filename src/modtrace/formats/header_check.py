"""What a file says of the recording as a whole, looked at before anything is built on it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from reprlib import repr as short
from typing import Any

from .._errors import TraceError
from ..timeline import Stats
from .escape import restore
from .header import FORMAT

__all__ = ["CHANGED", "WHAT_TO_DO", "checked_header", "thread", "whole"]

CHANGED = (ArithmeticError, AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError)
"""What reading events comes to where someone has changed them since modtrace wrote them."""

WHAT_TO_DO = "load the file as modtrace saved it, or the ring file of the recording"


def checked_header(path: str | os.PathLike[str], said: Any) -> dict[str, Any]:
    """Return the header of a trace that this version reads; all that `write.header` puts into it is there.

    Raises:
        TraceError: it was not written by modtrace, or in another format, or was changed since.
    """
    written = said.get("modtrace") if isinstance(said, dict) else None
    if not isinstance(written, dict):
        raise TraceError(
            path,
            "it is a trace, but modtrace did not save it, so it holds no timeline; "
            "to lay a recording over it: modtrace merge TRACE RECORDING",
        )
    if written.get("format") != FORMAT:
        raise TraceError(
            path,
            f"it was saved by modtrace {written.get('version')} in format {written.get('format')}, "
            f"and this version reads format {FORMAT}",
        )
    for fault in _faults(said):
        raise TraceError(path, f"its header is not as modtrace writes it: {fault}; {WHAT_TO_DO}")
    return dict(said)


def whole(value: object) -> bool:
    """Tell whether a value is a whole number of 64 bits."""
    return type(value) is int and -(2**63) <= value < 2**63


def thread(value: object) -> bool:
    """Tell whether a value can be a thread's id, which has 32 bits, with or without a sign."""
    return type(value) is int and -(2**31) <= value < 2**32


def _rank(value: object) -> bool:
    return value is None or whole(value)


def _text(value: object) -> bool:
    return isinstance(value, str)


def _kind(value: object) -> bool:
    return value in ("forward", "backward")


def _restorable(digits: Any) -> bool:
    try:
        restore("", {"": digits})
    except (TypeError, ValueError):
        return False
    return True


# Per list of the header what each of its entries says; where that is the name of a list, it is an index into it.
_LISTS: Mapping[str, Mapping[str, Callable[[object], bool] | str]] = {
    "processes": {"pid": whole, "rank": _rank, "program": _text, "here": whole},
    "tracks": {"kind": _kind, "thread": _text, "tid": thread, "process": "processes"},
    "counters": {"name": _text, "unit": _text, "process": "processes"},
    "lanes": {"track": "tracks", "pid": whole, "tid": whole},
}


def _faults(said: dict[str, Any]) -> Iterator[str]:
    for name in ("stats", "metadata", "originals"):
        if not isinstance(said.get(name), dict):
            yield _told(name, said)
            return
    for name, kinds in _LISTS.items():
        if not isinstance(said.get(name), list):
            yield _told(name, said)
            return
        for index, entry in enumerate(said[name]):
            yield from _entry_faults(f"{name}[{index}]", entry, kinds, said)
    known = {field.name for field in fields(Stats)}
    for name, value in said["stats"].items():
        if name not in known or not whole(value):
            yield f"stats.{name} is {short(value)}"
    for shown, digits in said["originals"].items():
        if not _restorable(digits):
            yield f"originals[{shown!r}] is {short(digits)}"


def _entry_faults(
    place: str, entry: object, kinds: Mapping[str, Callable[[object], bool] | str], said: dict[str, Any]
) -> Iterator[str]:
    if not isinstance(entry, dict):
        yield f"{place} is {short(entry)}"
        return
    for name, kind in kinds.items():
        value = entry.get(name)
        fits = kind(value) if callable(kind) else type(value) is int and 0 <= value < len(said[kind])
        if name not in entry or not fits:
            yield f"{place}.{_told(name, entry)}"


def _told(name: str, where: dict[str, Any]) -> str:
    return f"{name} is {short(where[name])}" if name in where else f"{name} is missing"
