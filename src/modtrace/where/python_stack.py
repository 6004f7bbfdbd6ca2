"""The Python stacks of a running process, as py-spy tells them."""

from __future__ import annotations

import shutil
import subprocess

from .rank_state import RankState

__all__ = ["NO_PY_SPY", "python_stacks"]

_TIMEOUT_S = 20.0
NO_PY_SPY = (
    "Python stacks are read by py-spy, which is not installed: pip install py-spy. Without it, a script that calls "
    "faulthandler.register(signal.SIGUSR1) prints them itself on kill -USR1 PID."
)


def python_stacks(state: RankState) -> list[str] | None:
    """Return the lines that `py-spy dump` prints of a process, or why it cannot; None where py-spy is not installed.

    py-spy stops the process for some milliseconds. Of a process that does not run here there is one line that says so.
    """
    if state.state != "running":
        return [f"pid {state.pid}: no stacks, as it does not run on this machine"]
    py_spy = shutil.which("py-spy")
    if py_spy is None:
        return None
    command = [py_spy, "dump", "--pid", str(state.pid)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"pid {state.pid}: py-spy could not read its stacks: {error}"]
    if done.returncode:
        reason = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        return [f"pid {state.pid}: py-spy could not read its stacks: {reason}"]
    return done.stdout.splitlines()
