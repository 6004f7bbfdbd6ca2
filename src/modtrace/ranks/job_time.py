"""The place of each rank's times in the time of the whole job, and how far that is off at most."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple

import numpy as np

from .._typing import Int64Array
from ..clocks.clock_map import ClockMap, Offset
from ..clocks.clock_tree import ClockTree, clock_in, measurements_in
from ..ring import read_ring_records
from ..timeline.decode.analysis import wall_clock
from .collective_offsets import offsets_by_collectives
from .rank_folder import RankRecording, load_collectives

WALL_CLOCK_BOUND_NS = 100_000_000
"""How far the wall clocks of two hosts are apart at most where NTP runs; nothing measures it."""

_CLOCK_KINDS = ("clock", "offset", "anchor")
Method = Literal["same clock", "pings", "collectives", "wall clock"]

_ToJob = Callable[[Int64Array], Offset]
_LargestBound = Callable[[int, int], int]


class RankTime(NamedTuple):
    """One rank's clock against the job's.

    A rank's own times are monotonic nanoseconds of its clock for a ring, Unix nanoseconds for a trace.

    Attributes:
        rank: its number.
        clock: the id of the clock that it was placed by; times of ranks with one are compared without error. A rank
            that was placed alone has one of its own.
        method: how it was found where the rank lies: it reads the clock that the job's time is of, pings between
            hosts, collectives ("without pings"), or the wall clock.
        to_job: own times → what to add to get Unix nanoseconds of the job's clock, and how far that is off at most.
        largest_bound: the first and the last of some own times → how far any between them is off at most.
    """

    rank: int
    clock: str
    method: Method
    to_job: _ToJob
    largest_bound: _LargestBound

    def move(self, own_ns: Int64Array) -> Int64Array:
        """Return own times as Unix nanoseconds of the job's clock."""
        return own_ns + self.to_job(own_ns).offset_ns

    def bound_ns(self, own_ns: Int64Array) -> int:
        """Return how far times in the range of `own_ns` are off at most; 0 for no times."""
        return self.largest_bound(int(own_ns.min()), int(own_ns.max())) if len(own_ns) else 0


class JobTime:
    """The time of a job: that of the clock which most ranks can be compared with.

    Ranks whose clocks were measured against each other are placed by that. What is left is placed by collectives, which
    no rank can leave before the last one has come, and what has none with the others by the wall clock.

    Args:
        files: the recordings.

    Attributes:
        reference: says which time it is; times of two jobs with one reference can be compared.

    Raises:
        ModtraceError: a file cannot be read.
    """

    def __init__(self, files: Sequence[RankRecording]) -> None:
        # Not their names, which are many.
        records = {
            file.rank: [record for record in read_ring_records(file.path) if record["kind"] in _CLOCK_KINDS]
            for file in files
            if file.is_ring
        }
        clocks = {file.rank: clock_in(records.get(file.rank, ())) or _own_clock(file.rank) for file in files}
        tree = ClockTree(
            measurement for rank_records in records.values() for measurement in measurements_in(rank_records)
        )
        roots = Counter(tree.root_of(clock) for clock in clocks.values())
        # Of equally many the one with the lowest rank.
        root = max(roots, key=lambda root: roots[root])
        reference = next(rank for rank in sorted(clocks) if tree.root_of(clocks[rank]) == root)
        anchors = {rank: wall_clock(rank_records) for rank, rank_records in records.items()}
        wall_ns = _wall_ahead(tree, clocks[reference], anchors.get(reference))
        self.reference = f"{root} {wall_ns}"
        self._times: dict[int, RankTime] = {}
        for rank, clock in clocks.items():
            if tree.root_of(clock) == root:
                method: Method = "same clock" if clock == root else "pings"
                by_clocks = partial(_by_clocks, tree, clock, wall_ns)
                self._times[rank] = RankTime(rank, clock, method, by_clocks, partial(tree.largest_bound, clock))
        left = [file for file in files if file.rank not in self._times]
        if left:
            collectives = {file.rank: load_collectives(file) for file in files}
            for rank, offsets in offsets_by_collectives(
                collectives, {rank: time.to_job for rank, time in self._times.items()}
            ):
                self._times[rank] = RankTime(rank, _own_clock(rank), "collectives", offsets.at, offsets.largest_bound)
        for file in left:
            if file.rank not in self._times:
                by_wall = partial(_by_wall_clock, anchors.get(file.rank))
                clock = _own_clock(file.rank)
                self._times[file.rank] = RankTime(file.rank, clock, "wall clock", by_wall, _wall_clock_bound)

    def __getitem__(self, rank: int) -> RankTime:
        return self._times[rank]

    @property
    def ranks(self) -> list[int]:
        """The ranks, ascending."""
        return sorted(self._times)


def _own_clock(rank: int) -> str:
    return f"rank {rank}"


def _wall_ahead(tree: ClockTree, clock: str, anchors: ClockMap | None) -> int:
    """Return how far Unix time is ahead of the root's clock, by the first anchor of one rank."""
    if anchors is None:
        return 0
    own = np.array([anchors.first_ns], np.int64)
    root = own + tree.to_root(clock, own).offset_ns
    return int(anchors.to_other(own)[0] - root[0])


def _by_clocks(tree: ClockTree, clock: str, wall_ns: int, own_ns: Int64Array) -> Offset:
    offset = tree.to_root(clock, own_ns)
    return Offset(offset.offset_ns + wall_ns, offset.bound_ns)


def _by_wall_clock(anchors: ClockMap | None, own_ns: Int64Array) -> Offset:
    offset = np.zeros(len(own_ns), np.int64) if anchors is None else anchors.to_other(own_ns) - own_ns
    return Offset(offset, np.full(len(own_ns), WALL_CLOCK_BOUND_NS))


def _wall_clock_bound(_first_ns: int, _last_ns: int) -> int:
    return WALL_CLOCK_BOUND_NS
