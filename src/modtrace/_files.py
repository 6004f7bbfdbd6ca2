"""Files: expanding arguments to files; opening and writing them; folders that stay open; hints about a written file.

Anyone who may write into a folder can place links there, or replace a file or folder by a link at any moment. So
modtrace creates its own files in a `Folder`, under names that cannot be links.
"""

import contextlib
import errno
import glob
import gzip
import io
import os
import secrets
import shlex
import shutil
import stat
import sys
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
    """Return `$MODTRACE_CACHE`, or `modtrace` in `$XDG_CACHE_HOME` or `~/.cache`; raise EngineError without a home."""
    cache_path = os.environ.get("MODTRACE_CACHE")
    cache = Path(cache_path) if cache_path else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "modtrace"
    try:
        return cache.expanduser()
    except RuntimeError as error:
        raise EngineError(
            f"{cache}: the home folder is not known (HOME is not set, and the user has none); "
            "name a folder in MODTRACE_CACHE"
        ) from error


def open_regular(path: str | os.PathLike[str]) -> io.FileIO:
    """Open a file to read its bytes, unbuffered; never wait for a pipe.

    Raises OSError if the file cannot be opened or read twice, such as a pipe, a device or a socket.
    """
    try:
        file = io.FileIO(path, opener=_open_at_once)
    except IsADirectoryError as error:
        help_ = f"name one of its files, or compare its ranks: modtrace ranks slow {shlex.quote(os.fspath(path))}"
        raise IsADirectoryError(error.errno, f"it is a folder; {help_}") from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a regular file; save its data to one first", os.fspath(path))
    return file


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))


_position_lock = threading.Lock()
"""Protects the position of a descriptor while `read_at` changes it."""


def read_at(descriptor: int, count: int, offset: int) -> bytes:
    """Return up to `count` bytes from `offset` on; the position of the file does not change."""
    if hasattr(os, "pread"):
        return os.pread(descriptor, count, offset)
    with _position_lock:  # Windows
        position = os.lseek(descriptor, 0, os.SEEK_CUR)
        try:
            os.lseek(descriptor, offset, os.SEEK_SET)
            return os.read(descriptor, count)
        finally:
            os.lseek(descriptor, position, os.SEEK_SET)


class Folder:
    """A folder that stays open: `path` leads to it even if another folder gets its name.

    An empty path means the working directory. Raises OSError if there is no such folder, or, unless `follow`, if the
    path is a link.
    """

    def __init__(self, path: str | os.PathLike[str], *, follow: bool = True) -> None:
        # A path through this process's descriptor (/proc/self/fd/N); the given path if the system has no such paths.
        self.path = os.fspath(path) or os.curdir
        if not follow and os.path.islink(self.path):
            raise NotADirectoryError(errno.ENOTDIR, "it is a link, and others may have made it", self.path)
        if hasattr(os, "O_PATH"):
            flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
            descriptor = os.open(self.path, flags)
            weakref.finalize(self, os.close, descriptor)
            descriptor_path = f"/proc/self/fd/{descriptor}"
            self.path = descriptor_path if os.path.isdir(descriptor_path) else self.path

    def make(self, name: str, mode: int) -> "Folder":
        """Return a subfolder, created if it is missing; raises OSError if it cannot be created, or is a link."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(f"{self.path}/{name}", mode)
        return Folder(f"{self.path}/{name}", follow=False)


def create_file(path: str, mode: int) -> int:
    """Create a file, and return a descriptor that appends to it; the umask reduces its mode.

    Raises OSError if the file cannot be created or the name exists already; an existing link is never followed.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL
    for flag in ("O_NOFOLLOW", "O_CLOEXEC", "O_BINARY"):  # only Windows has O_BINARY, and it lacks the other two
        flags |= getattr(os, flag, 0)
    return os.open(path, flags, mode)


