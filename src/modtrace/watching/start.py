"""Starts the watcher of a ring beside the training, which never sees a child process."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from .windows import kept_folder

_MAIN = (
    "import os, signal, sys; os.setsid(); os.closerange(3, min(os.sysconf('SC_OPEN_MAX'), 1 << 20)); "
    "signal.pthread_sigmask(signal.SIG_SETMASK, ()); "
    "sys.path[0] = sys.argv.pop(1); from modtrace.cli import main; main()"
)
"""It leaves the terminal and the descriptors of the training, which other libraries may hand on."""
_CLONE_VM, _CLONE_VFORK, _WAIT_FOR_ALL = 0x100, 0x4000, 0x40000000
_STACK_BYTES = 1 << 18


def start_watcher(ring: str, conditions: Sequence[str]) -> None:
    """Start `modtrace watch` for a ring of this process; it ends by itself once the ring has.

    The kernel sends SIGCHLD for an ended child, and `os.wait` returns it. A program that expects neither must not get
    them from a profiler. So the process between the two is made by `clone` without a signal, which `os.wait` does not
    see; its child runs the shell, which starts the watcher and ends.

    Raises:
        OSError: it cannot be started.
    """
    folder = kept_folder(ring)
    os.makedirs(folder, exist_ok=True)
    given = [word for condition in conditions for word in ("--keep-when", condition)]
    root = str(Path(__file__).parents[2])
    command = shlex.join([sys.executable, "-c", _MAIN, root, "watch", os.path.abspath(ring), *given])
    log = shlex.quote(str(folder / "watch.log"))
    # A numpy that reads a ring needs one thread.
    _run_unseen(f"OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 {command} </dev/null >>{log} 2>&1 &")


def _run_unseen(command: str) -> None:
    """Run a command of the shell to its end, without a child that this process could see."""
    library = ctypes.CDLL(None, use_errno=True)
    stack = ctypes.create_string_buffer(_STACK_BYTES)
    top = ctypes.c_void_p((ctypes.addressof(stack) + _STACK_BYTES) & ~63)
    flags = _CLONE_VM | _CLONE_VFORK  # as posix_spawn does it: this thread goes on once the other process has ended
    # No Python may run in the process between, which has this one's memory; no handler of SIGCHLD either.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGCHLD,))
    try:
        child = library.clone(ctypes.cast(library.system, ctypes.c_void_p), top, flags, os.fsencode(command))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if child < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    with contextlib.suppress(ChildProcessError):
        os.waitpid(child, _WAIT_FOR_ALL)
