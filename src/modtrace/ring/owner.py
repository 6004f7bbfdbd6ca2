"""The process that writes a ring file, whether it lives, and the names of ring files.

The newest ring has the plain name; earlier rings are kept under numbers.
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
_lock_descriptors: set[int] = set()
"""The file descriptors of all locks of this process."""


class WriterLock:
    """The lock on a ring file; at most one process holds it.

    The lock has a file description of its own: a mapping would keep its description, and the lock, in forked children
    too. A forked child closes its copy of the lock's descriptor at once.
    """

    def __init__(self, path: str) -> None:
        self.is_held = False  # whether this process holds the lock
        self.is_taken = False  # whether another process holds it; if neither does, the file system has no such locks
        self._process = os.getpid()
        self.fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
        _lock_descriptors.add(self.fd)
        if hasattr(fcntl, "F_OFD_SETLK"):
            try:
                fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
                self.is_held = True
            except OSError as error:
                self.is_taken = error.errno in (errno.EAGAIN, errno.EACCES)

    def release(self) -> None:
        """Release the lock and close its descriptor; a forked child leaves the lock to its parent."""
        if self.fd < 0 or self._process != os.getpid():
            return
        if self.is_held:
            with contextlib.suppress(OSError):  # a child that is being forked may still have a copy of the descriptor
                fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0))
        descriptor, self.fd, self.is_held = self.fd, -1, False
        _lock_descriptors.discard(descriptor)
        os.close(descriptor)

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            self.release()


@in_forked_child
def _close_in_child() -> None:
    for descriptor in _lock_descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _lock_descriptors.clear()


def name_digest(path: str) -> str:
    """Return the digest of a ring's name; the header holds the digest and not the name."""
    return hashlib.sha256(f"modtrace {os.path.basename(path)}".encode(errors="surrogateescape")).hexdigest()[:12]


def describe_writer(lock: WriterLock, path: str) -> dict[str, object]:
    """Return the description of this process for the header."""
    status = os.fstat(lock.fd)
    # The lock can be seen in this file, but not in a copy or from another kernel.
    locked_file = {"device": status.st_dev, "inode": status.st_ino} if lock.is_held else {}
    start_ticks = None
    with contextlib.suppress(OSError):
        start_ticks = read_process_stat("self").start_ticks
    boot, namespace = _boot_and_pid_namespace()
    return {
        "name": name_digest(path),
        "started": time.time_ns(),
        "boot": boot,
        "pid_namespace": namespace,
        "start_ticks": start_ticks,
        **locked_file,
    }


def writer_state(descriptor: int, header: FileHeader) -> WriterState:
    """Return the state of the process that writes a ring file.

    The process is dead if its lock is gone or the process does not exist any more. It runs if its lock is held or the
    process exists. Otherwise its state is unknown: it ran in another PID namespace or on another host, and the file is
    a copy or on a file system that does not show the lock.
    """
    answers = (_is_alive_by_lock(descriptor, header.writer), _is_alive_by_pid(header))
    if False in answers:
        return "dead"
    return "running" if True in answers else "unknown"


def _is_alive_by_lock(descriptor: int, writer: Mapping[str, object]) -> bool | None:
    if not hasattr(fcntl, "F_OFD_GETLK"):
        return None
    try:
        answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    except OSError:
        return None
    if _FLOCK.unpack(answer)[0] != fcntl.F_UNLCK:
        return True
    status = os.fstat(descriptor)
    file_id = (_boot_and_pid_namespace()[0], status.st_dev, status.st_ino)
    return False if (writer.get("boot"), writer.get("device"), writer.get("inode")) == file_id else None


def has_known_pid(header: FileHeader) -> bool:
    """Return whether the process that writes a ring file lives, and has the header's PID in this PID namespace."""
    return _is_alive_by_pid(header) is True


