"""The recordings of ranks in a folder or behind a URL, and the common time of all ranks."""

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
from .._files import RING_SUFFIXES, begins_with, work_folder
from ..read import SHOWN_EVENTS, FileKind, file_kind_by_head, read_timeline, too_large
from ..record_options import StepRange
from ..ring import (
    MAGIC,
    Kind,
    RingLog,
    RingSnapshot,
    newest_rings,
    read_ring,
    read_ring_records,
    read_ring_role_and_rank,
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

Location = str | os.PathLike[str]
"""The path of a folder, or a URL."""


def is_url(location: Location) -> bool:
    """Return whether the location is a URL, not the path of a folder."""
    return "://" in os.fspath(location)


def absolute_location(location: Location) -> str:
    """Return a location that does not depend on the working directory, for another process."""
    return os.fspath(location) if is_url(location) else os.path.abspath(location)


def open_location(location: Location) -> "tuple[FileSystem, str]":
    """Return the file system of a location, and the path in it; raise ModtraceError if pyarrow cannot open it."""
    require_extra("ranks", "pyarrow")
    from pyarrow.fs import FileSystem

    try:
        filesystem, path = FileSystem.from_uri(absolute_location(location))
    except (ValueError, OSError, ImportError) as error:
        raise ModtraceError(f"{os.fspath(location)}: pyarrow cannot open it: {error}") from error
    return filesystem, path.rstrip("/")


def is_dataset(location: Location) -> bool:
    """Return whether the location looks like a packed dataset; raise ModtraceError if a URL cannot be opened."""
    if not is_url(location):
        return os.path.isfile(os.path.join(location, DATASET_MARKER))
    filesystem, path = open_location(location)
    try:
        return bool(filesystem.get_file_info(f"{path}/{DATASET_MARKER}").is_file)
    except OSError as error:
        raise ModtraceError(f"{os.fspath(location)}: cannot be read: {error}") from error


@contextmanager
def as_folder(location: Location, executor: Executor | None = None) -> Iterator[str]:
    """Yield a folder itself; for a URL, yield a folder with a copy of its files, which is removed after the block.

    Raises ModtraceError if the files cannot be copied, or an executor is given, which would not see the copy.
    """
    if not is_url(location):
        yield os.fspath(location)
        return
    if executor is not None:
        raise ModtraceError(f"{location}: recordings are copied from a URL to this host, where no executor sees them")
    filesystem, path = open_location(location)
    from pyarrow.fs import FileSelector

    with work_folder() as folder:
        try:
            for file in filesystem.get_file_info(FileSelector(path)):
                if file.is_file:
                    _copy(filesystem, file, folder / file.base_name)
        except OSError as error:
            raise ModtraceError(f"{os.fspath(location)}: cannot be read: {error}") from error
        yield os.fspath(folder)


def _copy(filesystem: Any, file: Any, copy: Path) -> None:
    with filesystem.open_input_stream(file.path) as source, open(copy, "wb") as target:
        shutil.copyfileobj(source, target, _BLOCK_BYTES)
    modified_ns = file.mtime_ns or 0
    os.utime(copy, ns=(modified_ns, modified_ns))


_BLOCK_BYTES = 8 << 20


_TRACE_SUFFIXES = (".json", ".json.gz", ".pftrace", ".pftrace.gz")
_RECORDING_KINDS = (FileKind.SAVED_JSON, FileKind.PERFETTO, FileKind.PROFILE, FileKind.MERGED_PERFETTO)


class RankRecording(NamedTuple):
    """The recording of one rank."""

    rank: int  # its rank; if roles have ranks of their own, its index among all processes by role and rank
    path: Path  # the file
    is_ring: bool  # True for a ring file, False for a trace
    snapshot: RingSnapshot | None = None  # a snapshot of the ring to use instead of the file; None to read the file
    role: str = ""  # role of the process in its job; empty if unknown
    own_rank: int | None = None  # if roles have ranks of their own, the rank in its role; else None

    @property
    def world(self) -> str:
        """The name of the set of processes that count their ranks together and share process groups."""
        return "" if self.own_rank is None else self.role

    @property
    def rank_in_world(self) -> int:
        """Its rank in its world."""
        return self.rank if self.own_rank is None else self.own_rank


def find_rank_recordings(
    folder: str | os.PathLike[str], on_left_out: Callable[[ModtraceError], None] | None = None, role: str | None = None
) -> list[RankRecording]:
    """Return the recordings in a folder, by role and rank: its ring files if there are any, otherwise its traces.

    The rank comes from the recording, or else from the last number in the file name. Rings of earlier runs and empty
    rings of launchers are left out, and other roles if `role` is given. `on_left_out` is called with the error of a bad
    recording; if it is None, the error is raised. Raises ModtraceError if there is no recording, or two of one rank.
    """
    root = Path(folder)
    if not root.is_dir():
        raise ModtraceError(f"{root}: not a folder; give the folder with a recording of each rank")
    try:
        paths = sorted(path for path in root.iterdir() if path.is_file())
    except OSError as error:
        raise ModtraceError(f"{root}: cannot be read: {error.strerror}") from error
    rings = [
        path for path in paths if path.suffix in RING_SUFFIXES or (path.suffix != ".new" and begins_with(path, MAGIC))
    ]
    rings = [Path(path) for path in newest_rings(map(str, rings))[0]]
    recordings = [file for path in rings if (file := _read(path, _ring_recording, on_left_out))]
    recordings = recordings or [file for path in paths if (file := _read(path, _trace_recording, on_left_out))]
    if not recordings:
        raise ModtraceError(f"{root}: contains no recording; record with ring='{root}/%r.modtrace'")
    if role is not None:
        roles = ", ".join(sorted({file.role for file in recordings} - {""})) or "none"
        recordings = [file for file in recordings if file.role == role]
        if not recordings:
            raise ModtraceError(f"{root}: no recording has the role {role!r}; there are: {roles}")
    by_process: dict[tuple[str, int], RankRecording] = {}
    for file in _without_launchers(recordings):
        role_and_rank = file.role, file.rank
        first = by_process.setdefault(role_and_rank, file)
        if first is not file:
            label = process_label(*role_and_rank)
            raise ModtraceError(
                f"{first.path} and {file.path} are both of {label}; leave one in the folder: if the job was started "
                "again, move the earlier recordings of all ranks away; if both ran in one job, record each with a role "
                "(--role) or a rank (RANK) of its own"
            )
    if len({rank for _, rank in by_process}) == len(by_process):
        return sorted(by_process.values(), key=lambda file: file.rank)
    processes = sorted(by_process)
    return [by_process[key]._replace(rank=number, own_rank=key[1]) for number, key in enumerate(processes)]


def group_by_size(files: Sequence[RankRecording], nbytes: int, ranks: int) -> list[list[RankRecording]]:
    """Return recordings in groups, in order; each has one file, or at most `nbytes` of files and `ranks` ranks."""
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
    """Raise a ModtraceError if roles have ranks of their own, so that ranks of several worlds cannot be compared."""
    worlds = sorted({file.world for file in files})
    if len(worlds) > 1:
        roles = ", ".join(world or "without a role" for world in worlds)
        raise ModtraceError(
            f"{files[0].path.parent}: contains processes of several roles with ranks of their own ({roles}); "
            f"choose one role: --role {worlds[-1]}"
        )


def parse_rank_list(text: str) -> tuple[list[int], int]:
    """Return the ranks in a list, and the number of worst ranks that it requests.

    Example:
        >>> parse_rank_list("0-2,7,worst:4")
        ([0, 1, 2, 7], 4)

    Raises:
        ValueError: the text is not such a list.
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
    """Leave out the empty rings of a rank that has a ring with events of the same role; a launcher's has no role."""
    files_by_rank: dict[int, list[RankRecording]] = {}
    for file in recordings:
        files_by_rank.setdefault(file.rank, []).append(file)
    for files in files_by_rank.values():
        recorded = files if len(files) == 1 else [file for file in files if not file.is_ring or ring_serials(file.path)]
        recorded_roles = {"", *(file.role for file in recorded)} if recorded else set()
        yield from (file for file in files if file in recorded or file.role not in recorded_roles)


def _ring_recording(path: Path) -> RankRecording:
    role, rank = read_ring_role_and_rank(path)
    if rank is None:  # a driver has no rank, and is the only process of its role
        rank = 0 if role and not re.search(r"\d", path.name) else _rank_in_name(path)
    return RankRecording(rank, path, is_ring=True, role=role)


def _trace_recording(path: Path) -> RankRecording | None:
    """Return the rank's recording in a file; None if it is not a trace of one rank."""
    name = path.name.lower()
    if not name.endswith(_TRACE_SUFFIXES) or name.endswith(".speedscope.json"):
        return None
    if file_kind_by_head(path) not in _RECORDING_KINDS:
        return None
    processes = {(track.process.role, track.process.rank) for track in read_timeline(path).tracks}
    processes = {(role, rank) for role, rank in processes if rank is not None} or processes
    if len(processes) > 1:
        return None  # a trace of all ranks, as `ranks timeline` writes it
    role, rank = processes.pop() if processes else ("", None)
    return RankRecording(_rank_in_name(path) if rank is None else rank, path, is_ring=False, role=role)


def _rank_in_name(path: Path) -> int:
    numbers = re.findall(r"\d+", path.name.split(".")[0]) or re.findall(r"\d+", path.name)
    if not numbers:
        raise TraceError(path, "neither the recording nor its file name gives a rank; put the rank in the name")
    return int(numbers[-1])


_IDENTITY_ANCHOR = {"kind": "anchor", "monotonic": 0, "wall": 0}


def check_size(files: Iterable[RankRecording]) -> None:
    """Raise a ModtraceError if a ring is so large that the user should choose the steps to read."""
    for file in files:
        events = len(ring_serials(file.path)) if file.is_ring else 0
        if events > SHOWN_EVENTS:
            raise ModtraceError(
                f"{file.path}: has {events:,} events, too many to read all ranks at once; choose steps, such as "
                "--steps -1000: (--steps : reads all, with 100 MB or more for a million events), or make a dataset: "
                "modtrace ranks pack"
            )


def load_own_time(file: RankRecording, steps: StepRange | None = None) -> Timeline:
    """Read a rank's recording in its own time: monotonic nanoseconds of a ring, Unix nanoseconds of a trace."""
    timeline: Timeline | None
    if file.snapshot is not None:
        timeline = build_timeline(_use_own_clock(file.snapshot))
    elif file.is_ring:
        read, serials = _reader(file.path), ring_serials(file.path)
        timeline = None if steps is None else build_around(read, serials, *steps)
        timeline = timeline or RingPieces(read, serials).join()
    else:
        timeline = read_timeline(file.path)
    return timeline if steps is None else take_steps(timeline, *steps)


def load_pieces(file: RankRecording) -> Iterator[Timeline]:
    """Yield a recording in own time; a ring in pieces, each with whole steps and tracks of its own."""
    if file.snapshot is not None or not file.is_ring:
        yield load_own_time(file)
        return
    serials = ring_serials(file.path)
    pieces = RingPieces(_reader(file.path), serials)
    if not pieces.cuts and len(serials) > SHOWN_EVENTS:
        raise too_large(file.path, len(serials), "record with a smaller --capacity")
    yield from pieces


def load_collectives(file: RankRecording) -> Collectives:
    """Read a rank's collectives in its own time, without the rest of the recording if possible."""
    if file.snapshot is not None or not file.is_ring:
        return load_own_time(file).collectives
    return build_timeline(_reader(file.path)(ring_serials(file.path) or None, PIECE_KINDS)).collectives


def _reader(path: Path) -> ReadRing:
    """Return a function that reads the events of a ring, in own time."""
    log = RingLog()

    def read(serials: range | None, excluded_kinds: Collection[Kind]) -> RingSnapshot:
        return _use_own_clock(read_ring(path, None, serials, excluded_kinds, log))

    return read


def _use_own_clock(snapshot: RingSnapshot) -> RingSnapshot:
    """Return a ring's snapshot whose wall clock is its monotonic clock."""
    records = [record for record in snapshot.records if record["kind"] != "anchor"]
    return snapshot._replace(records=[*records, _IDENTITY_ANCHOR])


WALL_CLOCK_BOUND_NS = 100_000_000
"""Maximum difference between the wall clocks of two hosts that run NTP; an assumption, not a measurement."""

_CLOCK_KINDS = ("clock", "offset", "anchor")
Method = Literal["same clock", "pings", "collectives", "wall clock"]

_ToJob = Callable[[Int64Array], Offset]
_LargestBound = Callable[[int, int], int]


class RankTime(NamedTuple):
    """The mapping of one rank's clock to the job's clock.

    A rank's own times are monotonic nanoseconds of its clock for a ring, Unix nanoseconds for a trace.
    """

    rank: int  # rank of the recording
    # Id of the clock; times of ranks with one clock are compared without error. A rank mapped by collectives or by the
    # wall clock has a clock of its own.
    clock: str
    method: Method  # source of the mapping: the job's clock itself, pings between hosts, collectives, or the wall clock
    to_job: _ToJob  # own times -> (ns to add to get Unix nanoseconds of the job's clock, maximum error)
    largest_bound: _LargestBound  # (first, last own time) -> maximum error of all times between them

    def move(self, own_ns: Int64Array) -> Int64Array:
        """Return own times as Unix nanoseconds of the job's clock."""
        return own_ns + self.to_job(own_ns).offset_ns

    def bound_ns(self, own_ns: Int64Array) -> int:
        """Return the maximum error of times in the range of `own_ns`; 0 if `own_ns` is empty."""
        return self.largest_bound(int(own_ns.min()), int(own_ns.max())) if len(own_ns) else 0


class Reference(NamedTuple):
    """The definition of a time; times with one reference can be compared."""

    clock: str  # id of the clock
    wall_ns: int  # Unix ns minus the monotonic ns of the clock


class JobTime:
    """The time of a job: the time of the clock that most ranks can be compared with.

    Ranks whose clocks were measured against each other are mapped by these measurements. The others are mapped by
    collectives, which no rank can leave before the last rank has called them, or else by the wall clock.
    """

    def __init__(self, files: Sequence[RankRecording]) -> None:
        # Only the records about clocks: names would need much memory.
        records = {
            file.rank: [record for record in _records(file) if record["kind"] in _CLOCK_KINDS]
            for file in files
            if file.is_ring
        }
        clocks = {file.rank: clock_in(records.get(file.rank, ())) or _own_clock(file.rank) for file in files}
        # The measurements of hosts' clocks that each rank recorded.
        self.measurements = {rank: measurements_in(rank_records) for rank, rank_records in records.items()}
        tree = ClockTree(measurement for readings in self.measurements.values() for measurement in readings)
        roots = Counter(tree.root_of(clock) for clock in clocks.values())
        # If several clocks have equally many ranks, the clock with the lowest rank.
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
                by_clocks = partial(_offset_by_clocks, path, clock, wall_ns)
                self._times[rank] = RankTime(rank, clock, method, by_clocks, partial(path.largest_bound, clock))
        unmapped = [file for file in files if file.rank not in self._times]
        if unmapped:
            to_job_by_rank = {rank: time.to_job for rank, time in self._times.items()}
            # Groups of two worlds may have the same name and ranks.
            for world in {file.world for file in unmapped}:
                collectives = {file.rank: load_collectives(file) for file in files if file.world == world}
                for rank, offsets in offsets_by_collectives(collectives, to_job_by_rank):
                    clock = _own_clock(rank)
                    self._times[rank] = RankTime(rank, clock, "collectives", offsets.at, offsets.largest_bound)
        for file in unmapped:
            if file.rank not in self._times:
                if file.is_ring and all(record["kind"] != "anchor" for record in records[file.rank]):
                    raise ModtraceError(
                        f"{file.path}: the ring has no clock records, so its times fit no other rank; copy it again, "
                        "or move it out of the folder"
                    )
                by_wall = partial(_offset_by_wall_clock, anchors.get(file.rank))
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
    """Return Unix time minus the time of the root's clock, at the first anchor of one rank."""
    if anchors is None:
        return 0
    anchor_ns = np.array([anchors.first_ns], np.int64)
    root = anchor_ns + tree.to_root(clock, anchor_ns).offset_ns
    return int(anchors.to_other(anchor_ns)[0] - root[0])


def _offset_by_clocks(tree: ClockTree, clock: str, wall_ns: int, own_ns: Int64Array) -> Offset:
    offset = tree.to_root(clock, own_ns)
    return Offset(offset.offset_ns + wall_ns, offset.bound_ns)


def _offset_by_wall_clock(anchors: ClockMap | None, own_ns: Int64Array) -> Offset:
    offset = np.zeros(len(own_ns), np.int64) if anchors is None else anchors.to_other(own_ns) - own_ns
    return Offset(offset, np.full(len(own_ns), WALL_CLOCK_BOUND_NS))


def _wall_clock_bound(_first_ns: int, _last_ns: int) -> int:
    return WALL_CLOCK_BOUND_NS
