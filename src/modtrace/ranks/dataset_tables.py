"""A dataset: what it says of itself, its tables, and SQL over them, or over each bucket in processes, by DuckDB.

```
DATASET/dataset.json            steps in a bucket, and which time it is
DATASET/parts/NAME.json         the ranks of a part, and the files they came from; written last
DATASET/spans/NAME.parquet      their spans; so collectives/, steps/ and ranges/
```
"""

import glob
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from .._errors import ModtraceError
from .._files import create_file
from .._processes import map_in_processes, processor_count
from .._typing import AnyArray
from ..timeline import PHASES, Name
from .groups import number_distinct
from .rank_folder import DATASET_MARKER
from .rank_tables import ROW_KINDS, Bounds, CollectiveTable, RangeTable, SpanTable, StepTable, Table

_FORMAT = 2
"""The version of the layout; others are refused."""

FOLDERS: Mapping[type, str] = {
    SpanTable: "spans",
    CollectiveTable: "collectives",
    StepTable: "steps",
    RangeTable: "ranges",
}
"""The folder of each table of a dataset."""
TABLE_NAMES = tuple(FOLDERS.values())
"""The tables of a dataset, each in a folder of this name."""


class RankEntry(NamedTuple):
    """What a dataset says of one rank."""

    rank: int  # its number
    bound_ns: int  # how far its times are off at most, see `RankTimeline`
    method: str  # how it was found where it is, see `RankTime`
    clock: str  # the id of its clock
    spans: int  # how many it has
    peak_bytes: int  # the most that its tensors held; -1 if it recorded no memory
    source: list[Any]  # the file it came from: path, size and time of change


_ENTRY_TYPES = (int, int, str, str, int, int, list)


