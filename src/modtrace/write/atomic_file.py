"""Output files that appear whole or not at all."""

import contextlib
import errno
import gzip
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

from .._errors import WriteError
from .._files import create_file, is_of_user

_GZIP_LEVEL = 3
"""zlib's level: traces repeat themselves so much that higher ones take three times as long for a tenth of the size."""

_NEW_FILE_MODE = 0o666
"""Permissions of a new file; the umask takes some off."""
_REPLACED = (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)
"""Kinds of files that are not written directly; that a folder cannot be replaced is an error."""
_PRIVATE_MODE = 0o600
"""While a file is written that is to replace one; then it gets the permissions of that one."""


class Sink(Protocol):
    """Where a writer's bytes go."""

    def write(self, data: bytes, /) -> object:
        """Write all of `data`."""


@contextlib.contextmanager
def atomic_writer(path: str | os.PathLike[str], mode: int | None = None) -> Iterator[Sink]:
    """Write a file that takes the place of `path` when the block ends well.

    Until then the bytes go to a temporary file in the same directory; a block that raises leaves nothing behind and
    an existing file as it was. A `path` that ends in `.gz` is compressed.

    Args:
        path: where. A link of this user's or root's stays a link to the new file; one of another user's is replaced. A
            device or a pipe is written directly, unless it is a pipe of another user's.
        mode: permissions of a file that has its name from modtrace: what has the name is replaced. None: those of the
            file that is replaced if it is this user's, else what the umask leaves; never set-user-ID.

    Raises:
        WriteError: the file cannot be made, written or moved; names the path.
    """
    try:
        target = _follow_own_link(Path(path)) if mode is None else Path(path)
        known = _status_of(target) if mode is None else None
        if known is not None and not stat.S_ISLNK(known.st_mode) and is_of_user(known):
            mode = known.st_mode & 0o777
        is_special = known is not None and stat.S_IFMT(known.st_mode) not in _REPLACED
        opened = open(target, "wb", opener=_open_special) if is_special else _regular(target, mode)  # noqa: SIM115
        with opened as file:
            if os.fspath(path).lower().endswith(".gz"):
                with gzip.GzipFile("", "wb", _GZIP_LEVEL, file, mtime=0) as packed:
                    yield packed
            else:
                yield file
    except OSError as error:
        raise WriteError(f"cannot write {os.fspath(path)}: {error.strerror or error}") from error


@contextlib.contextmanager
def _regular(target: Path, mode: int | None) -> Iterator[BinaryIO]:
    if target.is_dir():
        raise IsADirectoryError(None, "it is a directory")
    temporary, descriptor = _create_beside(target, _NEW_FILE_MODE if mode is None else _PRIVATE_MODE)
    try:
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            if mode is not None:
                os.chmod(descriptor if os.chmod in os.supports_fd else temporary, mode)
            os.fsync(descriptor)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):  # an interrupt can come after it has moved
            os.unlink(temporary)
        raise


def _create_beside(target: Path, mode: int) -> tuple[Path, int]:
    """Create an empty file of an unguessable name; return its path and a descriptor open for writing.

    The kernel takes the umask off the mode: to read the umask, a process has to change it for all its threads. Nothing
    that lies there already is opened, a planted link least of all.
    """
    while True:
        temporary = target.parent / f".modtrace-{secrets.token_hex(8)}.tmp"
        with contextlib.suppress(FileExistsError):
            return temporary, create_file(os.fspath(temporary), mode)


def _open_special(path: str, flags: int) -> int:  # noqa: ARG001 (those of `open` create and truncate a file)
    descriptor = os.open(path, os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0))
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) or (stat.S_ISFIFO(status.st_mode) and not is_of_user(status, or_root=True)):
        os.close(descriptor)
        raise PermissionError(errno.EPERM, "another user has put this there")
    return descriptor


def _follow_own_link(path: Path) -> Path:
    """Return what a path leads to, unless it is a link of another user's."""
    link = _status_of(path)
    if link is None or not stat.S_ISLNK(link.st_mode):
        return path
    target = Path(os.path.realpath(path))
    # Looked at again: others may have changed it meanwhile.
    again = _status_of(path)
    return target if again is not None and os.path.samestat(link, again) and is_of_user(link, or_root=True) else path


def _status_of(target: Path) -> os.stat_result | None:
    """Return the status of what has a name, itself if it is a link; None if nothing has it."""
    try:
        return target.lstat()
    except FileNotFoundError:
        return None
