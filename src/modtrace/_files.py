"""Files: finding those that an argument means; opening them; writing them whole or not at all; folders that are held.

Whoever may write into a folder can put links there, also in place of a file or a folder that was there a moment ago. So
what modtrace makes by itself is made in a `Folder`, under a name that leads nowhere else.
"""

import contextlib
import errno
import glob
import gzip
import io
import os
import secrets
import shlex
import stat
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol

from ._errors import EngineError, ModtraceError, WriteError

LIBRARY_NAME = "modtrace_native"


def cache_home() -> Path:
    """Return the cache: `$MODTRACE_CACHE`, else `modtrace` in `$XDG_CACHE_HOME` or `~/.cache`, or raise EngineError."""
    named = os.environ.get("MODTRACE_CACHE")
    home = Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "modtrace"
    try:
        return home.expanduser()
    except RuntimeError as error:
        raise EngineError(
            f"{home}: the home folder is not known (HOME is not set, and the user has none); "
            "name a folder in MODTRACE_CACHE"
        ) from error


def open_regular(path: str | os.PathLike[str]) -> io.FileIO:
    """Open a file to read its bytes, unbuffered; never wait for a pipe.

    Raises OSError if it cannot be opened, or is a pipe, a device or a socket: these have no end, or no second reading.
    """
    try:
        file = io.FileIO(path, opener=_open_at_once)
    except IsADirectoryError as error:
        help_ = f"name one of its files, or compare its ranks: modtrace ranks slow {shlex.quote(os.fspath(path))}"
        raise IsADirectoryError(error.errno, f"it is a folder; {help_}") from error
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
        position = os.lseek(descriptor, 0, os.SEEK_CUR)
        try:
            os.lseek(descriptor, offset, os.SEEK_SET)
            return os.read(descriptor, count)
        finally:
            os.lseek(descriptor, position, os.SEEK_SET)


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
            by_descriptor = f"/proc/self/fd/{descriptor}"
            self.path = by_descriptor if os.path.isdir(by_descriptor) else self.path

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
        temporary = tempfile.TemporaryDirectory(prefix=".modtrace-" if parent else "modtrace-", dir=parent)
    except OSError as error:
        raise ModtraceError(
            f"no folder for temporary files can be made ({error.strerror or error}); "
            "free some space, or set TMPDIR to a folder that can be written"
        ) from error
    with temporary as name:
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

FileChoice = tuple[str, ...] | Callable[[str], bool]
"""Which files of a folder are meant: the ends of their names, or a function that decides by the path."""


def find_recordings(paths: Iterable[str]) -> list[str]:
    """Return the recordings that files, folders and patterns mean, each once; a file may be called anything.

    Raises ModtraceError if a folder holds none, or nothing matches a pattern.
    """
    return list(dict.fromkeys(file for path in paths for file in _files_of(path, RECORDING_SUFFIXES)))


def find_each(paths: Iterable[str], kind: FileChoice) -> tuple[list[str], list[str]]:
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


def _files_of(path: str, kind: FileChoice) -> list[str]:
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


_GZIP_LEVEL = 3
"""zlib's level: traces repeat themselves so much that higher ones take three times as long for a tenth of the size."""

_NEW_FILE_MODE = 0o666
"""Permissions of a new file; the umask takes some off."""
_REPLACED = (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)
"""Kinds of files that are not written directly; that a folder cannot be replaced is an error."""
_PRIVATE_MODE = 0o600
"""Permissions of a temporary file while it is written. Then it gets those of the file that it replaces."""


class Sink(Protocol):
    """Where a writer's bytes go."""

    def write(self, data: bytes, /) -> object:
        """Write all of `data`."""


@contextlib.contextmanager
def atomic_writer(path: str | os.PathLike[str], mode: int | None = None) -> Iterator[Sink]:
    """Write a file that takes the place of `path` when the block ends well.

    Until then the bytes go to a temporary file in the same directory. A block that raises leaves nothing behind, and
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
        old = _status_of(target) if mode is None else None
        if old is not None and not stat.S_ISLNK(old.st_mode) and is_of_user(old):
            mode = old.st_mode & 0o777
        is_special = old is not None and stat.S_IFMT(old.st_mode) not in _REPLACED
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
    # Asked a second time: others may have changed the link meanwhile.
    status = _status_of(path)
    return target if status is not None and os.path.samestat(link, status) and is_of_user(link, or_root=True) else path


def _status_of(target: Path) -> os.stat_result | None:
    """Return the status of what has a name, itself if it is a link; None if nothing has it."""
    try:
        return target.lstat()
    except FileNotFoundError:
        return None
