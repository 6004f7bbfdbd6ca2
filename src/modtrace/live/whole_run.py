"""The watcher's files on all steps: a line for each step, and the distributions of times over the whole run."""

import contextlib
import json
import os
import time
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Generic, TypeVar

import numpy as np

from .._arrays import INT64_MAX, Int64Array, Numbering
from .._errors import ModtraceError, WriteError
from .._files import atomic_writer
from ..ring import whole_run_path
from ..timeline import PHASES
from ..timeline.summary.slow_steps import slow_from_ns
from .follow import RingFollower, RingUpdate
from .read_whole_run import TIME_FIELDS, read_whole_run
from .windows import KeptFolder, begin_file, find_causes

_MAX_LINES = 100_000
_MAX_PENDING_BYTES = 1 << 24
"""Maximum bytes of lines that are kept in memory while the disk is full."""


class StepsFile:
    """Writes `steps.jsonl`: rank, pid, step, end_ns (Unix), duration_ns, parts and cause of each step.

    After `max_lines` lines only every second step gets a line, after as many again every fourth, and so on. The file of
    an earlier run is renamed to `steps.1.jsonl` or the next number; the last three are kept, like rings.

    Lines that cannot be written, for example to a full disk, are written later.

    Args:
        folder: folder of the file.
        name: name of the file, which is created with the first step.
        say: prints a line for the user.
        max_lines: number of lines after which the interval of steps doubles.
        is_named: whether the user named the file. Then its permissions follow the umask, otherwise the rings'.
    """

    def __init__(
        self,
        folder: KeptFolder,
        name: str,
        say: Callable[[str], None],
        max_lines: int = _MAX_LINES,
        *,
        is_named: bool = False,
    ) -> None:
        self._folder, self._name, self._say, self._max_lines, self._is_named = folder, name, say, max_lines, is_named
        self._lines, self._stride, self._mode = 0, 1, 0o666
        self._pending_bytes = b""
        self._file: int | None = None
        self._error = ""

    def add_update(self, follower: RingFollower, update: RingUpdate) -> None:
        """Write a line for each new step of the ring."""
        steps = [step for step in update.steps if step.number % self._stride == 0]
        if not steps and not self._pending_bytes:
            return
        causes: dict[int, str] = {}
        with contextlib.suppress(ModtraceError):
            limit_ns = slow_from_ns(float(np.median([step.training_ns for step in follower.last_steps])))
            slow_numbers = [step.number for step in steps if step.training_ns > limit_ns]
            causes = find_causes(follower, slow_numbers)
        for step in steps:
            line = {
                "rank": follower.rank,
                "pid": follower.pid,
                "step": step.number,
                "end_ns": step.end_ns,
                "duration_ns": step.end_ns - step.start_ns,
                "parts": step.parts,
                "cause": causes.get(step.number),
            }
            if len(self._pending_bytes) < _MAX_PENDING_BYTES:
                self._pending_bytes += f"{json.dumps(line)}\n".encode()
        self._lines += len(steps)
        if self._lines >= self._max_lines:
            self._stride, self._lines = 2 * self._stride, 0
        self._write(0o666 if self._is_named else follower.mode)

    def close(self) -> None:
        """Write the pending lines, and close the file."""
        if self._pending_bytes:
            self._write(self._mode)
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _write(self, mode: int) -> None:
        try:
            # The file stays open, so that another watcher that creates a file of this name does not disturb this one.
            if self._file is None:
                self._file, self._mode = begin_file(self._folder.open(mode), self._name, mode), mode
            elif mode & self._mode != self._mode:  # only the permissions that all rings have
                self._mode &= mode
                os.chmod(self._file, self._mode)
            while self._pending_bytes:
                self._pending_bytes = self._pending_bytes[os.write(self._file, self._pending_bytes) :]
        except OSError as error:
            if str(error) != self._error:
                self._error = str(error)
                path = self._folder.path / self._name
                self._say(f"{path}: {error.strerror or error}; unwritten lines are kept and written later")


