"""Opening files of a user's, which may be anything."""

from __future__ import annotations

import errno
import io
import os
import stat

__all__ = ["open_regular"]


def open_regular(path: str | os.PathLike[str]) -> io.FileIO:
    """Open a file to read its bytes, unbuffered; never wait for somebody to write into a pipe.

    Raises:
        OSError: it cannot be opened, or is a pipe, a device or a socket: these have no end, or no second reading.
    """
    file = io.FileIO(path, opener=_open_at_once)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is no regular file; save what it gives to one first", os.fspath(path))
    return file


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
