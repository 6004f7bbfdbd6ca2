"""Which process writes a ring file, and whether it lives; and the names of ring files.

The newest has the plain name, and those before it are kept under numbers.
"""

import contextlib
import errno
import hashlib
import os
import re
import struct
import time
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Literal

from .._errors import RingError
from .._files import RING_SUFFIXES, find_each, open_regular, read_at
from .._interrupts import in_forked_child
from .._processes import read_process_stat
from .file_format import SLOTS_OFFSET, FileHeader, parse_header

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

WriterState = Literal["running", "dead", "unknown"]

_FLOCK = struct.Struct("hhqqi4x")
"""The C library's `struct flock`: type, whence, start, length, process."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_open: set[int] = set()
"""The descriptors of all locks of this process."""


class WriterLock:
    """The lock on a ring file; at most one process holds it.

    The file is opened anew for it: a mapping keeps the description that it was made of, and the locks of that, in
    forked children too. These close their copy of this descriptor at once.
    """

    def __init__(self, path: str) -> None:
        self.is_held = False  # whether it was free, and is this process's now
        self.is_taken = False  # whether another one holds it; if neither, the file system has no such locks
        self._process = os.getpid()
        self.fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
        _open.add(self.fd)
        if hasattr(fcntl, "F_OFD_SETLK"):
            try:
                fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
                self.is_held = True
            except OSError as error:
                self.is_taken = error.errno in (errno.EAGAIN, errno.EACCES)

    def release(self) -> None:
        """Release the lock."""
        if self.fd < 0 or self._process != os.getpid():
            return
        if self.is_held:
            with contextlib.suppress(OSError):  # at once, also where a child that is being forked has a copy
                fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0))
        descriptor, self.fd, self.is_held = self.fd, -1, False
        _open.discard(descriptor)
        os.close(descriptor)

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            self.release()


@in_forked_child
def _close_in_child() -> None:
    for descriptor in _open:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _open.clear()


def name_digest(path: str) -> str:
    """Return a digest of the name that a ring was made for: the header shows it, and not the name."""
    return hashlib.sha256(f"modtrace {os.path.basename(path)}".encode(errors="surrogateescape")).hexdigest()[:12]


def describe_writer(lock: WriterLock, path: str) -> dict[str, object]:
    """Return the description of this process for the header."""
    status = os.fstat(lock.fd)
    # Where the lock can be seen: in the same file, and not in a copy, as far as this kernel runs.
    where = {"device": status.st_dev, "inode": status.st_ino} if lock.is_held else {}
    start_ticks = None
    with contextlib.suppress(OSError):
        start_ticks = read_process_stat("self").start_ticks
    boot, namespace = _here()
    return {
        "name": name_digest(path),
        "started": time.time_ns(),
        "boot": boot,
        "pid_namespace": namespace,
        "start_ticks": start_ticks,
        **where,
    }


def writer_state(descriptor: int, header: FileHeader) -> WriterState:
    """Return whether the process that writes a ring file lives.

    It is dead if its lock is gone, or if there is no such process any more. It runs if its lock is held, or if the
    process is there. Else nothing is known: it runs in another PID namespace or on another host, and the file is a copy
    or lies where locks are not seen.
    """
    answers = (_by_lock(descriptor, header.writer), _by_process(header))
    if False in answers:
        return "dead"
    return "running" if True in answers else "unknown"


def _by_lock(descriptor: int, writer: Mapping[str, object]) -> bool | None:
    if not hasattr(fcntl, "F_OFD_GETLK"):
        return None
    try:
        answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    except OSError:
        return None
    if _FLOCK.unpack(answer)[0] != fcntl.F_UNLCK:
        return True
    status = os.fstat(descriptor)
    seen = (_here()[0], status.st_dev, status.st_ino)
    return False if (writer.get("boot"), writer.get("device"), writer.get("inode")) == seen else None


def has_known_pid(header: FileHeader) -> bool:
    """Return whether the process that writes a ring file lives, and has the number that the file says for us too."""
    return _by_process(header) is True


def _by_process(header: FileHeader) -> bool | None:
    pid, writer = header.metadata.get("pid"), header.writer
    if pid is None or None in _here() or (writer.get("boot"), writer.get("pid_namespace")) != _here():
        return None
    try:
        start_ticks = process_start(pid)
    except ProcessLookupError:
        return False
    return None if start_ticks is None else start_ticks == writer.get("start_ticks")


def process_start(pid: int) -> int | None:
    """Return when a process began, in ticks; None if the system does not say.

    Raises ProcessLookupError if there is no such process.
    """
    if pid < 1:
        raise ProcessLookupError(pid)
    if os.name != "posix":
        return None  # there is no way to ask: os.kill would interrupt a process on Windows
    with contextlib.suppress(PermissionError):  # another user's
        os.kill(pid, 0)
    try:
        stat = read_process_stat(pid)
    except OSError:
        return None
    if stat.state in "ZX":  # it was killed, and its parent has not waited for it yet
        raise ProcessLookupError(pid)
    return stat.start_ticks


@cache
def _boot_hash() -> str | None:
    try:
        return hashlib.sha256(f"modtrace {BOOT_ID.read_text('utf-8')}".encode()).hexdigest()[:12]
    except (OSError, UnicodeDecodeError):
        return None


def _here() -> tuple[str | None, int | None]:
    """Return the id of this boot of the kernel, and this process's PID namespace; None if it is not known."""
    try:
        # The `/proc` of another namespace has other processes under these numbers.
        is_own = os.readlink("/proc/self") == str(os.getpid())
        return _boot_hash(), os.stat("/proc/self/ns/pid").st_ino if is_own else None
    except OSError:
        return _boot_hash(), None


