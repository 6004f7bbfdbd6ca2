"""What the rules report and look at, the same for both formats: violations, flow ends, unpaired events."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["FlowEnd", "FlowKey", "TrackKey", "UnpairedEvent", "Violation"]

TrackKey = tuple[str | int, ...]
"""Identifies a track: (pid, tid) in a Chrome trace, (uuid,) in a Perfetto trace."""
FlowKey = tuple[object, ...]
"""Identifies a flow, the same for all its ends; its id comes first."""


class Violation(NamedTuple):
    """One broken rule.

    Attributes:
        rule: the rule's name (`partial-overlap`).
        message: what is wrong, with the values that are.
        event: position of the event in the file, from 0 (of the packet in a Perfetto trace); None where the file as a
            whole is concerned.
        of_profiler: whether it is a fault of torch.profiler, in an event of its own; modtrace keeps these as they are.
    """

    rule: str
    message: str
    event: int | None = None
    of_profiler: bool = False

    def __str__(self) -> str:
        where = "" if self.event is None else f"event {self.event}: "
        return f"{self.rule}: {where}{self.message}"


class FlowEnd(NamedTuple):
    """Where a flow starts, passes through, or ends.

    Attributes:
        position: of its event in the file, from 0.
        phase: Chrome's letter: s, t or f.
        track: the track it lies on.
        time: ns.
        flow: the flow it belongs to.
    """

    position: int
    phase: str
    track: TrackKey
    time: int
    flow: FlowKey


class UnpairedEvent(NamedTuple):
    """A begin without an end, or an end without a begin.

    Attributes:
        position: in the file, from 0.
        name: the slice's name; "" for an end that would close whatever is open.
    """

    position: int
    name: str
