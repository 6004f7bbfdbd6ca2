"""Follows rings: each update reads their new events, and returns the steps that have ended and the job's rates."""

import os
import stat
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from .._arrays import Int64Array
from .._errors import RingError
from .._files import Folder, is_of_user, open_regular
from ..ring import Kind, RingSnapshot, has_news, read_ring, ring_state
from ..timeline import RingAnalysis, Timeline, build_timeline
from ..timeline.nesting import union_of
from ..timeline.select import window
from ..timeline.summary import ModuleTimes, find_step_bounds, summarize, take_steps
from ..timeline.summary.module_rows import fold_below
from ..timeline.summary.slow_steps import divide_steps
from .rank_state import RankState, rank_state_of, read_clocks


class RankRates(NamedTuple):
    """The work of one process in a window: the last seconds until now, or until it stopped."""

    state: RankState  # state of the process
    steps_per_s: float | None  # rate until now; None if fewer than two steps have ended
    window_steps_per_s: float | None  # rate in the window, whose end can be in the past
    window_ns: int  # duration of the window; shorter than requested if the events that were read are fewer
    rows: tuple[ModuleTimes, ...]  # times of each module in the window; calls across its edges count in part
    communication_ns: int  # time in the window with any thread in a torch.distributed call, or waiting for one
    parts: Mapping[str, float] = MappingProxyType({})  # share of each part of the window's steps, see `PartTimes`

    @property
    def is_quiet(self) -> bool:
        """Whether the process wrote no event for longer than the window."""
        return self.state.now_ns - self.state.last_ns > max(self.window_ns, _QUIET_NS)


_QUIET_NS = 1_000_000_000


def read_rank_rates(path: str | os.PathLike[str], seconds: float, max_events: int) -> RankRates:
    """Return the work of a process in the last `seconds`, until now or its last event, from at most `max_events`."""
    now = read_clocks()
    analysis = RingAnalysis(read_ring(path, max_events))
    state = rank_state_of(path, analysis, now)
    events = analysis.all_events
    if not len(events):
        return RankRates(state, None, None, 0, (), 0)
    window_ns, first_ns, last_ns = int(seconds * 1e9), int(events.time_ns.min()), int(events.time_ns.max())
    end_ns = state.now_ns if state.now_ns - last_ns < window_ns else last_ns
    start_ns = max(first_ns, end_ns - window_ns)
    step_ends_ns = analysis.events.time_ns[analysis.step_ends.event]
    rate, window_rate = (steps_per_second(step_ends_ns, until_ns, window_ns) for until_ns in (state.now_ns, end_ns))
    start_unix_ns, end_unix_ns = analysis.clock.to_other(np.array([start_ns, end_ns])).tolist()
    timeline = window(build_timeline(analysis), start_unix_ns, end_unix_ns)
    communication = union_of(timeline.collectives.start, timeline.collectives.end)
    communication_ns = int((communication.end_ns - communication.start_ns).sum())
    summary = summarize(timeline, step_by="optimizer")
    parts = {part.part: part.share for part in summary.parts}
    return RankRates(state, rate, window_rate, end_ns - start_ns, tuple(summary.rows), communication_ns, parts)


def steps_per_second(ends_ns: Int64Array, now_ns: int, window_ns: int) -> float | None:
    """Return the rate of the steps that ended in the window, or else of the last two steps.

    If the current step lasts more than twice as long as the mean of these, the time until now counts as well.
    """
    recent = int(np.searchsorted(ends_ns, now_ns - window_ns))
    ends = ends_ns[max(0, min(recent - 1, len(ends_ns) - 2)) :]
    if len(ends) < 2:
        return None
    steps, duration_ns, open_ns = len(ends) - 1, int(ends[-1] - ends[0]), now_ns - int(ends[-1])
    if open_ns > 2 * duration_ns / steps:
        duration_ns += open_ns
    return 1e9 * steps / duration_ns if duration_ns else None


RATE_SORT_KEYS = ("self", "total", "forward", "backward", "calls", "name")


class ModuleRate(NamedTuple):
    """The times of one module, as the mean over ranks; shares are fractions of elapsed time."""

    fqn: str  # fully qualified name of the module
    calls_per_s: float  # forward calls per second
    self_share: float  # share in the module, without inner modules
    total_share: float  # share in the module, in all phases
    forward_share: float  # share in forward
    backward_share: float  # share in backward and recompute
    busiest_share: float  # largest self share of a rank
    busiest_rank: int | None  # this rank; None if there is only one rank, or it is unknown
    busiest_role: str = ""  # role of this rank; empty if unknown


