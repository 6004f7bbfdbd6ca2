"""The tables of a dataset, and DuckDB's SQL over all rows, or over each bucket in parallel processes."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from pyarrow.fs import LocalFileSystem

from .._arrays import AnyArray, number_distinct
from .._errors import ModtraceError
from .._pools import map_in_processes, processor_count
from ..record_options import StepRange
from ..ring.event_text import CATEGORIES
from ..timeline import PHASES, Name
from ..timeline.select import step_interval
from .dataset_files import DatasetFiles, JoinedTime, file_name, read_head, read_parts
from .rank_folder import Location
from .rank_tables import NUMBERED, ROW_KINDS, CollectiveTable, RangeTable, RankTables, SpanTable, StepTable, Table

FOLDERS: Mapping[type, str] = {
    SpanTable: "spans",
    CollectiveTable: "collectives",
    StepTable: "steps",
    RangeTable: "ranges",
}
"""The folder of each table of a dataset."""
TABLE_NAMES = tuple(FOLDERS.values())
"""Names of the tables of a dataset, and of their folders."""


_DELTA_COLUMNS = ("start_ns", "duration_ns", "self_ns", "end_ns", "done_ns", "call", "counter")
"""Columns that are stored as differences between rows; all others are stored as dictionaries of few values."""


def parquet_options(schema: pa.Schema) -> dict[str, Any]:
    """Return the options of a Parquet writer; with these, a span needs 6 to 8 bytes."""
    deltas = [name for name in schema.names if name in _DELTA_COLUMNS]
    return {
        "compression": "zstd",
        "compression_level": 1,
        "use_dictionary": [name for name in schema.names if name not in _DELTA_COLUMNS],
        "column_encoding": dict.fromkeys(deltas, "DELTA_BINARY_PACKED"),
        "write_statistics": ["rank", "step"],
        "version": "2.6",
        "data_page_version": "2.0",
    }


_COLUMN_OF = {"place": "range", "nbytes": "bytes"}
"""Field -> column, if their names differ."""
_SMALL_FIELDS = ("track", "depth")
"""Fields that are stored with 16 bits."""
_KNOWN_TEXTS: Mapping[str, Sequence[str]] = {"phase": PHASES, "kind": ROW_KINDS, "category": CATEGORIES}
_END_BYTES = 1 << 16
"""Number of bytes at the end of a file that Arrow reads to find its columns."""
_READER_THREADS = 16
"""Number of files that are read in parallel."""
_TEXTS_OF = {number: texts for texts, number in NUMBERED.items() if texts != "names"}
"""Field of indices -> field with the texts that they refer to."""
_TEXT_COLUMNS = ["fqn", "module_class", *_KNOWN_TEXTS, *(_COLUMN_OF.get(field, field) for field in _TEXTS_OF)]
_PARQUET = ds.ParquetFileFormat(read_options=ds.ParquetReadOptions(dictionary_columns=_TEXT_COLUMNS))


def to_arrow(table: SpanTable | CollectiveTable | StepTable | RangeTable) -> pa.Table:
    """Return an Arrow table in which names, phases, operators and similar fields are texts."""
    texts = {**_KNOWN_TEXTS, **{field: getattr(table, text_field, ()) for field, text_field in _TEXTS_OF.items()}}
    columns = {}
    for field in (field for field in table._fields if field not in NUMBERED):
        values, column = getattr(table, field), _COLUMN_OF.get(field, field)
        if isinstance(table, SpanTable) and field == "name":
            columns["fqn"] = _texts([name.fqn for name in table.names], values)
            columns["module_class"] = _texts([name.module_class for name in table.names], values)
        elif field in texts:
            columns[column] = _texts(texts[field], values)
        else:
            columns[column] = values.astype(np.int16) if field in _SMALL_FIELDS else values
    return pa.table(columns)


def from_arrow(kind: type[Table], table: pa.Table) -> Table:
    """Return the table of a kind that an Arrow table represents; its module names have no slice labels."""
    fields: dict[str, Any] = {}
    for field in kind._fields:
        column = _COLUMN_OF.get(field, field)
        if field in _KNOWN_TEXTS:
            texts, code = _codes(table[column])
            fields[field] = np.array([_KNOWN_TEXTS[field].index(text) for text in texts] or [0], np.int8)[code]
        elif field in _TEXTS_OF:
            fields[_TEXTS_OF[field]], fields[field] = _codes(table[column])
        elif field == "name":
            (fqns, fqn), (classes, module_class) = _codes(table["fqn"]), _codes(table["module_class"])
            pairs, name = np.unique(fqn.astype(np.int64) << 32 | module_class, return_inverse=True)
            fields["names"] = [Name("", fqns[pair >> 32], classes[pair & 0xFFFFFFFF]) for pair in pairs.tolist()]
            fields["name"] = name.astype(np.int32)
        elif field not in NUMBERED:
            values = table[column].to_numpy()
            fields[field] = values.astype(np.int32) if field in _SMALL_FIELDS else values
    return kind(**fields)


def _texts(values: Sequence[str], codes: AnyArray) -> pa.DictionaryArray:
    unique, number = number_distinct(values)  # a dictionary must not have duplicates
    return pa.DictionaryArray.from_arrays(pa.array(number[codes]), pa.array(unique, pa.string()))


def _codes(column: pa.ChunkedArray) -> tuple[list[str], Any]:
    """Return the texts of a dictionary column, and the index of each row's text."""
    if not pa.types.is_dictionary(column.type):
        column = column.dictionary_encode()
    column = column.unify_dictionaries()
    texts = column.chunk(0).dictionary.to_pylist() if column.num_chunks else []
    codes = [chunk.indices.to_numpy() for chunk in column.chunks]
    return texts, np.concatenate([np.empty(0, np.int32), *codes]).astype(np.int32)


