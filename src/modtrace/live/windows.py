"""Windows of steps around slow moments, of all ranks, within limits of size and number."""

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
"""Key in the metadata of a kept window, for the list of sentences with the reasons."""
STEPS_FILE = "steps.jsonl"
"""Name of the file in the folder of the windows, with a JSON line per step."""
_MARGIN_NS = 5_000_000_000
"""Time that is kept before and after a moment if no step ends."""
_MAX_WAIT_NS = 60_000_000_000
"""Maximum wait for the steps after a moment."""
_MAX_OLD_FILES = 3
"""Number of files of steps, and of logs, of earlier runs that stay."""
_MAX_NAME_BYTES = 150
_MIN_LATE_SHARE = 0.1
"""Minimum share of a step that others wait for a late rank for the rank to be named."""
_MAX_EVENTS = 1 << 22
"""Maximum events of all ranks that are searched for a late rank, besides the slow step and the previous one."""
_MAX_PAST_MOMENTS = 64
"""Number of past moments that are remembered, so that other ranks' reports of them do not count as new moments."""
_HISTORY_STEPS = 16
"""Number of steps before a slow step that it is compared with."""


class KeepLimits(NamedTuple):
    """The limits of the size, number and frequency of kept windows."""

    margin_steps: int = 2  # number of steps before a moment, and after it
    pause_ns: int = 30_000_000_000  # minimum time between two windows of one reason
    max_kept: int = 20  # maximum number of kept moments
    max_bytes: int = 500_000_000  # maximum size of all windows in the folder, including windows of earlier runs


class LateArrival(NamedTuple):
    """The late arrival of a rank that others of its job waited for."""

    rank: int  # number of the rank
    step: int  # step in which the others waited
    cost_ns: int  # duration of their wait
    sentence: str  # description of the arrival


FindLate = Callable[[Mapping[int, RingSnapshot]], Sequence[LateArrival]]
"""A function from the snapshot of each rank's ring to the late arrivals."""


class _Pending:
    """A moment whose window is not saved yet."""

    def __init__(self, follower: RingFollower, trigger: Trigger) -> None:
        self.follower, self.first, self.triggers = follower, trigger, [(follower, trigger)]
        self.asked_at = time.monotonic_ns()

    def covers(self, follower: RingFollower, trigger: Trigger, later_steps: int) -> bool:
        """Return whether the window of this moment also covers another moment."""
        if self.first.step is None or trigger.step is None:
            return abs(self.first.time_ns - trigger.time_ns) <= _MARGIN_NS
        if follower is self.follower:
            return self.first.step <= trigger.step <= self.first.step + later_steps
        # If a rank is late right after its step ended, the ranks that wait for it are in the next step already.
        return abs(trigger.step - self.first.step) <= 1

    def is_ready(self, later_steps: int) -> bool:
        """Return whether the steps after the moment have ended, or are not expected."""
        follower = self.follower
        if (
            not self.first.waits_for_steps
            or follower.state == "ended"
            or time.monotonic_ns() - self.asked_at > _MAX_WAIT_NS
        ):
            return True
        if self.first.step is None:
            return follower.last_ns >= self.first.time_ns + _MARGIN_NS
        return bool(follower.last_steps) and follower.last_steps[-1].number >= self.first.step + later_steps

    def bounds(self, margin: int) -> tuple[int, int]:
        """Return the start and end of the window, Unix nanoseconds."""
        if self.first.step is None:
            return self.first.time_ns - _MARGIN_NS, self.first.time_ns + _MARGIN_NS
        steps = [step for step in self.follower.last_steps if abs(step.number - self.first.step) <= margin]
        start = min((step.start_ns for step in steps), default=self.first.time_ns - _MARGIN_NS)
        end = max((step.end_ns for step in steps), default=self.first.time_ns)
        last = self.follower.last_steps[-1].number if self.follower.last_steps else -1
        return min(start, self.first.time_ns), self.follower.last_ns + 1 if last < self.first.step + margin else end


class KeptFolder:
    """The folder of kept windows, created when it is first needed.

    Its parent is opened at the start. The folder itself may be a link only if `is_named` and it exists already.
    """

    def __init__(self, path: Path, *, is_named: bool = False) -> None:
        self.path = path
        self._folder = Folder(path) if is_named and path.is_dir() else None
        self._parent = Folder(path.parent) if path.parent.is_dir() else None

    def open(self, mode: int) -> Folder:
        """Return the opened folder; `mode` is the permissions of its files.

        Raises OSError if the folder cannot be created, or a file has its name.
        """
        if self._folder is not None:
            return self._folder
        if self._parent is None:
            os.makedirs(self.path.parent, exist_ok=True)
            self._parent = Folder(self.path.parent)
        return self._parent.make(self.path.name, folder_mode(mode))


