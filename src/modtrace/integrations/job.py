"""A job: a recorded process and its children. These are told what to record, and note what they have.

The children learn it from the environment. `PYTHONPATH` begins with the folder `startup`, whose `sitecustomize` Python
runs when it starts, and `MODTRACE_JOB` holds the rest. So it reaches whatever starts a Python: `multiprocessing`,
`subprocess`, torchrun, a shell. Forked children have it already.
"""

import contextlib
import io
import json
import os
import secrets
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .._ranks import add_rank, insert_before_suffixes
from ..record_options import OPTIONS

_VARIABLE = "MODTRACE_JOB"
_STARTUP = str(Path(__file__).with_name("startup"))
PARSERS: Mapping[str, Callable[[str], Any]] = {option.name: option.parse for option in OPTIONS}
"""The options of a recording as text → their values."""
PATHS = {"path", *(option.name for option in OPTIONS if option.is_path)}
"""Those that are paths."""


class ChildCount(NamedTuple):
    """The files of a job's children, as these noted them."""

    saved: list[str]  # the file that each recorded child saved
    unsaved: list[str]  # the ring of each child that began to record and saved nothing; empty if it has none


class Job:
    """A job, as each of its processes knows it.

    Args:
        arguments: of `modtrace.record`, for the process that begins the job; its paths are absolute and not expanded.
        notes: the file to which the children append a line when they begin to record and one when they have saved. It
            is in the memory of the process that begins the job and goes with it, however that ends: a path below
            `/proc`, and what tells it from another process's file.
    """

    def __init__(self, arguments: Mapping[str, Any], notes: tuple[str, str]) -> None:
        self.arguments = dict(arguments)
        self._notes = notes

    @classmethod
    def begin(cls, arguments: Mapping[str, Any]) -> "Job":
        """Return a new job."""
        notes = ("", "")
        with contextlib.suppress(OSError, AttributeError):  # not Linux: the children are recorded and not counted
            name = f"modtrace-job-{secrets.token_hex(8)}"
            notes = f"/proc/{os.getpid()}/fd/{os.memfd_create(name)}", name
        return cls(arguments, notes)

    @classmethod
    def inherited(cls) -> "Job":
        """Return the job whose process started this one, from what `tell_children` left in the environment."""
        arguments, notes = json.loads(os.environ[_VARIABLE].partition("\n")[2])
        for name, value in arguments.items():
            if isinstance(value, str) and name in PARSERS:
                arguments[name] = PARSERS[name](value)
        return cls(arguments, notes)

    def tell_children(self) -> None:
        """Let processes that this one starts from now on record themselves, if they run the same Python."""
        # `startup/sitecustomize.py` compares the first line.
        job = json.dumps([self.arguments, self._notes], default=str)
        os.environ[_VARIABLE] = f"{sys.hexversion:x} {sys.prefix}\n{job}"
        path = os.environ.get("PYTHONPATH", "")
        if path.split(os.pathsep)[0] != _STARTUP:
            os.environ["PYTHONPATH"] = f"{_STARTUP}{os.pathsep}{path}" if path else _STARTUP

    def child_arguments(self) -> dict[str, Any]:
        """Return the arguments of `modtrace.record` for this child, which has files of its own."""
        return {
            name: _child_path(value) if name in PATHS and value is not None else value
            for name, value in self.arguments.items()
        }

    def note(self, event: str, path: str = "") -> None:
        """Note that this process, a child, records ("begin", to a ring or ""), or saved to `path` ("saved")."""
        with contextlib.suppress(OSError), self._open() as file:
            file.write(f"{json.dumps([event, os.getpid(), path])}\n".encode())

    def close(self) -> ChildCount:
        """Return what the children noted until now, and remove the notes."""
        try:
            with self._open() as file:
                lines = file.read().splitlines()
            os.close(int(os.path.basename(self._notes[0])))
        except OSError:
            return ChildCount([], [])
        notes = [json.loads(line) for line in lines]
        saved = {pid: path for event, pid, path in notes if event == "saved"}
        unsaved = {pid: path for _, pid, path in notes if pid not in saved}
        return ChildCount([*saved.values()], [*unsaved.values()])

    def _open(self) -> io.FileIO:
        """Open the notes for reading from the start, and for appending.

        Raises:
            OSError: they are gone with their process, whose number another one may have; or the process closed them.
        """
        path, name = self._notes
        file = io.FileIO(path, "r+", opener=lambda path, flags: os.open(path, flags | os.O_APPEND | os.O_NONBLOCK))
        if f"memfd:{name}" not in os.readlink(f"/proc/self/fd/{file.fileno()}"):
            file.close()
            raise FileNotFoundError(path)
        return file


def _child_path(path: str) -> str:
    path = add_rank(path, os.environ)
    return path if "%p" in path.replace("%%", "") else insert_before_suffixes(path, "pid%p")
