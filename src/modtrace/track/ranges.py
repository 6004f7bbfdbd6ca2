"""Named ranges of a thread, and the ranges of users."""

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
"""Maximum number of names of ranges: a program may make new names all the time."""
_OTHER_RANGES = "other ranges"
_PREFIXES: Mapping[RangeCategory, tuple[str, ...]] = {
    "data loading": ("enumerate(",),
    "optimizer": ("Optimizer.",),
    "communication": ("gloo:", "nccl:", "mpi:", "ucc:", "xccl:", "FSDP::"),
    "torch": (
        *("FullyShardedDataParallel.", "DistributedDataParallel.", "torch.distributed.", "ProfilerStep#"),
        *("Torch-Compiled Region", "TorchDynamo ", "CompiledFunction", "## Call CompiledFxGraph"),
    ),
}
"""Prefixes of the names that torch gives, by category; all other names are the user's."""


@cache
def category_of(name: str) -> RangeCategory:
    """Return the category of a range by its name."""
    return next((category for category, prefixes in _PREFIXES.items() if name.startswith(prefixes)), "user")


class RangeRecorder:
    """Writes ranges into a ring, from `start` to `stop`."""

    # The recorder of the running recording. It is an attribute because torch.compile would compile a function.
    active: ClassVar[RangeRecorder | None] = None

    def __init__(self, events: EventSink, names: NameTable, on_error: OnError) -> None:
        self._events, self._names, self._on_error = events, names, on_error
        self._ids: dict[tuple[str, RangeCategory], int] = {}
        # Odd numbers; the native engine gives its ranges even numbers.
        self._next_number = itertools.count(1, 2).__next__

    def start(self) -> None:
        """Start: from now on, ranges are written into this recorder's ring."""
        RangeRecorder.active = self

    def stop(self) -> None:
        """Stop writing ranges."""
        if RangeRecorder.active is self:
            RangeRecorder.active = None

    def name_id(self, name: str, category: RangeCategory | None = None) -> int:
        """Return the id of a range's name; after 4,096 names, all further names of a category share one id."""
        key = name, category or category_of(name)
        name_id = self._ids.get(key)
        if name_id is None:
            text = range_text(*key) if len(self._ids) < _MAX_NAMES else range_text(_OTHER_RANGES, key[1])
            name_id = self._names.text(text)
            if len(self._ids) < _MAX_NAMES:
                self._ids[key] = name_id
        return name_id

    @skip_all
    def begin(self, name: str, category: RangeCategory | None = None) -> OpenRange | None:
        """Write the start of a range on this thread; return the open range, or None after an error."""
        try:
            name_id, number = self.name_id(name, category), self._next_number()
            if (on_boundary := self._events.on_boundary) is not None:
                on_boundary(category or name)
            self._events.write_event(Kind.RANGE_BEGIN, name_id, number)
        except Exception as error:
            self._on_error(error)
            return None
        return self, name_id, number

    @staticmethod
    @skip_all
    def end(opened: OpenRange | None) -> None:
        """Write the end of a range that `begin` returned."""
        if opened is not None and RangeRecorder.active is opened[0]:
            try:
                events = opened[0]._events
                events.write_event(Kind.RANGE_END, *opened[1:])
                if (on_boundary := events.on_boundary) is not None:
                    on_boundary(None)
            except Exception as error:
                opened[0]._on_error(error)


OpenRange = tuple[RangeRecorder, int, int]
"""The recorder that writes a range, the id of the range's name, and the range's number."""


class NamedRange:
    """A user's range around a block or a function. It does nothing if no recording runs."""

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
    """Start a user's range, if a recording runs and `is_on` returns True; return the open range."""
    ranges = RangeRecorder.active
    return None if ranges is None or not is_on() else ranges.begin(name, "user")


@overload
def named_range(name: str) -> NamedRange: ...
@overload
def named_range(name: _Function) -> _Function: ...
def named_range(name: Any) -> Any:
    """Name a block or a function: it gets its own row in the running recording, without a profiler.

    Nothing happens if no recording runs, or if it has `ranges=False`. In compiled code the range is left out.

    Args:
        name: the name of the range; or a function, whose name becomes the range's.

    Example:
        >>> with modtrace.range("augment"):
        ...     batch = augment(batch)
        >>> @modtrace.range("sample")
        ... def sample(model): ...
    """
    return NamedRange(name) if isinstance(name, str) else NamedRange(name.__qualname__)(name)
