"""Where recordings of ranks are, in a folder or behind a URL, which they are, and the one time that all have."""

import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from .._arrays import Int64Array
from .._errors import ModtraceError, TraceError, require_extra
from .._files import begins_with, work_folder
from ..read import SHOWN_EVENTS, FileKind, file_kind_by_head, read_timeline, too_large
from ..record_options import StepRange
from ..ring import (
    MAGIC,
    Kind,
    RingLog,
    RingSnapshot,
    newest_rings,
    read_ring,
    read_ring_place,
    read_ring_records,
    ring_serials,
)
from ..ring.clocks import ClockMap, ClockTree, Offset, clock_in, measurements_in
from ..ring.event_text import parse_ranks
from ..timeline import Collectives, ReadRing, RingPieces, Timeline, build_timeline
from ..timeline.contents import process_label
from ..timeline.decode.analysis import wall_clock
from ..timeline.decode.pieces import PIECE_KINDS
from ..timeline.decode.window import build_around
from ..timeline.summary import take_steps
from .sync_points import offsets_by_collectives

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem


DATASET_MARKER = "dataset.json"

Place = str | os.PathLike[str]
"""A folder, or a URL."""


def is_url(place: Place) -> bool:
    """Say whether this is a URL, and not the path of a folder."""
    return "://" in os.fspath(place)


def absolute(place: Place) -> str:
    """Return the name of a place for another process, whose working folder may be another one."""
    return os.fspath(place) if is_url(place) else os.path.abspath(place)


def open_place(place: Place) -> "tuple[FileSystem, str]":
    """Return the file system of a place, and its path there; raises ModtraceError if pyarrow opens none."""
    require_extra("ranks", "pyarrow")
    from pyarrow.fs import FileSystem

    try:
        filesystem, path = FileSystem.from_uri(absolute(place))
    except (ValueError, OSError, ImportError) as error:
        raise ModtraceError(f"{os.fspath(place)}: pyarrow cannot open it: {error}") from error
    return filesystem, path.rstrip("/")


def is_dataset(place: Place) -> bool:
    """Say whether a place looks like a packed dataset; raises ModtraceError if it is a URL that cannot be opened."""
    if not is_url(place):
        return os.path.isfile(os.path.join(place, DATASET_MARKER))
    filesystem, path = open_place(place)
    try:
        return bool(filesystem.get_file_info(f"{path}/{DATASET_MARKER}").is_file)
    except OSError as error:
        raise ModtraceError(f"{os.fspath(place)}: cannot be read: {error}") from error


@contextmanager
def as_folder(place: Place, executor: Executor | None = None) -> Iterator[str]:
    """Yield a place itself if it is a folder; of a URL a copy of its files, which goes with the block.

    Raises ModtraceError if it cannot be copied, or an executor would not see the copy.
    """
    if not is_url(place):
        yield os.fspath(place)
        return
    if executor is not None:
        raise ModtraceError(f"{place}: recordings are copied from there to this host, where no executor sees them")
    filesystem, path = open_place(place)
    from pyarrow.fs import FileSelector

    with work_folder() as folder:
        try:
            for file in filesystem.get_file_info(FileSelector(path)):
                if file.is_file:
                    _copy(filesystem, file, folder / file.base_name)
        except OSError as error:
            raise ModtraceError(f"{os.fspath(place)}: cannot be read: {error}") from error
        yield os.fspath(folder)


def _copy(filesystem: Any, file: Any, copy: Path) -> None:
    with filesystem.open_input_stream(file.path) as source, open(copy, "wb") as target:
        shutil.copyfileobj(source, target, _BLOCK_BYTES)
    changed = file.mtime_ns or 0
    os.utime(copy, ns=(changed, changed))


_BLOCK_BYTES = 8 << 20


_RING_SUFFIX = ".modtrace"
_TRACE_SUFFIXES = (".json", ".json.gz", ".pftrace", ".pftrace.gz")
_RECORDINGS = (FileKind.SAVED_JSON, FileKind.PERFETTO, FileKind.PROFILE, FileKind.MERGED_PERFETTO)


