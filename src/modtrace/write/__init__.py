"""Writers of files, one for each format; the suffix of the path picks it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from .._errors import WriteError

if TYPE_CHECKING:
    from ..timeline import Timeline

__all__ = ["SUFFIXES", "check_writable", "find_writer", "write"]

SUFFIXES = (".speedscope.json", ".json", ".json.gz", ".pftrace", ".pftrace.gz", ".folded", ".html", ".zip")
"""The suffixes that `write` knows; the first that a name ends with counts."""


def write(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Write `timeline` to `path` in the format of its suffix, one of `SUFFIXES`.

    Raises:
        WriteError: the suffix is not known, or the file cannot be written; an existing file is intact.
    """
    find_writer(path)(timeline, path)


def find_writer(path: str | os.PathLike[str]) -> Callable[[Timeline, str | os.PathLike[str]], object]:
    """Return what writes the format of a suffix, imported with all that it needs.

    Raises:
        WriteError: the suffix is not known.
    """
    name = os.fspath(path).lower()
    suffix = next((suffix for suffix in SUFFIXES if name.endswith(suffix)), None)
    if suffix == ".speedscope.json":
        from .flame_graphs import write_speedscope

        return write_speedscope
    if suffix in (".json", ".json.gz"):
        from .chrome import write_chrome

        return write_chrome
    if suffix in (".pftrace", ".pftrace.gz"):
        from .perfetto import write_perfetto

        return write_perfetto
    if suffix == ".folded":
        from .flame_graphs import write_folded

        return write_folded
    if suffix == ".html":
        from .html import write_html

        return write_html
    if suffix == ".zip":
        from ..reporting import report

        return report
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
