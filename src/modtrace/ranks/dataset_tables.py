"""The tables of a dataset, and SQL over them, or over each bucket in processes, by DuckDB."""

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
from .dataset_files import (
    DatasetFiles,
    JoinedTime,
    file_name,
    read_head,
    read_parts,
)
from .rank_folder import Place
from .rank_tables import NUMBERED, ROW_KINDS, CollectiveTable, RangeTable, RankTables, SpanTable, StepTable, Table

FOLDERS: Mapping[type, str] = {
    SpanTable: "spans",
    CollectiveTable: "collectives",
    StepTable: "steps",
    RangeTable: "ranges",
}
"""The folder of each table of a dataset."""
TABLE_NAMES = tuple(FOLDERS.values())
"""The tables of a dataset, each in a folder of this name."""


_TIMES = ("start_ns", "duration_ns", "self_ns", "end_ns", "done_ns", "call", "counter")
"""Columns whose differences from row to row are stored; all others are few different values."""


def parquet_options(schema: pa.Schema) -> dict[str, Any]:
    """Return the options of a Parquet writer, by which a span takes 6 to 8 bytes."""
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


_COLUMN_OF = {
    "self_time": "self_ns",
    "place": "range",
    "nbytes": "bytes",
    "retained": "retained_bytes",
    "peak": "peak_bytes",
    **{time: f"{time}_ns" for time in ("start", "duration", "end", "done")},
}
"""The columns of fields that have another name than the field."""
_SMALL = ("track", "depth")
"""Fields of 16 bits."""
_KNOWN_TEXTS: Mapping[str, Sequence[str]] = {"phase": PHASES, "kind": ROW_KINDS, "category": CATEGORIES}
_END_BYTES = 1 << 16
"""The bytes at the end of a file that Arrow reads to find its columns."""
_READERS = 16
"""The number of files that are read at a time."""
_TEXTS_OF = {number: texts for texts, number in NUMBERED.items() if texts != "names"}
"""Fields of numbers, and the fields with the texts that they point into."""
_TEXT_COLUMNS = ["fqn", "module_class", *_KNOWN_TEXTS, *(_COLUMN_OF.get(field, field) for field in _TEXTS_OF)]
_LAYOUT = ds.ParquetFileFormat(read_options=ds.ParquetReadOptions(dictionary_columns=_TEXT_COLUMNS))


def to_arrow(table: SpanTable | CollectiveTable | StepTable | RangeTable) -> pa.Table:
    """Return a table with names, phases, operators and the like as texts."""
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
            columns[column] = values.astype(np.int16) if field in _SMALL else values
    return pa.table(columns)


def from_arrow(kind: type[Table], table: pa.Table) -> Table:
    """Return a table of one kind; the names of modules have no labels of slices."""
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
            fields[field] = values.astype(np.int32) if field in _SMALL else values
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


