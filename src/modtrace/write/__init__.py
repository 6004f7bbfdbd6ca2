"""Writers of files, one for each format; the suffix of the path picks it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from .._errors import WriteError

if TYPE_CHECKING:
    from ..timeline import Pieces, Timeline

__all__ = ["REPORT", "SUFFIXES", "WRITTEN", "check_writable", "find_writer", "write"]

_CHROME, _PERFETTO = (".json", ".json.gz"), (".pftrace", ".pftrace.gz")
WRITTEN = (".speedscope.json", *_CHROME, *_PERFETTO, ".folded", ".html")
"""The suffixes that `write` knows; the first one that ends a name counts."""
REPORT = ".zip"
"""The suffix of a bug report, which `Timeline.save` makes with `modtrace.report`."""
SUFFIXES = (*WRITTEN, REPORT)


def write(timeline: Timeline | Pieces, path: str | os.PathLike[str]) -> None:
    """Write a timeline, or the pieces of one, to `path` in the format of its suffix, one of `WRITTEN`.

    Raises WriteError if the suffix is unknown, or the file cannot be written; an existing file is intact.
    """
    from ..timeline import Timeline

    writer = find_writer(path)
    takes_pieces = _suffix(path) in (*_CHROME, *_PERFETTO)
    writer(timeline if takes_pieces or isinstance(timeline, Timeline) else timeline.join(), path)


def find_writer(path: str | os.PathLike[str]) -> Callable[..., object]:
    """Return the function that writes a timeline in the format of a path's suffix; its module is imported here.

    Raises WriteError if the suffix is unknown.
    """
    suffix = _suffix(path)
    if suffix == ".speedscope.json":
        from .flame_graphs import write_speedscope

        return write_speedscope
    if suffix in _CHROME:
        from .chrome import write_chrome

        return write_chrome
    if suffix in _PERFETTO:
        from .perfetto import write_perfetto

        return write_perfetto
    if suffix == ".folded":
        from .flame_graphs import write_folded

        return write_folded
    if suffix == ".html":
        from .html import write_html

        return write_html
    raise _unknown_suffix(path)


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise WriteError before a run if `path` has no known suffix or cannot be written to."""
    name = os.fspath(path)
    if not name.lower().endswith(SUFFIXES):
        raise _unknown_suffix(path)
    directory = os.path.dirname(name) or "."
    if not os.path.isdir(directory):
        raise WriteError(f"{name}: there is no directory {directory}")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise WriteError(f"{name}: the directory {directory} cannot be written to")


def _suffix(path: str | os.PathLike[str]) -> str | None:
    name = os.fspath(path).lower()
    return next((suffix for suffix in SUFFIXES if name.endswith(suffix)), None)


def _unknown_suffix(path: str | os.PathLike[str]) -> WriteError:
    return WriteError(f"{os.fspath(path)}: the suffix must be one of {', '.join(SUFFIXES)}")