class RankRecording(NamedTuple):
    """The recording of one rank."""

    rank: int  # its number; where roles have ranks of their own, the place among all processes by role and rank
    path: Path  # the file
    is_ring: bool  # whether it is a ring file, else a trace
    snapshot: RingSnapshot | None = None  # what was read of a ring already, and counts alone; None if nothing was
    role: str = ""  # what the process does in its job; empty if that is not known
    own_rank: int | None = None  # where roles have ranks of their own, the rank among those of the role; else None

    @property
    def world(self) -> str:
        """Those with one world count their ranks together, and have process groups in common."""
        return "" if self.own_rank is None else self.role

    @property
    def rank_in_world(self) -> int:
        """Its number among those of its world."""
        return self.rank if self.own_rank is None else self.own_rank


def find_rank_recordings(
    folder: str | os.PathLike[str], on_left_out: Callable[[ModtraceError], None] | None = None, role: str | None = None
) -> list[RankRecording]:
    """Return the recordings in a folder, by role and rank: its ring files if there are any, else its traces.

    A rank's number is what the recording says, else the last number in the name of the file. Rings that were kept of
    earlier runs do not count, nor those of launchers, which are empty; nor do other roles if one is given. What is
    wrong with a recording goes to `on_left_out`, or is raised. Raises ModtraceError if there is none, or two are of one
    rank.
    """
    root = Path(folder)
    if not root.is_dir():
        raise ModtraceError(f"{root}: it is not a folder; give the one that holds a recording of each rank")
    try:
        paths = sorted(path for path in root.iterdir() if path.is_file())
    except OSError as error:
        raise ModtraceError(f"{root}: cannot be read: {error.strerror}") from error
    rings = [
        path for path in paths if path.suffix == _RING_SUFFIX or (path.suffix != ".new" and begins_with(path, MAGIC))
    ]
    rings = [Path(path) for path in newest_rings(map(str, rings))[0]]
    recordings = [file for path in rings if (file := _read(path, _ring, on_left_out))]
    recordings = recordings or [file for path in paths if (file := _read(path, _trace, on_left_out))]
    if not recordings:
        raise ModtraceError(f"{root}: it holds no recording; record with ring='{root}/%r.modtrace'")
    if role is not None:
        roles = ", ".join(sorted({file.role for file in recordings} - {""})) or "none"
        recordings = [file for file in recordings if file.role == role]
        if not recordings:
            raise ModtraceError(f"{root}: no recording is of role {role!r}; there are: {roles}")
    by_place: dict[tuple[str, int], RankRecording] = {}
    for file in _without_launchers(recordings):
        place = file.role, file.rank
        other = by_place.setdefault(place, file)
        if other is not file:
            label = process_label(*place)
            raise ModtraceError(
                f"{other.path} and {file.path} are both of {label}; leave one in the folder: if the job was started "
                "again, move the earlier recordings of all ranks away; if both ran in one job, record each with a role "
                "(--role) or a rank (RANK) of its own"
            )
    if len({rank for _, rank in by_place}) == len(by_place):
        return sorted(by_place.values(), key=lambda file: file.rank)
    places = sorted(by_place)
    return [by_place[place]._replace(rank=number, own_rank=place[1]) for number, place in enumerate(places)]


def group_by_size(files: Sequence[RankRecording], nbytes: int, ranks: int) -> list[list[RankRecording]]:
    """Return recordings in groups, in order: so many bytes of files and so many ranks at most, but one at least."""
    groups: list[list[RankRecording]] = []
    size = 0
    for file in files:
        file_bytes = 0 if file.snapshot is not None else file.path.stat().st_size
        if not groups or size + file_bytes > nbytes or len(groups[-1]) >= ranks:
            groups.append([])
            size = 0
        groups[-1].append(file)
        size += file_bytes
    return groups


