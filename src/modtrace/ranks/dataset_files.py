"""The files of a dataset, in a folder or behind a URL that pyarrow opens, and what it says of its ranks.

```
DATASET/dataset.json            steps in a bucket
DATASET/parts/NAME.json         its ranks, which time it is in, its steps, and where it came from; written last
DATASET/spans/NAME.STEP.parquet their spans in the bucket of steps from STEP on; so collectives/, steps/ and ranges/
```
"""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, get_origin, get_type_hints

import numpy as np
import orjson
from pyarrow.fs import FileInfo, FileSelector, LocalFileSystem

from .._arrays import AnyArray, Int64Array
from .._errors import ModtraceError
from .._files import Folder, create_file
from ..ring.clocks import ClockTree, measurements_in
from .rank_folder import DATASET_MARKER, WALL_CLOCK_BOUND_NS, Place, Reference, absolute, open_place
from .rank_tables import RankEntry

_FORMAT = 5
"""The version of the layout; others are refused."""
_MAX_STEP = 1 << 31
_TYPES: dict[type, tuple[type, ...]] = {
    record: tuple(get_origin(hint) or hint for hint in get_type_hints(record).values())
    for record in (Reference, RankEntry)
}


class Part(NamedTuple):
    """The description of a part in a dataset."""

    reference: Reference  # which time its times are in
    measurements: list[dict[str, Any]]  # what its ranks noted of the clocks of hosts, as records of a ring
    ranks: list[RankEntry]
    # By table, the buckets that have rows of it, as runs of steps: the first, and the one after the last with a row.
    steps: dict[str, list[list[int]]]

    def buckets(self, length: int, tables: Iterable[str]) -> set[int]:
        """Return the numbers of the buckets of `length` steps in which it has rows of any of some tables."""
        runs = [run for table in tables for run in self.steps[table]]
        return {number for first, end in runs for number in range(first // length, (end - 1) // length + 1)}

    @classmethod
    def parse(cls, text: bytes) -> "Part":
        """Parse the text of a file; raises ValueError, TypeError or LookupError if it describes no part."""
        values = orjson.loads(text)
        ranks, steps = [RankEntry(**record) for record in values["ranks"]], values["steps"]
        part = cls(Reference(**values["reference"]), values["measurements"], ranks, steps)
        measurements_in(part.measurements)
        bounds = [(first, end) for runs in dict(steps).values() for first, end in runs]
        if not all(-_MAX_STEP <= first < end <= _MAX_STEP and type(first) is type(end) is int for first, end in bounds):
            raise ValueError("it does not say which steps it is of")
        if any(_TYPES[type(record)] != tuple(map(type, record)) for record in (part.reference, *part.ranks)):
            raise ValueError("it does not say which ranks it is of")
        return part


class DatasetFiles:
    """The files of a dataset. Those of a folder are made in it, also if somebody puts links there.

    What cannot be seen, read, written or removed is an OSError of the methods. Raises ModtraceError if the URL cannot
    be opened.
    """

    def __init__(self, place: Place) -> None:
        self.place = absolute(place)  # the same, as any process of this host knows it
        self.filesystem, self.root = open_place(place)  # pyarrow's, which has the files; the path of the dataset in it
        self._held: dict[str, Folder] = {}

    def make(self, folders: Iterable[str]) -> None:
        """Make the folders that are missing; none may be a link; raises OSError if one cannot be made."""
        if isinstance(self.filesystem, LocalFileSystem):
            os.makedirs(self.root, exist_ok=True)
            held = Folder(self.root)
            self._held = {"": held} | {name: held.make(name, 0o777) for name in folders}

    def is_empty(self) -> bool:
        """Say whether there is nothing yet."""
        return not self._list("")

    def files(self, folder: str) -> list[FileInfo]:
        """Return the files in a folder, by name."""
        return sorted((file for file in self._list(folder) if file.is_file), key=lambda file: str(file.path))

    def read(self, name: str) -> bytes:
        """Return the bytes of a file."""
        with self.filesystem.open_input_stream(f"{self.root}/{name}") as stream:
            return bytes(stream.read())

    @contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        """Open a file to write, which has its name once the block has ended well; after `make`."""
        if not self._held:
            with self.filesystem.open_output_stream(f"{self.root}/{name}") as stream:
                try:
                    yield stream
                except BaseException:
                    stream.close()  # what was written of it gets the name all the same
                    self.remove(name)
                    raise
            return
        path = self._path(name)
        new = path.with_suffix(".new")
        new.unlink(missing_ok=True)
        with open(create_file(os.fspath(new), 0o666), "wb") as file:
            yield file
        os.replace(new, path)

    def remove(self, name: str) -> None:
        """Remove a file if it is there; after `make`."""
        if self._held:
            self._path(name).unlink(missing_ok=True)
        elif self.filesystem.get_file_info(f"{self.root}/{name}").is_file:
            self.filesystem.delete_file(f"{self.root}/{name}")

    def _path(self, name: str) -> Path:
        folder, _, file = name.rpartition("/")
        return Path(self._held[folder].path, file)

    def _list(self, folder: str) -> list[FileInfo]:
        selector = FileSelector(f"{self.root}/{folder}".rstrip("/"), allow_not_found=True)
        return list(self.filesystem.get_file_info(selector))


def read_head(files: DatasetFiles) -> int:
    """Return how many steps are stored together; raises ModtraceError if this is no dataset of this version."""
    try:
        values = orjson.loads(files.read(DATASET_MARKER))
    except (OSError, ValueError) as error:
        raise _no_dataset(files) from error
    match values:
        case {"format": version} if version != _FORMAT:
            raise ModtraceError(f"{files.place}: its format is {version}, and this version reads {_FORMAT}")
        case {"format": _, "steps_per_bucket": int(steps)} if steps > 0:
            return steps
    raise _no_dataset(files)


def write_head(files: DatasetFiles, steps_per_bucket: int) -> None:
    """Write what `read_head` returns."""
    with files.create(DATASET_MARKER) as file:
        file.write(orjson.dumps({"format": _FORMAT, "steps_per_bucket": steps_per_bucket}))


def read_parts(files: DatasetFiles) -> dict[str, Part]:
    """Return each part, by its name."""
    parts = {}
    for file in files.files("parts"):
        if file.extension == "json":
            try:
                parts[file.base_name.removesuffix(".json")] = Part.parse(files.read(f"parts/{file.base_name}"))
            except (OSError, ValueError, TypeError, LookupError) as error:
                path = f"{files.place}/parts/{file.base_name}"
                raise ModtraceError(f"{path}: cannot be read: {error}; delete it and pack again") from error
    return parts


def write_part(files: DatasetFiles, name: str, part: Part) -> None:
    """Write what a part holds, once its tables are there."""
    values = {
        "reference": part.reference._asdict(),
        "measurements": part.measurements,
        "ranks": [entry._asdict() for entry in part.ranks],
        "steps": part.steps,
    }
    with files.create(f"parts/{name}.json") as file:
        file.write(orjson.dumps(values))


def file_name(table: str, part: str, step: int) -> str:
    """Return the name of the file that has a part's rows of a table in the bucket from a step on."""
    return f"{table}/{part}.{step:06}.parquet"


def cut_parts(files: DatasetFiles, parts: Mapping[str, Part], length: int) -> set[str]:
    """Return the parts of which not all files are there, by the buckets of `length` steps that they say they have."""
    tables = {table for part in parts.values() for table in part.steps}
    found = {f"{table}/{file.base_name}" for table in tables for file in files.files(table)}
    return {
        name
        for name, part in parts.items()
        for table in part.steps
        if any(file_name(table, name, number * length) not in found for number in part.buckets(length, [table]))
    }


def remove_part(files: DatasetFiles, name: str, tables: Iterable[str]) -> None:
    """Remove the files of a part, its description first."""
    files.remove(f"parts/{name}.json")
    for table in tables:
        for file in files.files(table):
            if file.base_name.startswith(f"{name}."):
                files.remove(f"{table}/{file.base_name}")


def _no_dataset(files: DatasetFiles) -> ModtraceError:
    return ModtraceError(f"{files.place}: it is not a dataset; make one with `modtrace ranks pack`")


class JoinedTime:
    """The one time of parts that hosts packed apart: that of the clock which most ranks can be compared with.

    The parts hold what their ranks measured of each other's clocks. Where that does not join two parts, the wall clock
    does.
    """

    def __init__(self, parts: Iterable[Part]) -> None:
        in_order = sorted((part for part in parts if part.ranks), key=lambda part: part.ranks[0].rank)
        self._tree = ClockTree(measurements_in(record for part in in_order for record in part.measurements))
        roots = [self._tree.root_of(part.reference.clock) for part in in_order]
        ranks = Counter(root for part, root in zip(in_order, roots, strict=True) for _ in part.ranks)
        # Of equally many the one with the lowest rank.
        self._root = root = max(ranks, key=lambda entry: ranks[entry], default="")
        self._wall_ns = 0
        for part, own_root in zip(reversed(in_order), reversed(roots), strict=True):
            if own_root == root:
                begin = np.array([part.ranks[0].start_ns]) - part.reference.wall_ns
                self._wall_ns = part.reference.wall_ns - int(
                    self._tree.to_root(part.reference.clock, begin).offset_ns[0]
                )
        self._moves: dict[Reference, list[int]] = {}
        self.ranks: list[RankEntry] = []  # each rank in this time, ascending
        for part, own_root in zip(in_order, roots, strict=True):
            if own_root != root:
                self.ranks += [
                    entry._replace(method="wall clock", bound_ns=max(entry.bound_ns, WALL_CLOCK_BOUND_NS))
                    for entry in part.ranks
                ]
            elif part.reference == (root, self._wall_ns):
                self.ranks += part.ranks
            else:
                self._moves.setdefault(part.reference, []).extend(entry.rank for entry in part.ranks)
                self.ranks += [self._placed(part.reference, entry) for entry in part.ranks]
        self.ranks.sort(key=lambda entry: entry.rank)
        self.is_moved = bool(self._moves)  # whether any part is in another time than this

    def move(self, rank: AnyArray, time_ns: Int64Array) -> Int64Array:
        """Return times of ranks, as the parts have them, in this time; what is negative is not known, and stays."""
        moved = np.array(time_ns)
        for reference, ranks in self._moves.items():
            rows = np.isin(rank, ranks) & (moved >= 0)
            moved[rows] = self._move(reference, moved[rows])
        return moved

    def _move(self, reference: Reference, time_ns: Int64Array) -> Int64Array:
        clock_ns = time_ns - reference.wall_ns
        return clock_ns + self._tree.to_root(reference.clock, clock_ns).offset_ns + self._wall_ns

    def _placed(self, reference: Reference, entry: RankEntry) -> RankEntry:
        begin, end = self._move(reference, np.array([entry.start_ns, entry.end_ns])).tolist()
        ends = entry.start_ns - reference.wall_ns, entry.end_ns - reference.wall_ns
        more = self._tree.largest_bound(reference.clock, *ends)
        method = "pings" if entry.method == "same clock" and reference.clock != self._root else entry.method
        return entry._replace(bound_ns=entry.bound_ns + more, method=method, start_ns=begin, end_ns=end)
