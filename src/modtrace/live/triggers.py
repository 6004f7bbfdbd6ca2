"""Conditions under which windows are kept: parsed from text, and checked at each update of a ring."""

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
from .follow import EndedStep, RingFollower, RingUpdate

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

    text: str  # text of the condition
    # The measured duration: a step, a part of a step, a call of a module, or the time without an event. "signal" has
    # none: the recorded process itself requests the window.
    subject: Literal["step", "part", "module", "hang", "signal"]
    name: str  # name of the part, or pattern of the modules' names
    limit_ns: int | None  # limit of the duration; None if `times` is the limit
    factor: float = 0.0  # limit as a multiple of the median over the last steps

    @property
    def label(self) -> str:
        """The condition's name in file names: `step`, `gc`, `module GPT.head`, `hang`."""
        return self.name if self.subject == "part" else f"{self.subject} {self.name}".strip()


def parse_conditions(texts: str | Iterable[str]) -> tuple[Condition, ...]:
    """Return the conditions in one or several texts; `;` separates the conditions of a text.

    Raises ModtraceError if a condition is not valid, or a text has none; the message lists the forms.
    """
    is_single = isinstance(texts, str | bytes) or not isinstance(texts, Iterable)
    return tuple(_parse(part) for text in ([texts] if is_single else texts) for part in _split(text))


def _split(text: object) -> list[str]:
    parts = [part.strip() for part in text.split(";") if part.strip()] if isinstance(text, str) else []
    if not parts:
        raise _invalid_condition(text)
    return parts


def _invalid_condition(text: object) -> ModtraceError:
    return ModtraceError(f"{text!r} is not a condition; the forms are {_FORMS}")


def _parse(text: str) -> Condition:
    if text == "signal":
        return Condition(text, "signal", "", None)
    limit = _LIMIT.fullmatch(text)
    if limit is None:
        duration = parse_duration(text.removeprefix("hang")) if text.startswith("hang") else None
        if duration:
            return Condition(text, "hang", "", duration)
        raise _invalid_condition(text)
    subject_text, value = limit[1], limit[2].strip()
    kind, _, name = subject_text.partition(" ")
    times, limit_ns = _MULTIPLE.fullmatch(value), parse_duration(value)
    if not (limit_ns or (times and float(times[1]))):  # all are slower than 0
        raise _invalid_condition(text)
    if kind == "module" and name and limit_ns is not None:
        return Condition(text, "module", name.strip(), limit_ns)
    part = name.strip() if kind == "range" else _SHORT_NAMES.get(subject_text, subject_text)
    is_known = subject_text == "step" or part in (*PARTS, "other") or (kind == "range" and part)
    if not is_known:
        raise _invalid_condition(text)
    subject: Literal["step", "part"] = "step" if subject_text == "step" else "part"
    name = "" if subject == "step" else part
    return Condition(text, subject, name, limit_ns, float(times[1]) if times else 0.0)


def parse_duration(text: str) -> int | None:
    """Return a duration such as `500ms`, `1.5s` or `2min` in nanoseconds; None if the text is not a duration."""
    match = _DURATION.fullmatch(text.strip())
    return None if match is None else round(float(match[1]) * _UNITS_NS[match[2]])


def format_ns(ns: float) -> str:
    """Return a duration as text: `4.2 s`, `312 ms`."""
    return f"{ns / 1e9:,.3g} s" if ns >= 1e9 else f"{ns / 1e6:,.3g} ms"


_HISTORY = 64
_MIN_HISTORY = 8
"""Minimum number of steps for a median."""
_MIN_EXCESS_NS = 20_000_000
"""Minimum excess of a step or a part over its median: the system may stop any thread for a shorter time."""


class Trigger(NamedTuple):
    """A reason to keep a window, and the moment at its center."""

    key: str  # text of the condition, or reason of `Recording.keep`; the pause between windows applies per key
    label: str  # a few words for the file's name
    sentence: str  # description of the event
    step: int | None  # step of the moment; None if no step ends
    time_ns: int  # Unix ns of the moment
    waits_for_steps: bool = True  # whether to wait for the steps after it; False for a hang, which has none


