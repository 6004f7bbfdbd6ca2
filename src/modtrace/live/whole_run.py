"""The files of a watcher on all steps: a line for each step, and the distributions of times over the whole run."""

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
from .follow import Look, RingFollower
from .read_whole_run import TIME_FIELDS, read_whole_run
from .windows import KeptFolder, begin_file, find_causes

_MAX_LINES = 100_000
_MAX_UNWRITTEN = 1 << 24
"""Bytes of lines that wait for room on the disk."""


class StepsFile:
    """Writes `steps.jsonl`: rank, pid, step, end_ns (Unix), duration_ns, parts and cause of each step.

    After some lines it gets those of every second step, after as many more of every fourth, and so on. The file of an
    earlier run becomes `steps.1.jsonl`, or takes the next number; the last three are kept, like rings.

    What cannot be written waits, as where a disk is full.

    Args:
        folder: where.
        name: of the file; made with the first step.
        say: takes a line for the user.
        max_lines: after how many lines this changes.
        named: whether the user named the file, which has the umask's permissions then; else those of the rings.
    """

    def __init__(
        self,
        folder: KeptFolder,
        name: str,
        say: Callable[[str], None],
        max_lines: int = _MAX_LINES,
        *,
        named: bool = False,
    ) -> None:
        self._folder, self._name, self._say, self._max_lines, self._named = folder, name, say, max_lines, named
        self._lines, self._stride, self._mode = 0, 1, 0o666
        self._unwritten = b""
        self._file: int | None = None
        self._error = ""

    def add_look(self, follower: RingFollower, look: Look) -> None:
        """Write a line for each step that was new in the ring."""
        steps = [step for step in look.steps if step.number % self._stride == 0]
        if not steps and not self._unwritten:
            return
        causes: dict[int, str] = {}
        with contextlib.suppress(ModtraceError):
            limit_ns = slow_from_ns(float(np.median([step.training_ns for step in follower.last_steps])))
            slow = [step.number for step in steps if step.training_ns > limit_ns]
            causes = find_causes(follower, slow)
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
            if len(self._unwritten) < _MAX_UNWRITTEN:
                self._unwritten += f"{json.dumps(line)}\n".encode()
        self._lines += len(steps)
        if self._lines >= self._max_lines:
            self._stride, self._lines = 2 * self._stride, 0
        self._write(0o666 if self._named else follower.mode)

    def close(self) -> None:
        """Write the lines that wait, and close the file."""
        if self._unwritten:
            self._write(self._mode)
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _write(self, mode: int) -> None:
        try:
            # It stays open: if another watcher begins a file of this name, this one goes on with its own.
            if self._file is None:
                self._file, self._mode = begin_file(self._folder.open(mode), self._name, mode), mode
            elif mode & self._mode != self._mode:  # of all rings, what they all allow
                self._mode &= mode
                os.chmod(self._file, self._mode)
            while self._unwritten:
                self._unwritten = self._unwritten[os.write(self._file, self._unwritten) :]
        except OSError as error:
            if str(error) != self._error:
                self._error = str(error)
                self._say(f"{self._folder.path / self._name}: {error.strerror or error}; what is missing waits")


Key = TypeVar("Key", bound=Hashable)

_LOG_RATIO = float(np.log(1.02))
"""Each bin of a histogram ends 2 % above its begin, so its middle is 1 % from all that it holds."""
_BINS = int(np.log(2.0**63) / _LOG_RATIO) + 1
"""For all nanoseconds that 64 bits hold."""
_WRITE_EVERY_NS = 600_000_000


class Distributions(Generic[Key]):
    """Durations in nanoseconds by key: how many, their sum, least and largest, and a histogram with bins of 2 %."""

    def __init__(self) -> None:
        self._row_of = Numbering[Key]()
        self._times = np.zeros((3, 0), np.int64)  # the sum, the least and the largest of each row
        self._counts = np.zeros((0, _BINS), np.int64)

    def rows(self, keys: Iterable[Key]) -> Int64Array:
        """Return the number of the row of each key; one that is new gets a row."""
        rows = np.array([self._row_of[key] for key in keys], np.int64)
        if new := len(self._row_of) - len(self._counts):
            none = np.array([[0], [INT64_MAX], [0]])
            self._times = np.append(self._times, none.repeat(new, axis=1), axis=1)
            self._counts = np.append(self._counts, np.zeros((new, _BINS), np.int64), axis=0)
        return rows

    def add(self, rows: Int64Array, ns: Int64Array) -> None:
        """Add durations to rows, one to each; those below a nanosecond are in the first bin."""
        for take, times in zip((np.add, np.minimum, np.maximum), self._times, strict=True):
            take.at(times, rows, ns)
        np.add.at(self._counts, (rows, (np.log(np.maximum(ns, 1)) / _LOG_RATIO).astype(np.int64)), 1)

    def quantiles(self, *shares: float) -> list[Int64Array]:
        """Return an array per share: for each row the duration that so many of its durations do not exceed, to 1 %."""
        bins = np.flatnonzero(self._counts.any(axis=0))
        up_to = self._counts[:, bins].cumsum(axis=1)
        places = [np.count_nonzero(up_to < share * up_to[:, -1:], axis=1) for share in shares]
        middles = np.exp((bins + 0.5) * _LOG_RATIO).round().astype(np.int64)
        return [np.clip(middles[place], *self._times[1:]) for place in places]

    def to_dict(self) -> dict[Key, dict[str, int]]:
        """Return `count`, `total_ns`, `min_ns`, `p50_ns`, `p95_ns`, `p99_ns` and `max_ns` of each key."""
        if not self._row_of:
            return {}
        total, least, largest = self._times
        columns = [self._counts.sum(axis=1), total, least, *self.quantiles(0.5, 0.95, 0.99), largest]
        rows = np.stack(columns, axis=1).tolist()
        return {key: dict(zip(TIME_FIELDS, row, strict=True)) for key, row in zip(self._row_of, rows, strict=True)}