@contextmanager
def work_folder(parent: str | os.PathLike[str] | None = None) -> Iterator[Path]:
    """Make a private folder, in `parent` or in the system's temporary folder, that exists while the block runs."""
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
    """Return whether this user owns a file, or root if `or_root`; True on systems without user ids."""
    return not hasattr(os, "geteuid") or status.st_uid == os.geteuid() or (or_root and status.st_uid == 0)


RING_SUFFIXES = (".modtrace",)
_TRACE_SUFFIXES = (".pftrace", ".pftrace.gz", ".json", ".json.gz", ".zip")
RECORDING_SUFFIXES = (*_TRACE_SUFFIXES, *RING_SUFFIXES)

FileChoice = tuple[str, ...] | Callable[[str], bool]
"""A choice of files in a folder: suffixes of their names, or a function that returns whether a path is chosen."""


def find_recordings(paths: Iterable[str]) -> list[str]:
    """Return the distinct recordings of files, folders and patterns; a file given by its path may have any name.

    Raises ModtraceError if a folder has no recording, or no file matches a pattern.
    """
    return list(dict.fromkeys(file for path in paths for file in _files_of(path, RECORDING_SUFFIXES)))


def find_each(paths: Iterable[str], choice: FileChoice) -> tuple[list[str], list[str]]:
    """Return the chosen files of all arguments, and an error for each argument without files."""
    files: dict[str, None] = {}
    errors = []
    for path in paths:
        if choice == RING_SUFFIXES and path.lower().endswith(_TRACE_SUFFIXES) and os.path.isfile(path):
            errors.append(f"{path}: this is a trace, and not the ring file of a process; see it with modtrace summary")
            continue
        try:
            files |= dict.fromkeys(_files_of(path, choice))
        except ModtraceError as error:
            errors.append(str(error))
    return list(files), errors


def _files_of(path: str, choice: FileChoice) -> list[str]:
    if os.path.isdir(path):
        files = [os.path.join(path, name) for name in sorted(os.listdir(path))]
        if callable(choice):
            files, problem = [file for file in files if choice(file) and os.path.isfile(file)], "nothing of this kind"
        else:
            files = [file for file in files if file.lower().endswith(choice)]
            problem = f"no recording in this folder; they end in {', '.join(choice)}"
        if not files:
            raise ModtraceError(f"{path}: {problem}")
        return files
    if os.path.exists(path) or not glob.has_magic(path):
        return [path]
    matches = sorted(glob.glob(path))
    if not matches:
        raise ModtraceError(f"{path}: no file matches")
    return matches


def begins_with(path: str | os.PathLike[str], magic: bytes) -> bool:
    """Return whether a file begins with these bytes; False if it cannot be read."""
    try:
        with open_regular(os.fspath(path)) as file:
            return file.read(len(magic)) == magic
    except OSError:
        return False


_GZIP_LEVEL = 3
"""zlib's level: for traces, higher levels need three times as long and save only a tenth of the size."""

_NEW_FILE_MODE = 0o666
"""Permissions of a new file; the umask reduces them."""
_REPLACED_TYPES = (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)
"""File types that are replaced, not written directly; replacing a folder is an error."""
_PRIVATE_MODE = 0o600
"""Permissions of a temporary file while it is written. Then it gets the permissions of the file that it replaces."""


class Sink(Protocol):
    """The output of a writer of bytes."""

    def write(self, data: bytes, /) -> object:
        """Write all of `data`."""


