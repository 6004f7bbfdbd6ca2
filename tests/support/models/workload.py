"""The description of an architecture to measure."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn

__all__ = ["Workload"]


class Workload(NamedTuple):
    """A model, and a function that runs it once on fixed inputs and returns a loss."""

    model: nn.Module
    loss: Callable[[], Tensor]
