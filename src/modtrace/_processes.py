"""Processes, as the kernel has them: their state and signals; and one that this process cannot see."""

import ctypes
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple


class ProcessStat(NamedTuple):
    """A process as `/proc` has it."""

    state: str  # one letter: R runs, S and D wait, Z and X are dead
    parent: int  # id of the process that it is a child of
    start_unix_ns: int  # when it began, in Unix nanoseconds, to the kernel's tick of 10 ms
    start_ticks: int  # the same in ticks since the kernel started


def read_process_stat(pid: int | Literal["self"]) -> ProcessStat:
    """Read what the kernel says of a process of this host, or of "self"; raises OSError if it says nothing."""
    # The second field, the command's name in brackets, may hold blanks and brackets.
    fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    start_ticks = int(fields[19])
    started_after_boot_ns = start_ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    boot_unix_ns = time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    return ProcessStat(fields[0], int(fields[1]), boot_unix_ns + started_after_boot_ns, start_ticks)


def child_processes(pid: int) -> dict[int, str]:
    """Return what each child of a process of this host does: "running", "dead", "asleep" or "in" a kernel's function.

    It is empty if the system has no `/proc`.
    """
    children = {}
    for folder in sorted(Path("/proc").glob("[0-9]*"), key=lambda folder: int(folder.name)):
        with suppress(OSError):
            stat = read_process_stat(int(folder.name))
            if stat.parent == pid:
                function = (folder / "wchan").read_text().partition(".")[0].strip("0")
                asleep = f"in {function}" if function else "asleep"
                children[int(folder.name)] = {"R": "running", "Z": "dead"}.get(stat.state, asleep)
    return children


def is_signal_caught(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal, in Python or in C; a signal without one most often kills."""
    return _has(f"/proc/{pid}/status", "SigCgt", number)


def threads_with_signal(pid: int, number: int) -> set[str]:
    """Return the threads for which a signal waits, or that block it: as its handler does until it returns."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return set()
    fields = ("ShdPnd", "SigPnd", "SigBlk")
    return {tid for tid in threads if any(_has(f"/proc/{pid}/task/{tid}/status", field, number) for field in fields)}


def _has(status: str, field: str, number: int) -> bool:
    """Whether a signal is in a set of a process or thread (bit 0 is signal 1); False if that is gone."""
    try:
        with open(status) as lines:
            signals = next((int(line.split()[1], 16) for line in lines if line.startswith(f"{field}:")), 0)
    except OSError:
        return False
    return bool(signals >> (number - 1) & 1)


_CLONE_VM, _CLONE_VFORK, _WAIT_FOR_ALL = 0x100, 0x4000, 0x40000000
_STACK_BYTES = 1 << 18


def run_unseen(command: str) -> None:
    """Run a shell's command without a child that this process could see; raises OSError or AttributeError."""
    library = ctypes.CDLL(None, use_errno=True)
    stack = ctypes.create_string_buffer(_STACK_BYTES)
    top = ctypes.c_void_p((ctypes.addressof(stack) + _STACK_BYTES) & ~63)
    flags = _CLONE_VM | _CLONE_VFORK  # as posix_spawn does it: this thread goes on once the other process has ended
    # No Python may run in the process between, which has this one's memory; no handler of SIGCHLD either.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGCHLD,))
    try:
        child = library.clone(ctypes.cast(library.system, ctypes.c_void_p), top, flags, os.fsencode(command))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if child < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    with suppress(ChildProcessError):
        os.waitpid(child, _WAIT_FOR_ALL)