class DatasetTables(RankTables):
    """Reads a dataset: only files with steps and ranks that are asked for; raises ModtraceError if it cannot."""

    def __init__(self, place: Place) -> None:
        files = self._files = DatasetFiles(place)
        self.place = files.place
        self._steps_per_bucket, parts = read_head(files), read_parts(files)
        self.time = JoinedTime(parts.values())
        self.ranks = self.time.ranks
        if not self.ranks:
            raise ModtraceError(f"{self.place}: it holds no rank yet; run `modtrace ranks pack` again")
        self._parts, self._opened = parts, dict[str, ds.FileFragment]()

    def buckets(self, *tables: str, steps: StepRange = (None, None)) -> list[tuple[int, int]]:
        """Return the first step of each bucket of any of the tables, and the one after its last, in order."""
        length, numbers, end = self._steps_per_bucket, set[int](), 0
        with self.damage_named():
            for part in self._parts.values():
                numbers |= part.buckets(length, tables or TABLE_NAMES)
                end = max(end, *(until for table in tables or TABLE_NAMES for _, until in part.steps[table]), 0)
        first, last = step_interval(*steps, end)
        buckets = ((max(number * length, first), min((number + 1) * length, last)) for number in sorted(numbers))
        return [(begin, until) for begin, until in buckets if begin < until]

    def read(self, kind: type[Table], first: int, last: int, ranks: Sequence[int] | None = None) -> Table:
        """Return rows, as `RankTables` says it."""
        rank, step = pc.field("rank"), pc.field("step")
        chosen = (step >= first) & (step < last)
        if ranks is not None:
            chosen &= (rank >= min(ranks)) & (rank <= max(ranks)) & rank.isin(list(ranks))
        with self.damage_named():
            files = self._files_of(FOLDERS[kind], (first, last), ranks)
            table = from_arrow(kind, self._joined(self._small_at_once(files)).to_table(filter=chosen))
        if not self.time.is_moved:
            return table
        moved: dict[str, Any] = {
            name: self.time.move(table.rank, getattr(table, name)) for name in _MOVED if name in table._fields
        }
        return table._replace(**moved)

    def table(self, name: str, steps: tuple[int, int] | None = None) -> ds.Dataset:
        """Return the files of a table that can hold some of the steps; times are those of their parts."""
        return self._joined([self._fragment(file) for file in self._files_of(name, steps)])

    def _files_of(
        self, name: str, steps: tuple[int, int] | None = None, ranks: Sequence[int] | None = None
    ) -> list[str]:
        length, files = self._steps_per_bucket, list[str]()
        for part, contents in self._parts.items():
            if ranks is None or not {entry.rank for entry in contents.ranks}.isdisjoint(ranks):
                firsts = [number * length for number in sorted(contents.buckets(length, [name]))]
                chosen = [step for step in firsts if steps is None or (step < steps[1] and steps[0] < step + length)]
                files += [file_name(name, part, first) for first in chosen]
        if not files:  # the first bucket of a part has all tables
            part, contents = next(iter(self._parts.items()))
            files = [file_name(name, part, length * min(contents.buckets(length, TABLE_NAMES), default=0))]
        return files

    def _joined(self, fragments: Sequence[ds.FileFragment]) -> ds.Dataset:
        return ds.FileSystemDataset(fragments, fragments[0].physical_schema, _LAYOUT, self._files.filesystem)

    def _fragment(self, file: str) -> ds.FileFragment:
        if file not in self._opened:
            self._opened[file] = _LAYOUT.make_fragment(f"{self._files.root}/{file}", self._files.filesystem)
        return self._opened[file]

    def _small_at_once(self, files: Sequence[str]) -> list[ds.FileFragment]:
        """Read small files behind a URL: Arrow reads the end of each, which is all of it, and its columns again."""
        filesystem = self._files.filesystem
        if isinstance(filesystem, LocalFileSystem):
            return [self._fragment(file) for file in files]

        def read(file: str) -> ds.FileFragment:
            with filesystem.open_input_file(f"{self._files.root}/{file}") as opened:
                return (
                    _LAYOUT.make_fragment(opened.read_buffer()) if opened.size() <= _END_BYTES else self._fragment(file)
                )

        with ThreadPoolExecutor(_READERS) as pool:
            return list(pool.map(read, files))

    @contextmanager
    def damage_named(self) -> Iterator[None]:
        """Raise errors of damaged files as ModtraceError."""
        try:
            yield
        except (pa.ArrowException, OSError, LookupError, ValueError) as error:
            raise ModtraceError(f"{self.place}: cannot be read: {error}; delete it and pack again") from error


_MOVED = ("start", "end", "done")
"""Fields that are moments, and no durations."""


def query(dataset: Place, sql: str, steps: tuple[int, int] | None = None) -> pa.Table:
    """Return the answer of a SELECT over the tables `spans`, `collectives`, `steps`, `ranges` and `ranks`.

    Raises:
        ModtraceError: it is not a dataset, or the SQL is wrong.
    """
    import duckdb

    tables, connection = DatasetTables(dataset), duckdb.connect()
    only = "" if steps is None else f" WHERE step >= {steps[0]} AND step < {steps[1]}"
    if tables.time.is_moved:
        integers: Any = ["INTEGER", "BIGINT"]
        connection.create_function("job_time", partial(_move, tables.time), integers, "BIGINT", type="arrow")
    with tables.damage_named():
        for table in TABLE_NAMES:
            files = tables.table(table, steps)
            for fragment in files.get_fragments():
                fragment.ensure_complete_metadata()  # what is damaged is no fault of the SQL
            connection.register(f"{table} files", files)
            moments = [_COLUMN_OF[field] for field in _MOVED if tables.time.is_moved]
            times = [column for column in moments if column in files.schema.names]
            moved = ", ".join(f"job_time(rank, {name}) AS {name}" for name in times)
            columns = f"* REPLACE ({moved})" if times else "*"
            # Texts of ours in SQL: the names of tables and columns, and numbers.
            connection.execute(f'CREATE VIEW {table} AS SELECT {columns} FROM "{table} files"{only}')  # noqa: S608
    ranks = pa.Table.from_pylist([entry._asdict() | {"source": None} for entry in tables.ranks])
    connection.register("ranks", ranks.drop_columns(["source"]))
    return _run(connection, sql)


def _move(time: JoinedTime, rank: pa.ChunkedArray, time_ns: pa.ChunkedArray) -> pa.Array:
    return pa.array(time.move(rank.to_numpy(), time_ns.to_numpy()))


def query_each_bucket(dataset: Place, sql: str, then: str | None = None, executor: Executor | None = None) -> pa.Table:
    """Return the answers of a SELECT over each bucket of steps, one below the other; `then` asks them as `results`."""
    tables = DatasetTables(dataset)
    ask = partial(query, tables.place, sql)
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
