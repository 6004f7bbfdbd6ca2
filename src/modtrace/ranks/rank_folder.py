"""A folder → the recordings of ranks in it."""

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from .._errors import ModtraceError, TraceError
from .._system.files import begins_with
from ..read import FileKind, file_kind_by_head, load
from ..read.ring_file import SHOWN_EVENTS, Steps, too_large
from ..ring import MAGIC, Kind, RingSnapshot, newest_rings, read_ring, read_ring_rank, ring_serials
from ..ring.collective_text import parse_ranks
from ..timeline import Collectives, ReadRing, Timeline, build_in_pieces, build_timeline, find_pieces
from ..timeline.decode.pieces import PIECE_KINDS
from ..timeline.decode.window import build_around

DATASET_MARKER = "dataset.json"

_RING_SUFFIX = ".modtrace"
_TRACE_SUFFIXES = (".json", ".json.gz", ".pftrace", ".pftrace.gz")
_RECORDINGS = (FileKind.SAVED_JSON, FileKind.PERFETTO, FileKind.PROFILE, FileKind.MERGED_PERFETTO)


class RankRecording(NamedTuple):
    """The recording of one rank.

    Attributes:
        rank: its number.
        path: the file.
        is_ring: whether it is a ring file, else a trace.
    """

    rank: int
    path: Path
    is_ring: bool


def find_rank_recordings(
    folder: str | os.PathLike[str], on_left_out: Callable[[ModtraceError], None] | None = None
) -> list[RankRecording]:
    """Return the recordings in a folder, by rank: its ring files if there are any, else its traces.

    A rank's number is what the recording says, else the last number in the name of the file. Rings that were kept of
    earlier runs do not count.

    Args:
        folder: the folder.
        on_left_out: is called with what is wrong with a recording that is not taken; None: that is raised.

    Raises:
        ModtraceError: there is none, two are of one rank, or one does not say its rank or cannot be read.
    """
    root = Path(folder)
    if not root.is_dir():
        raise ModtraceError(f"{root}: it is no folder; give the one that holds a recording of each rank")
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
    by_rank: dict[int, RankRecording] = {}
    for file in recordings:
        other = by_rank.setdefault(file.rank, file)
        if other is not file:
            raise ModtraceError(f"{other.path} and {file.path} are both of rank {file.rank}; leave one in the folder")
    return [by_rank[rank] for rank in sorted(by_rank)]


def is_dataset(folder: str | os.PathLike[str]) -> bool:
    """Say whether a folder looks like a dataset of `modtrace ranks pack`."""
    return (Path(folder) / DATASET_MARKER).is_file()


def parse_rank_list(text: str) -> tuple[list[int], int]:
    """Return the ranks that a list names, and how many of the worst ones it asks for.

    Example:
        >>> parse_rank_list("0-2,7,worst:4")
        ([0, 1, 2, 7], 4)

    Raises:
        ValueError: it is no such list.
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


def _ring(path: Path) -> RankRecording:
    rank = read_ring_rank(path)
    return RankRecording(_rank_in_name(path) if rank is None else rank, path, is_ring=True)


def _trace(path: Path) -> RankRecording | None:
    """Return the rank's recording in a file; None if it is not a trace of one rank."""
    name = path.name.lower()
    if not name.endswith(_TRACE_SUFFIXES) or name.endswith(".speedscope.json"):
        return None
    if file_kind_by_head(path) not in _RECORDINGS:
        return None
    known = {track.process.rank for track in load(path).tracks} - {None}
    if len(known) > 1:
        return None  # a trace of all ranks, as `ranks timeline` writes it
    rank = known.pop() if known else None
    return RankRecording(_rank_in_name(path) if rank is None else rank, path, is_ring=False)


def _rank_in_name(path: Path) -> int:
    numbers = re.findall(r"\d+", path.name.split(".")[0]) or re.findall(r"\d+", path.name)
    if not numbers:
        raise TraceError(path, "neither it nor its name says its rank; put the rank's number in the name")
    return int(numbers[-1])


_OWN_ANCHOR = {"kind": "anchor", "monotonic": 0, "wall": 0}


def check_size(files: Iterable[RankRecording]) -> None:
    """Check that no ring is so large that its user should say which steps to read.

    Raises:
        ModtraceError: one is.
    """
    for file in files:
        events = len(ring_serials(file.path)) if file.is_ring else 0
        if events > SHOWN_EVENTS:
            raise ModtraceError(
                f"{file.path}: it has {events:,} events, too many to read all ranks at once; choose steps, as in "
                "--steps -1000: (--steps : takes all, with 100 MB or more for a million events), or make a dataset: "
                "modtrace ranks pack"
            )


def load_own_time(file: RankRecording, steps: Steps | None = None) -> Timeline:
    """Read a rank's recording in its own time: monotonic nanoseconds of a ring, Unix nanoseconds of a trace.

    Args:
        file: the recording.
        steps: take these alone; None: all.

    Raises:
        ModtraceError: it cannot be read.
    """
    whole: Timeline | None
    if file.is_ring:
        read, serials = _reader(file.path), ring_serials(file.path)
        whole = None if steps is None else build_around(read, serials, *steps)
        whole = whole or build_in_pieces(read, serials) or build_timeline(read(serials, ()))
    else:
        whole = load(file.path)
    return whole if steps is None else whole.steps(*steps)


def load_pieces(file: RankRecording) -> Iterator[Timeline]:
    """Do what `load_own_time` does; of a large ring piece by piece, each with whole steps and tracks of its own."""
    ring = find_pieces(_reader(file.path), ring_serials(file.path)) if file.is_ring else None
    if ring is None:
        events = len(ring_serials(file.path)) if file.is_ring else 0
        if events > SHOWN_EVENTS:
            raise too_large(file.path, events, "record with a smaller --capacity")
        yield load_own_time(file)
    else:
        yield from ring.timelines()


def load_collectives(file: RankRecording) -> Collectives:
    """Read a rank's collectives in its own time, and as little else as possible.

    Raises:
        ModtraceError: it cannot be read.
    """
    if not file.is_ring:
        return load(file.path).collectives
    return build_timeline(_reader(file.path)(ring_serials(file.path), PIECE_KINDS)).collectives


def _reader(path: Path) -> ReadRing:
    """Return what reads the events of a ring, with monotonic nanoseconds for its wall clock."""

    def read(serials: range, without: Collection[Kind]) -> RingSnapshot:
        snapshot = read_ring(path, None, serials, without)
        records = [record for record in snapshot.records if record["kind"] != "anchor"]
        return snapshot._replace(records=[*records, _OWN_ANCHOR])

    return read
