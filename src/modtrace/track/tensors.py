"""The tensors inside what goes into a module and what comes out of it, and how to look at one."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

_MAX_DEPTH = 8

unseen_by_modes: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunction
"""For a look at tensors: the user's modes and subclasses, which are told of it, may count, print or refuse."""


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
