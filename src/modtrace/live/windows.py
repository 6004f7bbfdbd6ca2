"""Windows around what is slow: some steps before and after it, of all ranks, within limits of space and number."""

import contextlib
import dataclasses
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from .._errors import ModtraceError
from .._files import Folder, create_file
from ..ring import RingSnapshot, give_number, numbered_files
from ..timeline import Timeline
from ..timeline.contents import WHOLE_RUN, process_label
from ..timeline.summary.slow_steps import divide_steps
from ..write.perfetto import write_perfetto
from .follow import RingFollower
from .triggers import Trigger

KEPT = "kept"
"""The key in the metadata of a kept window: a list of sentences that say why it was kept."""
STEPS_FILE = "steps.jsonl"
"""The file beside the windows, with a JSON line per step."""
_AROUND_NS = 5_000_000_000
"""The time that is kept before and after a moment if no step ends."""
_MAX_WAIT_NS = 60_000_000_000
"""The longest wait for the steps after a moment."""
_KEPT_FILES = 3
"""The files of steps of earlier runs that stay, and as many logs."""
_MAX_NAME_BYTES = 150
_LEAST_SHARE = 0.1
"""The least wait, as a part of the step, for which the rank that comes late is named."""
_MAX_EVENTS = 1 << 22
"""The most events of all ranks together that are searched for a late rank, besides the slow step and the one before."""
_REMEMBERED = 64
"""The number of moments that are remembered, so that other ranks' parts of them do not count as new ones."""
_CAUSE_STEPS = 16
"""The number of steps before a slow one that show what is usual."""


class KeepLimits(NamedTuple):
    """The size of kept windows, how many are kept, and how often."""

    steps: int = 2  # how many before a moment, and how many after it
    pause_ns: int = 30_000_000_000  # the time between two windows of one reason, at least
    max_kept: int = 20  # moments
    max_bytes: int = 500_000_000  # of all windows in the folder, those of earlier runs too


class CameLate(NamedTuple):
    """A rank that others of its job waited for."""

    rank: int  # its number
    step: int  # the step of the others in which they waited
    cost_ns: int  # for how long
    sentence: str  # who, when, and why


FindLate = Callable[[Mapping[int, RingSnapshot]], Sequence[CameLate]]
"""A function that returns who came late, from the snapshot of each rank's ring."""


class _Pending:
    """A moment whose window is not saved yet."""

    def __init__(self, follower: RingFollower, trigger: Trigger) -> None:
        self.follower, self.first, self.triggers = follower, trigger, [(follower, trigger)]
        self.asked_at = time.monotonic_ns()

    def holds(self, follower: RingFollower, trigger: Trigger, after: int) -> bool:
        """Whether the window of this moment shows another moment too."""
        if self.first.step is None or trigger.step is None:
            return abs(self.first.time_ns - trigger.time_ns) <= _AROUND_NS
        if follower is self.follower:
            return self.first.step <= trigger.step <= self.first.step + after
        # The ranks that wait for one another are in its next step already if it comes late after the end of one.
        return abs(trigger.step - self.first.step) <= 1

    def is_ready(self, after: int) -> bool:
        """Whether the steps that follow it are there, or will not come."""
        follower = self.follower
        if not self.first.waits or follower.state == "ended" or time.monotonic_ns() - self.asked_at > _MAX_WAIT_NS:
            return True
        if self.first.step is None:
            return follower.last_ns >= self.first.time_ns + _AROUND_NS
        return bool(follower.last_steps) and follower.last_steps[-1].number >= self.first.step + after

    def bounds(self, around: int) -> tuple[int, int]:
        """Return from when to when the window reaches, Unix nanoseconds."""
        if self.first.step is None:
            return self.first.time_ns - _AROUND_NS, self.first.time_ns + _AROUND_NS
        steps = [step for step in self.follower.last_steps if abs(step.number - self.first.step) <= around]
        start = min((step.start_ns for step in steps), default=self.first.time_ns - _AROUND_NS)
        end = max((step.end_ns for step in steps), default=self.first.time_ns)
        last = self.follower.last_steps[-1].number if self.follower.last_steps else -1
        return min(start, self.first.time_ns), self.follower.last_ns + 1 if last < self.first.step + around else end


class KeptFolder:
    """The folder of kept windows, made when it is first needed.

    What it is in is held from the start. The folder itself may be a link only if it is there when it is named.
    """

    def __init__(self, path: Path, *, named: bool = False) -> None:
        self.path = path
        self._folder = Folder(path) if named and path.is_dir() else None
        self._parent = Folder(path.parent) if path.parent.is_dir() else None

    def open(self, mode: int) -> Folder:
        """Return the folder, held; files in it have the permissions `mode`.

        Raises OSError if it cannot be made, or something else has its name.
        """
        if self._folder is not None:
            return self._folder
        if self._parent is None:
            os.makedirs(self.path.parent, exist_ok=True)
            self._parent = Folder(self.path.parent)
        return self._parent.make(self.path.name, folder_mode(mode))


