"""Whether a timeline can be written somewhere: asked before a long run, not after it."""

from __future__ import annotations

import os

from .._errors import WriteError

__all__ = ["SUFFIXES", "check_path"]

SUFFIXES = (".pftrace", ".pftrace.gz", ".json", ".json.gz", ".html", ".zip")
"""The formats, by the end of a file's name."""


def check_path(path: str | os.PathLike[str]) -> None:
    """Check that `path` has a known suffix and lies in a directory that can be written to.

    Raises:
        WriteError: it does not.
    """
    name = os.fspath(path)
    if not name.lower().endswith(SUFFIXES):
        raise WriteError(f"{name}: the suffix must be one of {', '.join(SUFFIXES)}")
    directory = os.path.dirname(name) or "."
    if not os.path.isdir(directory):
        raise WriteError(f"{name}: there is no directory {directory}")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise WriteError(f"{name}: the directory {directory} cannot be written to")
