"""Files: finding those that an argument means; opening them, reading at an offset; folders that are held, or temporary.

Whoever may write into a folder can put links there, also in place of a file or a folder that was there a moment ago. So
what modtrace makes by itself is made in a `Folder`, under a name that leads nowhere else.
"""

import contextlib
import errno
import glob
import io
import os
import stat
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ._errors import ModtraceError


def open_regular(path: str | os.PathLike[str]) -> io.FileIO:
    """Open a file to read its bytes, unbuffered; never wait for a pipe.

    Raises OSError if it cannot be opened, or is a pipe, a device or a socket: these have no end, or no second reading.
    """
    file = io.FileIO(path, opener=_open_at_once)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a regular file; save what it gives to one first", os.fspath(path))
    return file


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))


_position = threading.Lock()
"""Held while the position of a descriptor is not what its other readers left."""


def read_at(descriptor: int, count: int, offset: int) -> bytes:
    """Return at most `count` bytes from `offset` on; the position of the file does not change."""
    if hasattr(os, "pread"):
        return os.pread(descriptor, count, offset)
    with _position:  # Windows
        before = os.lseek(descriptor, 0, os.SEEK_CUR)
        try:
            os.lseek(descriptor, offset, os.SEEK_SET)
            return os.read(descriptor, count)
        finally:
            os.lseek(descriptor, before, os.SEEK_SET)


class Folder:
    """A folder that is kept open. What is done below `path` is done in this folder, even if another one gets its name.

    The path is empty for the working directory; it is a link only if `follow`. Raises OSError if there is no such
    folder.
    """

    def __init__(self, path: str | os.PathLike[str], *, follow: bool = True) -> None:
        # Another path of it, which goes by a descriptor of this process. It is as given where the system has none.
        self.path = os.fspath(path) or os.curdir
        if not follow and os.path.islink(self.path):
            raise NotADirectoryError(errno.ENOTDIR, "it is a link, and others may have made it", self.path)
        if hasattr(os, "O_PATH"):
            flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
            descriptor = os.open(self.path, flags)
            weakref.finalize(self, os.close, descriptor)
            held = f"/proc/self/fd/{descriptor}"
            self.path = held if os.path.isdir(held) else self.path

    def make(self, name: str, mode: int) -> "Folder":
        """Return a folder in this one, made if it is missing, and no link; raises OSError if it cannot be."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(f"{self.path}/{name}", mode)
        return Folder(f"{self.path}/{name}", follow=False)


def create_file(path: str, mode: int) -> int:
    """Create a file, and return a descriptor that appends to it; the umask takes some off its mode.

    Raises OSError if it cannot be made, or anything has that name already, a link least of all is followed.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL
    for flag in ("O_NOFOLLOW", "O_CLOEXEC", "O_BINARY"):  # the last one is of Windows, which lacks the others
        flags |= getattr(os, flag, 0)
    return os.open(path, flags, mode)


@contextmanager
def work_folder(parent: str | os.PathLike[str] | None = None) -> Iterator[Path]:
    """Make a folder for this user alone, in `parent` or among temporary files; it is there while the block runs."""
    try:
        made = tempfile.TemporaryDirectory(prefix=".modtrace-" if parent else "modtrace-", dir=parent)
    except OSError as error:
        raise ModtraceError(
            f"no folder for temporary files can be made ({error.strerror or error}); "
            "free some space, or set TMPDIR to a folder that can be written"
        ) from error
    with made as name:
        folder = Folder(name, follow=False)
        status = os.stat(folder.path)
        if hasattr(os, "geteuid") and not (is_of_user(status) and status.st_mode & 0o777 == 0o700):
            raise ModtraceError(f"{name}: another user has put a folder of this name there")
        yield Path(folder.path)


def is_of_user(status: os.stat_result, *, or_root: bool = False) -> bool:
    """Return whether a file is this user's, or perhaps root's; every file is where users have no numbers."""
    return not hasattr(os, "geteuid") or status.st_uid == os.geteuid() or (or_root and status.st_uid == 0)


RING_SUFFIXES = (".modtrace",)
_TRACE_SUFFIXES = (".pftrace", ".pftrace.gz", ".json", ".json.gz", ".zip")
RECORDING_SUFFIXES = (*_TRACE_SUFFIXES, *RING_SUFFIXES)

FileKind = tuple[str, ...] | Callable[[str], bool]
"""Which files of a folder are meant: the ends of their names, or a function that decides by the path."""


def find_recordings(paths: Iterable[str]) -> list[str]:
    """Return the recordings that files, folders and patterns mean, each once; a file may be called anything.

    Raises ModtraceError if a folder holds none, or nothing matches a pattern.
    """
    return list(dict.fromkeys(file for path in paths for file in _files_of(path, RECORDING_SUFFIXES)))


def find_each(paths: Iterable[str], kind: FileKind) -> tuple[list[str], list[str]]:
    """Return the files of a kind that arguments mean, and an error for each argument without files."""
    files: dict[str, None] = {}
    errors = []
    for path in paths:
        if kind == RING_SUFFIXES and path.lower().endswith(_TRACE_SUFFIXES) and os.path.isfile(path):
            errors.append(f"{path}: this is a trace, and not the ring file of a process; see it with modtrace summary")
            continue
        try:
            files |= dict.fromkeys(_files_of(path, kind))
        except ModtraceError as error:
            errors.append(str(error))
    return list(files), errors


def _files_of(path: str, kind: FileKind) -> list[str]:
    if os.path.isdir(path):
        files = [os.path.join(path, name) for name in sorted(os.listdir(path))]
        if callable(kind):
            chosen, missing = [file for file in files if kind(file) and os.path.isfile(file)], "nothing of this kind"
        else:
            chosen = [file for file in files if file.lower().endswith(kind)]
            missing = f"no recording in this folder; they end in {', '.join(kind)}"
        if not chosen:
            raise ModtraceError(f"{path}: {missing}")
        return chosen
    if os.path.exists(path) or not glob.has_magic(path):
        return [path]
    matching = sorted(glob.glob(path))
    if not matching:
        raise ModtraceError(f"{path}: no file matches")
    return matching


def begins_with(path: str | os.PathLike[str], start: bytes) -> bool:
    """Say whether a file begins with these bytes; False if it cannot be read."""
    try:
        with open_regular(os.fspath(path)) as file:
            return file.read(len(start)) == start
    except OSError:
        return False