_NUMBERED = re.compile(r"(.*)\.(\d{1,9})(\.[^./]*)?", re.DOTALL)
_PID = re.compile(r"\.pid\d+(?=\.)")


def stacks_path(ring: str) -> str:
    """Return the file beside a ring's, which its process appends Python stacks to when the signal comes."""
    return f"{ring}.stacks"


def whole_run_path(ring: str) -> str:
    """Return the file beside a ring's, in which a watcher writes what the whole run took."""
    return f"{ring}.whole.json"


def take_name(new: str, path: str, keep: int) -> str:
    """Move a new locked file to its name, and return that: `path`, or a numbered one if a process uses `path`.

    Under numbers so many rings of ended processes stay; older ones are removed. Raises OSError if no name can be given.
    """
    name = _replace_ended(new, path, keep) or give_number(new, path)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(new)
    _drop_old(path, keep)
    return name


def _replace_ended(new: str, path: str, keep: int) -> str | None:
    """Give the file the name that is asked for, and return it; None if a running process has it."""
    while True:
        with contextlib.suppress(FileExistsError):
            _give(new, path)
            return path
        try:
            lock = WriterLock(path)
        except FileNotFoundError:
            if os.path.islink(path):  # to nothing
                os.replace(new, path)
                return path
            continue
        except PermissionError:  # another user's
            return None
        try:
            if not _has_ended(lock, path):
                return None
            if not _is_file(lock, path):
                continue  # another process was faster
            if keep and os.fstat(lock.fd).st_size:
                _keep_ended(path)
            os.replace(new, path)
            return path
        finally:
            lock.release()


def _keep_ended(path: str) -> None:
    """Give the ring of an earlier run a number, and with it the files beside it."""
    kept = give_number(path, path)
    for beside in (stacks_path, whole_run_path):
        with contextlib.suppress(FileNotFoundError):
            os.replace(beside(path), beside(kept))


def _has_ended(lock: WriterLock, path: str) -> bool:
    """Whether no process writes the locked file; False if that cannot be known."""
    if lock.is_taken:
        return False
    try:
        header = _read_header(path, lock.fd)
    except RingError:
        return True
    return (lock.is_held and "inode" in header.writer) or writer_state(lock.fd, header) == "dead"


def _is_file(lock: WriterLock, path: str) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(lock.fd))
    except FileNotFoundError:
        return False


def _read_header(path: str, descriptor: int) -> FileHeader:
    return parse_header(path, read_at(descriptor, SLOTS_OFFSET, 0))


