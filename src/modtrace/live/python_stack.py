"""The Python stacks of a running process, by py-spy, or by its own faulthandler if it listens to a signal."""

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import time

from .._processes import is_signal_caught, threads_with_signal
from ..ring import stacks_path
from .places import workers
from .rank_state import RankState

_TIMEOUT_S = 20.0
_ANSWER_TIMEOUT_S = 5.0
_POLL_S = 0.002
NO_STACKS = (
    "Python stacks are read by py-spy, which is not installed: pip install py-spy. Without it, a process that records "
    "with stacks_on_signal=signal.SIGUSR2 (modtrace run --stacks-on-signal SIGUSR2) writes them when asked."
)


def python_stacks(state: RankState) -> list[str] | None:
    """Return the lines of a process' stacks, or why there are none; None if nothing can read them.

    Those of its child processes follow if it waits for its DataLoader. py-spy stops a process for some milliseconds;
    without py-spy it gets the signal that it listens to for this, and no other. If the process does not run here, one
    line says so.
    """
    if state.state != "running" or not state.known_pid:
        return [f"pid {state.pid}: no stacks, as it does not run on this machine"]
    py_spy = shutil.which("py-spy")
    number, lines = state.stacks_signal, []
    for pid in (state.pid, *workers(state)):
        lines += ["", f"child process {pid}:"] if pid != state.pid else []
        if py_spy is not None:
            lines += _by_py_spy(py_spy, pid)
        elif number is not None:
            lines += _by_signal(pid, stacks_path(state.path), number)
        else:
            return None
    return lines


def _by_py_spy(py_spy: str, pid: int) -> list[str]:
    command = [py_spy, "dump", "--pid", str(pid)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"pid {pid}: py-spy could not read its stacks: {error}"]
    if done.returncode:
        reason = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        return [f"pid {pid}: py-spy could not read its stacks: {reason}"]
    return done.stdout.splitlines()


def _by_signal(pid: int, path: str, number: int) -> list[str]:
    """Ask the process for its stacks, and return what it appends to the file that both know."""
    try:
        # Taken first: from now on this is one process, whatever becomes of its number.
        process = os.pidfd_open(pid)
    except OSError as error:
        return [f"pid {pid}: no stacks: {error.strerror}"]
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, encoding="utf-8", errors="replace") as file:
            if not _listens(pid, number, os.fstat(descriptor)):
                return [f"pid {pid}: no stacks: it does not listen to signal {number} for {path}"]
            before, always = file.seek(0, os.SEEK_END), threads_with_signal(pid, number)
            signal.pidfd_send_signal(process, number)
            deadline = time.monotonic() + _ANSWER_TIMEOUT_S
            while os.fstat(descriptor).st_size == before or threads_with_signal(pid, number) - always:
                if time.monotonic() > deadline:
                    return [f"pid {pid}: no stacks: no answer in {_ANSWER_TIMEOUT_S:.0f} s"]
                time.sleep(_POLL_S)
            return file.read().splitlines()
    except OSError as error:
        return [f"pid {pid}: no stacks: {error.filename or path}: {error.strerror}"]
    finally:
        os.close(process)


def _listens(pid: int, number: int, file: os.stat_result) -> bool:
    """Whether a process is surely the one that registered the signal: it has this very file open, and a handler.

    The ring may be a copy, or forged, or of a container with process ids of its own.
    """
    if not stat.S_ISREG(file.st_mode) or file.st_uid != os.geteuid() or not is_signal_caught(pid, number):
        return False
    folder = f"/proc/{pid}/fd"
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(f"{folder}/{name}"), file):
                return True
    return False
