"""The tensors inside what goes into a module and what comes out of it, and how to look at one."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

_MAX_DEPTH = 8


def unseen_by_modes() -> AbstractContextManager[None]:
    """Return what to look at tensors in: modes and subclasses of the user's may count or refuse it, traces note it."""
    tracing = torch._C._get_tracing_state()
    return torch._C.DisableTorchFunction() if tracing is None else _unseen_by_trace(tracing)


@contextmanager
def _unseen_by_trace(tracing: Any) -> Iterator[None]:
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        with torch._C.DisableTorchFunction():
            yield
    finally:
        torch._C._set_tracing_state(tracing)  # type: ignore[attr-defined]


def tensors_in(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists, mappings and dataclasses, in order.

    Args:
        value: anything; what is none of these holds no tensors.
        depth: how deep `value` lies; what lies deeper than 8 levels is left out, so that cycles end.
    """
    if isinstance(value, Tensor):
        yield value
    elif depth >= _MAX_DEPTH:
        return
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item, depth + 1)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item, depth + 1)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name, None), depth + 1)
