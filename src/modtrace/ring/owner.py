"""Which process writes a ring file, and whether it lives.

The writer holds an open file description lock on the file. The kernel drops it when the process ends, however it ends,
and shows it to processes in other namespaces. The header says which process it is, for file systems without locks.
"""

import contextlib
import errno
import hashlib
import os
import struct
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Literal

from .._interrupts import in_forked_child
from .._processes import read_process_stat
from .file_format import FileHeader

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
    """Return what the header says of this process."""
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
    start_ticks = find_process(pid)
    return start_ticks if start_ticks is None or start_ticks is False else start_ticks == writer.get("start_ticks")


def find_process(pid: int) -> int | bool | None:
    """Return when a process began, in ticks; False if there is none, None if the system does not say."""
    if pid < 1:
        return False
    if os.name != "posix":
        return None  # there is no way to ask: os.kill would interrupt a process on Windows
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's
    try:
        stat = read_process_stat(pid)
    except OSError:
        return None
    # A killed process whose parent has not waited for it yet is still listed.
    return False if stat.state in "ZX" else stat.start_ticks


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
