"""How far one process is with collectives, sends and receives, and in which one it is stuck."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..ring import Kind
from ..ring.collective_text import CollectiveName, parse_collective
from ..ring.slot_format import NO_NAME, NOT_AWAITED_BIT
from ..timeline import Group
from ..timeline.decode import RingAnalysis, is_communication

ANY_PEER = -1
"""The peer of a receive from any sender."""


class Blocked(NamedTuple):
    """A collective, a send or a receive that was called and is not complete.

    Attributes:
        operator: as `torch.distributed` calls it.
        counter: which collective of its group it is; for a send or receive which one with its peer.
        since_ns: when the wait for it began, or its call; monotonic nanoseconds.
        tid: of the thread that called it, as the operating system has it; 0 if that is not known.
        details: what else is known of it, as texts.
    """

    operator: str
    counter: int
    since_ns: int
    tid: int = 0
    details: tuple[str, ...] = ()


class GroupProgress(NamedTuple):
    """How far one process is with the collectives of one group.

    Attributes:
        group: the group.
        last: the counter of the last one that was called; -1 if none was.
        recent: the operators of the last ones, in order; empty texts if they are not known.
        blocked: the first one that is not complete, as far as the engine can know; else None.
    """

    group: Group
    last: int
    recent: tuple[str, ...]
    blocked: Blocked | None

    def operator(self, counter: int) -> str:
        """Return which operator has this counter; empty if that is not known."""
        index = len(self.recent) - 1 - (self.last - counter)
        return self.recent[index] if 0 <= index < len(self.recent) else ""


class PeerProgress(NamedTuple):
    """How far one process is with its sends to, or its receives from, one other.

    Attributes:
        group: the group that they are called on.
        operator: "send" or "recv".
        peer: the rank in the group at the other end, or `ANY_PEER`.
        last: the counter of the last one that was called.
        blocked: the first one that is not complete; else None.
    """

    group: Group
    operator: str
    peer: int
    last: int
    blocked: Blocked | None


_MAX_OPERATORS = 256
"""How many of the last collectives of a group are kept by name."""
_ANY_SOURCE = "recv_any_source"
_MESSAGES = ("send", "recv", _ANY_SOURCE)
"""The operators that have a peer."""


class RankProgress(NamedTuple):
    """How far one process is.

    Attributes:
        groups: with the collectives of each group that has any in the ring, or that the ring knows.
        peers: with the sends and receives of each pair.
        first_ns: the oldest event that was read, monotonic nanoseconds; earlier calls are not known. None if the ring
            holds all of the recording.
    """

    groups: tuple[GroupProgress, ...] = ()
    peers: tuple[PeerProgress, ...] = ()
    first_ns: int | None = None


def read_rank_progress(analysis: RingAnalysis) -> RankProgress:
    """Return how far the process of a ring is."""
    slots, lookup = analysis.snapshot.slots, analysis.lookup
    first_ns = int(slots.events.time[0]) if slots.overwritten and len(slots.events) else None
    events, groups = slots.events.take(is_communication(slots.events)), lookup.groups
    names = {
        number: parse_collective(lookup.texts[number])
        for number in np.unique(events.name).tolist()
        if number != NO_NAME
    }
    of_group = {name: _Calls() for name in groups}
    of_peer: dict[CollectiveName, _Calls] = {}  # without its device
    columns = (events.kind, events.name, events.value, events.time, events.thread)
    for kind, number, value, time_ns, thread in zip(*(column.tolist() for column in columns), strict=True):
        name = names.get(number)
        if name is None or (name.peer >= 0 and name.operator not in _MESSAGES):
            continue
        is_collective = name.peer < 0 and name.operator != _ANY_SOURCE
        calls = (
            of_group.setdefault(name.group, _Calls())
            if is_collective
            else of_peer.setdefault(name._replace(device=""), _Calls())
        )
        calls.add(kind, Blocked(name.operator, value, time_ns, lookup.threads[thread][1]), bool(name.device))

    def group(name: str) -> Group:
        return groups.get(name) or Group(name)

    return RankProgress(
        tuple(
            GroupProgress(group(name), calls.last, calls.recent(), calls.blocked()) for name, calls in of_group.items()
        ),
        tuple(
            PeerProgress(
                group(name.group),
                "recv" if name.operator == _ANY_SOURCE else name.operator,
                ANY_PEER if name.operator == _ANY_SOURCE else name.peer,
                calls.last,
                calls.blocked(),
            )
            for name, calls in of_peer.items()
        ),
        first_ns,
    )


class _Calls:
    """The calls of one group, or with one peer, as their events come."""

    def __init__(self) -> None:
        self.called: dict[int, Blocked] = {}
        self._in_call: dict[int, Blocked] = {}
        self._done: set[int] = set()
        self._completing: set[str] = set()
        self._waiting: dict[int, Blocked] = {}

    def add(self, kind: int, call: Blocked, on_device: bool = False) -> None:
        """Add an event; the counter of `call` is its value. A wait for a device ends before what it is for."""
        value = call.counter
        if kind == Kind.COLLECTIVE_ENTER:
            self.called[value] = self._in_call[call.tid] = call
        elif kind == Kind.COLLECTIVE_EXIT:
            entered = self._in_call.pop(call.tid, None)
            # No event will say when it is complete.
            if entered is not None and value & NOT_AWAITED_BIT:
                self._done.add(entered.counter)
        elif kind == Kind.COLLECTIVE_DONE:
            self._completing.add(call.operator)
            self._done.add(value)
        elif kind == Kind.WAIT_ENTER and value >= 0:
            self._waiting[value] = call
            self.called.setdefault(value, call)
        elif kind == Kind.WAIT_EXIT:
            self._waiting.pop(value, None)
            if not on_device:
                self._done.add(value)

    @property
    def last(self) -> int:
        return max(self.called, default=-1)

    def recent(self) -> tuple[str, ...]:
        first = max(min(self.called, default=0), self.last + 1 - _MAX_OPERATORS)
        return tuple(
            self.called[counter].operator if counter in self.called else "" for counter in range(first, self.last + 1)
        )

    def blocked(self) -> Blocked | None:
        pending = [*self._waiting.values(), *self._in_call.values()]
        # Others of its kind were seen to complete, so this one has not.
        pending += [
            call
            for counter, call in self.called.items()
            if counter not in self._done and counter not in self._waiting and call.operator in self._completing
        ]
        return min(pending, key=lambda call: call.counter, default=None)
