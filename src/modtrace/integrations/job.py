"""A job: a recorded process and its children, which get the options of the recording and note their files.

The children read the options from the environment. `PYTHONPATH` starts with the folder `startup`, whose `sitecustomize`
Python runs when it starts, and `MODTRACE_JOB` holds the job. So every program that starts a Python passes the job on:
`multiprocessing`, `subprocess`, torchrun, a shell. Forked children inherit the job.
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
"""The parsers of a recording's options: name → function from text to value."""
PATHS = {"path", *(option.name for option in OPTIONS if option.is_path)}
"""The names of options that are paths."""


class ChildFiles(NamedTuple):
    """The files that a job's children have noted."""

    saved: list[str]  # the file that each recorded child saved
    unsaved: list[str]  # the ring of each child that started to record and saved nothing; "" without a ring


class Job:
    """A job, as each of its processes knows it.

    Args:
        arguments: the first process's arguments of `modtrace.record`; its paths are absolute and not expanded.
        notes: the path below `/proc`, and the unique name, of the file to which each child appends a line when it
            starts to record and when it has saved. The file is in the memory of the first process, and ends with it.
    """

    def __init__(self, arguments: Mapping[str, Any], notes: tuple[str, str]) -> None:
        self.arguments = dict(arguments)
        self._notes = notes

    @classmethod
    def make(cls, arguments: Mapping[str, Any]) -> "Job":
        """Return a new job, with this process as its first one."""
        notes = ("", "")
        with contextlib.suppress(OSError, AttributeError):  # outside Linux, children are recorded and not counted
            name = f"modtrace-job-{secrets.token_hex(8)}"
            notes = f"/proc/{os.getpid()}/fd/{os.memfd_create(name)}", name
        return cls(arguments, notes)

    @classmethod
    def inherited(cls) -> "Job":
        """Return the job whose process started this one, from the environment that `tell_children` set."""
        arguments, notes = json.loads(os.environ[_VARIABLE].partition("\n")[2])
        for name, value in arguments.items():
            if isinstance(value, str) and name in PARSERS:
                arguments[name] = PARSERS[name](value)
        return cls(arguments, notes)

    def tell_children(self) -> None:
        """Make processes that this one starts from now on record themselves, if they run the same Python."""
        # `startup/sitecustomize.py` compares the first line.
        job = json.dumps([self.arguments, self._notes], default=str)
        os.environ[_VARIABLE] = f"{sys.hexversion:x} {sys.prefix}\n{job}"
        path = os.environ.get("PYTHONPATH", "")
        if path.split(os.pathsep)[0] != _STARTUP:
            os.environ["PYTHONPATH"] = f"{_STARTUP}{os.pathsep}{path}" if path else _STARTUP

    def child_arguments(self) -> dict[str, Any]:
        """Return the arguments of `modtrace.record` for this child, with paths of its own."""
        return {
            name: _child_path(value) if name in PATHS and value is not None else value
            for name, value in self.arguments.items()
        }

    def note(self, event: str, path: str = "") -> None:
        """Note an event of this child: "begin" of its recording to the ring `path` (or ""), or "saved" to `path`."""
        with contextlib.suppress(OSError), self._open() as file:
            file.write(f"{json.dumps([event, os.getpid(), path])}\n".encode())

    def close(self) -> ChildFiles:
        """Return the files that the children have noted so far, and remove the notes."""
        try:
            with self._open() as file:
                lines = file.read().splitlines()
            os.close(int(os.path.basename(self._notes[0])))
        except OSError:
            return ChildFiles([], [])
        notes = [json.loads(line) for line in lines]
        saved = {pid: path for event, pid, path in notes if event == "saved"}
        unsaved = {pid: path for _, pid, path in notes if pid not in saved}
        return ChildFiles([*saved.values()], [*unsaved.values()])

    def _open(self) -> io.FileIO:
        """Open the notes for reading from the start, and for appending.

        Raises:
            OSError: the first process has ended, and another may have its PID, or the process closed the notes.
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