@contextlib.contextmanager
def atomic_writer(path: str | os.PathLike[str], mode: int | None = None) -> Iterator[Sink]:
    """Write a file that replaces `path` when the block ends without an error.

    Until then the bytes go to a temporary file in the same directory. If the block raises, the temporary file is
    removed, and an existing file stays as it was. A `path` that ends in `.gz` is compressed.

    Args:
        path: the file to write. A link of this user or root stays and leads to the new file; a link of another user is
            replaced. A device or a pipe is written directly, unless it is a pipe of another user.
        mode: permissions of a file whose name modtrace chose; any file or link of that name is replaced. None: the
            permissions of the old file if this user owns it, otherwise those that the umask allows; never set-user-ID.

    Raises:
        WriteError: the file cannot be created, written or moved; the message names the path.
    """
    try:
        target = _follow_own_link(Path(path)) if mode is None else Path(path)
        old = _status_of(target) if mode is None else None
        if old is not None and not stat.S_ISLNK(old.st_mode) and is_of_user(old):
            mode = old.st_mode & 0o777
        is_special = old is not None and stat.S_IFMT(old.st_mode) not in _REPLACED_TYPES
        writer = open(target, "wb", opener=_open_special) if is_special else _regular(target, mode)  # noqa: SIM115
        with writer as file:
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
        with contextlib.suppress(FileNotFoundError):  # an interrupt can come after the file was moved
            os.unlink(temporary)
        raise


def _create_beside(target: Path, mode: int) -> tuple[Path, int]:
    """Create an empty file with an unguessable name in the folder of `target`; return its path and a descriptor.

    The kernel applies the umask to the mode: to read the umask, a process has to change it for all its threads. An
    existing file or link is never opened.
    """
    while True:
        temporary = target.parent / f".modtrace-{secrets.token_hex(8)}.tmp"
        with contextlib.suppress(FileExistsError):
            return temporary, create_file(os.fspath(temporary), mode)


def _open_special(path: str, flags: int) -> int:  # noqa: ARG001 (the flags of `open` create and truncate a file)
    descriptor = os.open(path, os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0))
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) or (stat.S_ISFIFO(status.st_mode) and not is_of_user(status, or_root=True)):
        os.close(descriptor)
        raise PermissionError(errno.EPERM, "another user has put this there")
    return descriptor


def _follow_own_link(path: Path) -> Path:
    """Return the target of a link, unless it is another user's; otherwise the path itself."""
    link = _status_of(path)
    if link is None or not stat.S_ISLNK(link.st_mode):
        return path
    target = Path(os.path.realpath(path))
    # A second check: another process may have changed the link meanwhile.
    status = _status_of(path)
    return target if status is not None and os.path.samestat(link, status) and is_of_user(link, or_root=True) else path


def _status_of(target: Path) -> os.stat_result | None:
    """Return `os.lstat` of a path; None if it does not exist."""
    try:
        return target.lstat()
    except FileNotFoundError:
        return None


def next_step_hint(path: str) -> str:
    """Return a line with the commands that summarize and show a trace or ring file."""
    suffix = Path(path).suffix.lower()
    if suffix == ".html":
        return f"Next: open {path} in a browser; it needs no network"
    if suffix in (".folded", ".json") and path.lower().endswith((".folded", ".speedscope.json")):
        return f"Next: drop {path} onto https://www.speedscope.app"
    command, quoted = _command(), shlex.quote(path)
    if suffix == ".zip":
        return f"Next: {command} view {quoted}, or attach it to a bug report"
    hint = f"Next: {command} summary {quoted}; to see it, {command} view {quoted}"
    is_perfetto = path.lower().endswith((".json", ".json.gz", ".pftrace", ".pftrace.gz"))
    return f"{hint}, or drop {path} onto https://ui.perfetto.dev" if is_perfetto else hint


def share_hint(path: str) -> str:
    """Return a line that explains how to share the recording in `path` with other people."""
    if path.lower().endswith(".zip"):
        return f"To show it to others, give them {path}: they open the viewer.html in it, or run modtrace view"
    archive = f"{Path(path.removesuffix('.gz')).stem}.zip"
    return f"To give it to others: {_command()} report {shlex.quote(path)} -o {shlex.quote(archive)}"


def _command() -> str:
    """Return the command that runs modtrace, even if the virtual environment is not activated."""
    if shutil.which("modtrace"):
        return "modtrace"
    script = Path(sys.executable).with_name("modtrace")
    return shlex.quote(str(script)) if script.exists() else f"{shlex.quote(sys.executable)} -m modtrace"