Key = TypeVar("Key", bound=Hashable)

_LOG_RATIO = float(np.log(1.02))
"""Each histogram bin ends 2 % above its start, so its middle is within 1 % of every value in it."""
_BINS = int(np.log(2.0**63) / _LOG_RATIO) + 1
"""Number of bins for all nanoseconds of a signed 64-bit integer."""
_WRITE_EVERY_NS = 600_000_000


class Distributions(Generic[Key]):
    """Durations in nanoseconds by key: their count, sum, minimum, maximum, and a histogram with bins of 2 %."""

    def __init__(self) -> None:
        self._row_of = Numbering[Key]()
        self._times = np.zeros((3, 0), np.int64)  # sum, minimum and maximum of each row
        self._counts = np.zeros((0, _BINS), np.int64)

    def rows(self, keys: Iterable[Key]) -> Int64Array:
        """Return the row of each key; new keys get new rows."""
        rows = np.array([self._row_of[key] for key in keys], np.int64)
        if new_rows := len(self._row_of) - len(self._counts):
            empty_times = np.array([[0], [INT64_MAX], [0]])
            self._times = np.append(self._times, empty_times.repeat(new_rows, axis=1), axis=1)
            self._counts = np.append(self._counts, np.zeros((new_rows, _BINS), np.int64), axis=0)
        return rows

    def add(self, rows: Int64Array, ns: Int64Array) -> None:
        """Add a duration to each of the rows; durations below a nanosecond are in the first bin."""
        for combine, times in zip((np.add, np.minimum, np.maximum), self._times, strict=True):
            combine.at(times, rows, ns)
        np.add.at(self._counts, (rows, (np.log(np.maximum(ns, 1)) / _LOG_RATIO).astype(np.int64)), 1)

    def quantiles(self, *shares: float) -> list[Int64Array]:
        """Return one array per share, with the quantile of each row, accurate to 1 %."""
        bins = np.flatnonzero(self._counts.any(axis=0))
        cumulative = self._counts[:, bins].cumsum(axis=1)
        indices = [np.count_nonzero(cumulative < share * cumulative[:, -1:], axis=1) for share in shares]
        middles = np.exp((bins + 0.5) * _LOG_RATIO).round().astype(np.int64)
        return [np.clip(middles[index], *self._times[1:]) for index in indices]

    def to_dict(self) -> dict[Key, dict[str, int]]:
        """Return `count`, `total_ns`, `min_ns`, `p50_ns`, `p95_ns`, `p99_ns` and `max_ns` of each key."""
        if not self._row_of:
            return {}
        total_ns, shortest, longest = self._times
        columns = [self._counts.sum(axis=1), total_ns, shortest, *self.quantiles(0.5, 0.95, 0.99), longest]
        rows = np.stack(columns, axis=1).tolist()
        return {key: dict(zip(TIME_FIELDS, row, strict=True)) for key, row in zip(self._row_of, rows, strict=True)}


