"""Writers of files, one for each format; the suffix of the path picks it."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from .._errors import WriteError

if TYPE_CHECKING:
    from ..timeline import Timeline

__all__ = ["SUFFIXES", "check_writable", "find_writer", "write"]

# Named by text, so that a format's module is only imported where it is written, and the report, which is made with
# these writers, can be one of them.
_WRITERS = {
    ".speedscope.json": "modtrace.write.speedscope:write_speedscope",  # before .json: the first that fits is taken
    ".json": "modtrace.write.chrome:write_chrome",
    ".json.gz": "modtrace.write.chrome:write_chrome",
    ".pftrace": "modtrace.write.perfetto:write_perfetto",
    ".pftrace.gz": "modtrace.write.perfetto:write_perfetto",
    ".folded": "modtrace.write.folded:write_folded",
    ".html": "modtrace.write.html:write_html",
    ".zip": "modtrace.report:write_report",
}

SUFFIXES = tuple(_WRITERS)
"""The suffixes that `write` knows."""


def write(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Write `timeline` to `path` in the format of its suffix, one of `SUFFIXES`.

    Raises:
        WriteError: the suffix is not known, or the file cannot be written; an existing file is intact.
    """
    find_writer(path)(timeline, path)


def find_writer(path: str | os.PathLike[str]) -> Callable[[Timeline, str | os.PathLike[str]], None]:
    """Return what writes the format of a suffix, imported with all that it needs.

    Raises:
        WriteError: the suffix is not known.
    """
    name = os.fspath(path).lower()
    for suffix, writer in _WRITERS.items():
        if name.endswith(suffix):
            module, _, function = writer.partition(":")
            found: Callable[[Timeline, str | os.PathLike[str]], None] = getattr(
                importlib.import_module(module), function
            )
            return found
    raise _unknown_suffix(path)


def check_writable(path: str | os.PathLike[str]) -> None:
    """Check, before a run and not after it, that `path` has a known suffix and its directory can be written to.

    Raises:
        WriteError: it has not, or cannot.
    """
    name = os.fspath(path)
    if not name.lower().endswith(SUFFIXES):
        raise _unknown_suffix(path)
    directory = os.path.dirname(name) or "."
    if not os.path.isdir(directory):
        raise WriteError(f"{name}: there is no directory {directory}")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise WriteError(f"{name}: the directory {directory} cannot be written to")


def _unknown_suffix(path: str | os.PathLike[str]) -> WriteError:
    return WriteError(f"{os.fspath(path)}: the suffix must be one of {', '.join(SUFFIXES)}")
