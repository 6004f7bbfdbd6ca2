"""Follows rings: each look reads their new ends, and gives the steps that have ended and what the job did since."""

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
    """The work of one process in the last seconds, or in the last ones before it stopped."""

    state: RankState  # where it is
    steps_per_s: float | None  # until now; None if fewer than two steps have ended
    window_steps_per_s: float | None  # the same in the time that the rows are of, which can be over
    # How long the time is that the rows are of; shorter than asked for where the ring, or what was read of it, does not
    # go back so far.
    window_ns: int
    # The times of each module in that time; a call that began before or is not over counts with its part.
    rows: tuple[ModuleTimes, ...]
    communication_ns: int  # of that time, with any thread in a call of torch.distributed or in a wait for one
    # The share of each part of a step, see `PartTimes`, in the steps that are known of that time.
    parts: Mapping[str, float] = MappingProxyType({})

    @property
    def is_quiet(self) -> bool:
        """Whether it wrote no event for longer than the window of the rows."""
        return self.state.now_ns - self.state.last_ns > max(self.window_ns, _QUIET_NS)


_QUIET_NS = 1_000_000_000


def read_rank_rates(path: str | os.PathLike[str], seconds: float, max_events: int) -> RankRates:
    """Return the work of a process in the last seconds of its ring, until now or its last event; of `max_events`."""
    now = read_clocks()
    analysis = RingAnalysis(read_ring(path, max_events))
    state = rank_state_of(path, analysis, now)
    events = analysis.all_events
    if not len(events):
        return RankRates(state, None, None, 0, (), 0)
    window_ns, first_ns, last_ns = int(seconds * 1e9), int(events.time.min()), int(events.time.max())
    end_ns = state.now_ns if state.now_ns - last_ns < window_ns else last_ns
    begin_ns = max(first_ns, end_ns - window_ns)
    step_ends_ns = analysis.events.time[analysis.step_ends.event]
    rate, window_rate = (steps_per_second(step_ends_ns, until_ns, window_ns) for until_ns in (state.now_ns, end_ns))
    begin_unix_ns, end_unix_ns = analysis.clock.to_other(np.array([begin_ns, end_ns])).tolist()
    timeline = window(build_timeline(analysis), begin_unix_ns, end_unix_ns)
    communication = union_of(timeline.collectives.start, timeline.collectives.end)
    communication_ns = int((communication.end - communication.start).sum())
    summary = summarize(timeline, step_by="optimizer")
    parts = {part.part: part.share for part in summary.parts}
    return RankRates(state, rate, window_rate, end_ns - begin_ns, tuple(summary.rows), communication_ns, parts)


def steps_per_second(ends_ns: Int64Array, now_ns: int, window_ns: int) -> float | None:
    """Return how many steps end in a second, by those that ended in the window, or else by the last two.

    A step that takes more than twice as long as those before counts as if it ended now.
    """
    recent = int(np.searchsorted(ends_ns, now_ns - window_ns))
    ends = ends_ns[max(0, min(recent - 1, len(ends_ns) - 2)) :]
    if len(ends) < 2:
        return None
    steps, took_ns, since_ns = len(ends) - 1, int(ends[-1] - ends[0]), now_ns - int(ends[-1])
    if since_ns > 2 * took_ns / steps:
        took_ns += since_ns
    return 1e9 * steps / took_ns if took_ns else None


RATE_SORT_KEYS = ("self", "total", "forward", "backward", "calls", "name")


class ModuleRate(NamedTuple):
    """The times of one module, as the mean over ranks; a share of 1 is all of the time that passes."""

    fqn: str  # the module's fully qualified name
    calls_per_s: float  # how often its forward runs in a second
    self_share: float  # in it and outside of modules inside it
    total_share: float  # in it, in all phases
    forward_share: float  # in forward
    backward_share: float  # in backward and recompute
    busiest_share: float  # the largest self share of a rank
    busiest_rank: int | None  # that rank; None if there is one rank only, or it is not known
    busiest_role: str = ""  # the role of that rank; empty if it is not known


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
    """Return modules by one of `RATE_SORT_KEYS`, the largest first; by name as names are sorted."""
    if key == "name":
        return sorted(modules)
    field = "calls_per_s" if key == "calls" else f"{key}_share"
    return sorted(modules, key=lambda module: -float(getattr(module, field)))