def _is_alive_by_pid(header: FileHeader) -> bool | None:
    pid, writer, own = header.metadata.get("pid"), header.writer, _boot_and_pid_namespace()
    if pid is None or None in own or (writer.get("boot"), writer.get("pid_namespace")) != own:
        return None
    try:
        start_ticks = process_start(pid)
    except ProcessLookupError:
        return False
    return None if start_ticks is None else start_ticks == writer.get("start_ticks")


def process_start(pid: int) -> int | None:
    """Return the start time of a process, in clock ticks; None if the system does not report it.

    Raises ProcessLookupError if there is no such process.
    """
    if pid < 1:
        raise ProcessLookupError(pid)
    if os.name != "posix":
        return None  # on Windows os.kill would interrupt the process
    with contextlib.suppress(PermissionError):  # another user's process
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


def _boot_and_pid_namespace() -> tuple[str | None, int | None]:
    """Return the id of this boot of the kernel, and of this process's PID namespace; None for an unknown id."""
    try:
        # The `/proc` of another namespace has other processes under these PIDs.
        is_own = os.readlink("/proc/self") == str(os.getpid())
        return _boot_hash(), os.stat("/proc/self/ns/pid").st_ino if is_own else None
    except OSError:
        return _boot_hash(), None


_NUMBERED_NAME = re.compile(r"(.*)\.(\d{1,9})(\.[^./]*)?", re.DOTALL)
_PID = re.compile(r"\.pid\d+(?=\.)")


def stacks_path(ring: str) -> str:
    """Return the path of the file next to a ring to which its process appends Python stacks on a signal."""
    return f"{ring}.stacks"


def whole_run_path(ring: str) -> str:
    """Return the path of the file next to a ring in which a watcher writes the times of the whole run."""
    return f"{ring}.whole.json"


def take_name(new: str, path: str, keep: int) -> str:
    """Move a new locked file to its name and return the name: `path`, or a numbered name if a process uses `path`.

    Up to `keep` numbered rings of ended processes stay; older rings are removed. Raises OSError if the move fails.
    """
    name = _replace_ended(new, path, keep) or give_number(new, path)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(new)
    _drop_old(path, keep)
    return name


def _replace_ended(new: str, path: str, keep: int) -> str | None:
    """Move the file to `path` and return `path`; None if the ring there may still be written."""
    while True:
        with contextlib.suppress(FileExistsError):
            _link_as(new, path)
            return path
        try:
            lock = WriterLock(path)
        except FileNotFoundError:
            if os.path.islink(path):  # a dangling link
                os.replace(new, path)
                return path
            continue
        except PermissionError:  # another user's file
            return None
        try:
            if not _has_ended(lock, path):
                return None
            if not _is_file(lock, path):
                continue  # another process was faster
            if keep and os.fstat(lock.fd).st_size:
                _number_ended(path)
            os.replace(new, path)
            return path
        finally:
            lock.release()


def _number_ended(path: str) -> None:
    """Give the ring of an earlier run, and the files next to it, a number."""
    numbered_path = give_number(path, path)
    for companion_path in (stacks_path, whole_run_path):
        with contextlib.suppress(FileNotFoundError):
            os.replace(companion_path(path), companion_path(numbered_path))


def _has_ended(lock: WriterLock, path: str) -> bool:
    """Whether the process that wrote the locked file has ended; False if its state is unknown."""
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


def _link_as(file: str, name: str) -> None:
    """Give a file another name; raises FileExistsError if a file has that name."""
    try:
        os.link(file, name)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links, or another user's file
        if os.path.lexists(name):
            raise FileExistsError(name) from None
        os.rename(file, name)


def give_number(file: str, path: str) -> str:
    """Give a file the next numbered form of `path`, and return the numbered name."""
    number = max((number for number, _ in numbered_files(path)), default=0) + 1
    stem, suffix = os.path.splitext(path)
    while True:
        name = f"{stem}.{number}{suffix}"
        with contextlib.suppress(FileExistsError):
            _link_as(file, name)
            return name
        number += 1


