"""The options of a recording: one table for `modtrace.record`, the command line and `MODTRACE=`.

The table is read by `modtrace run --help` and `modtrace.on_trace_ready`, so this file does not import torch.
"""

import os
import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from ._ranks import ROLE

if TYPE_CHECKING:
    from torch import nn
    from torch.profiler import ProfilerAction

EngineName = Literal["auto", "native", "python"]
EngineKind = Literal["native", "python"]
ENGINES: tuple[EngineName, ...] = ("auto", "native", "python")
DEFAULT_CAPACITY = 1 << 20
MIN_CAPACITY = 16
MAX_CAPACITY = 1 << 34
_USER_SIGNALS = ("SIGUSR1", "SIGUSR2")


StepRange = tuple[int | None, int | None]
"""The first step of a range and the step after its last; None: no limit."""


class RecordOptions(TypedDict, total=False):
    """The keyword arguments of `modtrace.record`, which documents them; types functions that pass them on."""

    engine: EngineName
    capacity: int
    ring: str | os.PathLike[str] | None
    model: "nn.Module | str | None"
    max_steps: int | None
    schedule: "Callable[[int], ProfilerAction] | None"
    shapes: bool
    memory_interval: float | None
    memory: bool
    on_signal: int | None
    stacks_on_signal: int | None
    host_name: bool
    strip_wrappers: bool
    device_times: bool | int | str
    ranges: bool
    flops: bool
    workers: bool
    keep: int
    keep_when: str | Sequence[str] | None
    role: str | None


@dataclass(frozen=True)
class Option:
    """The text form of an option of `RecordOptions`."""

    name: str  # the argument of `record` and the key in `MODTRACE=`; on the command line with dashes
    parse: Callable[[str], Any]  # text → value; raises ValueError with a message for the user
    help: str  # one line for the command line
    metavar: str | None = None  # the word for the value in the help; None if the option is a flag
    default: Any = None  # default of `record`
    is_path: bool = False  # whether the text is a path, in which `%r` and `%p` are filled in
    suggestions: tuple[str, ...] = ()  # texts that a shell's completion offers
    separator: str = ""  # joins the texts of an option that is given several times; empty: the last text counts


def check_engine(engine: object) -> EngineName:
    """Return the name of an engine; raise ValueError if there is no such engine."""
    if engine not in ENGINES:
        names = f"{', '.join(map(repr, ENGINES[:-1]))} or {ENGINES[-1]!r}"
        raise ValueError(f"engine is {engine!r}; it must be {names}")
    return engine


def check_capacity(capacity: object) -> int:
    """Return the capacity of a ring in events; raise ValueError if a ring cannot have this capacity."""
    if not isinstance(capacity, int) or not MIN_CAPACITY <= capacity <= MAX_CAPACITY:
        raise ValueError(
            f"capacity is {capacity!r}; it must be a whole number of events, {MIN_CAPACITY} to {MAX_CAPACITY:,}"
        )
    return capacity


def check_role(role: object) -> str:
    """Return the name of a role; raise ValueError if it cannot be part of a process name."""
    if not isinstance(role, str) or not re.fullmatch(ROLE, role):
        raise ValueError(f"role is {role!r}; it must be a name of at most 40 letters, digits, '_', '.' and '-'")
    return role


def _capacity(text: str) -> int:
    return check_capacity(int(text) if text.isdecimal() else text)


_MIN_COUNT = {"max_steps": 1, "keep": 0}


def check_count(name: str, count: object) -> int:
    """Return the value of an option that is a count; raise ValueError for an invalid value."""
    if type(count) is not int or count < _MIN_COUNT[name]:
        raise ValueError(f"{name} is {count!r}; it must be a whole number, {_MIN_COUNT[name]} or more")
    return count


