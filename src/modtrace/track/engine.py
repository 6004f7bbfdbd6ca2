"""The engines' interface, and the choice between them."""

from __future__ import annotations

import logging
import os
from functools import cache
from typing import Literal, Protocol

from .._errors import EngineError
from ..record_options import EngineName as EngineName  # for those who choose an engine
from ..ring import Ring
from .compiled_regions import CompiledBackward
from .event_sink import EngineOptions, EventSink, OnError
from .native.device_times import say_no_device_times
from .native.engine import NativeEngine, say_no_memory
from .native.library import why_unavailable
from .portable.engine import PortableEngine

# Loads the native engine if it is built. Now, and not when a recording begins: torch holds a lock while the engine
# gives it a callback, and a child that is forked meanwhile would wait for that lock for ever.
if hasattr(os, "fork"):
    why_unavailable()


class Engine(EventSink, CompiledBackward, Protocol):
    """Writes into a ring what modules and autograd nodes run.

    Attributes:
        kind: "native" or "python".
    """

    kind: str

    def start(self) -> None:
        """Start recording: wrap `nn.Module.__call__`."""

    def stop(self) -> None:
        """Stop recording. Thread-safe; wrappers already on the stack become no-ops."""

    def finish_notes(self) -> None:
        """Note what is known of events that were written and not noted with them, before the ring is read."""

    def unmatched_model(self) -> str | None:
        """Return the class given as `model=` if names started at no module of it; else None."""

    def after_fork(self) -> None:
        """Stop in a forked child, whose ring is its parent's."""


def choose_engine(wanted: EngineName) -> Literal["native", "python"]:
    """Return the engine to use where `wanted` is asked for; "auto" takes the native one where it can be had."""
    if wanted != "auto":
        return wanted
    reason = why_unavailable()
    if reason is None:
        return "native"
    _log_fallback(reason)
    return "python"


def make_engine(kind: Literal["native", "python"], ring: Ring, on_error: OnError, options: EngineOptions) -> Engine:
    """Return an engine that was not started.

    Args:
        kind: which one.
        ring: where events and names go.
        on_error: called with what went wrong inside.
        options: what it records.

    Raises:
        EngineError: the native engine is asked for and cannot be had, or FLOPs are, which it alone counts.
    """
    if kind == "native":
        return NativeEngine(ring, on_error, options)
    if options.flops:
        raise EngineError("flops needs the native engine; `modtrace build` makes it, `modtrace doctor` says what lacks")
    if options.device is not None:
        say_no_device_times("the portable engine has none; `modtrace doctor` says why the native one does not record")
    if options.memory:
        say_no_memory("the portable engine counts none; `modtrace doctor` says why the native one does not record")
    return PortableEngine(ring, on_error, options)


@cache
def _log_fallback(reason: str) -> None:
    logging.getLogger("modtrace").warning(
        "the portable engine records, not the native one (exact, and a fifth of the cost): %s", reason
    )