def read_head(folder: Path) -> tuple[int, str]:
    """Return how many steps of a dataset are stored together, and which time it is, see `JobTime`.

    Raises:
        ModtraceError: it is none, or of another version.
    """
    try:
        values = orjson.loads((folder / DATASET_MARKER).read_bytes())
        version = values["format"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise _no_dataset(folder) from error
    if version != _FORMAT:
        raise ModtraceError(f"{folder}: its format is {version}, and this version reads {_FORMAT}")
    steps, reference = values.get("steps_per_bucket"), values.get("reference")
    if not (isinstance(steps, int) and steps > 0 and isinstance(reference, str)):
        raise _no_dataset(folder)
    return steps, reference


def write_head(folder: Path, steps_per_bucket: int, reference: str) -> None:
    """Write what `read_head` returns.

    Raises:
        OSError: it cannot be written.
    """
    head = {"format": _FORMAT, "steps_per_bucket": steps_per_bucket, "reference": reference}
    _write_json(folder / DATASET_MARKER, head)


def read_parts(folder: Path) -> dict[str, list[RankEntry]]:
    """Return the ranks of each part, by its name.

    Raises:
        ModtraceError: one cannot be read.
    """
    parts = {}
    for path in sorted((folder / "parts").glob("*.json")):
        try:
            entries = [RankEntry(**entry) for entry in orjson.loads(path.read_bytes())]
            if any(tuple(map(type, entry)) != _ENTRY_TYPES for entry in entries):
                raise ValueError("it does not say which ranks it is of")
        except (OSError, ValueError, TypeError) as error:
            raise ModtraceError(f"{path}: cannot be read: {error}; delete it and pack again") from error
        parts[path.stem] = entries
    return parts


def create_anew(path: Path) -> BinaryIO:
    """Create a file in place of what an earlier run left there, or others: no link is followed.

    Raises:
        OSError: it cannot be made.
    """
    path.unlink(missing_ok=True)
    return open(create_file(os.fspath(path), 0o666), "wb")


def write_part(parts: Path, name: str, entries: Sequence[RankEntry]) -> None:
    """Write which ranks a part holds, once its tables are there.

    Raises:
        OSError: it cannot be written.
    """
    _write_json(parts / f"{name}.json", [entry._asdict() for entry in entries])


def _no_dataset(folder: Path) -> ModtraceError:
    return ModtraceError(f"{folder}: it is not a dataset; make one with `modtrace ranks pack`")


def _write_json(path: Path, value: object) -> None:
    new = path.with_suffix(".new")
    with create_anew(new) as file:
        file.write(orjson.dumps(value))
    os.replace(new, path)


_TIMES = ("start_ns", "duration_ns", "self_ns", "end_ns", "done_ns", "call", "counter")
"""Columns whose differences from row to row are stored; all others are few different values."""


def parquet_options(schema: pa.Schema) -> dict[str, Any]:
    """Return how a writer stores the columns: measured to be 6 to 8 bytes a span."""
    deltas = [name for name in schema.names if name in _TIMES]
    return {
        "compression": "zstd",
        "compression_level": 1,
        "use_dictionary": [name for name in schema.names if name not in _TIMES],
        "column_encoding": dict.fromkeys(deltas, "DELTA_BINARY_PACKED"),
        "write_statistics": ["rank", "step"],
        "version": "2.6",
        "data_page_version": "2.0",
    }


_OF_ALL = ("rank", "step")
_SPANS = (*_OF_ALL, "track", "phase", "fqn", "module_class", "call", "start_ns", "duration_ns", "self_ns", "depth")
_COLLECTIVES = (*_OF_ALL, "operator", "group", "peer", "kind", "counter", "start_ns", "end_ns", "done_ns", "bytes")
_COLUMNS = {
    SpanTable: _SPANS,
    CollectiveTable: _COLLECTIVES,
    StepTable: (*_OF_ALL, "end_ns"),
    RangeTable: (*_OF_ALL, "range", "start_ns", "end_ns"),
}
_FIELDS = {"fqn": "name", "module_class": "name", "self_ns": "self_time", "bytes": "nbytes", "range": "place"}
"""The fields that columns are made of; of others it is the column's name without its unit."""
_SMALL = ("track", "depth")
"""Columns of 16 bits."""
_KNOWN_TEXTS: Mapping[str, Sequence[str]] = {"phase": PHASES, "kind": ROW_KINDS}
_OWN_TEXTS = {"operator": "operators", "group": "groups", "range": "places"}
"""Columns of texts, and the fields that have them."""


def to_arrow(table: SpanTable | CollectiveTable | StepTable | RangeTable) -> pa.Table:
    """Return a table with names, phases, operators and the like as texts."""
    texts = {**_KNOWN_TEXTS, **{column: getattr(table, field, ()) for column, field in _OWN_TEXTS.items()}}
    if isinstance(table, SpanTable):
        texts["fqn"], texts["module_class"] = ([name[part] for name in table.names] for part in (1, 2))
    columns = {}
    for column in _COLUMNS[type(table)]:
        values = getattr(table, _FIELDS.get(column, column.removesuffix("_ns")))
        columns[column] = values.astype(np.int16) if column in _SMALL else values
        if column in texts:
            columns[column] = _texts(texts[column], values)
    return pa.table(columns)


def from_arrow(kind: type[Table], table: pa.Table) -> Table:
    """Return a table of one kind; names of modules lack what a slice is called."""
    fields: dict[str, Any] = {}
    for column in _COLUMNS[kind]:
        field = _FIELDS.get(column, column.removesuffix("_ns"))
        if column in _KNOWN_TEXTS:
            texts, code = _codes(table[column])
            fields[field] = np.array([_KNOWN_TEXTS[column].index(text) for text in texts] or [0], np.int8)[code]
        elif column in _OWN_TEXTS:
            fields[_OWN_TEXTS[column]], fields[field] = _codes(table[column])
        elif field != "name":
            fields[field] = table[column].to_numpy()
            if column in _SMALL:
                fields[field] = fields[field].astype(np.int32)
    if kind is SpanTable:
        (fqns, fqn), (classes, module_class) = _codes(table["fqn"]), _codes(table["module_class"])
        pairs, name = np.unique(fqn.astype(np.int64) << 32 | module_class, return_inverse=True)
        fields["names"] = [Name("", fqns[pair >> 32], classes[pair & 0xFFFFFFFF]) for pair in pairs.tolist()]
        fields["name"] = name.astype(np.int32)
    return kind(**fields)


def _texts(values: Sequence[str], codes: AnyArray) -> pa.DictionaryArray:
    unique, number = number_distinct(values)  # a dictionary has each text once
    return pa.DictionaryArray.from_arrays(pa.array(number[codes]), pa.array(unique, pa.string()))


def _codes(column: pa.ChunkedArray) -> tuple[list[str], Any]:
    """Return the texts of a dictionary column, and for each row which one it has."""
    if not pa.types.is_dictionary(column.type):
        column = column.dictionary_encode()
    column = column.unify_dictionaries()
    texts = column.chunk(0).dictionary.to_pylist() if column.num_chunks else []
    codes = [chunk.indices.to_numpy() for chunk in column.chunks]
    return texts, np.concatenate([np.empty(0, np.int32), *codes]).astype(np.int32)


class DatasetTables:
    """Reads a dataset: only the row groups that hold the steps and the ranks that are asked for.

    Args:
        path: its folder.

    Attributes:
        path: the folder.
        ranks: what is known of each rank, in their order.
        peak_bytes: by rank, the most that its tensors held; without those that recorded no memory.

    Raises:
        ModtraceError: it is none, of another version, or cannot be read; so do the methods.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        (self._steps_per_bucket, _), parts = read_head(self.path), read_parts(self.path)
        self.ranks = sorted((entry for entries in parts.values() for entry in entries), key=lambda entry: entry.rank)
        if not self.ranks:
            raise ModtraceError(f"{self.path}: it holds no rank yet; run `modtrace ranks pack` again")
        self.peak_bytes = {one.rank: one.peak_bytes for one in self.ranks if one.peak_bytes >= 0}
        self._names = list(parts)

    def files(self, table: str) -> list[Path]:
        """Return the files of one of `TABLE_NAMES`."""
        return [self.path / table / f"{name}.parquet" for name in self._names]

    def buckets(self, *tables: str) -> list[tuple[int, int]]:
        """Return the first step of each bucket and the one after its last, in order.

        Args:
            tables: which of `TABLE_NAMES` has something in it; none: any of them.
        """
        length = self._steps_per_bucket
        numbers: set[int] = set()
        with self._damage_named():
            for table in tables or TABLE_NAMES:
                for fragment in self._dataset(table).get_fragments():
                    for bounds in (group.statistics["step"] for group in fragment.row_groups):
                        numbers.update(range(bounds["min"] // length, bounds["max"] // length + 1))
        return [(number * length, (number + 1) * length) for number in sorted(numbers)]

    def bounds(self) -> Bounds:
        """Return how far the times of each rank are off."""
        return Bounds([(one.rank, one.bound_ns, one.clock) for one in self.ranks])

    def read(self, kind: type[Table], first: int, last: int, ranks: Sequence[int] | None = None) -> Table:
        """Return the rows of a kind of table, as `RankTables.read` does."""
        rank, step = pc.field("rank"), pc.field("step")
        chosen = (step >= first) & (step < last)
        if ranks is not None:
            chosen &= (rank >= min(ranks)) & (rank <= max(ranks)) & rank.isin(list(ranks))
        with self._damage_named():
            return from_arrow(kind, self._dataset(FOLDERS[kind]).to_table(filter=chosen))

    def _dataset(self, table: str) -> Any:
        return _open(tuple((str(file), file.stat().st_mtime_ns) for file in self.files(table)))

    @contextmanager
    def _damage_named(self) -> Iterator[None]:
        try:
            yield
        except (pa.ArrowException, OSError, LookupError, ValueError) as error:
            raise ModtraceError(f"{self.path}: cannot be read: {error}; delete it and pack again") from error


@lru_cache(maxsize=2 * len(TABLE_NAMES))  # each bucket asks for them
def _open(files: tuple[tuple[str, int], ...]) -> Any:
    """Open the Parquet files of a table, known by their paths and the times at which they were changed."""
    options = ds.ParquetReadOptions(dictionary_columns=["fqn", "module_class", *_KNOWN_TEXTS, *_OWN_TEXTS])
    return ds.dataset([path for path, _ in files], format=ds.ParquetFileFormat(read_options=options))


def query(dataset: str | os.PathLike[str], sql: str, steps: tuple[int, int] | None = None) -> pa.Table:
    """Return what SQL says of the tables `spans`, `collectives`, `steps`, `ranges` and `ranks`.

    Args:
        dataset: its folder.
        sql: over the tables.
        steps: those from the first to before the second alone; None: all.

    Raises:
        ModtraceError: it is not a dataset, or the SQL is wrong.
    """
    import duckdb

    tables, connection = DatasetTables(dataset), duckdb.connect()
    only = "" if steps is None else f" WHERE step >= {steps[0]} AND step < {steps[1]}"
    try:
        for table in TABLE_NAMES:
            files = ", ".join("'" + glob.escape(str(path)).replace("'", "''") + "'" for path in tables.files(table))
            # Texts of ours in SQL: the names of tables, paths with their quotes doubled, and numbers.
            connection.execute(f"CREATE VIEW {table} AS SELECT * FROM read_parquet([{files}]){only}")  # noqa: S608
    except duckdb.Error as error:
        # The lines after the first are our SQL.
        text = str(error).partition("\n")[0]
        raise ModtraceError(f"{tables.path}: cannot be read: {text}; delete it and pack again") from error
    ranks = pa.Table.from_pylist([entry._asdict() | {"source": None} for entry in tables.ranks])
    connection.register("ranks", ranks.drop_columns(["source"]))
    return _run(connection, sql)


def query_each_bucket(
    dataset: str | os.PathLike[str], sql: str, then: str | None = None, executor: Executor | None = None
) -> pa.Table:
    """Return what SQL says of each bucket of steps, below each other in the order of the steps.

    Args:
        dataset: its folder.
        sql: over the tables, which hold one bucket each time.
        then: SQL over all these results, as the table `results`.
        executor: asks the buckets; None: processes of this machine.

    Raises:
        ModtraceError: it is not a dataset, or the SQL is wrong.
    """
    tables = DatasetTables(dataset)
    ask = partial(query, os.path.abspath(dataset), sql)
    by_bucket = dict(map_in_processes(ask, tables.buckets(), processor_count(), executor))
    if not by_bucket:
        raise ModtraceError(f"{dataset}: nothing is in it, so there is no bucket to ask")
    results = pa.concat_tables([by_bucket[bucket] for bucket in sorted(by_bucket)], promote_options="permissive")
    if then is None:
        return results
    import duckdb

    connection = duckdb.connect()
    connection.register("results", results)
    return _run(connection, then)


def _run(connection: Any, sql: str) -> pa.Table:
    import duckdb

    try:
        relation = connection.sql(sql)
        if relation is None:
            raise ModtraceError("the SQL returns nothing; it should be one SELECT")
        # Of several columns with one name, as a join can have, all but the first are numbered so.
        return relation.select("*").to_arrow_table()
    except duckdb.Error as error:
        raise ModtraceError(f"the SQL cannot be run: {error}") from error