def folder_mode(mode: int) -> int:
    """Return the permissions of a folder whose files have `mode`: readers of the files may enter it."""
    return mode | (mode & 0o444) >> 2


def begin_file(folder: Folder, name: str, mode: int) -> int:
    """Create a file, and return a descriptor for appending; a file of an earlier run is renamed, and three are kept."""
    path = os.path.join(folder.path, name)
    if os.path.lexists(path):
        give_number(path, path)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    for _, old in numbered_files(path)[:-_MAX_OLD_FILES]:
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
        self._past: deque[_Pending] = deque(maxlen=_MAX_PAST_MOMENTS)
        self._last_ns: dict[str, int] = {}
        self._bytes = sum(file.lstat().st_size for file in folder.path.rglob("*.pftrace"))
        self._is_full = False
        self._skipped: dict[str, tuple[int, str]] = {}
        self.kept = 0  # number of kept moments

    def add(self, follower: RingFollower, trigger: Trigger) -> None:
        """Keep the window around a moment, unless a limit prevents it."""
        window = next((p for p in self._pending if p.covers(follower, trigger, self._limits.margin_steps)), None)
        if window is not None:
            if trigger.key not in (pending_trigger.key for _, pending_trigger in window.triggers):
                window.triggers.append((follower, trigger))
            return
        if any(past.follower is not follower and past.covers(follower, trigger, 0) for past in self._past):
            return
        last_ns = self._last_ns.get(trigger.key)
        if last_ns is not None and trigger.time_ns - last_ns < self._limits.pause_ns:
            self._skip("--pause", trigger)
            self._past.append(_Pending(follower, trigger))
            return
        if self.kept + len(self._pending) >= self._limits.max_kept:
            self._skip("--max-kept", trigger, f"{self._limits.max_kept} windows are kept")
            return
        self._last_ns[trigger.key] = trigger.time_ns
        self._pending.append(_Pending(follower, trigger))

    def _skip(self, limit: str, trigger: Trigger, final_reason: str = "") -> None:
        """Count a moment that is not kept; report once if a limit prevents all further windows."""
        if final_reason and limit not in self._skipped:
            self._say(f"{final_reason} ({limit}); no further window is kept")
        count, first = self._skipped.get(limit, (0, trigger.sentence))
        self._skipped[limit] = count + 1, first

    def save_ready(self, followers: Sequence[RingFollower], *, flush: bool = False) -> None:
        """Save the complete windows, or with `flush` all windows."""
        ready = [
            p for p in self._pending if flush or (not p.follower.failures and p.is_ready(self._limits.margin_steps))
        ]
        self._pending = [p for p in self._pending if p not in ready]
        for pending in ready:
            self._save(pending, followers)
        self._past += ready

    def close(self) -> None:
        """Report the number of skipped moments per limit."""
        for limit, (count, first) in self._skipped.items():
            self._say(f"{count} more windows were not kept because of {limit}; the first: {first}")

    def _save(self, pending: _Pending, followers: Sequence[RingFollower]) -> None:
        """Save the window around a moment, one file per rank."""
        if self._is_full:
            self._skip("--max-bytes", pending.first)
            return
        bounds = pending.bounds(self._limits.margin_steps)
        triggers = sorted(pending.triggers, key=lambda pair: pair[1].label)
        label = "+".join(dict.fromkeys(trigger.label for _, trigger in triggers))
        step = "" if pending.first.step is None else f"step{pending.first.step}-"
        sentences = [f"{_prefix(follower, followers)}{trigger.sentence}" for follower, trigger in triggers]
        late, first = None, pending.follower
        with contextlib.suppress(ModtraceError):
            late = self._find_late_arrival(pending, followers)
            if late is None:
                steps = [] if pending.first.step is None else [pending.first.step]
                sentences += [f"{_prefix(first, followers)}{cause}" for cause in find_causes(first, steps).values()]
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
                size_text = f"the windows in {self._folder.path} have {self._bytes:,} bytes"
                self._skip("--max-bytes", pending.first, size_text)
                break
        if saved:
            self.kept += 1
            place = saved[0] if len(saved) == 1 else saved[0].parent
            self._say(f"kept {place}: {'; '.join(sentences)}")

    def _save_rank(
        self, follower: RingFollower, bounds: tuple[int, int], subfolder: str, name: str, sentences: Sequence[str]
    ) -> list[Path] | None:
        """Save the window of one rank, and return its file; empty without events, None if the file is too large."""
        timeline = follower.window(*bounds)
        if not len(timeline.slices):
            return []
        root = self._folder.open(follower.mode)
        folder = root.make(subfolder, folder_mode(follower.mode)) if subfolder else root
        name = save_window(timeline, folder, name, sentences, follower.mode)
        size = os.lstat(os.path.join(folder.path, name)).st_size
        if self._bytes + size > self._limits.max_bytes:
            os.unlink(os.path.join(folder.path, name))
            with contextlib.suppress(OSError):
                os.rmdir(os.path.join(root.path, subfolder or os.curdir))
            return None
        self._bytes += size
        return [self._folder.path / subfolder / name]

    def _find_late_arrival(self, pending: _Pending, followers: Sequence[RingFollower]) -> LateArrival | None:
        """Return the late arrival that made other ranks wait at a moment; None if there is none."""
        number, by_rank = pending.first.step, {f.rank: f for f in followers if f.rank is not None}
        if self._find_late is None or number is None or len(by_rank) < 2:
            return None
        steps = [step for step in pending.follower.last_steps if step.number >= number - _HISTORY_STEPS]
        if not steps:
            return None
        # The events of all ranks are in memory at the same time.
        first_serial = pending.follower.recorded - _MAX_EVENTS // len(by_rank)
        steps = [step for step in steps if step.end_serial >= first_serial or step.number >= number - 1] or steps[-1:]
        rings = {rank: follower.read_since(steps[0].start_ns) for rank, follower in by_rank.items()}
        nearby = (arrival for arrival in self._find_late(rings) if abs(arrival.step - number) <= 1)
        late = max(nearby, key=lambda arrival: arrival.cost_ns, default=None)
        slow_step = next((step for step in steps if step.number == number), None)
        if late is None or slow_step is None:
            return late
        # If all ranks are slow, the rank that comes last is not the cause.
        excess_ns = slow_step.training_ns - median(step.training_ns for step in steps if step.number <= number)
        return late if late.cost_ns >= max(excess_ns / 2, _MIN_LATE_SHARE * slow_step.training_ns) else None


