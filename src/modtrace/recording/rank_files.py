"""The files that a recording writes: their paths, and that no two ranks write the same one."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import socket

from .._errors import RecordingError
from .._rank import expand_path, is_shared, rank_in
from .._system.processes import read_process_stat

__all__ = ["RankFile"]

# Held until the process ends, so that no rank overwrites what another one has saved. By the file's real path.
_claims: dict[str, socket.socket] = {}
_written: set[tuple[int, int]] = set()
"""Device and inode of each file that this process has written."""
_RANK_ATTRIBUTE = "user.modtrace.rank"
"""An extended attribute: the rank that wrote a file whose name does not tell."""


class RankFile:
    """The path of a file that a recording writes.

    Where several ranks run and the path does not tell them apart, each makes sure that it alone writes the file. Two
    ranks on one host are told apart when the second one claims it. Where they run on several hosts that share a file
    system, or the first one has ended already, the file that is there is newer than this process, or says which rank
    wrote it, where its file system keeps extended attributes.

    Args:
        name: what the path is called in errors.
        path: text or `pathlib.Path`; `%r`, `%p`, `%h` and `%%` are filled in.

    Attributes:
        path: with these filled in.

    Raises:
        RecordingError: it is no path, or `%r` has no value.
    """

    def __init__(self, name: str, path: str | os.PathLike[str]) -> None:
        text: object = os.fspath(path)
        if not isinstance(text, str):
            raise RecordingError(f"{name} is {path!r}; give it as text or as a pathlib.Path")
        if "\0" in text:
            raise RecordingError(f"{name} is {path!r}; the name of a file holds no NUL")
        self.path = expand_path(text, os.environ)
        self._is_shared = is_shared(text, os.environ)

    def claim(self, path: str) -> None:
        """Make sure that no other rank writes `path`, which is this file's or that of one of its cycles.

        Raises:
            RecordingError: another one does, or has done.
        """
        if not self._is_shared:
            return
        self.check(path)
        real = os.path.realpath(path)
        if real in _claims:
            return
        if not (hasattr(os, "getuid") and hasattr(socket, "AF_UNIX")):
            return  # Windows; `check` is left
        # A name without a file behind it, which the kernel drops when the process ends, however it ends.
        name = f"\0modtrace-{os.getuid()}-{hashlib.sha256(real.encode()).hexdigest()[:32]}"
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind(name)
        except OSError as error:
            claim.close()
            if error.errno == errno.EADDRINUSE:
                raise _taken(path) from None
            return  # no such names here; `check` is left
        _claims[real] = claim

    def check(self, path: str) -> None:
        """Make sure that no other rank wrote what stands at `path`, as far as that can be told.

        Raises:
            RecordingError: another rank has, or another process since this one began.
        """
        if not self._is_shared:
            return
        with contextlib.suppress(OSError):
            status = os.stat(path)
            if (status.st_dev, status.st_ino) in _written:
                return
            if status.st_mtime_ns > read_process_stat("self").start_unix_ns:
                raise _taken(path)
            writer = _rank_that_wrote(path)
            if writer is not None and writer != str(rank_in(os.environ)):
                raise _taken(path, f", or remove what rank {writer} wrote there")

    def note_written(self, path: str) -> None:
        """Remember that what stands at `path` is this process's own."""
        if self._is_shared:
            with contextlib.suppress(OSError):
                status = os.stat(path)
                _written.add((status.st_dev, status.st_ino))
                if hasattr(os, "setxattr"):
                    os.setxattr(path, _RANK_ATTRIBUTE, str(rank_in(os.environ)).encode())


def _rank_that_wrote(path: str) -> str | None:
    """Return the rank that wrote a file; None where it does not say."""
    if hasattr(os, "getxattr"):
        with contextlib.suppress(OSError):
            return os.getxattr(path, _RANK_ATTRIBUTE).decode("ascii", "replace")
    return None


def _taken(path: str, otherwise: str = "") -> RecordingError:
    return RecordingError(
        f"{path}: another rank writes this file too; put %r (the rank) in the path, as in trace-%r.pftrace{otherwise}"
    )