class Triggers:
    """Checks the conditions on one ring."""

    def __init__(self, conditions: Sequence[Condition]) -> None:
        self._conditions = conditions
        self._history: dict[Condition, deque[int]] = {c: deque(maxlen=_HISTORY) for c in conditions if c.factor}
        self._matches = {c: re.compile(fnmatch.translate(c.name)).match for c in conditions if c.subject == "module"}
        self._hang_event_count = -1

    def judge(self, follower: RingFollower, update: RingUpdate) -> list[Trigger]:
        """Return the reasons to keep windows in an update of the ring."""
        triggers = [*self._hang_triggers(follower)]
        for step in update.steps:
            triggers += [trigger for condition in self._conditions for trigger in self._step_triggers(condition, step)]
        if update.timeline is not None:
            triggers += self._module_triggers(follower, update, update.timeline)
            for time_ns, why in update.keeps:
                triggers.append(Trigger(f"keep {why}", f"keep {why}", why, _step_at(update.timeline, time_ns), time_ns))
        # A slow step with another reason counts only for that reason, not for `step > 3x`.
        general = {condition.text for condition in self._conditions if condition.subject == "step"}
        return sorted(triggers, key=lambda trigger: (trigger.step is None, trigger.step or 0, trigger.key in general))

    def _step_triggers(self, condition: Condition, step: EndedStep) -> Iterator[Trigger]:
        if condition.subject not in ("step", "part"):
            return
        ns = step.parts.get(condition.name, 0) if condition.name else step.training_ns
        limit_ns, median_text = condition.limit_ns, ""
        if condition.factor:
            history = self._history[condition]
            if len(history) >= _MIN_HISTORY:
                median = float(np.median(history))
                limit_ns = int(max(condition.factor * median, median + _MIN_EXCESS_NS))
                median_text = f"; usually {format_ns(median)}"
            history.append(ns)
        if limit_ns is None or ns <= limit_ns or step.is_first:
            return
        subject_text = f"{condition.name} in step {step.number}" if condition.name else f"step {step.number}"
        sentence = f"{subject_text} took {format_ns(ns)} ({condition.text}{median_text})"
        yield Trigger(condition.text, condition.label, sentence, step.number, step.end_ns)

    def _module_triggers(self, follower: RingFollower, update: RingUpdate, timeline: Timeline) -> Iterator[Trigger]:
        columns = timeline.columns
        is_new = columns.complete & (columns.end > update.since_ns)
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
                duration, fqn = format_ns(columns.end[row] - columns.start[row]), timeline.names[columns.name[row]].fqn
                step_number = _step_at(timeline, int(columns.start[row]))
                step_text = "" if step_number is None else f" in step {step_number}"
                sentence = f"{fqn} took {duration}{step_text} ({condition.text})"
                yield Trigger(condition.text, condition.label, sentence, step_number, int(columns.end[row]))

    def _hang_triggers(self, follower: RingFollower) -> Iterator[Trigger]:
        limits = [c for c in self._conditions if c.subject == "hang" and follower.quiet_ns > (c.limit_ns or 0)]
        if not limits or follower.state == "ended" or follower.recorded in (0, self._hang_event_count):
            return
        self._hang_event_count = follower.recorded
        assert follower.analysis is not None
        stacks, ends = follower.analysis.open_stacks, follower.analysis.step_ends.number
        call = next((stack.calls[-1] for stack in stacks if stack.calls), None)
        place = f" in {call.fqn} ({call.phase})" if call is not None else ", in no module"
        sentence = f"no event for {format_ns(follower.quiet_ns)}{place} ({limits[0].text})"
        step = int(ends.max()) + 1 if len(ends) else None
        yield Trigger(limits[0].text, limits[0].label, sentence, step, follower.last_ns, waits_for_steps=False)


def _step_at(timeline: Timeline, time_ns: int) -> int | None:
    """Return the number of the step at a moment; None if no step ends."""
    if not len(timeline.step_ends):
        return None
    return int(steps_at(timeline, np.array([time_ns], np.int64))[0])
