"""Calls of torch.distributed in a recording: collectives, sends and receives, and the waits for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from .._arrays import BoolArray, Int32Array, Int64Array, Numbering
from ..ring.event_text import CollectiveName, parse_ranks
from .slices import COLLECTIVE, WAIT, Arg, ArgColumn, Args, Slices, without_empty


class Group(NamedTuple):
    """A process group of torch.distributed.

    Attributes:
        name: torch's name of the group; `0` for the default group.
        ranks: its global ranks, ascending; empty if torch did not know them.
        description: torch's description of its purpose (`default_pg`, `mesh_dp`).
    """

    name: str
    ranks: tuple[int, ...] = ()
    description: str = ""

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> Group:
        """Return the group that a record of a ring's name table describes."""
        return _group_of(record["name"], record["ranks"], record["description"])


@lru_cache(maxsize=256)  # thousands of rings name the same thousands of ranks
def _group_of(name: str, ranks: str, description: str) -> Group:
    try:
        return Group(name, tuple(parse_ranks(ranks)), description)
    except ValueError:
        return Group(name, (), description)


class Collective(NamedTuple):
    """One call of a collective, a send or a receive, or a wait for one.

    Attributes:
        operator: name in `torch.distributed` (`all_reduce`); for a wait the operator waited for, empty if unknown.
        group: name of the group, see `Collectives.groups`; empty if unknown.
        peer: rank in the group at the other end of a send or receive; None for other operators.
        is_wait: True for a wait for a collective, False for the call.
        counter: number among the collectives of its group, from 0 at the start of the recording; None if unknown. A
            collective has the same number on all ranks. Sends and receives are counted per peer.
        nbytes: bytes of the larger of input and output on this rank; 0 for a wait and a barrier.
        start_ns: start of the call, integer nanoseconds since the Unix epoch.
        end_ns: return of the call; never less than `start_ns`.
        done_ns: completion of the collective; None if unknown.
        track: name of its track (`communication · MainThread`).
        step: number of the training step, from 0.
        complete: False if its end never came or was overwritten.
        device: type of the device that runs it (`cuda`), on which the call and the waits only queue the work. Its
            completion is known only from device times (`record(device_times=True)`), by the stream that runs it or
            waits for it. Empty for the CPU and a barrier.
    """

    operator: str
    group: str
    peer: int | None
    is_wait: bool
    counter: int | None
    nbytes: int
    start_ns: int
    end_ns: int
    done_ns: int | None
    track: str
    step: int
    complete: bool
    device: str = ""

    @property
    def duration_ns(self) -> int:
        """The duration of the call in nanoseconds."""
        return self.end_ns - self.start_ns


