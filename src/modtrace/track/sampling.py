"""What can be noted beside the calls, on request: input shapes, and memory. Nothing is paid where nothing is asked."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from .._errors import RecordingError
from ..ring import Kind, NameTable
from .call_patch import Layer
from .tensors import tensors_in

__all__ = ["Samples"]

_MOST_TENSORS = 16
_PAGE = os.sysconf("SC_PAGE_SIZE")


class _Notes(Protocol):
    def event(self, kind: Kind, name: int, value: int) -> None: ...


class Samples:
    """Notes shapes of each call's inputs, and memory at module boundaries.

    Args:
        shapes: note shapes and dtypes.
        memory_interval: sample memory at most once in so many seconds; None does not.
    """

    def __init__(self, shapes: bool, memory_interval: float | None) -> None:
        if memory_interval is not None and not memory_interval >= 0:
            raise RecordingError(f"memory_interval is {memory_interval}; it must be a number of seconds, 0 or more")
        self._shapes = shapes
        self._interval_ns = None if memory_interval is None else int(memory_interval * 1e9)
        self._next = 0
        self._engine: _Notes | None = None
        self._names: NameTable | None = None
        self._fail: Callable[[BaseException], None] | None = None

    def start(self, engine: _Notes, names: NameTable, fail: Callable[[BaseException], None]) -> None:
        """Begin, below the engine's own layer, so that what is noted follows the call's enter."""
        if not self._shapes and self._interval_ns is None:
            return
        self._engine, self._names, self._fail = engine, names, fail
        self._next = 0
        _LAYER.samples = self
        _LAYER.put_on()

    def stop(self) -> None:
        """End it."""
        if self._engine is not None:
            self._engine = None
            _LAYER.samples = None
            _LAYER.take_off()

    def note(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note what is asked for at the begin of a call."""
        engine, names, fail = self._engine, self._names, self._fail
        if engine is None or names is None or fail is None:
            return
        try:
            if self._shapes:
                engine.event(Kind.SHAPES, names.text(_describe(args, kwargs)), 0)
            if self._interval_ns is not None and time.monotonic_ns() >= self._next:
                self._next = time.monotonic_ns() + self._interval_ns
                for text, value in _memory():
                    engine.event(Kind.COUNTER, names.text(text), value)
        except Exception as error:
            fail(error)


def _describe(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    parts: list[str] = []
    for name, value in [("", value) for value in args] + [(f"{key}=", value) for key, value in kwargs.items()]:
        for tensor in tensors_in(value):
            if len(parts) == _MOST_TENSORS:
                return ", ".join([*parts, "…"])
            parts.append(f"{name}{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}")
    return ", ".join(parts)


def _memory() -> list[tuple[str, int]]:
    with open("/proc/self/statm", "rb") as statm:
        counters = [("process RSS", int(statm.read().split()[1]) * _PAGE)]
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        device = torch.cuda.current_device()
        counters.append((f"cuda:{device} allocated", torch.cuda.memory_allocated(device)))
        counters.append((f"cuda:{device} reserved", torch.cuda.memory_reserved(device)))
    return counters


def _make_call(layer: Layer) -> Callable[..., Any]:
    assert isinstance(layer, _SampleLayer)

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807  # what it stands for
        samples = layer.samples
        if not is_dynamo_compiling() and samples is not None:
            samples.note(args, kwargs)
        return layer.inner(self, *args, **kwargs)

    return __call__


class _SampleLayer(Layer):
    samples: Samples | None = None


_LAYER = _SampleLayer(_make_call)
