"""What the whole run took, beyond what the ring still holds: distributions of bounded size, beside the ring."""

import json
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from .._errors import WriteError
from .._typing import Int64Array
from ..ring import whole_run_path
from ..timeline import PHASES
from ..write.atomic_file import atomic_writer
from .follow import Look, RingFollower
from .read_whole_run import read_whole_run

_LOG_RATIO = float(np.log(1.02))
"""Each bin of a histogram ends 2 % above its begin, so its middle is 1 % from all that it holds."""
_BINS = 1 << 12
"""More than 64 bits of nanoseconds have."""
_WRITE_EVERY_NS = 600_000_000


class Distribution:
    """Durations in nanoseconds: how many, their sum, least and largest, and a histogram with bins of 2 %."""

    def __init__(self) -> None:
        self.count = self.total_ns = self.max_ns = 0
        self.min_ns = np.iinfo(np.int64).max
        self._bins: dict[int, int] = {}

    def add(self, ns: Int64Array) -> None:
        """Add durations; those below a nanosecond count as one."""
        add_groups(np.zeros(len(ns), np.int64), ns, lambda _: self)

    def _add(self, total_ns: int, min_ns: int, max_ns: int, bins: list[int], counts: list[int]) -> None:
        self.count += sum(counts)
        self.total_ns += total_ns
        self.min_ns, self.max_ns = min(self.min_ns, min_ns), max(self.max_ns, max_ns)
        for number, count in zip(bins, counts, strict=True):
            self._bins[number] = self._bins.get(number, 0) + count

    def quantiles(self, *shares: float) -> list[int]:
        """Return what these shares of the durations, in rising order, do not exceed, to 1 %."""
        bins = sorted(self._bins.items())
        found, seen, at = [], 0, -1
        for share in shares:
            while at < 0 or (seen < share * self.count and at + 1 < len(bins)):
                at += 1
                seen += bins[at][1] if bins else 0
            middle = round(math.exp((bins[at][0] + 0.5) * _LOG_RATIO)) if bins else 0
            found.append(min(max(middle, self.min_ns), self.max_ns))
        return found

    def to_json(self) -> dict[str, int]:
        """Return `count`, `total_ns`, `min_ns`, `p50_ns`, `p95_ns`, `p99_ns` and `max_ns`."""
        p50, p95, p99 = self.quantiles(0.5, 0.95, 0.99)
        least = self.min_ns if self.count else 0
        ends = {"count": self.count, "total_ns": self.total_ns, "min_ns": least}
        return {**ends, "p50_ns": p50, "p95_ns": p95, "p99_ns": p99, "max_ns": self.max_ns}


def add_groups(group: Int64Array, ns: Int64Array, of_group: Callable[[int], Distribution]) -> None:
    """Add durations to several distributions at once.

    Args:
        group: of each duration, a number from 0.
        ns: the durations.
        of_group: returns the distribution of a group.
    """
    order = np.argsort(group, kind="stable")
    group, ns = group[order], ns[order]
    groups, first = np.unique(group, return_index=True)
    ends = (ufunc.reduceat(ns, first).tolist() if len(ns) else [] for ufunc in (np.add, np.minimum, np.maximum))
    bins = (np.log(np.maximum(ns, 1)) / _LOG_RATIO).astype(np.int64)
    keys, counts = np.unique(group * _BINS + bins, return_counts=True)
    splits = np.searchsorted(keys, groups[1:] * _BINS)
    parts = [[part.tolist() for part in np.split(column, splits)] for column in (keys % _BINS, counts)]
    for number, *of_one in zip(groups.tolist(), *ends, *(parts if len(ns) else ([], [])), strict=True):
        of_group(number)._add(*of_one)


