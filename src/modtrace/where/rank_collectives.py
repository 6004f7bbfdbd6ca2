"""One ring → which collectives its process has called, and in which one it is stuck."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..ring import Kind, RingSnapshot
from ..ring.collective_text import parse_collective, parse_ranks
from ..ring.slot_format import NO_NAME
from ..timeline.build import is_communication

__all__ = ["Blocked", "GroupProgress", "read_group_progress"]


class Blocked(NamedTuple):
    """A collective that was called and is not complete.

    Attributes:
        operator: as `torch.distributed` calls it.
        counter: which collective of its group it is, from 0.
        since_ns: when the wait for it began, or its call; monotonic nanoseconds.
        tid: of the thread that called it, as the operating system has it.
    """

    operator: str
    counter: int
    since_ns: int
    tid: int


class GroupProgress(NamedTuple):
    """How far one process is with the collectives of one group; sends and receives are none.

    Attributes:
        group: its name.
        ranks: its global ranks; empty where they are not known.
        description: what torch says it is for.
        operators: what was called, by counter, as far as the ring still holds it.
        blocked: the first one that is not complete, as far as the engine can know; else None.
    """

    group: str
    ranks: tuple[int, ...]
    description: str
    operators: Mapping[int, str]
    blocked: Blocked | None

    @property
    def last(self) -> int:
        """The counter of the last one that was called; -1 where none was."""
        return max(self.operators, default=-1)


def read_group_progress(snapshot: RingSnapshot) -> tuple[GroupProgress, ...]:
    """Return the progress of each group that has collectives in the ring, or that the ring knows."""
    events = snapshot.slots.events
    events = events.take(is_communication(events))
    texts = {record["id"]: record["text"] for record in snapshot.records if record["kind"] == "text"}
    tids = {record["id"]: record["tid"] for record in snapshot.records if record["kind"] == "thread"}
    groups: dict[str, _Group] = {}
    for record in snapshot.records:
        if record["kind"] == "group":
            groups.setdefault(record["name"], _Group()).record = record
    names = {
        number: parse_collective(texts.get(number, f"#{number}"))
        for number in np.unique(events.name).tolist()
        if number != NO_NAME
    }
    rows = zip(*(column.tolist() for column in (events.kind, events.name, events.value, events.time)), strict=True)
    for index, (kind, number, value, time_ns) in enumerate(rows):
        name = names.get(number)
        if name is None or name.peer >= 0 or name.operator == "recv_any_source":
            continue
        group = groups.setdefault(name.group, _Group())
        if kind == Kind.COLLECTIVE_ENTER:
            tid = tids.get(int(events.thread[index]), 0)
            group.called[value] = group.entered = Blocked(name.operator, value, time_ns, tid)
            group.in_call = group.entered
        elif kind == Kind.COLLECTIVE_EXIT:
            group.in_call = None
        elif kind == Kind.COLLECTIVE_DONE:
            group.completing.add(name.operator)
            group.done.add(value)
        elif kind == Kind.WAIT_ENTER and value >= 0:
            group.waiting[value] = time_ns
        elif kind == Kind.WAIT_EXIT:
            group.waiting.pop(value, None)
            group.done.add(value)
    return tuple(group.progress(name) for name, group in groups.items())


class _Group:
    def __init__(self) -> None:
        self.record: Mapping[str, Any] = {}
        self.called: dict[int, Blocked] = {}
        self.entered: Blocked | None = None
        self.in_call: Blocked | None = None
        self.done: set[int] = set()
        self.completing: set[str] = set()
        self.waiting: dict[int, int] = {}

    def progress(self, name: str) -> GroupProgress:
        try:
            ranks = tuple(parse_ranks(self.record.get("ranks", "")))
        except ValueError:
            ranks = ()
        operators = {counter: call.operator for counter, call in self.called.items()}
        return GroupProgress(name, ranks, self.record.get("description", ""), operators, self._blocked())

    def _blocked(self) -> Blocked | None:
        found = [] if self.in_call is None else [self.in_call]
        for counter, call in self.called.items():
            if counter in self.waiting:
                found.append(call._replace(since_ns=self.waiting[counter]))
            elif counter not in self.done and call.operator in self.completing:
                # Others of its kind were seen to complete, so this one has not.
                found.append(call)
        return min(found, key=lambda call: call.counter, default=None)
