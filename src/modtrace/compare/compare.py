"""The comparison: samples of both sides → a verdict per module and phase."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from .._errors import ModtraceError
from .._typing import Int64Array
from ..read import load
from ..timeline import PHASES, Timeline
from .changes import Change
from .diff_result import Diff
from .intervals import MedianDraws, independent_steps
from .samples import Key, Samples, take_samples
from .side_by_side import typical_side

__all__ = ["diff"]

Recorded: TypeAlias = "Timeline | str | os.PathLike[str]"

CONFIDENCE = 0.95
MIN_CHANGE = 0.02
"""Part of the time before: what is less is no change; runs of one program differ by that much."""
MIN_STEPS = 6
MIN_RUNS = 5
"""From so many recordings a side on, these are the samples and not their steps."""
_SCREENING_DRAWS = 4_000
_DRAWS = 200_000


def diff(
    base: Recorded | Sequence[Recorded],
    new: Recorded | Sequence[Recorded],
    *,
    map: Mapping[str, str] | None = None,  # noqa: A002 (as `--map` of the command line)
) -> Diff:
    """Compare what modules took before and after, per step and phase, by their self times on the CPU.

    Steps are the samples, or recordings where there are five or more a side. The first steps are left out while they
    are slower than what follows.

    Args:
        base: a timeline, any file that `load` takes, or several of one program.
        new: the same, after the change.
        map: names of modules before and what they are called after: `{"GPT.blocks": "GPT.layers"}`; what they
            contain follows.

    Raises:
        ModtraceError: a recording has no whole steps, or a file cannot be read.

    Example:
        >>> print(modtrace.diff("yesterday.pftrace", "today.pftrace"))
    """
    timelines = [_timeline(one) for one in _all(base)], [_timeline(one) for one in _all(new)]
    before = [take_samples(one, map or {}) for one in timelines[0]]
    after = [take_samples(one, {}) for one in timelines[1]]
    if not before or not after:
        raise ModtraceError("there is nothing to compare: give a recording for each side")
    by_run = min(len(before), len(after)) >= MIN_RUNS
    keys = list(dict.fromkeys(key for side in (before, after) for one in side for key in one.self_ns))
    pairs = {key: (_self_times(before, key, by_run), _self_times(after, key, by_run)) for key in keys}
    durations = (_durations(before, by_run), _durations(after, by_run))
    sizes = _independent(before, by_run), _independent(after, by_run)
    enough = (
        min(len(before), len(after)) >= MIN_RUNS if by_run else min(len(durations[0]), len(durations[1])) >= MIN_STEPS
    )
    speed = _common_ratio(list(pairs.values()))
    screening, draws = (MedianDraws(size, *sizes) for size in (_SCREENING_DRAWS, _DRAWS))
    confidence = 1 - (1 - CONFIDENCE) / max(len(keys), 1)

    def change(key: Key, times: tuple[Int64Array, Int64Array], scale: float, level: float) -> Change:
        low, high = screening.interval(*times, CONFIDENCE)
        if low > 0 or high < 0:
            low, high = draws.interval(*times, level)
        base_ns, new_ns = (round(float(np.median(side))) for side in times)
        base_calls, new_calls = (_calls(side, key) for side in (before, after))
        if bool(base_calls) != bool(new_calls):
            verdict = "removed" if base_calls else "added"
        else:
            scaled = draws.interval(*times, level, scale) if low > 0 or high < 0 else (low, high)
            verdict = _verdict(base_ns, (low, high), scaled, new_ns - base_ns) if enough else "cannot tell"
        fqn, phase = key
        return Change(fqn, phase, base_ns, new_ns, round(low), round(high), base_calls, new_calls, verdict)

    changes = [change(key, times, speed, confidence) for key, times in pairs.items()]
    step = change(("", "step"), durations, 1.0, CONFIDENCE)
    return Diff(
        changes=sorted(changes, key=_by_cost),
        step=step,
        base_steps=sum(len(one.duration_ns) for one in before),
        new_steps=sum(len(one.duration_ns) for one in after),
        warm_up=sum(one.warm_up for one in [*before, *after]),
        independent=(round(sizes[0], 1), round(sizes[1], 1)),
        common_ratio=speed,
        runs=(len(before), len(after)),
        sides=(
            typical_side(timelines[0], step.base_ns, map or {}),
            typical_side(timelines[1], step.new_ns, {}),
        ),
    )


def _all(side: Recorded | Sequence[Recorded]) -> list[Recorded]:
    return [side] if isinstance(side, (Timeline, str, os.PathLike)) else list(side)


def _timeline(one: Recorded) -> Timeline:
    return one if isinstance(one, Timeline) else load(one)


def _independent(side: Sequence[Samples], by_run: bool) -> float:
    return float(len(side)) if by_run else sum(independent_steps(one.self_ns.values()) for one in side)


def _self_times(side: Sequence[Samples], key: Key, by_run: bool) -> Int64Array:
    none = [np.zeros(len(one.duration_ns), np.int64) for one in side]
    times = [one.self_ns.get(key, zeros) for one, zeros in zip(side, none, strict=True)]
    return _joined(times, by_run)


def _durations(side: Sequence[Samples], by_run: bool) -> Int64Array:
    return _joined([one.duration_ns for one in side], by_run)


def _joined(runs: Sequence[Int64Array], by_run: bool) -> Int64Array:
    return np.array([round(float(np.median(run))) for run in runs], np.int64) if by_run else np.concatenate(runs)


def _calls(side: Sequence[Samples], key: Key) -> int:
    """Return the usual number of spans in a step; of a module that is called in few steps, 1."""
    counts = [one.calls[key] for one in side if key in one.calls]
    if not counts:
        return 0
    return max(int(np.median(np.concatenate(counts))), 1)


def _common_ratio(pairs: Sequence[tuple[Int64Array, Int64Array]]) -> float:
    """Return by how much all modules changed alike, as they do where the machine runs slower or faster: a median."""
    medians = [(float(np.median(base)), float(np.median(new))) for base, new in pairs]
    ratios = [new / base for base, new in medians if base > 0 and new > 0]
    return float(np.median(ratios)) if ratios else 1.0


def _verdict(base_ns: int, interval: tuple[float, float], scaled: tuple[float, float], difference_ns: int) -> str:
    """Say what the intervals allow: a change is one beside that of all modules, and larger than what runs differ by."""
    limit = MIN_CHANGE * base_ns
    if interval[0] > 0 and scaled[0] > 0 and difference_ns > limit:
        return "slower"
    if interval[1] < 0 and scaled[1] < 0 and -difference_ns > limit:
        return "faster"
    return "same" if -limit <= interval[0] and interval[1] <= limit else "cannot tell"


def _by_cost(change: Change) -> tuple[bool, int, str, int]:
    settled = change.verdict in {"same", "cannot tell"}
    return settled, -abs(change.difference_ns), change.fqn, PHASES.index(change.phase)
