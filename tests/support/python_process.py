"""Python in a process of its own, with the modtrace and the tests of this checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import IO

import modtrace

__all__ = [
    "HANGS_AFTER_S",
    "LAZY_IMPORTS_WORK",
    "STARTUP",
    "PythonProcess",
    "python_environment",
    "run_python",
    "start_python",
    "users_environment",
]

HANGS_AFTER_S = 600
"""Seconds after which a process that has not ended never will, even on a busy machine."""
LAZY_IMPORTS_WORK = sys.version_info < (3, 13) or [*map(int, version("torch").split(".")[:2])] < [2, 14]
"""Torch 2.14 deletes names while it is imported, which modules of CPython 3.13's LazyLoader do not survive."""

_SOURCE, _ROOT = Path(modtrace.__file__).parents[1], Path(__file__).parents[2]
STARTUP = Path(__file__).parent / "startup"
"""A folder whose `sitecustomize` Python runs at its start."""


def python_environment(**variables: str) -> dict[str, str]:
    """Return `users_environment` with less garbage collection in Python, by `startup/sitecustomize.py`."""
    return users_environment(**{"PYTHONPATH": _search_path(_SOURCE, _ROOT, STARTUP), **variables})


def users_environment(**variables: str) -> dict[str, str]:
    """Return this process's environment, from which a Python can import modtrace and the tests, and more variables."""
    return {**os.environ, "PYTHONPATH": _search_path(_SOURCE, _ROOT), **variables}


def _search_path(*folders: Path) -> str:
    return os.pathsep.join(map(str, folders))


def run_python(
    *arguments: object,
    status: int | None = 0,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    wrapper: Sequence[str] = (),
    timeout_s: float = HANGS_AFTER_S,
) -> subprocess.CompletedProcess[str]:
    """Run Python to its end and return its output.

    Args:
        arguments: Python's arguments: "-c" and code, "-m" and a module, or a script; converted to text.
        status: the expected exit status; None for any.
        cwd: its working directory.
        env: its whole environment; default: `python_environment()`.
        wrapper: a command that runs it.
        timeout_s: seconds after which it is killed.
    """
    done = subprocess.run(
        [*wrapper, sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=python_environment() if env is None else env,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert status in (None, done.returncode), f"exit status {done.returncode}\n{done.stderr}"
    return done


class PythonProcess(subprocess.Popen[str]):
    """A process that a failure in its `with` block kills without waiting for its end, which may never come."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            self.kill()
        super().__exit__(kind, error, traceback)


def start_python(
    *arguments: object,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: int | None = None,
    stdout: int | IO[bytes] | None = subprocess.PIPE,
    stderr: int | IO[bytes] | None = None,
) -> subprocess.Popen[str]:
    """Start Python and return at once; arguments are those of `run_python` and of `subprocess.Popen`."""
    return PythonProcess(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=python_environment() if env is None else env,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        text=True,
    )
