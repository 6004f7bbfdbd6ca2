"""The files that a recording writes: a set for each cycle of its schedule, and no two ranks write the same one."""

import contextlib
import errno
import hashlib
import logging
import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy.ma  # noqa: F401  # `numpy.unique` imports it when it is first called
from torch.profiler import ProfilerAction

from .._errors import RecordingError
from .._processes import read_process_stat
from .._ranks import expand_path, insert_before_suffixes, is_shared
from .._tables import next_step_hint
from ..reporting import report  # noqa: F401  # `Timeline.save` imports it
from ..write import WRITTEN, check_writable, find_writer

if TYPE_CHECKING:
    from .capture import Capture

# A recording imports nothing once it begins. A child forked while another thread imports a module would wait for ever
# if it needs that module too; and a disk that is full when the recording ends takes no `.pyc` file either.
for _suffix in WRITTEN:
    find_writer(_suffix)

Schedule = Callable[[int], ProfilerAction]
"""Number of a step, from 0 → what to do in it; as `torch.profiler.schedule` makes them."""


class Cycles:
    """Goes through a schedule, step by step; None records all steps, in one cycle that has no number."""

    def __init__(self, schedule: Schedule | None) -> None:
        if schedule is not None and not callable(schedule):
            raise RecordingError(f"schedule is {schedule!r}; give it as torch.profiler.schedule(wait=…, …) makes it")
        self._schedule = schedule
        self.is_scheduled = schedule is not None
        self.number = 0  # of the cycle that runs or comes next, from 0
        # What to do in the step that runs; in a warm-up, what events go into is made: that takes time.
        self.action = self._at(0)

    def path(self, path: str) -> str:
        """Return the path of the cycle that runs or comes next: `a.json` → `a.cycle0.json`."""
        return path if self._schedule is None else insert_before_suffixes(path, f"cycle{self.number}")

    def next(self, step: int) -> bool:
        """Go on to the step of this number; return whether the cycle ended with the one before."""
        last, self.action = self.action, self._at(step)
        goes_on = self.action in (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)
        return last is ProfilerAction.RECORD_AND_SAVE or (last is ProfilerAction.RECORD and not goes_on)

    def _at(self, step: int) -> ProfilerAction:
        action = ProfilerAction.RECORD if self._schedule is None else self._schedule(step)
        if not isinstance(action, ProfilerAction):
            raise RecordingError(f"schedule({step}) is {action!r}; it must be a torch.profiler.ProfilerAction")
        return action


# Held until the process ends, so that no rank overwrites what another one has saved. By the file's real path.
_claims: dict[str, socket.socket] = {}
_written: set[tuple[int, int]] = set()
"""Device and inode of each file that this process has written."""