def folder_mode(mode: int) -> int:
    """Return the permissions of a folder whose files have `mode`: whoever may read them may enter it."""
    return mode | (mode & 0o444) >> 2


def begin_file(folder: Folder, name: str, mode: int) -> int:
    """Create a file, and return a descriptor that appends to it; one of an earlier run gets a number, three stay."""
    path = os.path.join(folder.path, name)
    if os.path.lexists(path):
        give_number(path, path)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    for _, old in numbered_files(path)[:-_KEPT_FILES]:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(old)
    return create_file(path, mode)


class WindowKeeper:
    """Keeps windows in a folder."""

    def __init__(
        self, folder: KeptFolder, limits: KeepLimits, say: Callable[[str], None], find_late: FindLate | None = None
    ) -> None:
        self._folder, self._limits, self._say, self._find_late = folder, limits, say, find_late
        self._pending: list[_Pending] = []
        self._done: deque[_Pending] = deque(maxlen=_REMEMBERED)
        self._last_ns: dict[str, int] = {}
        self._bytes = sum(file.lstat().st_size for file in folder.path.rglob("*.pftrace"))
        self._is_full = False
        self._passed_over: dict[str, tuple[int, str]] = {}
        self.kept = 0  # how many moments were kept

    def add(self, follower: RingFollower, trigger: Trigger) -> None:
        """Keep the window around a moment, unless a limit forbids it."""
        window = next((p for p in self._pending if p.holds(follower, trigger, self._limits.steps)), None)
        if window is not None:
            if trigger.key not in (held.key for _, held in window.triggers):
                window.triggers.append((follower, trigger))
            return
        if any(done.follower is not follower and done.holds(follower, trigger, 0) for done in self._done):
            return
        last_ns = self._last_ns.get(trigger.key)
        if last_ns is not None and trigger.time_ns - last_ns < self._limits.pause_ns:
            self._pass_over("--pause", trigger)
            self._done.append(_Pending(follower, trigger))
            return
        if self.kept + len(self._pending) >= self._limits.max_kept:
            self._pass_over("--max-kept", trigger, f"{self._limits.max_kept} windows are kept")
            return
        self._last_ns[trigger.key] = trigger.time_ns
        self._pending.append(_Pending(follower, trigger))

    def _pass_over(self, limit: str, trigger: Trigger, why_for_good: str = "") -> None:
        """Count a moment that is not kept; say once if a limit forbids all further windows."""
        if why_for_good and limit not in self._passed_over:
            self._say(f"{why_for_good} ({limit}); no further window is kept")
        count, first = self._passed_over.get(limit, (0, trigger.sentence))
        self._passed_over[limit] = count + 1, first

    def save_ready(self, followers: Sequence[RingFollower], *, flush: bool = False) -> None:
        """Save the windows that are whole; with `flush` all."""
        ready = [p for p in self._pending if flush or (not p.follower.failures and p.is_ready(self._limits.steps))]
        self._pending = [p for p in self._pending if p not in ready]
        for pending in ready:
            self._save(pending, followers)
        self._done += ready

    def close(self) -> None:
        """Say how many moments were passed over, and by which limit."""
        for limit, (count, first) in self._passed_over.items():
            self._say(f"{count} more were not kept, by {limit}; the first: {first}")

    def _save(self, pending: _Pending, followers: Sequence[RingFollower]) -> None:
        """Save the window around a moment, of each rank a file."""
        if self._is_full:
            self._pass_over("--max-bytes", pending.first)
            return
        bounds = pending.bounds(self._limits.steps)
        triggers = sorted(pending.triggers, key=lambda pair: pair[1].label)
        label = "+".join(dict.fromkeys(trigger.label for _, trigger in triggers))
        step = "" if pending.first.step is None else f"step{pending.first.step}-"
        sentences = [f"{_whose(follower, followers)}{trigger.sentence}" for follower, trigger in triggers]
        late, first = None, pending.follower
        with contextlib.suppress(ModtraceError):
            late = self._who_came_late(pending, followers)
            if late is None:
                steps = [] if pending.first.step is None else [pending.first.step]
                sentences += [f"{_whose(first, followers)}{cause}" for cause in find_causes(first, steps).values()]
        subfolder = _file_name(f"{step}{label}") if len(followers) > 1 else ""  # for the files of all ranks
        if late is not None:
            sentences.insert(0, late.sentence)
            first = next(follower for follower in followers if follower.rank == late.rank)
            subfolder = _file_name(f"rank{late.rank}-{step}{label}")
        saved: list[Path] = []
        for follower in sorted(followers, key=lambda follower: follower is not first):
            process = "" if follower.rank is None else f"rank{follower.rank}-"
            if not process and len(followers) > 1:
                process = f"pid{follower.pid}-"
            try:
                files = self._save_rank(follower, bounds, subfolder, f"{process}{step}{label}", sentences)
            except (ModtraceError, OSError) as error:
                self._say(f"a window cannot be kept: {error}")
                continue
            saved += files or []
            if files is None:
                self._is_full = True
                taken = f"the windows in {self._folder.path} take {self._bytes:,} bytes"
                self._pass_over("--max-bytes", pending.first, taken)
                break
        if saved:
            self.kept += 1
            place = saved[0] if len(saved) == 1 else saved[0].parent
            self._say(f"kept {place}: {'; '.join(sentences)}")

    def _save_rank(
        self, follower: RingFollower, bounds: tuple[int, int], subfolder: str, name: str, sentences: Sequence[str]
    ) -> list[Path] | None:
        """Save the window of one rank, and return its file, if anything is in it; None if that is too much."""
        timeline = follower.window(*bounds)
        if not len(timeline.slices):
            return []
        kept = self._folder.open(follower.mode)
        folder = kept.make(subfolder, folder_mode(follower.mode)) if subfolder else kept
        name = save_window(timeline, folder, name, sentences, follower.mode)
        size = os.lstat(os.path.join(folder.path, name)).st_size
        if self._bytes + size > self._limits.max_bytes:
            os.unlink(os.path.join(folder.path, name))
            with contextlib.suppress(OSError):
                os.rmdir(os.path.join(kept.path, subfolder or os.curdir))
            return None
        self._bytes += size
        return [self._folder.path / subfolder / name]

    def _who_came_late(self, pending: _Pending, followers: Sequence[RingFollower]) -> CameLate | None:
        """Return the rank that came late and so made others wait at a moment, if there is one."""
        number, of_rank = pending.first.step, {f.rank: f for f in followers if f.rank is not None}
        if self._find_late is None or number is None or len(of_rank) < 2:
            return None
        steps = [step for step in pending.follower.last_steps if step.number >= number - _CAUSE_STEPS]
        if not steps:
            return None
        # The events of all ranks are in memory together.
        most, recorded = _MAX_EVENTS // len(of_rank), pending.follower.recorded
        read = [step for step in steps if recorded - step.end_serial <= most or step.number >= number - 1] or steps[-1:]
        rings = {rank: follower.read_since(read[0].start_ns) for rank, follower in of_rank.items()}
        near = (late for late in self._find_late(rings) if abs(late.step - number) <= 1)
        late = max(near, key=lambda late: late.cost_ns, default=None)
        slow = next((step for step in read if step.number == number), None)
        if late is None or slow is None:
            return late
        # If all ranks are slow, that is not the fault of the one that comes last.
        more_ns = slow.training_ns - median(step.training_ns for step in read if step.number <= number)
        return late if late.cost_ns >= max(more_ns / 2, _LEAST_SHARE * slow.training_ns) else None