def _give(file: str, name: str) -> None:
    """Give a file another name; raises FileExistsError if a file has that."""
    try:
        os.link(file, name)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links, or another user's file
        if os.path.lexists(name):
            raise FileExistsError(name) from None
        os.rename(file, name)


def give_number(file: str, path: str) -> str:
    """Give a file the next number of a name, and return the numbered name."""
    number = max((number for number, _ in numbered_files(path)), default=0) + 1
    stem, suffix = os.path.splitext(path)
    while True:
        name = f"{stem}.{number}{suffix}"
        with contextlib.suppress(FileExistsError):
            _give(file, name)
            return name
        number += 1


def numbered_files(path: str) -> list[tuple[int, str]]:
    """Return the files that have a numbered form of a name, with their numbers, ascending."""
    folder = os.path.dirname(path)
    try:
        names = os.listdir(folder or os.curdir)
    except OSError:  # a folder that may be written and not read
        return []
    files = [(_NUMBERED.fullmatch(file), file) for file in (os.path.join(folder, name) for name in names)]
    return sorted((int(match[2]), file) for match, file in files if match and _plain_name(file) == path)


def _drop_old(path: str, keep: int) -> None:
    """Remove the oldest kept rings of a name, down to `keep`. Other files stay, and rings that may still be written."""
    kept = 0
    for _, file in reversed(numbered_files(path)):
        with contextlib.suppress(OSError, RingError):
            kept += _is_kept(file, path, is_wanted=kept < keep)


def _is_kept(ring: str, path: str, *, is_wanted: bool) -> bool:
    """Whether a ring with a number is that of an earlier run of a name; one that is not wanted is removed."""
    lock = WriterLock(ring)
    try:
        header = _read_header(ring, lock.fd)
        is_ours = header.writer.get("name") == name_digest(path) and writer_state(lock.fd, header) == "dead"
        for gone in (ring, stacks_path(ring), whole_run_path(ring)) if is_ours and not is_wanted else ():
            with contextlib.suppress(FileNotFoundError):
                os.unlink(gone)
        return is_ours
    finally:
        lock.release()


def find_rings(paths: Iterable[str]) -> tuple[list[str], list[str], list[str]]:
    """Return the rings that arguments mean (files, which all count, folders and patterns), older ones, and errors.

    The older ones are those of folders and patterns that do not count. The errors say what is wrong with arguments.
    """
    rings: dict[str, None] = {}
    older: set[str] = set()
    errors: list[str] = []
    for path in paths:
        files, wrong = find_each([path], RING_SUFFIXES)
        errors += wrong
        if files != [path]:
            files, left = newest_rings(files)
            older.update(left)
        rings |= dict.fromkeys(files)
    return list(rings), sorted(older - rings.keys()), errors


def newest_rings(paths: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the rings that count, and those of earlier runs: of each name and rank the newest counts, and what runs.

    Rings of child processes of one rank have one name, with any process id.
    """
    by_name: dict[str, list[str]] = {}
    for path in paths:
        by_name.setdefault(_PID.sub("", _plain_name(path)), []).append(path)
    older: set[str] = set()
    for files in by_name.values():
        if len(files) > 1:
            older.update(_older(files))
    return [path for files in by_name.values() for path in files if path not in older], sorted(older)


def _plain_name(path: str) -> str:
    match = _NUMBERED.fullmatch(path)
    return path if match is None else match[1] + (match[3] or "")


def _older(files: Iterable[str]) -> list[str]:
    ended: dict[str, list[tuple[int, str]]] = {}
    running: set[str] = set()
    for file in files:
        try:
            with open_regular(file) as opened:
                header = _read_header(file, opened.fileno())
                state = writer_state(opened.fileno(), header)
        except (OSError, RingError):
            continue  # who reads it says what is wrong
        rank, started = header.metadata.get("rank"), header.writer.get("started")
        is_child = rank is not None and _PID.search(file)
        process = str(rank if is_child else header.writer.get("name", _plain_name(file)))
        if state == "running":
            running.add(process)
        else:
            ended.setdefault(process, []).append((started if isinstance(started, int) else 0, file))
    return [file for process, rings in ended.items() for _, file in sorted(rings)[: None if process in running else -1]]