class OutputPath:
    """The path of a file that a recording writes.

    If several ranks run and the path does not tell them apart, each makes sure that it alone writes the file. Of two
    ranks on one host, the second one cannot claim it. If they run on several hosts that share a file system, or the
    first one has ended already, a file is there that is newer than this process.

    Args:
        name: what the path is called in errors.
        path: text or `pathlib.Path`; `%r`, `%p`, `%h` and `%%` are filled in.

    Raises:
        RecordingError: it is not a path, or `%r` has no value.
    """

    def __init__(self, name: str, path: str | os.PathLike[str]) -> None:
        text: object = os.fspath(path) if isinstance(path, os.PathLike) else path
        if not isinstance(text, str):
            raise RecordingError(
                f"{name} is of {type(path).__name__}; give it as text or as a pathlib.Path; a model is given as model="
            )
        if "\0" in text:
            raise RecordingError(f"{name} is {path!r}; the name of a file holds no NUL")
        self.path = expand_path(text, os.environ)  # with these filled in
        self._is_shared = is_shared(text, os.environ)

    def claim(self, path: str) -> None:
        """Make sure that no other rank writes `path`: this file, or that of one of its cycles.

        Raises RecordingError if another one does, or has done.
        """
        if not self._is_shared:
            return
        self.check(path)
        real = os.path.realpath(path)
        if real in _claims:
            return
        if not (hasattr(os, "getuid") and hasattr(socket, "AF_UNIX")):
            return  # Windows; `check` is left
        # A name without a file behind it, which the kernel drops when the process ends, however it ends.
        name = f"\0modtrace-{os.getuid()}-{hashlib.sha256(real.encode()).hexdigest()[:32]}"
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind(name)
        except OSError as error:
            claim.close()
            if error.errno == errno.EADDRINUSE:
                raise _taken(path) from None
            return  # no such names here; `check` is left
        _claims[real] = claim

    def check(self, path: str) -> None:
        """Make sure that no other rank wrote the file at `path`, as far as that can be known.

        Raises:
            RecordingError: another rank has, or another process since this one began.
        """
        if not self._is_shared:
            return
        with contextlib.suppress(OSError):
            status = os.stat(path)
            is_ours = (status.st_dev, status.st_ino) in _written
            if not is_ours and status.st_mtime_ns > read_process_stat("self").start_unix_ns:
                raise _taken(path)

    def note_written(self, path: str) -> None:
        """Remember that the file at `path` is this process's own."""
        if self._is_shared:
            with contextlib.suppress(OSError):
                status = os.stat(path)
                _written.add((status.st_dev, status.st_ino))


def _taken(path: str) -> RecordingError:
    return RecordingError(
        f"{path}: another rank writes this file too; put %r (the rank) in the path, as in trace-%r.pftrace"
    )


_log = logging.getLogger("modtrace")


class Outputs:
    """Where a recording saves, and the file behind its ring."""

    def __init__(
        self, path: str | os.PathLike[str] | None, ring: str | os.PathLike[str] | None, cycles: Cycles
    ) -> None:
        self._trace = None if path is None else OutputPath("path", path)
        self._ring = None if ring is None else OutputPath("ring", ring)
        self._cycles = cycles
        self._ring_names: dict[str, str] = {}
        self.saved: list[str] = []  # the files saved so far
        if self._trace is not None:
            check_writable(self._trace.path)

    @property
    def destination(self) -> str:
        """Where it records, for a message: `to step.pftrace`, or `in memory`."""
        path = self.path or self.ring_path
        return "in memory" if path is None else f"to {path}"

    @property
    def path(self) -> str | None:
        """Where the cycle that runs or comes next is saved."""
        return None if self._trace is None else self._cycles.path(self._trace.path)

    @property
    def ring_path(self) -> str | None:
        """The file behind the ring of the cycle that runs or comes next."""
        if self._ring is None:
            return None
        path = self._cycles.path(self._ring.path)
        return self._ring_names.get(path, path)

    def make_capture(self, make: "Callable[[str | None], Capture]", warn: Callable[[str], None]) -> "Capture":
        """Return what `make` makes with the path of the ring's file, or with None.

        Raises RecordingError if another rank writes that file, or saves where this one does.
        """
        if self._trace is not None:
            self._trace.claim(self._cycles.path(self._trace.path))
        if self._ring is None:
            return make(None)
        path = self._cycles.path(self._ring.path)
        self._ring.claim(path)
        capture = make(path)
        name = self._ring_names[path] = capture.ring.path or path
        if name != path:
            warn(f"a running process records to {path}; this one records to {name}")
        self._ring.note_written(name)
        return capture

    def save(self, save: Callable[[str], None]) -> None:
        """Call `save` with the path to save to, if there is one.

        Raises RecordingError if another rank has saved there.
        """
        if self._trace is not None:
            path = self._cycles.path(self._trace.path)
            self._trace.check(path)
            save(path)
            self._trace.note_written(path)
            if path not in self.saved:
                self.saved.append(path)


def log_saved(path: str) -> None:
    """Log where a recording is, and how to look at it."""
    _log.info("recorded to %s. %s", path, next_step_hint(path))