def _count(name: str) -> Callable[[str], int]:
    return lambda text: check_count(name, int(text) if text.removeprefix("-").isdecimal() else text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise ValueError(f"{text!r} is not a number of seconds, 0 or more")
    return seconds


def _signal(text: str) -> signal.Signals:
    try:
        return signal.Signals[text]
    except KeyError:
        raise ValueError(f"{text!r} is not the name of a signal, such as SIGUSR1") from None


@dataclass(frozen=True)
class _StepSchedule:
    """The schedule of `torch.profiler.schedule`, but torch is imported only when it is called."""

    wait: int
    warmup: int
    active: int
    repeat: int = 0

    def __str__(self) -> str:
        return f"{self.wait},{self.warmup},{self.active},{self.repeat}"

    def __call__(self, step: int) -> "ProfilerAction":
        from torch.profiler import ProfilerAction

        cycle, position = divmod(step, self.wait + self.warmup + self.active)
        if (self.repeat and cycle >= self.repeat) or position < self.wait:
            return ProfilerAction.NONE
        if position < self.wait + self.warmup:
            return ProfilerAction.WARMUP
        is_last = position == self.wait + self.warmup + self.active - 1
        return ProfilerAction.RECORD_AND_SAVE if is_last else ProfilerAction.RECORD


def _schedule(text: str) -> _StepSchedule:
    numbers = text.split(",")
    if not 3 <= len(numbers) <= 4 or not all(number.strip().isdecimal() for number in numbers):
        raise ValueError(f"{text!r} is not wait,warmup,active,repeat: numbers of steps, and of cycles (0: without end)")
    schedule = _StepSchedule(*map(int, numbers))
    if schedule.active < 1:
        raise ValueError(f"{text!r} records no step; the third number, active, must be 1 or more")
    return schedule


def parse_flag(text: str) -> bool:
    """Return the bool for `true`, `false`, `1` or `0`; raise ValueError for another text."""
    try:
        return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
    except KeyError:
        raise ValueError(f"{text!r} is neither true nor false") from None


def _device_times(text: str) -> bool | int | str:
    if text.isdecimal() and text != "0":
        return int(text)
    return parse_flag(text) if text.lower() in ("true", "false", "0") else text


OPTIONS: tuple[Option, ...] = (
    Option("ring", str, "A file behind the ring: it survives SIGKILL.", "FILE", is_path=True),
    Option("engine", check_engine, "Which engine records.", f"[{'|'.join(ENGINES)}]", "auto", suggestions=ENGINES),
    Option("capacity", _capacity, "Events kept, 32 bytes each; the oldest are overwritten.", "N", DEFAULT_CAPACITY),
    Option("model", str, "Start names at the module of this class. [each outermost called module]", "CLASS"),
    Option("max_steps", _count("max_steps"), "Stop recording after N training steps.", "N"),
    Option("schedule", _schedule, "Record only some steps, a file per cycle.", "WAIT,WARMUP,ACTIVE[,REPEAT]"),
    Option("shapes", parse_flag, "Note shapes and dtypes of each call's input tensors.", default=False),
    Option("memory_interval", _seconds, "Sample memory, at intervals of SECONDS or more.", "SECONDS"),
    Option(
        "memory",
        parse_flag,
        "Record what each call of a module allocates and keeps, on the GPU if one is used.",
        default=False,
    ),
    Option(
        "on_signal",
        _signal,
        "Save whenever this signal comes (SIGUSR1), and go on.",
        "SIGNAL",
        suggestions=_USER_SIGNALS,
    ),
    Option(
        "stacks_on_signal",
        _signal,
        "On this signal (SIGUSR2) write Python stacks beside the ring.",
        "SIGNAL",
        suggestions=_USER_SIGNALS,
    ),
    Option("host_name", parse_flag, "Note the host's name instead of a hash of it.", default=False),
    Option("strip_wrappers", parse_flag, "Leave wrappers (DDP, FSDP, torch.compile, PEFT) out of names.", default=True),
    Option(
        "device_times", _device_times, "Also record when the device (a GPU) is in two levels of calls.", default=False
    ),
    Option("ranges", parse_flag, "Record named ranges: data loading, optimizer, your own.", default=True),
    Option("flops", parse_flag, "Count the FLOPs of each module, once per shapes of inputs.", default=False),
    Option("workers", parse_flag, "Also record what the workers of a DataLoader do.", default=False),
    Option("keep", _count("keep"), "Rings of earlier runs to keep, such as run.1.modtrace.", "N", 3),
    Option("keep_when", str, "Keep the steps around slow ones: 'step > 3x'.", "CONDITION", separator="; "),
    Option("role", check_role, "Role of this process in its job, such as trainer or rollout.", "NAME"),
)
"""All of `RecordOptions`."""