class _WholeRun:
    """The distributions of one ring."""

    def __init__(self) -> None:
        self.step = Distribution()
        self.parts: dict[str, Distribution] = {}
        self.modules: dict[tuple[str, str, str], Distribution] = {}
        self.spans = 0
        self._folded_step, self._by_time = -1, False
        self.written_at = 0

    def fold(self, follower: RingFollower, look: Look) -> None:
        """Add what is new in a look: each step and each whole span once.

        A span counts with the step that it began in, once that has ended for good. If many events come before the end
        of a step, it counts when it has ended itself.
        """
        self.step.add(np.array([step.end_ns - step.start_ns for step in look.steps], np.int64))
        for part in dict.fromkeys(part for step in look.steps for part in step.parts):
            ns = [step.parts[part] for step in look.steps if part in step.parts]
            self.parts.setdefault(part, Distribution()).add(np.array(ns, np.int64))
        if look.timeline is None:
            return
        columns = look.timeline.columns
        if follower.is_stepless:
            is_new = columns.end > (look.since_ns if self._by_time else 0)
            self._by_time = True
        else:
            last = follower.last_steps[-1].number if follower.last_steps else -1
            until = np.iinfo(np.int64).max if follower.state == "ended" else last
            is_new = (columns.step > self._folded_step) & (columns.step <= until)
            self._folded_step = max(self._folded_step, until)
        rows, names = np.flatnonzero(is_new & columns.complete), look.timeline.names
        self.spans += len(rows)
        key = columns.name[rows].astype(np.int64) * len(PHASES) + columns.phase[rows]

        def of_key(number: int) -> Distribution:
            name = names[number // len(PHASES)]
            module = (name.fqn, name.module_class, PHASES[number % len(PHASES)])
            return self.modules.setdefault(module, Distribution())

        add_groups(key, (columns.end - columns.start)[rows], of_key)

    def to_json(self, follower: RingFollower) -> dict[str, Any]:
        """Return all of it; `begin` tells this run from others of the same ring's name."""
        assert follower.analysis is not None
        snapshot = follower.analysis.snapshot
        begin = next((record["monotonic"] for record in snapshot.records if record["kind"] == "anchor"), 0)
        last = int(snapshot.slots.events.time.max(initial=begin))
        fields = ("fqn", "module_class", "phase")
        return {
            "pid": follower.pid,
            "begin": begin,
            "steps": self.step.count,
            "spans": self.spans,
            "seconds": (last - begin) / 1e9,
            "missed_events": follower.missed_events,
            "step": self.step.to_json(),
            "parts": {part: times.to_json() for part, times in self.parts.items()},
            "modules": [
                dict(zip(fields, module, strict=True)) | times.to_json() for module, times in self.modules.items()
            ],
        }


class WholeRuns:
    """Writes `run.modtrace.whole.json` beside each ring, about once a second, whole at any time.

    Args:
        say: takes a line for the user.
        every_ns: the time between two writings of one file, at least.
    """

    def __init__(self, say: Callable[[str], None], every_ns: int = _WRITE_EVERY_NS) -> None:
        self._say, self._every_ns = say, every_ns
        self._runs: dict[RingFollower, _WholeRun] = {}

    def take(self, follower: RingFollower, look: Look) -> None:
        """Add a look, and write."""
        run = self._runs.setdefault(follower, _WholeRun())
        run.fold(follower, look)
        if look.timeline is not None and time.monotonic_ns() - run.written_at >= self._every_ns:
            self._write(follower, run)

    def close(self) -> None:
        """Write all that is not written."""
        for follower, run in self._runs.items():
            if follower.analysis is not None:
                self._write(follower, run)

    def _write(self, follower: RingFollower, run: _WholeRun) -> None:
        name = follower.ring_name
        if run.written_at < 0 or name is None:
            return
        if not run.written_at:
            assert follower.analysis is not None
            other = read_whole_run(name, follower.analysis.snapshot.records)
            if other is not None and other["missed_events"] < follower.missed_events:
                run.written_at = -1
                self._say(f"{whole_run_path(name)}: a watcher that began earlier writes it")
                return
        try:
            with atomic_writer(whole_run_path(name)) as file:
                file.write(json.dumps(run.to_json(follower)).encode())
            run.written_at = time.monotonic_ns()
        except WriteError as error:
            self._say(str(error))
            run.written_at = -1
