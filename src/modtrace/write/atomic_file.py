"""Output files that appear whole or not at all."""

import contextlib
import gzip
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

from .._errors import WriteError

_GZIP_LEVEL = 3
"""zlib's level: traces repeat themselves so much that higher ones take three times as long for a tenth of the size."""

_NEW_FILE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL
for _flag in ("O_NOFOLLOW", "O_CLOEXEC", "O_BINARY"):  # the last one is of Windows, which lacks the others
    _NEW_FILE_FLAGS |= getattr(os, _flag, 0)

_NEW_FILE_MODE = 0o666
"""Of a new file; the umask takes some off."""
_PRIVATE_MODE = 0o600
"""While a file is written that is to replace one; then it gets the permissions of that one."""


class Sink(Protocol):
    """Where a writer's bytes go."""

    def write(self, data: bytes, /) -> object:
        """Take all of `data`."""


@contextlib.contextmanager
def atomic_writer(path: str | os.PathLike[str]) -> Iterator[Sink]:
    """Write a file that takes the place of `path` when the block ends well.

    Until then the bytes go to a temporary file in the same directory; a block that raises leaves nothing behind and
    an existing file as it was. A `path` that ends in `.gz` is compressed. A device or a pipe is written directly.

    Raises:
        WriteError: the file cannot be made, written or moved; names the path.
    """
    try:
        target = Path(os.path.realpath(path))  # a link stays a link to the new file
        mode = _mode_of(target)
        is_special = mode is not None and not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)
        opened: contextlib.AbstractContextManager[BinaryIO] = (
            target.open("wb") if is_special else _regular(target, mode)
        )
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
                os.chmod(descriptor if os.chmod in os.supports_fd else temporary, stat.S_IMODE(mode))
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
            return temporary, os.open(temporary, _NEW_FILE_FLAGS, mode)


def _mode_of(target: Path) -> int | None:
    """Return type and permissions of the file that is replaced; None where there is none."""
    try:
        return target.stat().st_mode
    except FileNotFoundError:
        return None
