"""What parts of an engine are given: where events go, and whom to tell of an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ..ring import Kind

__all__ = ["EventSink", "OnError"]

OnError = Callable[[BaseException], None]
"""Called with what went wrong inside modtrace; the recording stops, the user's call goes on."""


class EventSink(Protocol):
    """Takes single events; both engines do."""

    def write_event(self, kind: Kind, name: int, value: int) -> None:
        """Write one event of the thread that calls.

        Args:
            kind: its kind.
            name: id of a name or of a text, by kind; `NO_NAME` for none.
            value: by kind, see `Kind`.
        """