def _prefix(follower: RingFollower, followers: Sequence[RingFollower]) -> str:
    """Return the prefix of a sentence on one of several rings; empty for a single ring."""
    return "" if len(followers) < 2 or follower.rank is None else f"{process_label(follower.role, follower.rank)}: "


def save_window(timeline: Timeline, folder: Folder, name: str, reasons: Iterable[str], mode: int) -> str:
    """Save a window under an unused name, and return the file's name."""
    stem, number = _file_name(name), 1
    file = f"{stem}.pftrace"
    while os.path.lexists(os.path.join(folder.path, file)):
        number += 1
        file = f"{stem}-{number}.pftrace"
    metadata = {name: value for name, value in timeline.metadata.items() if name != WHOLE_RUN} | {KEPT: list(reasons)}
    stats = timeline.stats  # events before a window do not count as lost
    stats = dataclasses.replace(stats, recorded=stats.recorded - stats.overwritten, overwritten=0)
    window = dataclasses.replace(timeline, metadata=metadata, stats=stats)
    write_perfetto(window, os.path.join(folder.path, file), mode=mode)
    return file


def kept_folder(ring: str | os.PathLike[str]) -> Path:
    """Return the folder for the windows of a ring (`run.kept` for `run.modtrace`), or of a folder of rings (`kept`)."""
    path = Path(ring)
    stem = path.name.removesuffix(".gz").rpartition(".")[0]
    return path / "kept" if path.is_dir() else path.with_name(f"{stem or path.name}.kept")


def find_causes(follower: RingFollower, steps: Sequence[int]) -> dict[int, str]:
    """Return slow step -> sentence on the part that made it slow, compared with the steps before."""
    if not steps:
        return {}
    history = [step for step in follower.last_steps if steps[0] - _HISTORY_STEPS <= step.number <= steps[-1]]
    if not history:
        return {}
    divided = divide_steps(follower.window(history[0].start_ns, history[-1].end_ns))
    return {step.step: step.cause for step in divided if step.cause is not None and step.step in steps}


def _file_name(text: str) -> str:
    """Return a text as a file name that is valid on all systems."""
    name = re.sub(r"[^\w.+-]+", "-", text).encode(errors="replace")[:_MAX_NAME_BYTES]
    return name.decode(errors="ignore").strip("-.")
