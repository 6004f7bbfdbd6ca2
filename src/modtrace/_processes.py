"""The state and signals of processes, read from the kernel, and a command that runs without a child process."""

import ctypes
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple


class ProcessStat(NamedTuple):
    """Fields of a process's `/proc/PID/stat`."""

    state: str  # one letter: R runs, S and D wait, Z and X are dead
    parent: int  # id of the parent process
    start_unix_ns: int  # start of the process in Unix ns, rounded to the kernel's tick of 10 ms
    start_ticks: int  # start of the process in ticks since the kernel started


def read_process_stat(pid: int | Literal["self"]) -> ProcessStat:
    """Read the state of a process of this host, or of "self"; raises OSError if the kernel does not report it."""
    # The second field, the command's name in brackets, may contain blanks and brackets.
    fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    start_ticks = int(fields[19])
    start_after_boot_ns = start_ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    boot_unix_ns = time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    return ProcessStat(fields[0], int(fields[1]), boot_unix_ns + start_after_boot_ns, start_ticks)


def child_processes(pid: int) -> dict[int, str]:
    """Return the state of each child: "running", "dead", "asleep", "in" a kernel's function; empty without `/proc`."""
    children = {}
    for folder in sorted(Path("/proc").glob("[0-9]*"), key=lambda folder: int(folder.name)):
        with suppress(OSError):
            stat = read_process_stat(int(folder.name))
            if stat.parent == pid:
                function = (folder / "wchan").read_text().partition(".")[0].strip("0")
                sleep_state = f"in {function}" if function else "asleep"
                children[int(folder.name)] = {"R": "running", "Z": "dead"}.get(stat.state, sleep_state)
    return children


def is_signal_caught(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal, in Python or in C; most signals kill without a handler."""
    return _is_in_set(f"/proc/{pid}/status", "SigCgt", number)


def threads_with_signal(pid: int, number: int) -> set[str]:
    """Return the threads for which a signal is pending, or that block it, such as while its handler runs."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return set()
    paths = {tid: f"/proc/{pid}/task/{tid}/status" for tid in threads}
    sets = ("ShdPnd", "SigPnd", "SigBlk")
    return {tid for tid, path in paths.items() if any(_is_in_set(path, field, number) for field in sets)}


def _is_in_set(status: str, field: str, number: int) -> bool:
    """Return whether a set of signals (bit 0 is signal 1) in a status file contains a signal; False without file."""
    try:
        with open(status) as lines:
            signals = next((int(line.split()[1], 16) for line in lines if line.startswith(f"{field}:")), 0)
    except OSError:
        return False
    return bool(signals >> (number - 1) & 1)


_CLONE_VM, _CLONE_VFORK, _WAIT_FOR_ALL = 0x100, 0x4000, 0x40000000
_STACK_BYTES = 1 << 18


def run_without_child(command: str) -> None:
    """Run a shell command that this process cannot see as its child; raises OSError or AttributeError."""
    library = ctypes.CDLL(None, use_errno=True)
    stack = ctypes.create_string_buffer(_STACK_BYTES)
    top = ctypes.c_void_p((ctypes.addressof(stack) + _STACK_BYTES) & ~63)
    flags = _CLONE_VM | _CLONE_VFORK  # as in posix_spawn, this thread waits for the end of the new process
    # The new process shares this one's memory, so neither Python nor a handler of SIGCHLD may run in it.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGCHLD,))
    try:
        child = library.clone(ctypes.cast(library.system, ctypes.c_void_p), top, flags, os.fsencode(command))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if child < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    with suppress(ChildProcessError):
        os.waitpid(child, _WAIT_FOR_ALL)