KEEP_PREFIX = "modtrace.keep "
"""The begin of the text of a mark that asks to keep the window around it; the reason follows."""

_FIRST_EVENTS = 1 << 13
_MAX_EVENTS = 1 << 20
"""The most events that one look reads."""
_FIRST_STEP_EVENTS = 1 << 16
"""After so many events without the end of a step none is expected."""
_CONTEXT_EVENTS = 1 << 14
"""How much before a look is then divided again with it, for calls that had begun."""
_REMEMBERED_STEPS = 256
_PRIVATE_MODE, _FILE_MODE = 0o600, 0o666
_MAX_UNREAD = 30
"""After so many looks without news the ring is read all the same, for what only its name table says."""
_MAX_TRIES = 60
_STEP_KINDS = (Kind.STEP, Kind.OPTIMIZER_STEP, Kind.GRADIENTS, Kind.MARK)


@dataclass(frozen=True)
class EndedStep:
    """A training step that has ended; times are Unix nanoseconds."""

    number: int  # of the step
    start_ns: int  # when it began
    end_ns: int  # when it ended
    end_serial: int  # of the event that ended it
    parts: Mapping[str, int]  # nanoseconds by part; they add up to its duration
    is_first: bool  # whether it is the first of the recording: such a step sets up what later ones have

    @property
    def training_ns(self) -> int:
        """How long it took without evaluation."""
        return self.end_ns - self.start_ns - self.parts.get("evaluation", 0)


@dataclass(frozen=True)
class Look:
    """The news in a ring when it was read."""

    timeline: Timeline | None = None  # of its end, from before the first new step on; None if nothing new was divided
    # Those that have ended and were in no look before, in their order. A step is given once the next one has ended, or
    # the ring has: until then a second optimizer may still end it later.
    steps: list[EndedStep] = field(default_factory=list)
    since_ns: int = 0  # what ended up to this moment was in an earlier look, Unix nanoseconds
    keeps: list[tuple[int, str]] = field(default_factory=list)  # the time and the reason of each mark that asks to keep


