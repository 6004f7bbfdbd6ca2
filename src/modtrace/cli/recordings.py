"""The files that an argument of a command stands for: a file, those in a folder, or those that match a pattern."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterable

from .._errors import ModtraceError

__all__ = ["RECORDING_SUFFIXES", "RING_SUFFIXES", "Kind", "find_each", "find_recordings"]

RING_SUFFIXES = (".modtrace",)
RECORDING_SUFFIXES = (".pftrace", ".pftrace.gz", ".json", ".json.gz", ".zip", *RING_SUFFIXES)

Kind = tuple[str, ...] | Callable[[str], bool]
"""Which files of a folder are meant: what their names end in, or a function that tells by the path."""


def find_recordings(paths: Iterable[str], kind: Kind = RECORDING_SUFFIXES) -> list[str]:
    """Return the files that arguments stand for, each once.

    Args:
        paths: files, folders, and patterns that the shell did not expand.
        kind: which files of a folder; one that is named itself may be called anything.

    Raises:
        ModtraceError: a folder holds none, or nothing matches a pattern.
    """
    return list(dict.fromkeys(file for path in paths for file in _files_of(path, kind)))


def find_each(paths: Iterable[str], kind: Kind) -> tuple[list[str], list[str]]:
    """Return the files of a kind that arguments stand for, and what is wrong with those that stand for none."""
    found = [_files_or_error(path, kind) for path in paths]
    files = dict.fromkeys(file for files in found if not isinstance(files, str) for file in files)
    return list(files), [error for error in found if isinstance(error, str)]


def _files_or_error(path: str, kind: Kind) -> list[str] | str:
    try:
        return _files_of(path, kind)
    except ModtraceError as error:
        return str(error)


def _files_of(path: str, kind: Kind) -> list[str]:
    if os.path.isdir(path):
        files = [os.path.join(path, name) for name in sorted(os.listdir(path))]
        if callable(kind):
            found, missing = [file for file in files if kind(file) and os.path.isfile(file)], "nothing of this kind"
        else:
            found = [file for file in files if file.lower().endswith(kind)]
            missing = f"no recording in this folder; they end in {', '.join(kind)}"
        if not found:
            raise ModtraceError(f"{path}: {missing}")
        return found
    if os.path.exists(path) or not glob.has_magic(path):
        return [path]
    found = sorted(glob.glob(path))
    if not found:
        raise ModtraceError(f"{path}: no file matches")
    return found
