"""The files of a dataset, in a folder or behind a URL that pyarrow can open, and the descriptions of its ranks.

```
DATASET/dataset.json            steps per bucket
DATASET/parts/NAME.json         description of a part: ranks, time reference, steps, source files; written last
DATASET/spans/NAME.STEP.parquet spans of a part in the bucket that starts at STEP; also collectives/, steps/, ranges/
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
from .rank_folder import DATASET_MARKER, WALL_CLOCK_BOUND_NS, Location, Reference, absolute_location, open_location
from .rank_tables import RankEntry

_FORMAT = 5
"""Version of the layout; other versions are rejected."""
_MAX_STEP = 1 << 31
_TYPES: dict[type, tuple[type, ...]] = {
    record: tuple(get_origin(hint) or hint for hint in get_type_hints(record).values())
    for record in (Reference, RankEntry)
}


class Part(NamedTuple):
    """The description of a part in a dataset."""

    reference: Reference  # reference of its times
    measurements: list[dict[str, Any]]  # measurements of hosts' clocks by its ranks, as records of a ring
    ranks: list[RankEntry]
    # Table -> [first, end] of each run of steps whose buckets all have rows; the last row is of step `end` - 1.
    steps: dict[str, list[list[int]]]

    def buckets(self, length: int, tables: Iterable[str]) -> set[int]:
        """Return the numbers of the buckets of `length` steps in which the part has rows of any of the tables."""
        runs = [run for table in tables for run in self.steps[table]]
        return {number for first, end in runs for number in range(first // length, (end - 1) // length + 1)}

    @classmethod
    def parse(cls, text: bytes) -> "Part":
        """Parse the text of a file; raise ValueError, TypeError or LookupError if it does not describe a part."""
        values = orjson.loads(text)
        ranks, steps = [RankEntry(**record) for record in values["ranks"]], values["steps"]
        part = cls(Reference(**values["reference"]), values["measurements"], ranks, steps)
        measurements_in(part.measurements)
        bounds = [(first, end) for runs in dict(steps).values() for first, end in runs]
        if not all(-_MAX_STEP <= first < end <= _MAX_STEP and type(first) is type(end) is int for first, end in bounds):
            raise ValueError("its steps are not valid")
        if any(_TYPES[type(record)] != tuple(map(type, record)) for record in (part.reference, *part.ranks)):
            raise ValueError("its ranks are not valid")
        return part


class DatasetFiles:
    """The files of a dataset. In a folder, new files never follow links that somebody else puts there.

    The methods raise OSError if files cannot be listed, read, written or removed. The constructor raises ModtraceError
    if the URL cannot be opened.
    """

    def __init__(self, location: Location) -> None:
        self.location = absolute_location(location)  # valid for every process of this host
        self.filesystem, self.root = open_location(location)  # pyarrow's file system, and the dataset's path in it
        self._folders: dict[str, Folder] = {}

    def make(self, folders: Iterable[str]) -> None:
        """Create missing folders; raise OSError if a folder is a link or cannot be created."""
        if isinstance(self.filesystem, LocalFileSystem):
            os.makedirs(self.root, exist_ok=True)
            folder = Folder(self.root)
            self._folders = {"": folder} | {name: folder.make(name, 0o777) for name in folders}

    def is_empty(self) -> bool:
        """Return whether the dataset has no files yet."""
        return not self._list("")

    def files(self, folder: str) -> list[FileInfo]:
        """Return the files in a folder, sorted by name."""
        return sorted((file for file in self._list(folder) if file.is_file), key=lambda file: str(file.path))

    def read(self, name: str) -> bytes:
        """Return the bytes of a file."""
        with self.filesystem.open_input_stream(f"{self.root}/{name}") as stream:
            return bytes(stream.read())

    @contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        """Open a file for writing, to be called after `make`; the file gets its name when the block succeeds."""
        if not self._folders:
            with self.filesystem.open_output_stream(f"{self.root}/{name}") as stream:
                try:
                    yield stream
                except BaseException:
                    stream.close()  # an incomplete file gets its name too
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
        """Remove a file if it exists; to be called after `make`."""
        if self._folders:
            self._path(name).unlink(missing_ok=True)
        elif self.filesystem.get_file_info(f"{self.root}/{name}").is_file:
            self.filesystem.delete_file(f"{self.root}/{name}")

    def _path(self, name: str) -> Path:
        folder, _, file = name.rpartition("/")
        return Path(self._folders[folder].path, file)

    def _list(self, folder: str) -> list[FileInfo]:
        selector = FileSelector(f"{self.root}/{folder}".rstrip("/"), allow_not_found=True)
        return list(self.filesystem.get_file_info(selector))


def read_head(files: DatasetFiles) -> int:
    """Return the steps per bucket; raise ModtraceError if there is no dataset of this version."""
    try:
        values = orjson.loads(files.read(DATASET_MARKER))
    except (OSError, ValueError) as error:
        raise _not_a_dataset(files) from error
    match values:
        case {"format": version} if version != _FORMAT:
            raise ModtraceError(f"{files.location}: its format is {version}, but this modtrace reads {_FORMAT}")
        case {"format": _, "steps_per_bucket": int(steps)} if steps > 0:
            return steps
    raise _not_a_dataset(files)


def write_head(files: DatasetFiles, steps_per_bucket: int) -> None:
    """Write the description that `read_head` reads."""
    with files.create(DATASET_MARKER) as file:
        file.write(orjson.dumps({"format": _FORMAT, "steps_per_bucket": steps_per_bucket}))


def read_parts(files: DatasetFiles) -> dict[str, Part]:
    """Return the description of each part, by its name."""
    parts = {}
    for file in files.files("parts"):
        if file.extension == "json":
            try:
                parts[file.base_name.removesuffix(".json")] = Part.parse(files.read(f"parts/{file.base_name}"))
            except (OSError, ValueError, TypeError, LookupError) as error:
                path = f"{files.location}/parts/{file.base_name}"
                raise ModtraceError(f"{path}: cannot be read: {error}; delete it and pack again") from error
    return parts


def write_part(files: DatasetFiles, name: str, part: Part) -> None:
    """Write the description of a part, after its tables."""
    description = {
        "reference": part.reference._asdict(),
        "measurements": part.measurements,
        "ranks": [entry._asdict() for entry in part.ranks],
        "steps": part.steps,
    }
    with files.create(f"parts/{name}.json") as file:
        file.write(orjson.dumps(description))


def file_name(table: str, part: str, step: int) -> str:
    """Return the name of the file with a part's rows of a table in the bucket that starts at `step`."""
    return f"{table}/{part}.{step:06}.parquet"


