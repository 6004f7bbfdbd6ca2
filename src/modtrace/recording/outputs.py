"""The files that a recording writes: a set for each cycle of its schedule, and different files for each rank."""

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
from .._files import next_step_hint
from .._processes import read_process_stat
from .._ranks import expand_path, insert_before_suffixes, is_shared
from ..reporting import report  # noqa: F401  # `Timeline.save` imports it
from ..write import WRITTEN, check_writable, find_writer

if TYPE_CHECKING:
    from .capture import Capture

# A recording imports nothing after its start. A child forked while another thread imports a module would wait forever
# for that module; and a disk that is full when the recording ends has no space for a `.pyc` file.
for _suffix in WRITTEN:
    find_writer(_suffix)

Schedule = Callable[[int], ProfilerAction]
"""The function of `torch.profiler.schedule`: number of a step, from 0 → action in the step."""


class Cycles:
    """The cycles of a schedule, step by step; without a schedule, all steps are one cycle without a number."""

    def __init__(self, schedule: Schedule | None) -> None:
        if schedule is not None and not callable(schedule):
            raise RecordingError(f"schedule is {schedule!r}; give it as torch.profiler.schedule(wait=…, …) makes it")
        self._schedule = schedule
        self.is_scheduled = schedule is not None
        self.number = 0  # number of the current or next cycle, from 0
        # The action in the current step; a warm-up makes the ring and the engine, which need time.
        self.action = self._action_in(0)

    def path(self, path: str) -> str:
        """Return the path of the current or next cycle: `a.json` → `a.cycle0.json`."""
        return path if self._schedule is None else insert_before_suffixes(path, f"cycle{self.number}")

    def next(self, step: int) -> bool:
        """Go on to step `step`; return whether the cycle ended with the step before."""
        last_action, self.action = self.action, self._action_in(step)
        if last_action is ProfilerAction.RECORD:
            return self.action not in (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)
        return last_action is ProfilerAction.RECORD_AND_SAVE

    def _action_in(self, step: int) -> ProfilerAction:
        action = ProfilerAction.RECORD if self._schedule is None else self._schedule(step)
        if not isinstance(action, ProfilerAction):
            raise RecordingError(f"schedule({step}) is {action!r}; it must be a torch.profiler.ProfilerAction")
        return action


_claims: dict[str, socket.socket] = {}
"""The claims by the file's real path, held until the process ends so that no rank overwrites another rank's file."""
_written_files: set[tuple[int, int]] = set()
"""Device and inode of each file that this process has written."""


class OutputPath:
    """The path of a file that a recording writes.

    If several ranks have the same path, each makes sure that only it writes the file. On one host, only the first rank
    can claim the path. If the ranks run on several hosts that share a file system, or the first rank has ended already,
    the file is newer than this process.

    Args:
        name: the name of the option in errors.
        path: text or `pathlib.Path`; `%r`, `%p`, `%h` and `%%` are filled in.

    Raises:
        RecordingError: `path` is not a path, or `%r` has no value.
    """

    def __init__(self, name: str, path: str | os.PathLike[str]) -> None:
        text: object = os.fspath(path) if isinstance(path, os.PathLike) else path
        if not isinstance(text, str):
            raise RecordingError(
                f"{name} is of type {type(path).__name__}; pass a str or a pathlib.Path (pass a model as model=)"
            )
        if "\0" in text:
            raise RecordingError(f"{name} is {path!r}; remove the NUL character, which no file name can contain")
        self.path = expand_path(text, os.environ)
        self._is_shared = is_shared(text, os.environ)

    def claim(self, path: str) -> None:
        """Make sure that no other rank writes `path`, the file of the recording or of a cycle.

        Raises RecordingError if another rank writes or has written it.
        """
        if not self._is_shared:
            return
        self.check(path)
        real = os.path.realpath(path)
        if real in _claims:
            return
        if not (hasattr(os, "getuid") and hasattr(socket, "AF_UNIX")):
            return  # on Windows only `check` protects the file
        # An abstract socket name has no file, and the kernel drops it when the process ends in any way.
        name = f"\0modtrace-{os.getuid()}-{hashlib.sha256(real.encode()).hexdigest()[:32]}"
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind(name)
        except OSError as error:
            claim.close()
            if error.errno == errno.EADDRINUSE:
                raise _shared_path_error(path) from None
            return  # without abstract names only `check` protects the file
        _claims[real] = claim

    def check(self, path: str) -> None:
        """Make sure that no other process has written the file at `path` since this process started.

        Raises:
            RecordingError: another process has written it.
        """
        if not self._is_shared:
            return
        with contextlib.suppress(OSError):
            status = os.stat(path)
            is_ours = (status.st_dev, status.st_ino) in _written_files
            if not is_ours and status.st_mtime_ns > read_process_stat("self").start_unix_ns:
                raise _shared_path_error(path)

    def note_written(self, path: str) -> None:
        """Remember that this process has written the file at `path`."""
        if self._is_shared:
            with contextlib.suppress(OSError):
                status = os.stat(path)
                _written_files.add((status.st_dev, status.st_ino))


def _shared_path_error(path: str) -> RecordingError:
    return RecordingError(
        f"{path}: another rank writes this file too; put %r (the rank) in the path, such as trace-%r.pftrace"
    )


_log = logging.getLogger("modtrace")


class Outputs:
    """The paths to which a recording saves, and the file of its ring."""

    def __init__(
        self, path: str | os.PathLike[str] | None, ring: str | os.PathLike[str] | None, cycles: Cycles
    ) -> None:
        self._trace = None if path is None else OutputPath("path", path)
        self._ring = None if ring is None else OutputPath("ring", ring)
        self._cycles = cycles
        self._ring_names: dict[str, str] = {}
        self.saved: list[str] = []  # paths of the files saved so far
        if self._trace is not None:
            check_writable(self._trace.path)

    @property
    def destination(self) -> str:
        """The destination for a message: `to step.pftrace`, or `in memory`."""
        path = self.path or self.ring_path
        return "in memory" if path is None else f"to {path}"

    @property
    def path(self) -> str | None:
        """The path to which the current or next cycle is saved; None without a path."""
        return None if self._trace is None else self._cycles.path(self._trace.path)

    @property
    def ring_path(self) -> str | None:
        """The file of the ring of the current or next cycle; None without a file."""
        if self._ring is None:
            return None
        path = self._cycles.path(self._ring.path)
        return self._ring_names.get(path, path)

    def make_capture(self, make: "Callable[[str | None], Capture]", warn: Callable[[str], None]) -> "Capture":
        """Call `make` with the path of the ring's file (None: in memory), and return the capture.

        Raises RecordingError if another rank writes the ring's file, or saves to the same path.
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
        """Call `save` with the path to save to, if a path was given.

        Raises RecordingError if another process has written that file.
        """
        if self._trace is not None:
            path = self._cycles.path(self._trace.path)
            self._trace.check(path)
            save(path)
            self._trace.note_written(path)
            if path not in self.saved:
                self.saved.append(path)


def log_saved(path: str) -> None:
    """Log the path of a recording, and the command that shows it."""
    _log.info("recorded to %s. %s", path, next_step_hint(path))