class DatasetTables(RankTables):
    """The tables of a dataset; reads only the files of requested steps and ranks. Raises ModtraceError on failure."""

    def __init__(self, location: Location) -> None:
        files = self._files = DatasetFiles(location)
        self.location = files.location
        self._steps_per_bucket, parts = read_head(files), read_parts(files)
        self.time = JoinedTime(parts.values())
        self.ranks = self.time.ranks
        if not self.ranks:
            raise ModtraceError(f"{self.location}: contains no rank yet; run `modtrace ranks pack` again")
        self._parts, self._fragments = parts, dict[str, ds.FileFragment]()

    def buckets(self, *tables: str, steps: StepRange = (None, None)) -> list[tuple[int, int]]:
        """Return (first step, end) of each bucket with rows in any of the tables, in order."""
        length, numbers, end = self._steps_per_bucket, set[int](), 0
        with self.damage_named():
            for part in self._parts.values():
                numbers |= part.buckets(length, tables or TABLE_NAMES)
                end = max(end, *(end for table in tables or TABLE_NAMES for _, end in part.steps[table]), 0)
        first, stop = step_interval(*steps, end)
        buckets = ((max(number * length, first), min((number + 1) * length, stop)) for number in sorted(numbers))
        return [(start, end) for start, end in buckets if start < end]

    def read(self, kind: type[Table], first: int, stop: int, ranks: Sequence[int] | None = None) -> Table:
        """Return rows, see `RankTables.read`."""
        rank, step = pc.field("rank"), pc.field("step")
        row_filter = (step >= first) & (step < stop)
        if ranks is not None:
            row_filter &= (rank >= min(ranks)) & (rank <= max(ranks)) & rank.isin(list(ranks))
        with self.damage_named():
            files = self._files_of(FOLDERS[kind], (first, stop), ranks)
            table = from_arrow(kind, self._dataset_of(self._fragments_of(files)).to_table(filter=row_filter))
        if not self.time.is_moved:
            return table
        moved: dict[str, Any] = {
            name: self.time.move(table.rank, getattr(table, name)) for name in _MOMENT_FIELDS if name in table._fields
        }
        return table._replace(**moved)

    def table(self, name: str, steps: tuple[int, int] | None = None) -> ds.Dataset:
        """Return the files of a table that can contain the steps; their times are not moved to the common time."""
        return self._dataset_of([self._fragment(file) for file in self._files_of(name, steps)])

    def _files_of(
        self, name: str, steps: tuple[int, int] | None = None, ranks: Sequence[int] | None = None
    ) -> list[str]:
        length, files = self._steps_per_bucket, list[str]()
        for part, contents in self._parts.items():
            if ranks is None or not {entry.rank for entry in contents.ranks}.isdisjoint(ranks):
                firsts = [number * length for number in sorted(contents.buckets(length, [name]))]
                if steps is not None:
                    firsts = [first for first in firsts if first < steps[1] and steps[0] < first + length]
                files += [file_name(name, part, first) for first in firsts]
        if not files:  # the first bucket of a part has all tables
            part, contents = next(iter(self._parts.items()))
            files = [file_name(name, part, length * min(contents.buckets(length, TABLE_NAMES), default=0))]
        return files

    def _dataset_of(self, fragments: Sequence[ds.FileFragment]) -> ds.Dataset:
        return ds.FileSystemDataset(fragments, fragments[0].physical_schema, _PARQUET, self._files.filesystem)

    def _fragment(self, file: str) -> ds.FileFragment:
        if file not in self._fragments:
            self._fragments[file] = _PARQUET.make_fragment(f"{self._files.root}/{file}", self._files.filesystem)
        return self._fragments[file]

    def _fragments_of(self, files: Sequence[str]) -> list[ds.FileFragment]:
        """Return the files, with small files behind a URL already in memory: Arrow would read each of these twice."""
        filesystem = self._files.filesystem
        if isinstance(filesystem, LocalFileSystem):
            return [self._fragment(file) for file in files]

        def read(file: str) -> ds.FileFragment:
            with filesystem.open_input_file(f"{self._files.root}/{file}") as source:
                is_small = source.size() <= _END_BYTES
                return _PARQUET.make_fragment(source.read_buffer()) if is_small else self._fragment(file)

        with ThreadPoolExecutor(_READER_THREADS) as pool:
            return list(pool.map(read, files))

    @contextmanager
    def damage_named(self) -> Iterator[None]:
        """Raise the errors of damaged files as ModtraceError."""
        try:
            yield
        except (pa.ArrowException, OSError, LookupError, ValueError) as error:
            raise ModtraceError(f"{self.location}: cannot be read: {error}; delete it and pack again") from error