@dataclass(frozen=True)
class Collectives:
    """Collectives and waits as columns in start order; every array has one entry per row.

    Attributes:
        names: the distinct names, indexed by `name`.
        groups: the process groups, by name.
        track_names: the names of the timeline's tracks.
        start: int64, nanoseconds since the Unix epoch.
        end: int64, nanoseconds; never less than `start`.
        done: int64, nanoseconds; -1 if its completion is unknown.
        name: int32, index into `names`; -1 for a wait for something unknown.
        is_wait: bool.
        counter: int64, see `Collective`; -1 if unknown.
        nbytes: int64, see `Collective`.
        track: int32, index into `Timeline.tracks`.
        step: int64, the number of steps that had ended when it was called.
        complete: bool.
    """

    names: Sequence[CollectiveName]
    groups: Sequence[Group]
    start: Int64Array
    end: Int64Array
    done: Int64Array
    name: Int32Array
    is_wait: BoolArray
    counter: Int64Array
    nbytes: Int64Array
    track: Int32Array
    step: Int64Array
    complete: BoolArray
    track_names: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.start)

    def __getitem__(self, index: int) -> Collective:
        index = range(len(self))[index]
        name, done, counter = int(self.name[index]), int(self.done[index]), int(self.counter[index])
        operator, group, peer, device = self.names[name] if name >= 0 else CollectiveName("", "")
        track = int(self.track[index])
        return Collective(
            operator=operator,
            group=group,
            peer=peer if peer >= 0 else None,
            is_wait=bool(self.is_wait[index]),
            counter=counter if counter >= 0 else None,
            nbytes=int(self.nbytes[index]),
            start_ns=int(self.start[index]),
            end_ns=int(self.end[index]),
            done_ns=done if done >= 0 else None,
            track=self.track_names[track] if track < len(self.track_names) else "",
            step=int(self.step[index]),
            complete=bool(self.complete[index]),
            device=device,
        )

    @property
    def on_device(self) -> BoolArray:
        """True for collectives that run on a device: their ends on the host do not depend on other ranks."""
        has_device: BoolArray = np.array([bool(name.device) for name in self.names] + [False])
        return has_device[self.name]

    def __iter__(self) -> Iterator[Collective]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        waits = int(np.count_nonzero(self.is_wait))
        return f"<Collectives: {len(self) - waits} on {len(self.groups)} groups, {waits} waits>"

    @classmethod
    def of_slices(cls, slices: Slices, groups: Sequence[Group], track_names: Sequence[str]) -> Collectives:
        """Return the collectives and waits among a timeline's slices."""
        rows = slices.take(slices.block_of(COLLECTIVE))
        shared = {name: getattr(rows, name) for name in ("start", "end", "track", "step", "complete")}
        args = [rows.arg(name) for name in (Arg.OPERATOR, Arg.GROUP, Arg.PEER, Arg.DEVICE)]
        # The four values of each row as one number; the distinct numbers are unravelled.
        code, sizes = np.zeros(len(rows), np.int64), [int(column.values.max(initial=-1)) + 2 for column in args]
        for column, size in zip(args, sizes, strict=True):
            code = code * size + column.dense(len(rows)) + 1
        codes, name = np.unique(code, return_inverse=True)
        values = np.stack(np.unravel_index(codes, sizes)) - 1
        is_named = values[:2].max(axis=0, initial=-1) >= 0
        number: Int32Array = np.where(is_named, np.cumsum(is_named) - 1, -1).astype(np.int32)
        names = [
            CollectiveName(args[0].text(operator), args[1].text(group), peer, args[3].text(device))
            for operator, group, peer, device in values[:, is_named].T.tolist()
        ]
        return cls(
            names,
            groups,
            name=number[name],
            is_wait=rows.kind == WAIT,
            counter=rows.arg(Arg.COUNTER).dense(len(rows)),
            nbytes=rows.arg(Arg.NBYTES).dense(len(rows), 0),
            done=rows.arg(Arg.DONE).dense(len(rows)),
            track_names=track_names,
            **shared,
        )


def collective_args(
    names: Sequence[CollectiveName], name: Int64Array, counter: Int64Array, nbytes: Int64Array, done: Int64Array
) -> Args:
    """Return the args of a table of collectives and waits; -1 means unknown, see `Collective`."""
    rows, row_name = np.flatnonzero(name >= 0), name[name >= 0]
    args = {}
    for arg, name_texts in (
        (Arg.OPERATOR, [name.operator for name in names]),
        (Arg.GROUP, [name.group for name in names]),
        (Arg.DEVICE, [name.device for name in names]),
    ):
        texts = Numbering[str]()
        code = np.array([texts[text] if text else -1 for text in name_texts], np.int64)[row_name]
        args[arg] = ArgColumn(rows[code >= 0], code[code >= 0], [*texts])
    peer = np.array([name.peer for name in names], np.int64)[row_name]
    args[Arg.PEER] = ArgColumn(rows[peer >= 0], peer[peer >= 0])
    for arg, values, min_value in ((Arg.COUNTER, counter, 0), (Arg.NBYTES, nbytes, 1), (Arg.DONE, done, 0)):
        arg_rows = np.flatnonzero(values >= min_value)
        args[arg] = ArgColumn(arg_rows, values[arg_rows])
    return without_empty(args)