def numbered_files(path: str) -> list[tuple[int, str]]:
    """Return (number, file) of each file with a numbered form of a name, in ascending order."""
    folder = os.path.dirname(path)
    try:
        names = os.listdir(folder or os.curdir)
    except OSError:  # the folder may be writable and not readable
        return []
    files = [(_NUMBERED_NAME.fullmatch(file), file) for file in (os.path.join(folder, name) for name in names)]
    return sorted((int(match[2]), file) for match, file in files if match and _plain_name(file) == path)


def _drop_old(path: str, keep: int) -> None:
    """Remove the oldest numbered rings of a name, down to `keep`; other files and unfinished rings stay."""
    kept_count = 0
    for _, file in reversed(numbered_files(path)):
        with contextlib.suppress(OSError, RingError):
            kept_count += _is_ended_ring(file, path, remove=kept_count >= keep)


def _is_ended_ring(ring: str, path: str, *, remove: bool) -> bool:
    """Return whether a numbered ring is from an ended run of the name `path`; if so, `remove` removes its files."""
    lock = WriterLock(ring)
    try:
        header = _read_header(ring, lock.fd)
        is_ended = header.writer.get("name") == name_digest(path) and writer_state(lock.fd, header) == "dead"
        for file in (ring, stacks_path(ring), whole_run_path(ring)) if is_ended and remove else ():
            with contextlib.suppress(FileNotFoundError):
                os.unlink(file)
        return is_ended
    finally:
        lock.release()


def find_rings(paths: Iterable[str]) -> tuple[list[str], list[str], list[str]]:
    """Return the rings that files, folders and patterns name, the older rings among them, and error messages.

    A ring that is named itself always counts; the rings of a folder or a pattern count if `newest_rings` returns them.
    """
    rings: dict[str, None] = {}
    older: set[str] = set()
    errors: list[str] = []
    for path in paths:
        files, messages = find_each([path], RING_SUFFIXES)
        errors += messages
        if files != [path]:
            files, older_files = newest_rings(files)
            older.update(older_files)
        rings |= dict.fromkeys(files)
    return list(rings), sorted(older - rings.keys()), errors


def newest_rings(paths: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the rings that count (the newest of each name and rank, and running ones), and the rings of earlier runs.

    The rings of a rank's child processes have one name, whatever PID it contains.
    """
    by_name: dict[str, list[str]] = {}
    for path in paths:
        by_name.setdefault(_PID.sub("", _plain_name(path)), []).append(path)
    older: set[str] = set()
    for files in by_name.values():
        if len(files) > 1:
            older.update(_rings_of_earlier_runs(files))
    return [path for files in by_name.values() for path in files if path not in older], sorted(older)


def _plain_name(path: str) -> str:
    match = _NUMBERED_NAME.fullmatch(path)
    return path if match is None else match[1] + (match[3] or "")


def _rings_of_earlier_runs(files: Iterable[str]) -> list[str]:
    ended_rings: dict[str, list[tuple[int, str]]] = {}
    running_processes: set[str] = set()
    for file in files:
        try:
            with open_regular(file) as ring:
                header = _read_header(file, ring.fileno())
                state = writer_state(ring.fileno(), header)
        except (OSError, RingError):
            continue  # reading the ring will report the error
        rank, start_ns = header.metadata.get("rank"), header.writer.get("started")
        is_child = rank is not None and _PID.search(file)
        process = str(rank if is_child else header.writer.get("name", _plain_name(file)))
        if state == "running":
            running_processes.add(process)
        else:
            ended_rings.setdefault(process, []).append((start_ns if isinstance(start_ns, int) else 0, file))
    earlier = [sorted(rings)[: None if process in running_processes else -1] for process, rings in ended_rings.items()]
    return [file for rings in earlier for _, file in rings]