def _whose(follower: RingFollower, followers: Sequence[RingFollower]) -> str:
    """Return the begin of a sentence on a ring that is one of several."""
    return "" if len(followers) < 2 or follower.rank is None else f"{process_label(follower.role, follower.rank)}: "


def save_window(timeline: Timeline, folder: Folder, name: str, why: Iterable[str], mode: int) -> str:
    """Save a window under a name that no file has, and return its file's name."""
    stem, number = _file_name(name), 1
    file = f"{stem}.pftrace"
    while os.path.lexists(os.path.join(folder.path, file)):
        number += 1
        file = f"{stem}-{number}.pftrace"
    metadata = {name: value for name, value in timeline.metadata.items() if name != WHOLE_RUN} | {KEPT: list(why)}
    stats = timeline.stats  # what is before a window is not lost
    stats = dataclasses.replace(stats, recorded=stats.recorded - stats.overwritten, overwritten=0)
    window = dataclasses.replace(timeline, metadata=metadata, stats=stats)
    write_perfetto(window, os.path.join(folder.path, file), mode=mode)
    return file


def kept_folder(ring: str | os.PathLike[str]) -> Path:
    """Return where windows of a ring are kept: `run.kept` beside `run.modtrace`; in a folder of rings `kept`."""
    path = Path(ring)
    stem = path.name.removesuffix(".gz").rpartition(".")[0]
    return path / "kept" if path.is_dir() else path.with_name(f"{stem or path.name}.kept")


def find_causes(follower: RingFollower, steps: Sequence[int]) -> dict[int, str]:
    """Return for slow steps a sentence on the part that made each slow, judged by the steps before."""
    if not steps:
        return {}
    around = [step for step in follower.last_steps if steps[0] - _CAUSE_STEPS <= step.number <= steps[-1]]
    if not around:
        return {}
    divided = divide_steps(follower.window(around[0].start_ns, around[-1].end_ns))
    return {step.step: step.cause for step in divided if step.cause is not None and step.step in steps}


def _file_name(text: str) -> str:
    """Return a text as a file's name that all systems take."""
    name = re.sub(r"[^\w.+-]+", "-", text).encode(errors="replace")[:_MAX_NAME_BYTES]
    return name.decode(errors="ignore").strip("-.")
