"""What the rules work on, the same for both formats: checked events and violations."""

from __future__ import annotations

from typing import Literal, NamedTuple

__all__ = ["CheckedEvent", "TrackKey", "Violation"]

TrackKey = tuple[str | int, ...]
"""Identifies a track: (pid, tid) in a Chrome trace, (uuid,) in a Perfetto trace."""


class Violation(NamedTuple):
    """One broken rule.

    Attributes:
        rule: the rule's name (`partial-overlap`).
        message: what is wrong, with the values that are.
        event: position of the event in the file, from 0 (of the packet in a Perfetto trace); None where the file as a
            whole is concerned.
    """

    rule: str
    message: str
    event: int | None = None

    def __str__(self) -> str:
        where = "" if self.event is None else f"event {self.event}: "
        return f"{self.rule}: {where}{self.message}"


class CheckedEvent(NamedTuple):
    """A slice, the begin or end of a slice, or one end of a flow.

    Attributes:
        position: position in the file, from 0.
        phase: Chrome's letter: X, B, E for slices; s, t, f for flows.
        track: the track it is drawn on.
        time: ns.
        duration: ns for an X, else 0.
        name: the slice's name; "" for an E that closes whatever is open.
        flow: identifies the flow, the same for all its ends; None for slices.
        binding: for a flow's end, whether it belongs to the slice around it or to the next slice that begins.
    """

    position: int
    phase: str
    track: TrackKey
    time: int
    duration: int = 0
    name: str = ""
    flow: tuple[object, ...] | None = None
    binding: Literal["around", "next"] = "around"
