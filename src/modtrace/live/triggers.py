"""Conditions under which windows are kept: parsed from text, and judged at each look at a ring."""

import fnmatch
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np

from .._errors import ModtraceError
from ..ring import FIRST_STEP
from ..timeline import Timeline
from ..timeline.select import steps_at
from ..timeline.summary.parts import PARTS
from .follow import EndedStep, Look, RingFollower

_UNITS_NS = {"ns": 1, "us": 1_000, "µs": 1_000, "ms": 1_000_000, "s": 1_000_000_000, "min": 60_000_000_000}
_NUMBER = r"(\d+(?:\.\d+)?)\s*"
_DURATION = re.compile(rf"{_NUMBER}({'|'.join(_UNITS_NS)})")
_LIMIT = re.compile(r"(.+?)\s*>\s*(.+)", re.DOTALL)
_MULTIPLE = re.compile(rf"{_NUMBER}x")
_SHORT_NAMES = {"data": "data loading"}
_FORMS = (
    '"step > 3x" (times the median of the last steps), "step > 500ms", "data > 1s", "gc > 200ms" and other parts of '
    'a step, "range NAME > 50ms", "module GPT.head > 50ms" (a pattern of names), "hang 60s", "signal"; several are '
    'joined by ";"'
)


class Condition(NamedTuple):
    """A condition under which a window is kept."""

    text: str  # as it was given
    # The thing that is measured: a step, a part of it, a call of a module, or the time without an event. For a signal
    # the recorded process itself asks to keep.
    subject: Literal["step", "part", "module", "hang", "signal"]
    name: str  # of the part, or the pattern of the modules' names
    limit_ns: int | None  # what it must exceed, in nanoseconds; None if `times` is the limit
    times: float = 0.0  # how many times its median over the last steps it must exceed

    @property
    def label(self) -> str:
        """Its name in the name of a file: `step`, `gc`, `module GPT.head`, `hang`."""
        return self.name if self.subject == "part" else f"{self.subject} {self.name}".strip()


def parse_conditions(texts: str | Iterable[str]) -> tuple[Condition, ...]:
    """Return the conditions of a text, or of several; `;` separates those of one text.

    Raises ModtraceError if one is not understood, or a text has none; the message lists the forms.
    """
    is_one = isinstance(texts, str | bytes) or not isinstance(texts, Iterable)
    return tuple(_parse(part) for text in ([texts] if is_one else texts) for part in _split(text))


def _split(text: object) -> list[str]:
    parts = [part.strip() for part in text.split(";") if part.strip()] if isinstance(text, str) else []
    if not parts:
        raise _refusal(text)
    return parts


def _refusal(text: object) -> ModtraceError:
    return ModtraceError(f"{text!r} is not a condition; the forms are {_FORMS}")


def _parse(text: str) -> Condition:
    if text == "signal":
        return Condition(text, "signal", "", None)
    limit = _LIMIT.fullmatch(text)
    if limit is None:
        duration = parse_duration(text.removeprefix("hang")) if text.startswith("hang") else None
        if duration:
            return Condition(text, "hang", "", duration)
        raise _refusal(text)
    subject_text, value = limit[1], limit[2].strip()
    kind, _, name = subject_text.partition(" ")
    times, limit_ns = _MULTIPLE.fullmatch(value), parse_duration(value)
    if not (limit_ns or (times and float(times[1]))):  # all are slower than 0
        raise _refusal(text)
    if kind == "module" and name and limit_ns is not None:
        return Condition(text, "module", name.strip(), limit_ns)
    part = name.strip() if kind == "range" else _SHORT_NAMES.get(subject_text, subject_text)
    is_known = subject_text == "step" or part in (*PARTS, "other") or (kind == "range" and part)
    if not is_known:
        raise _refusal(text)
    subject: Literal["step", "part"] = "step" if subject_text == "step" else "part"
    name = "" if subject == "step" else part
    return Condition(text, subject, name, limit_ns, float(times[1]) if times else 0.0)


def parse_duration(text: str) -> int | None:
    """Parse a duration such as `500ms`, `1.5s` or `2min` to nanoseconds; None if it is something else."""
    match = _DURATION.fullmatch(text.strip())
    return None if match is None else round(float(match[1]) * _UNITS_NS[match[2]])


def format_ns(ns: float) -> str:
    """Return a duration as one reads it: `4.2 s`, `312 ms`."""
    return f"{ns / 1e9:,.3g} s" if ns >= 1e9 else f"{ns / 1e6:,.3g} ms"


_HISTORY = 64
_USUAL_FROM = 8
"""The number of steps that a median needs."""
_LEAST_NS = 20_000_000
"""The least excess of a step or a part over its median: the system may stop any thread for a shorter time."""


