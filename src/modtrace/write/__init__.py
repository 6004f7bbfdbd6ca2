"""Outputs: one file per format; the suffix of the path picks it."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

from .._errors import WriteError

if TYPE_CHECKING:
    from ..timeline import Timeline

__all__ = ["SUFFIXES", "check_path", "write"]

WRITERS = {
    ".json": ("chrome", "write_chrome"),
    ".json.gz": ("chrome", "write_chrome"),
    ".pftrace": ("perfetto", "write_perfetto"),
    ".pftrace.gz": ("perfetto", "write_perfetto"),
    ".html": ("html", "write_html"),
    ".zip": (".report", "write_report"),
}

SUFFIXES = tuple(WRITERS)
"""The suffixes that `write` knows."""


def write(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Write `timeline` to `path` in the format of its suffix, one of `SUFFIXES`.

    Raises:
        WriteError: the suffix is not known, or the file cannot be written; an existing file is intact.
    """
    name = os.fspath(path).lower()
    for suffix, (module, function) in WRITERS.items():
        if name.endswith(suffix):
            getattr(importlib.import_module(f".{module}", __name__), function)(timeline, path)
            return
    raise _unknown_suffix(path)


def check_path(path: str | os.PathLike[str]) -> None:
    """Check that `path` has a known suffix and lies in a directory that can be written to: before a run, not after it.

    Raises:
        WriteError: it does not.
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