def check_one_world(files: Sequence[RankRecording]) -> None:
    """Raise a ModtraceError if roles have ranks of their own, so that no one is like all others."""
    worlds = sorted({file.world for file in files})
    if len(worlds) > 1:
        roles = ", ".join(world or "without a role" for world in worlds)
        raise ModtraceError(
            f"{files[0].path.parent}: it holds processes of several roles with ranks of their own ({roles}); "
            f"ask for one of them: --role {worlds[-1]}"
        )


def parse_rank_list(text: str) -> tuple[list[int], int]:
    """Return the ranks that a list names, and how many of the worst ones it asks for.

    Example:
        >>> parse_rank_list("0-2,7,worst:4")
        ([0, 1, 2, 7], 4)

    Raises:
        ValueError: it is not such a list.
    """
    parts = text.split(",")
    worst = [int(part.removeprefix("worst:")) for part in parts if part.startswith("worst:")]
    ranks = [rank for part in parts if not part.startswith("worst:") for rank in parse_ranks(part or "-")]
    if min(worst, default=1) < 1:
        raise ValueError(text)
    return sorted(set(ranks)), worst[-1] if worst else 0


def _read(
    path: Path, read: Callable[[Path], RankRecording | None], on_left_out: Callable[[ModtraceError], None] | None
) -> RankRecording | None:
    try:
        return read(path)
    except ModtraceError as error:
        if on_left_out is None:
            raise
        on_left_out(error)
        return None


def _without_launchers(recordings: Sequence[RankRecording]) -> Iterator[RankRecording]:
    """Leave out empty rings beside one of the same rank that is not, and of the same role if they say one."""
    of_rank: dict[int, list[RankRecording]] = {}
    for file in recordings:
        of_rank.setdefault(file.rank, []).append(file)
    for files in of_rank.values():
        recorded = files if len(files) == 1 else [file for file in files if not file.is_ring or ring_serials(file.path)]
        # A launcher says no role.
        beside = {"", *(file.role for file in recorded)} if recorded else set()
        yield from (file for file in files if file in recorded or file.role not in beside)


def _ring(path: Path) -> RankRecording:
    role, rank = read_ring_place(path)
    if rank is None:  # a driver has none, and is alone
        rank = 0 if role and not re.search(r"\d", path.name) else _rank_in_name(path)
    return RankRecording(rank, path, is_ring=True, role=role)


def _trace(path: Path) -> RankRecording | None:
    """Return the rank's recording in a file; None if it is not a trace of one rank."""
    name = path.name.lower()
    if not name.endswith(_TRACE_SUFFIXES) or name.endswith(".speedscope.json"):
        return None
    if file_kind_by_head(path) not in _RECORDINGS:
        return None
    processes = {(track.process.role, track.process.rank) for track in read_timeline(path).tracks}
    processes = {place for place in processes if place[1] is not None} or processes
    if len(processes) > 1:
        return None  # a trace of all ranks, as `ranks timeline` writes it
    role, rank = processes.pop() if processes else ("", None)
    return RankRecording(_rank_in_name(path) if rank is None else rank, path, is_ring=False, role=role)


def _rank_in_name(path: Path) -> int:
    numbers = re.findall(r"\d+", path.name.split(".")[0]) or re.findall(r"\d+", path.name)
    if not numbers:
        raise TraceError(path, "neither it nor its name says its rank; put the rank's number in the name")
    return int(numbers[-1])


_OWN_ANCHOR = {"kind": "anchor", "monotonic": 0, "wall": 0}


def check_size(files: Iterable[RankRecording]) -> None:
    """Raise a ModtraceError if a ring is so large that the user should say which steps to read."""
    for file in files:
        events = len(ring_serials(file.path)) if file.is_ring else 0
        if events > SHOWN_EVENTS:
            raise ModtraceError(
                f"{file.path}: it has {events:,} events, too many to read all ranks at once; choose steps, as in "
                "--steps -1000: (--steps : takes all, with 100 MB or more for a million events), or make a dataset: "
                "modtrace ranks pack"
            )


