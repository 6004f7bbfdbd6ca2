"""What the whole run took, beyond what the ring still holds: distributions of bounded size, beside the ring."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from .._errors import WriteError
from .._typing import Int64Array
from ..ring import whole_run_path
from ..timeline import PHASES, Timeline
from ..write.atomic_file import atomic_writer
from .follow import Look, RingFollower
from .read_whole_run import read_whole_run

_LOG_RATIO = float(np.log(1.02))
"""Each bin of a histogram ends 2 % above its begin, so its middle is 1 % from all that it holds."""
_WRITE_EVERY_NS = 1_000_000_000


class Distribution:
    """Durations in nanoseconds: how many, their sum, least and largest, and a histogram with bins of 2 %."""

    def __init__(self) -> None:
        self.count = self.total_ns = self.max_ns = 0
        self.min_ns = np.iinfo(np.int64).max
        self._bins: dict[int, int] = {}

    def add(self, ns: Int64Array) -> None:
        """Add durations; those below a nanosecond count as one."""
        if not len(ns):
            return
        self.count += len(ns)
        self.total_ns += int(ns.sum())
        self.min_ns, self.max_ns = min(self.min_ns, int(ns.min())), max(self.max_ns, int(ns.max()))
        bins, counts = np.unique((np.log(np.maximum(ns, 1)) / _LOG_RATIO).astype(np.int64), return_counts=True)
        for number, count in zip(bins.tolist(), counts.tolist(), strict=True):
            self._bins[number] = self._bins.get(number, 0) + count

    def quantile(self, share: float) -> int:
        """Return what this share of the durations does not exceed, to 1 %."""
        left = share * self.count
        for number, count in sorted(self._bins.items()):
            left -= count
            if left <= 0:
                middle = round(float(np.exp((number + 0.5) * _LOG_RATIO)))
                return min(max(middle, self.min_ns), self.max_ns)
        return self.max_ns

    def to_json(self) -> dict[str, int]:
        """Return `count`, `total_ns`, `min_ns`, `p50_ns`, `p95_ns`, `p99_ns` and `max_ns`."""
        quantiles = {f"p{share}_ns": self.quantile(share / 100) for share in (50, 95, 99)}
        least = self.min_ns if self.count else 0
        return {"count": self.count, "total_ns": self.total_ns, "min_ns": least, **quantiles, "max_ns": self.max_ns}


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
        self._fold_spans(look.timeline, np.flatnonzero(is_new & columns.complete))

    def _fold_spans(self, timeline: Timeline, rows: Int64Array) -> None:
        columns, names = timeline.columns, timeline.names
        self.spans += len(rows)
        if not len(rows):
            return
        key = columns.name[rows].astype(np.int64) * len(PHASES) + columns.phase[rows]
        order = np.argsort(key, kind="stable")
        duration = (columns.end - columns.start)[rows][order]
        keys, first = np.unique(key[order], return_index=True)
        for number, ns in zip(keys.tolist(), np.split(duration, first[1:]), strict=True):
            name = names[number // len(PHASES)]
            module = (name.fqn, name.module_class, PHASES[number % len(PHASES)])
            self.modules.setdefault(module, Distribution()).add(ns)

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