def merge_ranks(ranks: Sequence[RankRates], max_depth: int | None) -> list[ModuleRate]:
    """Return the times of each module, in the order in which modules were first called."""
    measured = [rank for rank in ranks if rank.rows and rank.window_ns]
    totals: dict[str, list[float]] = {}
    busiest: dict[str, tuple[float, int | None, str]] = {}
    for rank in measured:
        number = rank.state.rank if len(measured) > 1 else None
        for row in rank.rows if max_depth is None else fold_below(rank.rows, max_depth):
            backward_ns = row.backward_ns + row.recompute_ns
            values = [1e9 * row.calls, row.self_ns, row.total_ns, row.forward_ns, backward_ns]
            shares = [value / rank.window_ns for value in values]
            totals[row.fqn] = [a + b for a, b in zip(totals.get(row.fqn, [0.0] * 5), shares, strict=True)]
            if row.fqn not in busiest or shares[1] >= busiest[row.fqn][0]:
                busiest[row.fqn] = shares[1], number, rank.state.role
    means = {fqn: [total / len(measured) for total in shares] for fqn, shares in totals.items()}
    return [ModuleRate._make([fqn, *mean, *busiest[fqn]]) for fqn, mean in means.items()]


def sort_modules(modules: Sequence[ModuleRate], key: str) -> list[ModuleRate]:
    """Return modules sorted by one of `RATE_SORT_KEYS`: names ascending, numbers descending."""
    if key == "name":
        return sorted(modules)
    field = "calls_per_s" if key == "calls" else f"{key}_share"
    return sorted(modules, key=lambda module: -float(getattr(module, field)))


KEEP_PREFIX = "modtrace.keep "
"""Prefix of the text of a mark that requests to keep the window around it; the reason follows."""

_FIRST_EVENTS = 1 << 13
_MAX_EVENTS = 1 << 20
"""Maximum number of events that one update reads."""
_FIRST_STEP_EVENTS = 1 << 16
"""Number of events without a step end after which a ring counts as stepless."""
_CONTEXT_EVENTS = 1 << 14
"""Number of events before the new ones that are decoded again in a stepless ring, for calls that are still open."""
_REMEMBERED_STEPS = 256
_PRIVATE_MODE, _FILE_MODE = 0o600, 0o666
_MAX_SKIPPED_READS = 30
"""Number of updates without new events after which the ring is read anyway, because its name table may have changed."""
_MAX_FAILURES = 60
_STEP_KINDS = (Kind.STEP, Kind.OPTIMIZER_STEP, Kind.GRADIENTS, Kind.MARK)


@dataclass(frozen=True)
class EndedStep:
    """A training step that has ended; times are Unix nanoseconds."""

    number: int  # number of the step
    start_ns: int  # start of the step
    end_ns: int  # end of the step
    end_serial: int  # serial number of the event that ended it
    parts: Mapping[str, int]  # part -> ns; the parts add up to the step's duration
    is_first: bool  # True for the first step of the recording, which does work that later steps do not repeat

    @property
    def training_ns(self) -> int:
        """The duration of the step without evaluation."""
        return self.end_ns - self.start_ns - self.parts.get("evaluation", 0)


@dataclass(frozen=True)
class RingUpdate:
    """The events that one read of a ring found and earlier reads had not."""

    timeline: Timeline | None = None  # the ring's end, starting before the first new step; None if nothing was decoded
    # Newly ended steps, in order. A step is reported when the next step or the recording has ended: until then a second
    # optimizer may still move its end.
    steps: list[EndedStep] = field(default_factory=list)
    since_ns: int = 0  # Unix ns up to which earlier updates reported all ended calls
    keeps: list[tuple[int, str]] = field(default_factory=list)  # (time, reason) of each mark that requests a window