def load_own_time(file: RankRecording, steps: StepRange | None = None) -> Timeline:
    """Read a rank's recording in its own time: monotonic nanoseconds of a ring, Unix nanoseconds of a trace."""
    whole: Timeline | None
    if file.snapshot is not None:
        whole = build_timeline(_in_own_time(file.snapshot))
    elif file.is_ring:
        read, serials = _reader(file.path), ring_serials(file.path)
        whole = None if steps is None else build_around(read, serials, *steps)
        whole = whole or RingPieces(read, serials).join()
    else:
        whole = read_timeline(file.path)
    return whole if steps is None else take_steps(whole, *steps)


def load_pieces(file: RankRecording) -> Iterator[Timeline]:
    """Do what `load_own_time` does; of a ring piece by piece, each with whole steps and tracks of its own."""
    if file.snapshot is not None or not file.is_ring:
        yield load_own_time(file)
        return
    serials = ring_serials(file.path)
    pieces = RingPieces(_reader(file.path), serials)
    if not pieces.cuts and len(serials) > SHOWN_EVENTS:
        raise too_large(file.path, len(serials), "record with a smaller --capacity")
    yield from pieces


def load_collectives(file: RankRecording) -> Collectives:
    """Read a rank's collectives in its own time, and as little else as possible."""
    if file.snapshot is not None or not file.is_ring:
        return load_own_time(file).collectives
    return build_timeline(_reader(file.path)(ring_serials(file.path) or None, PIECE_KINDS)).collectives


def _reader(path: Path) -> ReadRing:
    """Return a function that reads the events of a ring, in own time."""
    log = RingLog()

    def read(serials: range | None, without: Collection[Kind]) -> RingSnapshot:
        return _in_own_time(read_ring(path, None, serials, without, log))

    return read


def _in_own_time(snapshot: RingSnapshot) -> RingSnapshot:
    """Return a ring's snapshot whose wall clock is its monotonic clock."""
    records = [record for record in snapshot.records if record["kind"] != "anchor"]
    return snapshot._replace(records=[*records, _OWN_ANCHOR])


WALL_CLOCK_BOUND_NS = 100_000_000
"""How far the wall clocks of two hosts are apart at most where NTP runs; nothing measures it."""

_CLOCK_KINDS = ("clock", "offset", "anchor")
Method = Literal["same clock", "pings", "collectives", "wall clock"]

_ToJob = Callable[[Int64Array], Offset]
_LargestBound = Callable[[int, int], int]


class RankTime(NamedTuple):
    """One rank's clock against the job's.

    A rank's own times are monotonic nanoseconds of its clock for a ring, Unix nanoseconds for a trace.
    """

    rank: int  # that of the recording
    # The id of the clock that it was placed by; times of ranks with one are compared without error. A rank that was
    # placed alone has one of its own.
    clock: str
    # How it was found where the rank lies: it reads the clock that the job's time is of, pings between hosts,
    # collectives ("without pings"), or the wall clock.
    method: Method
    # Own times → what to add to get Unix nanoseconds of the job's clock, and how far that is off at most.
    to_job: _ToJob
    largest_bound: _LargestBound  # the first and the last of some own times → how far any between them is off at most

    def move(self, own_ns: Int64Array) -> Int64Array:
        """Return own times as Unix nanoseconds of the job's clock."""
        return own_ns + self.to_job(own_ns).offset_ns

    def bound_ns(self, own_ns: Int64Array) -> int:
        """Return how far times in the range of `own_ns` are off at most; 0 for no times."""
        return self.largest_bound(int(own_ns.min()), int(own_ns.max())) if len(own_ns) else 0


class Reference(NamedTuple):
    """Which time it is: times with one reference can be compared."""

    clock: str  # the id of the clock that it is the time of
    wall_ns: int  # how far it is ahead of that clock's monotonic nanoseconds


