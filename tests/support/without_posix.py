"""The `modtrace` command, or a script, where nothing of a POSIX system is there; as on Windows, as far as Linux can.

`python -m tests.support.without_posix [--torch] modtrace ARGUMENTS…`, or `SCRIPT ARGUMENTS…` in place of `modtrace`.
Without `--torch`, torch cannot be imported either.
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
import runpy
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from types import ModuleType
from typing import Any

ABSENT_MODULES = {"fcntl", "grp", "pty", "pwd", "resource", "syslog", "termios", "tty"}
ABSENT: dict[ModuleType, set[str]] = {
    os: {
        *("chown", "fchmod", "fchown", "fork", "forkpty", "getegid", "geteuid", "getgid", "getloadavg", "getpgid"),
        *("getuid", "killpg", "lchown", "mkfifo", "nice", "posix_fallocate", "pread", "preadv", "pwrite", "pwritev"),
        *("copy_file_range", "register_at_fork", "sched_getaffinity", "sendfile", "setsid", "splice"),
        *("sysconf", "uname", "O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "SEEK_DATA", "SEEK_HOLE"),
    },
    time: {name for name in dir(time) if name.startswith(("clock_", "pthread_", "CLOCK_"))},
    signal: {
        *("SIGALRM", "SIGCHLD", "SIGCONT", "SIGHUP", "SIGKILL", "SIGPIPE", "SIGQUIT", "SIGSTOP", "SIGTSTP", "SIGUSR1"),
        *("SIGUSR2", "alarm", "pause", "pthread_kill", "pthread_sigmask", "setitimer", "siginterrupt", "sigpending"),
        *("sigtimedwait", "sigwait", "sigwaitinfo"),
    },
    mmap: {name for name in dir(mmap) if name.startswith(("MADV_", "MAP_", "PROT_"))},
    select: {"epoll", "poll"},
    socket: {"AF_UNIX", "SO_REUSEPORT", "socketpair"},
}
O_BINARY = 0x8000
"""As on Windows, where a file that is opened without it changes the ends of lines; Linux ignores it."""


class _Mmap(mmap.mmap):
    def __new__(cls, fileno: int, length: int, **options: Any) -> _Mmap:
        if options.keys() - {"tagname", "access", "offset"}:
            raise TypeError(f"mmap() has no {options}")
        return super().__new__(cls, fileno, length, **options)

    def __getattribute__(self, name: str) -> Any:
        if name == "madvise":
            raise AttributeError(name)
        return super().__getattribute__(name)


class _CDLL(ctypes.CDLL):
    def __init__(self, name: str | None, *arguments: Any, **options: Any) -> None:
        if name is None:
            raise TypeError("LoadLibrary() argument 1 must be str, not None")
        super().__init__(name, *arguments, **options)


class _Status:
    """What `os.fstat` returns, without the blocks."""

    def __init__(self, status: os.stat_result) -> None:
        self._status = status

    def __getattr__(self, name: str) -> Any:
        if name in ("st_blocks", "st_blksize"):
            raise AttributeError(name)
        return getattr(self._status, name)


def _refuse_proc(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and isinstance(arguments[0], str) and arguments[0].startswith(("/proc/", "/sys/")):
        raise FileNotFoundError(2, "No such file or directory", arguments[0])


def take_away(modules: set[str]) -> None:
    """Take away what Windows lacks, and these modules."""
    # What ctypes keeps as `ctypes.pythonapi` was opened by its import.
    vars(ctypes)["CDLL"] = _CDLL
    vars(mmap)["mmap"] = _Mmap
    open_, fstat = os.open, os.fstat

    def open_binary(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        assert flags & O_BINARY, f"{path} is opened as text"
        return open_(path, flags, *arguments, **options)

    vars(os).update(open=open_binary, fstat=lambda descriptor: _Status(fstat(descriptor)))
    for module, names in ABSENT.items():
        for name in names & vars(module).keys():
            delattr(module, name)
    absent = ABSENT_MODULES | modules
    for name in list(sys.modules):
        if name.partition(".")[0] in absent:
            del sys.modules[name]
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]  # None: there is no such module
    sys.addaudithook(_refuse_proc)


def main(arguments: Sequence[str]) -> None:
    """Take everything away, then run the command or the script."""
    with_torch = arguments[0] == "--torch"
    program, *rest = arguments[1:] if with_torch else arguments
    vars(os).update(O_BINARY=O_BINARY, supports_dir_fd=set(), supports_fd=set())
    for name in ("shutil", "tempfile"):  # look at these when they are imported
        sys.modules.pop(name, None)
    # What was built for a POSIX system needs one when it is imported.
    importlib.import_module("torch.profiler" if with_torch else "numpy")
    take_away(set() if with_torch else {"torch"})
    sys.argv = [program, *rest]
    if program == "modtrace":
        runpy.run_module("modtrace", run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
