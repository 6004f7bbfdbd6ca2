"""What an engine is, and which one runs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Literal, Protocol

from torch import nn

from ..record_options import EngineName
from ..ring import Kind, Ring
from .native.engine import NativeEngine
from .native.library import is_built, native_path
from .portable.engine import PortableEngine

__all__ = ["Engine", "EngineName", "Fail", "choose_engine", "make_engine"]

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

    def after_fork(self) -> None:
        """End it in a forked child."""

    def event(self, kind: Kind, name: int, value: int) -> None:
        """Write one event of this thread."""


def choose_engine(wanted: EngineName) -> Literal["native", "python"]:
    """Say which engine runs where `wanted` is asked for; "auto" takes the native one where it is built."""
    if wanted != "auto":
        return wanted
    if is_built():
        return "native"
    _say_how_to_build()
    return "python"


def make_engine(kind: Literal["native", "python"], ring: Ring, model: nn.Module | str | None, fail: Fail) -> Engine:
    """Return the engine.

    Raises:
        EngineError: the native engine is asked for and cannot be had.
    """
    return (NativeEngine if kind == "native" else PortableEngine)(ring, model, fail)


@cache
def _say_how_to_build() -> None:
    logging.getLogger("modtrace").warning(
        "the native engine (exact, and a tenth of the cost) is not built for this torch; "
        "run `modtrace build` once. Until then the portable engine records. (%s)",
        native_path().parent.name,
    )