class RingFollower:
    """Follows the ring file of one process to its end, even if the file is renamed.

    Raises OSError if the file cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        # A descriptor still refers to the file when a new run takes its name.
        with open_regular(self.path) as file:
            descriptor = self._descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, descriptor)
        self._by_link = not os.path.samestat(os.lstat(self.path), os.fstat(descriptor))
        self._source = f"/proc/self/fd/{descriptor}"
        try:
            open_regular(self._source).close()
        except OSError:  # a system without /proc
            self._source = self.path
        self.rank: int | None = None
        self.role = ""
        self.pid = self.failures = 0
        self.recorded = self.missed_events = 0  # events written until now; events overwritten before they were read
        self.quiet_ns = self.last_ns = 0  # time without events until now; Unix ns of the last event
        self.state = "unknown"  # or "running", or "ended" if the process or its recording has ended
        self.is_stepless = False  # True after many events without a step end
        self._was_running = False
        self.total_steps = 0  # number of reported steps
        self.last_steps: deque[EndedStep] = deque(maxlen=_REMEMBERED_STEPS)
        self.analysis: RingAnalysis | None = None  # of the last read; None before the first update
        self._context = self._decoded = self._skipped_reads = self._new_events = 0
        self._last_number = self._decoded_time = -1
        self._changed_at = self._quiet_since = time.monotonic_ns()

    @property
    def mode(self) -> int:
        """The permissions of files derived from the ring: the ring's own, or 0600 for another user's ring or a link."""
        status = os.fstat(self._descriptor)
        is_own = not self._by_link and is_of_user(status)
        return stat.S_IMODE(status.st_mode) & _FILE_MODE | _PRIVATE_MODE if is_own else _PRIVATE_MODE

    def find(self) -> tuple[Folder, str] | None:
        """Return the folder of the ring and its current name; None if it is no longer there."""
        names = [os.path.basename(self.path)]
        with suppress(OSError):
            names.insert(0, os.path.basename(os.readlink(self._source)))
        with suppress(OSError):
            folder = Folder(os.path.dirname(self.path))
            for name in names:
                with suppress(OSError):
                    if os.path.samestat(os.stat(os.path.join(folder.path, name)), os.fstat(self._descriptor)):
                        return folder, name
        return None

    def update(self) -> RingUpdate:
        """Read the new events of the ring.

        Raises RingError if the file cannot be read, or is not a ring file; `failures` counts these errors in a row.
        """
        self.failures += 1
        update = self._update()
        self.failures = 0
        return update

    def is_lost(self, error: RingError) -> bool:
        """Return whether to give the file up after an error of `update`.

        A file is not given up while its process runs. Otherwise it is given up after a minute of failures, for example
        for lack of descriptors, or at once if it is not a ring.
        """
        if ring_state(self._descriptor) == "running":
            self._was_running = True
            return False
        return not isinstance(error.__cause__, OSError) or self.failures >= _MAX_FAILURES

    @property
    def is_unread(self) -> bool:
        """Whether the last events of a process that was seen running cannot be read."""
        return bool(self.failures and (self.recorded or self._was_running))

    def _update(self) -> RingUpdate:
        if self._is_quiet():
            self.quiet_ns = time.monotonic_ns() - self._quiet_since
            return RingUpdate()
        snapshot = self._read()
        if snapshot.writer != "dead" and snapshot.has_stopped:
            snapshot = self._read()  # it stopped during the read, so its last events may be missing
        has_ended = snapshot.writer == "dead" or snapshot.has_stopped
        new_events = self._new_events = snapshot.slots.recorded - self.recorded
        was_running, self.state = self.state != "ended", "ended" if has_ended else snapshot.writer
        self.recorded = snapshot.slots.recorded
        events = snapshot.slots.events
        self.analysis = RingAnalysis(snapshot)
        if new_events:
            self._changed_at = time.monotonic_ns()
            self.last_ns = int(self.analysis.clock.to_other(events.time_ns[-1:])[0]) if len(events) else 0
        self._quiet_since = int(events.time_ns[-1]) if snapshot.known_pid and len(events) else self._changed_at
        self.quiet_ns = time.monotonic_ns() - self._quiet_since
        is_new = events.serial >= self._decoded
        ends = is_new & np.isin(events.kind, _STEP_KINDS)
        is_due = is_new.any() and (not self.last_steps or np.count_nonzero(is_new) > _FIRST_STEP_EVENTS)
        if ends.any() or is_due or (has_ended and was_running):
            return self._decode(snapshot, has_ended)
        return RingUpdate()

    def _is_quiet(self) -> bool:
        """Return whether there are no new events; this costs a tenth of a read."""
        self._skipped_reads += 1
        if self.analysis is not None and self.state == "running" and self._skipped_reads <= _MAX_SKIPPED_READS:
            with self._naming_file():
                if not has_news(self._source, self.analysis.snapshot):
                    return True
        self._skipped_reads = 0
        return False

    def _read(self) -> RingSnapshot:
        # 1.5 times the new events of the last update: usually one read is enough.
        count = _FIRST_EVENTS + self.recorded - self._context + self._new_events * 3 // 2
        while True:
            snapshot = self._last_events(count)
            event_count = len(snapshot.slots.events) + snapshot.slots.torn
            if snapshot.slots.overwritten <= self._context or event_count < count or count >= _MAX_EVENTS:
                metadata = snapshot.metadata
                self.rank, self.role = metadata.get("rank"), metadata.get("role", "")
                self.pid = metadata.get("pid", 0)
                return snapshot
            count = min(_MAX_EVENTS, snapshot.slots.recorded - self._context + _FIRST_EVENTS)

    def _last_events(self, count: int) -> RingSnapshot:
        with self._naming_file():
            return read_ring(self._source, count)

    @contextmanager
    def _naming_file(self) -> Iterator[None]:
        """Replace the descriptor's path in errors by the file's path."""
        try:
            yield
        except RingError as error:
            raise RingError(str(error).replace(self._source, self.path, 1)) from error.__cause__

    def _decode(self, snapshot: RingSnapshot, has_ended: bool) -> RingUpdate:
        """Return the steps and marks since the last update, and remember them as reported."""
        self.missed_events += max(0, snapshot.slots.overwritten - self._decoded)
        analysis = RingAnalysis(_keep_from_serial(snapshot, self._context))
        timeline, events = build_timeline(analysis), analysis.events
        steps = self._new_steps(analysis, timeline, has_ended)
        since_ns = int(analysis.clock.to_other(np.array([self._decoded_time]))[0]) if self._decoded_time >= 0 else 0
        marks = np.flatnonzero((events.kind == Kind.MARK) & (events.serial >= self._decoded))
        times = analysis.clock.to_other(events.time_ns[marks]).tolist()
        texts = [analysis.lookup.texts[name] for name in events.name[marks].tolist()]
        keeps = [
            (moment, text.removeprefix(KEEP_PREFIX))
            for moment, text in zip(times, texts, strict=True)
            if text.startswith(KEEP_PREFIX)
        ]
        self._decoded = snapshot.slots.recorded
        self._decoded_time = int(snapshot.slots.events.time_ns.max(initial=self._decoded_time))
        if steps:
            self._last_number = steps[-1].number
            self.last_steps += steps
            self.total_steps += len(steps)
        if len(self.last_steps) > 1:
            # Starts at the end of the second to last step, so that calls across a step end are complete.
            self._context = max(self._context, self.last_steps[-2].end_serial)
        self._context = max(self._context, self._decoded - _MAX_EVENTS // 2)
        self.is_stepless |= not self.last_steps and self._decoded > _FIRST_STEP_EVENTS
        if self.is_stepless and not self.last_steps:
            self._context = max(self._context, self._decoded - _CONTEXT_EVENTS)
        return RingUpdate(timeline, steps, since_ns, keeps)

    def _new_steps(self, analysis: RingAnalysis, timeline: Timeline, has_ended: bool) -> list[EndedStep]:
        ends, bounds = analysis.step_ends, find_step_bounds(timeline)
        end_ns: Int64Array = analysis.clock.to_other(analysis.events.time_ns[ends.event])
        steps: list[EndedStep] = []
        for index, step in enumerate(divide_steps(timeline)):
            end_row = int(np.searchsorted(end_ns, bounds.end_ns[index]))
            if (
                not bounds.is_whole[index]
                or end_row + (not has_ended) >= len(ends.event)
                or step.step <= self._last_number
            ):
                continue
            serial = int(analysis.events.serial[ends.event[end_row]])
            start, end = int(bounds.start_ns[index]), int(bounds.end_ns[index])
            is_first = not self.total_steps and not steps and not timeline.stats.overwritten
            steps.append(EndedStep(step.step, start, end, serial, step.parts, is_first))
        return steps

    def window(self, start_ns: int, end_ns: int) -> Timeline:
        """Return the steps that overlap a time range; if none is known, the events in the range."""
        steps = [step for step in self.last_steps if step.end_ns > start_ns and step.start_ns < end_ns]
        timeline = build_timeline(self.read_since(start_ns))
        if not steps:
            return window(timeline, start_ns, end_ns)
        is_open = steps[-1] is self.last_steps[-1] and end_ns > steps[-1].end_ns
        return take_steps(timeline, steps[0].number, None if is_open else steps[-1].number + 1)

    def read_since(self, start_ns: int) -> RingSnapshot:
        """Return the ring's events, starting with the step at `start_ns`; its last events if no step is known."""
        index = next((i for i, step in enumerate(self.last_steps) if step.end_ns > start_ns), None)
        if index is None:
            first_serial = self.recorded - _FIRST_STEP_EVENTS
        else:
            first_serial = self.last_steps[index - 1].end_serial if index else 0
        count = min(_MAX_EVENTS, self.recorded - first_serial + _FIRST_EVENTS)
        return _keep_from_serial(self._last_events(count), first_serial)


def _keep_from_serial(snapshot: RingSnapshot, serial: int) -> RingSnapshot:
    """Return the snapshot of a ring without the events before a serial number."""
    slots = snapshot.slots
    if slots.overwritten >= serial:
        return snapshot
    events = slots.events.take(slots.events.serial >= serial)
    torn = slots.recorded - serial - len(events)
    return snapshot._replace(slots=slots._replace(events=events, overwritten=serial, torn=torn))