_MOMENT_FIELDS = ("start_ns", "end_ns", "done_ns")
"""Fields that are moments, not durations."""


def query(dataset: Location, sql: str, steps: tuple[int, int] | None = None) -> pa.Table:
    """Return the result of a SELECT over the tables `spans`, `collectives`, `steps`, `ranges` and `ranks`.

    Raises:
        ModtraceError: there is no dataset, or the SQL is wrong.
    """
    import duckdb

    tables, connection = DatasetTables(dataset), duckdb.connect()
    step_filter = "" if steps is None else f" WHERE step >= {steps[0]} AND step < {steps[1]}"
    if tables.time.is_moved:
        integers: Any = ["INTEGER", "BIGINT"]
        connection.create_function("job_time", partial(_move, tables.time), integers, "BIGINT", type="arrow")
    with tables.damage_named():
        for table in TABLE_NAMES:
            files = tables.table(table, steps)
            for fragment in files.get_fragments():
                fragment.ensure_complete_metadata()  # so that a damaged file is not reported as an error of the SQL
            connection.register(f"{table} files", files)
            times = [name for name in _MOMENT_FIELDS if tables.time.is_moved and name in files.schema.names]
            replacements = ", ".join(f"job_time(rank, {name}) AS {name}" for name in times)
            columns = f"* REPLACE ({replacements})" if times else "*"
            # Only modtrace's names of tables and columns, and numbers, are inserted into the SQL.
            connection.execute(f'CREATE VIEW {table} AS SELECT {columns} FROM "{table} files"{step_filter}')  # noqa: S608
    ranks = pa.Table.from_pylist([entry._asdict() | {"source": None} for entry in tables.ranks])
    connection.register("ranks", ranks.drop_columns(["source"]))
    return _run(connection, sql)


def _move(time: JoinedTime, rank: pa.ChunkedArray, time_ns: pa.ChunkedArray) -> pa.Array:
    return pa.array(time.move(rank.to_numpy(), time_ns.to_numpy()))


def query_each_bucket(
    dataset: Location, sql: str, then: str | None = None, executor: Executor | None = None
) -> pa.Table:
    """Return the joined results of a SELECT over each bucket; `then` is a SELECT over them, as table `results`."""
    tables = DatasetTables(dataset)
    query_bucket = partial(query, tables.location, sql)
    by_bucket = dict(map_in_processes(query_bucket, tables.buckets(), processor_count(), executor))
    if not by_bucket:
        raise ModtraceError(f"{dataset}: the dataset is empty; there is no bucket to query")
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
        # If several columns have one name, such as after a join, this numbers all except the first.
        return relation.select("*").to_arrow_table()
    except duckdb.Error as error:
        raise ModtraceError(f"the SQL cannot be run: {error}") from error
