"""What the rules speak of: events as both formats have them, and violations."""

from __future__ import annotations

from typing import Literal, NamedTuple

__all__ = ["Event", "Track", "Violation"]

Track = tuple[str | int, ...]
"""(pid, tid) of a Chrome trace, (uuid,) of a Perfetto trace."""


class Violation(NamedTuple):
    """One broken rule.

    Attributes:
        rule: its name, the same for all violations of the rule.
        message: what is wrong there.
        event: the position of the event in the file (of the packet in a Perfetto trace), from 0; None where it is
            about the file.
    """

    rule: str
    message: str
    event: int | None = None

    def __str__(self) -> str:
        at = "" if self.event is None else f"event {self.event}: "
        return f"{self.rule}: {at}{self.message}"


class Event(NamedTuple):
    """A slice, one end of a slice, or a flow's end.

    Attributes:
        position: where it stands in the file.
        phase: the letter of Chrome's format: X, B, E; s, t, f for flows.
        track: the row it is drawn on.
        time: nanoseconds.
        duration: nanoseconds of an X, else 0.
        name: the slice's name; "" on an E that closes whatever is open.
        flow: what joins the ends of one flow, None for slices.
        binding: whether a flow's end lies in the slice around it or on the next to begin.
    """

    position: int
    phase: str
    track: Track
    time: int
    duration: int = 0
    name: str = ""
    flow: tuple[object, ...] | None = None
    binding: Literal["around", "next"] = "around"