class JobTime:
    """The time of a job: that of the clock which most ranks can be compared with.

    Ranks whose clocks were measured against each other are placed by that. What is left is placed by collectives, which
    no rank can leave before the last one has come, and what has none with the others by the wall clock.
    """

    def __init__(self, files: Sequence[RankRecording]) -> None:
        # Not their names, which are many.
        records = {
            file.rank: [record for record in _records(file) if record["kind"] in _CLOCK_KINDS]
            for file in files
            if file.is_ring
        }
        clocks = {file.rank: clock_in(records.get(file.rank, ())) or _own_clock(file.rank) for file in files}
        # The readings of hosts' clocks that each rank noted.
        self.measurements = {rank: measurements_in(rank_records) for rank, rank_records in records.items()}
        tree = ClockTree(measurement for noted in self.measurements.values() for measurement in noted)
        roots = Counter(tree.root_of(clock) for clock in clocks.values())
        # Of equally many the one with the lowest rank.
        root = max(roots, key=lambda root: roots[root])
        reference = next(rank for rank in sorted(clocks) if tree.root_of(clocks[rank]) == root)
        anchors = {rank: wall_clock(rank_records) for rank, rank_records in records.items()}
        wall_ns = _wall_ahead(tree, clocks[reference], anchors.get(reference))
        self.reference = Reference(root, wall_ns)
        self._times: dict[int, RankTime] = {}
        for rank, clock in clocks.items():
            if tree.root_of(clock) == root:
                method: Method = "same clock" if clock == root else "pings"
                path = tree.path_of(clock)
                by_clocks = partial(_by_clocks, path, clock, wall_ns)
                self._times[rank] = RankTime(rank, clock, method, by_clocks, partial(path.largest_bound, clock))
        left = [file for file in files if file.rank not in self._times]
        if left:
            placed = {rank: time.to_job for rank, time in self._times.items()}
            # Groups of two worlds may have one name and equal ranks.
            for world in {file.world for file in left}:
                collectives = {file.rank: load_collectives(file) for file in files if file.world == world}
                for rank, offsets in offsets_by_collectives(collectives, placed):
                    clock = _own_clock(rank)
                    self._times[rank] = RankTime(rank, clock, "collectives", offsets.at, offsets.largest_bound)
        for file in left:
            if file.rank not in self._times:
                if file.is_ring and all(record["kind"] != "anchor" for record in records[file.rank]):
                    raise ModtraceError(f"{file.path}: its clocks were cut off; move it away, or copy it again")
                by_wall = partial(_by_wall_clock, anchors.get(file.rank))
                clock = _own_clock(file.rank)
                self._times[file.rank] = RankTime(file.rank, clock, "wall clock", by_wall, _wall_clock_bound)

    def __getitem__(self, rank: int) -> RankTime:
        return self._times[rank]

    @property
    def ranks(self) -> list[int]:
        """The ranks, ascending."""
        return sorted(self._times)


def _records(file: RankRecording) -> Sequence[Mapping[str, Any]]:
    return read_ring_records(file.path) if file.snapshot is None else file.snapshot.records


def _own_clock(rank: int) -> str:
    return f"rank {rank}"


def _wall_ahead(tree: ClockTree, clock: str, anchors: ClockMap | None) -> int:
    """Return how far Unix time is ahead of the root's clock, by the first anchor of one rank."""
    if anchors is None:
        return 0
    anchor_ns = np.array([anchors.first_ns], np.int64)
    root = anchor_ns + tree.to_root(clock, anchor_ns).offset_ns
    return int(anchors.to_other(anchor_ns)[0] - root[0])


def _by_clocks(tree: ClockTree, clock: str, wall_ns: int, own_ns: Int64Array) -> Offset:
    offset = tree.to_root(clock, own_ns)
    return Offset(offset.offset_ns + wall_ns, offset.bound_ns)


def _by_wall_clock(anchors: ClockMap | None, own_ns: Int64Array) -> Offset:
    offset = np.zeros(len(own_ns), np.int64) if anchors is None else anchors.to_other(own_ns) - own_ns
    return Offset(offset, np.full(len(own_ns), WALL_CLOCK_BOUND_NS))


def _wall_clock_bound(_first_ns: int, _last_ns: int) -> int:
    return WALL_CLOCK_BOUND_NS