class RingFollower:
    """Follows the ring file of one process to its end, also when the file gets another name.

    Raises OSError if the file cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        # A descriptor stays with the file when a new run takes its name.
        with open_regular(self.path) as file:
            descriptor = self._descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, descriptor)
        self._by_link = not os.path.samestat(os.lstat(self.path), os.fstat(descriptor))
        self._source = f"/proc/self/fd/{descriptor}"
        try:
            open_regular(self._source).close()
        except OSError:  # another system
            self._source = self.path
        self.rank: int | None = None
        self.role = ""
        self.pid = self.failures = 0
        self.recorded = self.missed_events = 0  # events written until now; those overwritten before a look came
        self.quiet_ns = self.last_ns = 0  # how long it has written no event; when its last was, Unix nanoseconds
        self.state = "unknown"  # or "running", or "ended": the process, or its recording in good order
        self.is_stepless = False  # whether it wrote many events before the first step ended, if any
        self._was_running = False
        self.total_steps = 0  # how many have been given
        self.last_steps: deque[EndedStep] = deque(maxlen=_REMEMBERED_STEPS)
        self.analysis: RingAnalysis | None = None  # of what was read last; None before the first look
        self._context = self._divided = self._unread = self._news = 0
        self._last_number = self._divided_time = -1
        self._changed_at = self._quiet_since = time.monotonic_ns()

    @property
    def mode(self) -> int:
        """The permissions of what is made of the ring: its own, if it is this user's and no link led to it."""
        status = os.fstat(self._descriptor)
        is_own = not self._by_link and is_of_user(status)
        return stat.S_IMODE(status.st_mode) & _FILE_MODE | _PRIVATE_MODE if is_own else _PRIVATE_MODE

    def find(self) -> tuple[Folder, str] | None:
        """Return the folder that the ring is in, and what it is called there now; None if it is not there any more."""
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

    def look(self) -> Look:
        """Read the events that are new in the ring.

        Raises RingError if the file cannot be read, or is not a ring file; then `failures` counts it.
        """
        self.failures += 1
        look = self._look()
        self.failures = 0
        return look

    def is_lost(self, error: RingError) -> bool:
        """Whether to give the file up after an error of `look`.

        As long as its process runs it may be read again; else after a minute of tries, as where no descriptor is left,
        or at once, if it is no ring.
        """
        if ring_state(self._descriptor) == "running":
            self._was_running = True
            return False
        return not isinstance(error.__cause__, OSError) or self.failures >= _MAX_TRIES

    @property
    def is_unread(self) -> bool:
        """Whether what a process wrote last, which ran when it was looked at, cannot be read."""
        return bool(self.failures and (self.recorded or self._was_running))

    def _look(self) -> Look:
        if self._is_quiet():
            self.quiet_ns = time.monotonic_ns() - self._quiet_since
            return Look()
        snapshot = self._read()
        if snapshot.writer != "dead" and snapshot.has_stopped:
            snapshot = self._read()  # it stopped while it was read, and its last events may have come after that
        has_ended = snapshot.writer == "dead" or snapshot.has_stopped
        news = self._news = snapshot.slots.recorded - self.recorded
        was_running, self.state = self.state != "ended", "ended" if has_ended else snapshot.writer
        self.recorded = snapshot.slots.recorded
        events = snapshot.slots.events
        self.analysis = RingAnalysis(snapshot)
        if news:
            self._changed_at = time.monotonic_ns()
            self.last_ns = int(self.analysis.clock.to_other(events.time[-1:])[0]) if len(events) else 0
        self._quiet_since = int(events.time[-1]) if snapshot.known_pid and len(events) else self._changed_at
        self.quiet_ns = time.monotonic_ns() - self._quiet_since
        fresh = events.serial >= self._divided
        ends = fresh & np.isin(events.kind, _STEP_KINDS)
        is_due = fresh.any() and (not self.last_steps or np.count_nonzero(fresh) > _FIRST_STEP_EVENTS)
        if ends.any() or is_due or (has_ended and was_running):
            return self._divide(snapshot, has_ended)
        return Look()

    def _is_quiet(self) -> bool:
        """Whether there is nothing to read; that costs a tenth of reading it."""
        self._unread += 1
        if self.analysis is not None and self.state == "running" and self._unread <= _MAX_UNREAD:
            with self._named():
                if not has_news(self._source, self.analysis.snapshot):
                    return True
        self._unread = 0
        return False

    def _read(self) -> RingSnapshot:
        # As much as was new last time, and half of it more: most often one reading is enough.
        count = _FIRST_EVENTS + self.recorded - self._context + self._news * 3 // 2
        while True:
            snapshot = self._last_events(count)
            held = len(snapshot.slots.events) + snapshot.slots.torn
            if snapshot.slots.overwritten <= self._context or held < count or count >= _MAX_EVENTS:
                metadata = snapshot.metadata
                self.rank, self.role = metadata.get("rank"), metadata.get("role", "")
                self.pid = metadata.get("pid", 0)
                return snapshot
            count = min(_MAX_EVENTS, snapshot.slots.recorded - self._context + _FIRST_EVENTS)

    def _last_events(self, count: int) -> RingSnapshot:
        with self._named():
            return read_ring(self._source, count)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Let an error name the file, and not the descriptor."""
        try:
            yield
        except RingError as error:
            raise RingError(str(error).replace(self._source, self.path, 1)) from error.__cause__

    def _divide(self, snapshot: RingSnapshot, has_ended: bool) -> Look:
        """Give what has ended since the last look, and move on."""
        self.missed_events += max(0, snapshot.slots.overwritten - self._divided)
        analysis = RingAnalysis(_since(snapshot, self._context))
        timeline, events = build_timeline(analysis), analysis.events
        steps = self._new_steps(analysis, timeline, has_ended)
        since_ns = int(analysis.clock.to_other(np.array([self._divided_time]))[0]) if self._divided_time >= 0 else 0
        marks = np.flatnonzero((events.kind == Kind.MARK) & (events.serial >= self._divided))
        times = analysis.clock.to_other(events.time[marks]).tolist()
        texts = [analysis.lookup.texts[name] for name in events.name[marks].tolist()]
        keeps = [
            (moment, text.removeprefix(KEEP_PREFIX))
            for moment, text in zip(times, texts, strict=True)
            if text.startswith(KEEP_PREFIX)
        ]
        self._divided = snapshot.slots.recorded
        self._divided_time = int(snapshot.slots.events.time.max(initial=self._divided_time))
        if steps:
            self._last_number = steps[-1].number
            self.last_steps += steps
            self.total_steps += len(steps)
        if len(self.last_steps) > 1:
            # From the end of the step before the last on, so that what reaches over the end of a step is known whole.
            self._context = max(self._context, self.last_steps[-2].end_serial)
        self._context = max(self._context, self._divided - _MAX_EVENTS // 2)
        self.is_stepless |= not self.last_steps and self._divided > _FIRST_STEP_EVENTS
        if self.is_stepless and not self.last_steps:
            self._context = max(self._context, self._divided - _CONTEXT_EVENTS)
        return Look(timeline, steps, since_ns, keeps)

    def _new_steps(self, analysis: RingAnalysis, timeline: Timeline, has_ended: bool) -> list[EndedStep]:
        ends, bounds = analysis.step_ends, find_step_bounds(timeline)
        end_ns: Int64Array = analysis.clock.to_other(analysis.events.time[ends.event])
        steps: list[EndedStep] = []
        for index, divided in enumerate(divide_steps(timeline)):
            end_row = int(np.searchsorted(end_ns, bounds.end[index]))
            if (
                not bounds.whole[index]
                or end_row + (not has_ended) >= len(ends.event)
                or divided.step <= self._last_number
            ):
                continue
            serial = int(analysis.events.serial[ends.event[end_row]])
            start, end = int(bounds.start[index]), int(bounds.end[index])
            is_first = not self.total_steps and not steps and not timeline.stats.overwritten
            steps.append(EndedStep(divided.step, start, end, serial, divided.parts, is_first))
        return steps

    def window(self, start_ns: int, end_ns: int) -> Timeline:
        """Return the steps that overlap a range of time, or what is in it if no step is known."""
        inside = [step for step in self.last_steps if step.end_ns > start_ns and step.start_ns < end_ns]
        timeline = build_timeline(self.read_since(start_ns))
        if not inside:
            return window(timeline, start_ns, end_ns)
        is_open = inside[-1] is self.last_steps[-1] and end_ns > inside[-1].end_ns
        return take_steps(timeline, inside[0].number, None if is_open else inside[-1].number + 1)

    def read_since(self, start_ns: int) -> RingSnapshot:
        """Return the events of the ring from the step on that a moment is in; its last ones if no step is known."""
        since = [step for step in self.last_steps if step.end_ns > start_ns]
        before = [step.end_serial for step in self.last_steps if since and step.number < since[0].number]
        first_serial = before[-1] if before else 0 if since else self.recorded - _FIRST_STEP_EVENTS
        count = min(_MAX_EVENTS, self.recorded - first_serial + _FIRST_EVENTS)
        return _since(self._last_events(count), first_serial)


def _since(snapshot: RingSnapshot, serial: int) -> RingSnapshot:
    """Return the snapshot of a ring without the events before a serial number."""
    slots = snapshot.slots
    if slots.overwritten >= serial:
        return snapshot
    events = slots.events.take(slots.events.serial >= serial)
    torn = slots.recorded - serial - len(events)
    return snapshot._replace(slots=slots._replace(events=events, overwritten=serial, torn=torn))
