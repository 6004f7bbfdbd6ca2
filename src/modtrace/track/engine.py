"""What an engine is, and which one runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

from torch import nn

from ..ring import Kind, Ring
from .portable import PortableEngine

__all__ = ["Engine", "EngineName", "Fail", "make_engine"]

EngineName = Literal["auto", "native", "python"]
Fail = Callable[[BaseException], None]


class Engine(Protocol):
    """Notes what runs in a ring.

    Attributes:
        kind: "native" or "python".
    """

    kind: str

    def start(self) -> None:
        """Begin to note."""

    def stop(self) -> None:
        """End it, from any thread, at any moment; what still calls does nothing."""

    def event(self, kind: Kind, name: int, value: int) -> None:
        """Write one event of this thread."""


def make_engine(wanted: EngineName, ring: Ring, model: nn.Module | None, fail: Fail) -> Engine:
    """Return the engine to use.

    Raises:
        EngineError: the native engine is asked for and cannot be had.
    """
    return PortableEngine(ring, model, fail)