class _RingDistributions:
    """The distributions of one ring."""

    def __init__(self) -> None:
        self.step_and_parts: Distributions[str | None] = Distributions()
        self.modules: Distributions[tuple[str, str, str]] = Distributions()
        self.steps = self.spans = 0
        self._last_counted_step, self._counts_by_time = -1, False
        self.written_at = 0
        self.has_other_writer = False

    def add_update(self, follower: RingFollower, update: RingUpdate) -> None:
        """Add the new steps and complete spans of an update, each once.

        A span counts with the step in which it started, once the step is reported. In a stepless ring, it counts when
        it has ended itself.
        """
        times: list[tuple[str | None, int]] = [(None, step.end_ns - step.start_ns) for step in update.steps]
        times += [part for step in update.steps for part in step.parts.items()]
        self.step_and_parts.add(
            self.step_and_parts.rows(name for name, _ in times), np.array([ns for _, ns in times], np.int64)
        )
        self.steps += len(update.steps)
        if update.timeline is None:
            return
        columns = update.timeline.columns
        if follower.is_stepless:
            is_new = columns.end > (update.since_ns if self._counts_by_time else 0)
            self._counts_by_time = True
        else:
            last_step = follower.last_steps[-1].number if follower.last_steps else -1
            end_step = INT64_MAX if follower.state == "ended" else last_step
            is_new = (columns.step > self._last_counted_step) & (columns.step <= end_step)
            self._last_counted_step = max(self._last_counted_step, end_step)
        rows, names = np.flatnonzero(is_new & columns.complete), update.timeline.names
        self.spans += len(rows)
        keys, key_of_row = np.unique(
            columns.name[rows].astype(np.int64) * len(PHASES) + columns.phase[rows], return_inverse=True
        )
        modules = [(names[key // len(PHASES)], PHASES[key % len(PHASES)]) for key in keys.tolist()]
        row_of_key = self.modules.rows((name.fqn, name.module_class, phase) for name, phase in modules)
        self.modules.add(row_of_key[key_of_row], (columns.end - columns.start)[rows])

    def to_dict(self, follower: RingFollower) -> dict[str, Any]:
        """Return the values of the file; `begin` distinguishes this run from others with the same ring name."""
        assert follower.analysis is not None
        snapshot = follower.analysis.snapshot
        start_ns = next((record["monotonic"] for record in snapshot.records if record["kind"] == "anchor"), 0)
        last_ns = int(snapshot.slots.events.time_ns.max(initial=start_ns))
        fields = ("fqn", "module_class", "phase")
        parts = self.step_and_parts.to_dict()
        return {
            "pid": follower.pid,
            "begin": start_ns,
            "steps": self.steps,
            "spans": self.spans,
            "seconds": (last_ns - start_ns) / 1e9,
            "missed_events": follower.missed_events,
            "step": parts.pop(None, dict.fromkeys(TIME_FIELDS, 0)),
            "parts": parts,
            "modules": [
                dict(zip(fields, module, strict=True)) | times for module, times in self.modules.to_dict().items()
            ],
        }


class WholeRunWriter:
    """Writes `run.modtrace.whole.json` next to each ring, about once a second, atomically."""

    def __init__(self, say: Callable[[str], None], every_ns: int = _WRITE_EVERY_NS) -> None:
        self._say, self._every_ns = say, every_ns
        self._by_ring: dict[RingFollower, _RingDistributions] = {}
        self._printed: set[str] = set()

    def add_update(self, follower: RingFollower, update: RingUpdate) -> None:
        """Add the update of a ring to its distributions, and write them."""
        distributions = self._by_ring.setdefault(follower, _RingDistributions())
        distributions.add_update(follower, update)
        if update.timeline is not None and time.monotonic_ns() - distributions.written_at >= self._every_ns:
            self._write(follower, distributions)

    def close(self) -> None:
        """Write the distributions of all rings."""
        for follower, distributions in self._by_ring.items():
            if follower.analysis is not None:
                self._write(follower, distributions)

    def _write(self, follower: RingFollower, distributions: _RingDistributions) -> None:
        location = follower.find()
        if distributions.has_other_writer or location is None:
            return
        folder, name = location
        path = whole_run_path(os.path.join(os.path.dirname(follower.path), name))
        ring_path = os.path.join(folder.path, name)
        if not distributions.written_at:
            assert follower.analysis is not None
            other_run = read_whole_run(ring_path, follower.analysis.snapshot.records)
            if other_run is not None and other_run["missed_events"] < follower.missed_events:
                distributions.has_other_writer = True
                self._say(f"{path}: another watcher, started earlier, writes this file")
                return
        try:
            with atomic_writer(whole_run_path(ring_path), follower.mode) as file:
                file.write(json.dumps(distributions.to_dict(follower)).encode())
        except WriteError as error:
            message = str(error).replace(whole_run_path(ring_path), path)
            if message not in self._printed:
                self._printed.add(message)
                self._say(message)
        distributions.written_at = time.monotonic_ns()
