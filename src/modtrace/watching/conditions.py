"""What is kept: conditions as text, and what each means."""

import re
from collections.abc import Iterable
from typing import Literal, NamedTuple

from .._errors import ModtraceError
from ..timeline.summary.parts import PARTS

_UNITS_NS = {"ns": 1, "us": 1_000, "µs": 1_000, "ms": 1_000_000, "s": 1_000_000_000, "min": 60_000_000_000}
_NUMBER = r"(\d+(?:\.\d+)?)\s*"
_DURATION = re.compile(rf"{_NUMBER}({'|'.join(_UNITS_NS)})")
_LIMIT = re.compile(r"(.+?)\s*>\s*(.+)", re.DOTALL)
_TIMES = re.compile(rf"{_NUMBER}x")
_SHORT_NAMES = {"data": "data loading"}
_FORMS = (
    '"step > 3x" (times the median of the last steps), "step > 500ms", "data > 1s", "gc > 200ms" and other parts of '
    'a step, "range NAME > 50ms", "module GPT.head > 50ms" (a pattern of names), "hang 60s", "signal"; several are '
    'joined by ";"'
)


class Condition(NamedTuple):
    """When a window is kept.

    Attributes:
        text: as it was given.
        subject: what is measured: a step, a part of it, a call of a module, or the time without an event. For a signal
            the recorded process itself asks to keep.
        name: of the part, or the pattern of the modules' names.
        limit_ns: what it must exceed, in nanoseconds; None if `times` is the limit.
        times: how many times its median over the last steps it must exceed.
    """

    text: str
    subject: Literal["step", "part", "module", "hang", "signal"]
    name: str
    limit_ns: int | None
    times: float = 0.0

    @property
    def label(self) -> str:
        """What a file's name says of it: `step`, `gc`, `module GPT.head`, `hang`."""
        return self.name if self.subject == "part" else f"{self.subject} {self.name}".strip()


def parse_conditions(texts: str | Iterable[str]) -> tuple[Condition, ...]:
    """Return the conditions of a text, or of several; `;` separates those of one text.

    Raises:
        ModtraceError: one is not understood, or a text has none; the message lists the forms.
    """
    is_one = isinstance(texts, str | bytes) or not isinstance(texts, Iterable)
    return tuple(_parse(part) for text in ([texts] if is_one else texts) for part in _split(text))


def _split(text: object) -> list[str]:
    parts = [part.strip() for part in text.split(";") if part.strip()] if isinstance(text, str) else []
    if not parts:
        raise _refusal(text)
    return parts


def _refusal(text: object) -> ModtraceError:
    return ModtraceError(f"{text!r} is no condition; the forms are {_FORMS}")


def _parse(text: str) -> Condition:
    if text == "signal":
        return Condition(text, "signal", "", None)
    limit = _LIMIT.fullmatch(text)
    if limit is None:
        duration = parse_duration(text.removeprefix("hang")) if text.startswith("hang") else None
        if duration:
            return Condition(text, "hang", "", duration)
        raise _refusal(text)
    what, value = limit[1], limit[2].strip()
    kind, _, name = what.partition(" ")
    times, limit_ns = _TIMES.fullmatch(value), parse_duration(value)
    if not (limit_ns or (times and float(times[1]))):  # all are slower than 0
        raise _refusal(text)
    if kind == "module" and name and limit_ns is not None:
        return Condition(text, "module", name.strip(), limit_ns)
    part = name.strip() if kind == "range" else _SHORT_NAMES.get(what, what)
    is_known = what == "step" or part in (*PARTS, "other") or (kind == "range" and part)
    if not is_known:
        raise _refusal(text)
    subject: Literal["step", "part"] = "step" if what == "step" else "part"
    name = "" if subject == "step" else part
    return Condition(text, subject, name, limit_ns, float(times[1]) if times else 0.0)


def parse_duration(text: str) -> int | None:
    """Return a duration as `500ms`, `1.5s` or `2min` in nanoseconds; None if it is none."""
    match = _DURATION.fullmatch(text.strip())
    return None if match is None else round(float(match[1]) * _UNITS_NS[match[2]])


def format_ns(ns: float) -> str:
    """Return a duration as one reads it: `4.2 s`, `312 ms`."""
    return f"{ns / 1e9:,.3g} s" if ns >= 1e9 else f"{ns / 1e6:,.3g} ms"
