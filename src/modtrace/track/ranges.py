"""Named ranges of a thread, and those of users."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import cache, wraps
from typing import Any, ClassVar, TypeVar, cast, overload

from torch.compiler import is_dynamo_compiling

from ..ring import Kind, NameTable
from ..ring.event_text import RangeCategory, range_text
from .event_sink import EventSink, OnError
from .unseen import skip_all

_Function = TypeVar("_Function", bound=Callable[..., Any])

_MAX_NAMES = 4096
"""Names that a program makes anew all the time must not fill the name table."""
_OTHERS = "other ranges"
_PREFIXES: Mapping[RangeCategory, tuple[str, ...]] = {
    "data loading": ("enumerate(",),
    "optimizer": ("Optimizer.",),
    "communication": ("gloo:", "nccl:", "mpi:", "ucc:", "xccl:", "FSDP::"),
    "torch": (
        *("FullyShardedDataParallel.", "DistributedDataParallel.", "torch.distributed.", "ProfilerStep#"),
        *("Torch-Compiled Region", "TorchDynamo ", "CompiledFunction", "## Call CompiledFxGraph"),
    ),
}
"""How names begin that torch gives; all others are the user's."""


@cache
def category_of(name: str) -> RangeCategory:
    """Return the category of a range that torch or the user gave this name."""
    return next((category for category, prefixes in _PREFIXES.items() if name.startswith(prefixes)), "user")


class RangeRecorder:
    """Writes ranges into a ring, from `start` to `stop`."""

    # The one of the recording that runs. An attribute, as torch.compile would compile a function.
    active: ClassVar[RangeRecorder | None] = None

    def __init__(self, events: EventSink, names: NameTable, on_error: OnError) -> None:
        self._events, self._names, self._on_error = events, names, on_error
        self._ids: dict[tuple[str, RangeCategory], int] = {}
        # Odd, since the native engine counts its own by even numbers.
        self._next_number = itertools.count(1, 2).__next__

    def start(self) -> None:
        """Begin."""
        RangeRecorder.active = self

    def stop(self) -> None:
        """End."""
        if RangeRecorder.active is self:
            RangeRecorder.active = None

    def name_id(self, name: str, category: RangeCategory | None = None) -> int:
        """Return the id of a range's name; from the 4,096th name on all share one."""
        key = name, category or category_of(name)
        name_id = self._ids.get(key)
        if name_id is None:
            text = range_text(*key) if len(self._ids) < _MAX_NAMES else range_text(_OTHERS, key[1])
            name_id = self._names.text(text)
            if len(self._ids) < _MAX_NAMES:
                self._ids[key] = name_id
        return name_id

    @skip_all
    def begin(self, name: str, category: RangeCategory | None = None) -> OpenRange | None:
        """Write that this thread begins a range; None if an error came in between."""
        try:
            name_id, number = self.name_id(name, category), self._next_number()
            if (tell := self._events.on_boundary) is not None:
                tell(category or name)
            self._events.write_event(Kind.RANGE_BEGIN, name_id, number)
        except Exception as error:
            self._on_error(error)
            return None
        return self, name_id, number

    @staticmethod
    @skip_all
    def end(opened: OpenRange | None) -> None:
        """Write that a range ends, which `begin` returned."""
        if opened is not None and RangeRecorder.active is opened[0]:
            try:
                events = opened[0]._events
                events.write_event(Kind.RANGE_END, *opened[1:])
                if (tell := events.on_boundary) is not None:
                    tell(None)
            except Exception as error:
                opened[0]._on_error(error)


OpenRange = tuple[RangeRecorder, int, int]
"""Who writes a range, the id of its name, and its number."""


class NamedRange:
    """A range of the user's own; a block or a function that runs in it. It does nothing if nothing records."""

    def __init__(self, name: str, is_on: Callable[[], bool] = lambda: True) -> None:
        if not isinstance(name, str):
            raise TypeError(f"the name of a range is a str, not {type(name).__name__}")
        self._name, self._is_on = name, is_on
        self._opened: list[OpenRange | None] = []

    def __enter__(self) -> NamedRange:
        if not is_dynamo_compiling():
            self._opened.append(begin_named(self._name, self._is_on))
        return self

    def __exit__(self, *exception: object) -> None:
        if not is_dynamo_compiling():
            RangeRecorder.end(self._opened.pop())

    def __call__(self, function: _Function) -> _Function:
        """Return a function that runs in the range each time."""

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with NamedRange(self._name, self._is_on):
                return function(*args, **kwargs)

        return cast("_Function", call)


@skip_all
def begin_named(name: str, is_on: Callable[[], bool]) -> OpenRange | None:
    """Begin a range of the user's, if anything records and `is_on` says so; return what ends it."""
    ranges = RangeRecorder.active
    return None if ranges is None or not is_on() else ranges.begin(name, "user")


@overload
def named_range(name: str) -> NamedRange: ...
@overload
def named_range(name: _Function) -> _Function: ...
def named_range(name: Any) -> Any:
    """Name what runs in a block or a function: a row of its own in the recording that runs, without a profiler.

    It does nothing if nothing records, or the recording has `ranges=False`. In compiled code it is left out.

    Args:
        name: the name of the range; or a function, whose name is taken.

    Example:
        >>> with modtrace.range("augment"):
        ...     batch = augment(batch)
        >>> @modtrace.range("sample")
        ... def sample(model): ...
    """
    return NamedRange(name) if isinstance(name, str) else NamedRange(name.__qualname__)(name)