def broken_parts(files: DatasetFiles, parts: Mapping[str, Part], length: int) -> set[str]:
    """Return the names of the parts without a file for each of their buckets of `length` steps."""
    tables = {table for part in parts.values() for table in part.steps}
    file_names = {f"{table}/{file.base_name}" for table in tables for file in files.files(table)}
    return {
        name
        for name, part in parts.items()
        for table in part.steps
        if any(file_name(table, name, number * length) not in file_names for number in part.buckets(length, [table]))
    }


def remove_part(files: DatasetFiles, name: str, tables: Iterable[str]) -> None:
    """Remove the files of a part, its description first."""
    files.remove(f"parts/{name}.json")
    for table in tables:
        for file in files.files(table):
            if file.base_name.startswith(f"{name}."):
                files.remove(f"{table}/{file.base_name}")


def _not_a_dataset(files: DatasetFiles) -> ModtraceError:
    return ModtraceError(f"{files.location}: not a dataset; make one with `modtrace ranks pack`")


class JoinedTime:
    """The common time of parts that several hosts packed: the time of the clock that most ranks can be compared with.

    The parts contain their ranks' measurements of each other's clocks. Two parts without such measurements are joined
    by the wall clock.
    """

    def __init__(self, parts: Iterable[Part]) -> None:
        in_order = sorted((part for part in parts if part.ranks), key=lambda part: part.ranks[0].rank)
        self._tree = ClockTree(measurements_in(record for part in in_order for record in part.measurements))
        roots = [self._tree.root_of(part.reference.clock) for part in in_order]
        ranks = Counter(root for part, root in zip(in_order, roots, strict=True) for _ in part.ranks)
        # If several clocks have equally many ranks, the clock with the lowest rank.
        self._root = root = max(ranks, key=lambda entry: ranks[entry], default="")
        self._wall_ns = 0
        for part, own_root in zip(reversed(in_order), reversed(roots), strict=True):
            if own_root == root:
                start = np.array([part.ranks[0].start_ns]) - part.reference.wall_ns
                self._wall_ns = part.reference.wall_ns - int(
                    self._tree.to_root(part.reference.clock, start).offset_ns[0]
                )
        self._moves: dict[Reference, list[int]] = {}
        self.ranks: list[RankEntry] = []  # ascending, with times in the common time
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
                self.ranks += [self._moved_entry(part.reference, entry) for entry in part.ranks]
        self.ranks.sort(key=lambda entry: entry.rank)
        self.is_moved = bool(self._moves)  # True if the times of any part have to be moved

    def move(self, rank: AnyArray, time_ns: Int64Array) -> Int64Array:
        """Return times of ranks, moved from the parts' times to the common time; negative (unknown) times stay."""
        moved = np.array(time_ns)
        for reference, ranks in self._moves.items():
            rows = np.isin(rank, ranks) & (moved >= 0)
            moved[rows] = self._move(reference, moved[rows])
        return moved

    def _move(self, reference: Reference, time_ns: Int64Array) -> Int64Array:
        clock_ns = time_ns - reference.wall_ns
        return clock_ns + self._tree.to_root(reference.clock, clock_ns).offset_ns + self._wall_ns

    def _moved_entry(self, reference: Reference, entry: RankEntry) -> RankEntry:
        start, end = self._move(reference, np.array([entry.start_ns, entry.end_ns])).tolist()
        bounds = entry.start_ns - reference.wall_ns, entry.end_ns - reference.wall_ns
        clock_bound = self._tree.largest_bound(reference.clock, *bounds)
        method = "pings" if entry.method == "same clock" and reference.clock != self._root else entry.method
        return entry._replace(bound_ns=entry.bound_ns + clock_bound, method=method, start_ns=start, end_ns=end)