class Trigger(NamedTuple):
    """A reason to keep a window, and the moment that it is around."""

    key: str  # what the time between two windows is of: the text of the condition, or the reason of `Recording.keep`
    label: str  # a few words for the file's name
    sentence: str  # what happened
    step: int | None  # in which step, or None if no step ends
    time_ns: int  # when, Unix nanoseconds
    waits: bool = True  # whether the steps after it are waited for; a process that hangs has none


class Triggers:
    """Judges one ring."""

    def __init__(self, conditions: Sequence[Condition]) -> None:
        self._conditions = conditions
        self._history: dict[Condition, deque[int]] = {c: deque(maxlen=_HISTORY) for c in conditions if c.times}
        self._matches = {c: re.compile(fnmatch.translate(c.name)).match for c in conditions if c.subject == "module"}
        self._hung_at = -1

    def judge(self, follower: RingFollower, look: Look) -> list[Trigger]:
        """Return the reasons to keep windows that a look at the ring gives."""
        triggers = [*self._hang(follower)]
        for step in look.steps:
            triggers += [trigger for condition in self._conditions for trigger in self._of_step(condition, step)]
        if look.timeline is not None:
            triggers += self._of_modules(follower, look, look.timeline)
            for time_ns, why in look.keeps:
                triggers.append(Trigger(f"keep {why}", f"keep {why}", why, _step_at(look.timeline, time_ns), time_ns))
        # A window of a slow step that has a reason of its own does not count as one of `step > 3x`.
        general = {condition.text for condition in self._conditions if condition.subject == "step"}
        return sorted(triggers, key=lambda trigger: (trigger.step is None, trigger.step or 0, trigger.key in general))

    def _of_step(self, condition: Condition, step: EndedStep) -> Iterator[Trigger]:
        if condition.subject not in ("step", "part"):
            return
        ns = step.parts.get(condition.name, 0) if condition.name else step.training_ns
        limit_ns, usual = condition.limit_ns, ""
        if condition.times:
            history = self._history[condition]
            if len(history) >= _USUAL_FROM:
                median = float(np.median(history))
                limit_ns = int(max(condition.times * median, median + _LEAST_NS))
                usual = f"; usually {format_ns(median)}"
            history.append(ns)
        if limit_ns is None or ns <= limit_ns or step.is_first:
            return
        subject_text = f"{condition.name} in step {step.number}" if condition.name else f"step {step.number}"
        sentence = f"{subject_text} took {format_ns(ns)} ({condition.text}{usual})"
        yield Trigger(condition.text, condition.label, sentence, step.number, step.end_ns)

    def _of_modules(self, follower: RingFollower, look: Look, timeline: Timeline) -> Iterator[Trigger]:
        columns = timeline.columns
        is_new = columns.complete & (columns.end > look.since_ns)
        if len(timeline.step_ends) and follower.analysis is not None:
            is_new &= columns.step != follower.analysis.snapshot.metadata.get(FIRST_STEP, 0)
        for condition, matches in self._matches.items():
            is_named = np.array([matches(name.fqn) is not None for name in timeline.names] or [False], np.bool_)
            slow = np.flatnonzero(is_new & is_named[columns.name])
            slow = slow[(columns.end - columns.start)[slow] > (condition.limit_ns or 0)]
            for step in np.unique(columns.step[slow]).tolist():
                row = max(
                    slow[columns.step[slow] == step].tolist(), key=lambda row: columns.end[row] - columns.start[row]
                )
                took, fqn = format_ns(columns.end[row] - columns.start[row]), timeline.names[columns.name[row]].fqn
                step_number = _step_at(timeline, int(columns.start[row]))
                where = "" if step_number is None else f" in step {step_number}"
                sentence = f"{fqn} took {took}{where} ({condition.text})"
                yield Trigger(condition.text, condition.label, sentence, step_number, int(columns.end[row]))

    def _hang(self, follower: RingFollower) -> Iterator[Trigger]:
        limits = [c for c in self._conditions if c.subject == "hang" and follower.quiet_ns > (c.limit_ns or 0)]
        if not limits or follower.state == "ended" or not follower.recorded or follower.recorded == self._hung_at:
            return
        self._hung_at = follower.recorded
        assert follower.analysis is not None
        stacks, ends = follower.analysis.open_stacks, follower.analysis.step_ends.number
        inside = next((stack.calls[-1] for stack in stacks if stack.calls), None)
        where = f" in {inside.fqn} ({inside.phase})" if inside is not None else ", in no module"
        sentence = f"no event for {format_ns(follower.quiet_ns)}{where} ({limits[0].text})"
        step = int(ends.max()) + 1 if len(ends) else None
        yield Trigger(limits[0].text, limits[0].label, sentence, step, follower.last_ns, waits=False)


def _step_at(timeline: Timeline, time_ns: int) -> int | None:
    """Return the step that a moment is in; None if no step ends."""
    if not len(timeline.step_ends):
        return None
    return int(steps_at(timeline, np.array([time_ns], np.int64))[0])