class _RingDistributions:
    """The distributions of one ring."""

    def __init__(self) -> None:
        self.step_and_parts: Distributions[str | None] = Distributions()
        self.modules: Distributions[tuple[str, str, str]] = Distributions()
        self.steps = self.spans = 0
        self._last_counted_step, self._by_time = -1, False
        self.written_at = 0
        self.is_of_another = False

    def add_look(self, follower: RingFollower, look: Look) -> None:
        """Add what is new in a look: each step and each whole span once.

        A span counts with the step that it began in, once that has ended for good. If many events come before the end
        of a step, it counts when it has ended itself.
        """
        times: list[tuple[str | None, int]] = [(None, step.end_ns - step.start_ns) for step in look.steps]
        times += [part for step in look.steps for part in step.parts.items()]
        self.step_and_parts.add(
            self.step_and_parts.rows(name for name, _ in times), np.array([ns for _, ns in times], np.int64)
        )
        self.steps += len(look.steps)
        if look.timeline is None:
            return
        columns = look.timeline.columns
        if follower.is_stepless:
            is_new = columns.end > (look.since_ns if self._by_time else 0)
            self._by_time = True
        else:
            last = follower.last_steps[-1].number if follower.last_steps else -1
            until = INT64_MAX if follower.state == "ended" else last
            is_new = (columns.step > self._last_counted_step) & (columns.step <= until)
            self._last_counted_step = max(self._last_counted_step, until)
        rows, names = np.flatnonzero(is_new & columns.complete), look.timeline.names
        self.spans += len(rows)
        keys, key_of_row = np.unique(
            columns.name[rows].astype(np.int64) * len(PHASES) + columns.phase[rows], return_inverse=True
        )
        modules = [(names[key // len(PHASES)], PHASES[key % len(PHASES)]) for key in keys.tolist()]
        of_key = self.modules.rows((name.fqn, name.module_class, phase) for name, phase in modules)
        self.modules.add(of_key[key_of_row], (columns.end - columns.start)[rows])

    def to_dict(self, follower: RingFollower) -> dict[str, Any]:
        """Return all of it; `begin` tells this run from others of the same ring's name."""
        assert follower.analysis is not None
        snapshot = follower.analysis.snapshot
        begin = next((record["monotonic"] for record in snapshot.records if record["kind"] == "anchor"), 0)
        last = int(snapshot.slots.events.time.max(initial=begin))
        fields = ("fqn", "module_class", "phase")
        parts = self.step_and_parts.to_dict()
        return {
            "pid": follower.pid,
            "begin": begin,
            "steps": self.steps,
            "spans": self.spans,
            "seconds": (last - begin) / 1e9,
            "missed_events": follower.missed_events,
            "step": parts.pop(None, dict.fromkeys(TIME_FIELDS, 0)),
            "parts": parts,
            "modules": [
                dict(zip(fields, module, strict=True)) | times for module, times in self.modules.to_dict().items()
            ],
        }


class WholeRunWriter:
    """Writes `run.modtrace.whole.json` beside each ring, about once a second, whole at any time."""

    def __init__(self, say: Callable[[str], None], every_ns: int = _WRITE_EVERY_NS) -> None:
        self._say, self._every_ns = say, every_ns
        self._by_ring: dict[RingFollower, _RingDistributions] = {}
        self._said: set[str] = set()

    def add_look(self, follower: RingFollower, look: Look) -> None:
        """Add what was new in a ring to its distributions, and write them."""
        distributions = self._by_ring.setdefault(follower, _RingDistributions())
        distributions.add_look(follower, look)
        if look.timeline is not None and time.monotonic_ns() - distributions.written_at >= self._every_ns:
            self._write(follower, distributions)

    def close(self) -> None:
        """Write all that is not written."""
        for follower, distributions in self._by_ring.items():
            if follower.analysis is not None:
                self._write(follower, distributions)

    def _write(self, follower: RingFollower, distributions: _RingDistributions) -> None:
        place = follower.find()
        if distributions.is_of_another or place is None:
            return
        folder, name = place
        path = whole_run_path(os.path.join(os.path.dirname(follower.path), name))
        held = os.path.join(folder.path, name)
        if not distributions.written_at:
            assert follower.analysis is not None
            other = read_whole_run(held, follower.analysis.snapshot.records)
            if other is not None and other["missed_events"] < follower.missed_events:
                distributions.is_of_another = True
                self._say(f"{path}: a watcher that began earlier writes it")
                return
        try:
            with atomic_writer(whole_run_path(held), follower.mode) as file:
                file.write(json.dumps(distributions.to_dict(follower)).encode())
        except WriteError as error:
            message = str(error).replace(whole_run_path(held), path)
            if message not in self._said:
                self._said.add(message)
                self._say(message)
        distributions.written_at = time.monotonic_ns()
