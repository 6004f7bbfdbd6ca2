"""What a dataset says of itself: the steps in a bucket, and which ranks each of its parts holds.

```
DATASET/dataset.json            steps in a bucket, and which time it is
DATASET/parts/NAME.json         the ranks of a part, and the files they came from; written last
DATASET/spans/NAME.parquet      their spans; so collectives/ and steps/
```
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from .._errors import ModtraceError
from .._typing import AnyArray
from ..timeline import PHASES, Name
from .groups import number_distinct
from .rank_folder import DATASET_MARKER
from .rank_tables import ROW_KINDS, Bounds, CollectiveTable, RangeTable, SpanTable, StepTable

_FORMAT = 1
"""The version of the layout; others are refused."""

TABLES = ("spans", "collectives", "steps")
"""The tables of a dataset, each in a folder of this name."""


class DatasetHead(NamedTuple):
    """What a dataset says as a whole.

    Attributes:
        steps_per_bucket: how many steps are stored together.
        reference: which time it is, see `JobTime`.
    """

    steps_per_bucket: int
    reference: str


class RankEntry(NamedTuple):
    """What a dataset says of one rank.

    Attributes:
        rank: its number.
        bound_ns: how far its times are off at most, see `RankTimeline`.
        method: how it was found where it is, see `RankTime`.
        clock: the id of its clock.
        spans: how many it has.
        source: the file it came from: path, size and time of change.
    """

    rank: int
    bound_ns: int
    method: str
    clock: str
    spans: int
    source: list[Any]


_ENTRY_TYPES = {"rank": int, "bound_ns": int, "method": str, "clock": str, "spans": int, "source": list}


def read_head(folder: Path) -> DatasetHead:
    """Return what a dataset says as a whole.

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
    return DatasetHead(steps, reference)


def write_head(folder: Path, head: DatasetHead) -> None:
    """Write what a dataset says as a whole.

    Raises:
        OSError: it cannot be written.
    """
    _write_json(folder / DATASET_MARKER, {"format": _FORMAT, **head._asdict()})


def read_parts(folder: Path) -> dict[str, list[RankEntry]]:
    """Return the ranks of each part, by its name.

    Raises:
        ModtraceError: one cannot be read.
    """
    parts = {}
    for path in sorted((folder / "parts").glob("*.json")):
        try:
            entries = orjson.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise ModtraceError(f"{path}: cannot be read: {error}; delete it and pack again") from error
        if not isinstance(entries, list) or not all(_is_entry(entry) for entry in entries):
            raise ModtraceError(f"{path}: it does not say which ranks it is of; delete it and pack again")
        parts[path.stem] = [RankEntry(**{key: entry[key] for key in _ENTRY_TYPES}) for entry in entries]
    return parts


def write_part(folder: Path, name: str, entries: Sequence[RankEntry]) -> None:
    """Write which ranks a part holds, once its tables are there.

    Raises:
        OSError: it cannot be written.
    """
    _write_json(folder / "parts" / f"{name}.json", [entry._asdict() for entry in entries])


def _is_entry(entry: object) -> bool:
    return isinstance(entry, Mapping) and all(isinstance(entry.get(key), kind) for key, kind in _ENTRY_TYPES.items())


def _no_dataset(folder: Path) -> ModtraceError:
    return ModtraceError(f"{folder}: it is no dataset; make one with `modtrace ranks pack`")


def _write_json(path: Path, value: object) -> None:
    partial = path.with_suffix(".new")
    partial.write_bytes(orjson.dumps(value))
    os.replace(partial, path)


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
_STEPS = (*_OF_ALL, "end_ns")
"""The columns of each table of a dataset."""
_FIELDS = {"fqn": "name", "module_class": "name", "self_ns": "self_time", "bytes": "nbytes"}
"""The fields that columns are made of; of others it is the column's name without its unit."""
_SMALL = ("track", "depth")
"""Columns of 16 bits."""


def arrow_spans(table: SpanTable) -> pa.Table:
    """Return spans with their names and phases as texts."""
    fqns, classes = [name.fqn for name in table.names], [name.module_class for name in table.names]
    return _arrow(table, _SPANS, {"phase": PHASES, "fqn": fqns, "module_class": classes})


def arrow_collectives(table: CollectiveTable) -> pa.Table:
    """Return collectives and waits with operators, groups and kinds as texts."""
    return _arrow(table, _COLLECTIVES, {"operator": table.operators, "group": table.groups, "kind": ROW_KINDS})


def arrow_steps(table: StepTable) -> pa.Table:
    """Return when steps ended."""
    return _arrow(table, _STEPS, {})


def _field(column: str) -> str:
    return _FIELDS.get(column, column.removesuffix("_ns"))


def _arrow(table: object, columns: Sequence[str], texts: Mapping[str, Sequence[str]]) -> pa.Table:
    arrays = {column: getattr(table, _field(column)) for column in columns}
    arrays |= {column: arrays[column].astype(np.int16) for column in _SMALL if column in arrays}
    return pa.table(arrays | {column: _texts(values, arrays[column]) for column, values in texts.items()})


def spans_from_arrow(table: pa.Table) -> SpanTable:
    """Return the spans of an Arrow table; their names lack what a slice is called."""
    fqns, fqn = _codes(table["fqn"])
    classes, module_class = _codes(table["module_class"])
    pairs, name = np.unique(fqn.astype(np.int64) * max(len(classes), 1) + module_class, return_inverse=True)
    names = [Name("", fqns[pair // len(classes)], classes[pair % len(classes)]) for pair in pairs.tolist()]
    known: dict[str, Any] = {"names": names, "name": name.astype(np.int32)}
    known["phase"] = _known_codes(table["phase"], PHASES)
    return SpanTable(**known, **_numbers(table, _SPANS, known))


def collectives_from_arrow(table: pa.Table) -> CollectiveTable:
    """Return the collectives of an Arrow table."""
    operators, operator = _codes(table["operator"])
    groups, group = _codes(table["group"])
    known: dict[str, Any] = {"operators": operators, "operator": operator, "groups": groups, "group": group}
    known["kind"] = _known_codes(table["kind"], ROW_KINDS)
    return CollectiveTable(**known, **_numbers(table, _COLLECTIVES, known))


def steps_from_arrow(table: pa.Table) -> StepTable:
    """Return the steps of an Arrow table."""
    return StepTable(**_numbers(table, _STEPS, ()))


def _numbers(table: pa.Table, columns: Sequence[str], known: Collection[str]) -> dict[str, Any]:
    """Return the arrays of numbers, by field; of 16 bits as the tables have them."""
    arrays = {_field(column): table[column].to_numpy() for column in columns if _field(column) not in known}
    return arrays | {field: arrays[field].astype(np.int32) for field in _SMALL if field in arrays}


def _known_codes(column: pa.ChunkedArray, values: Sequence[str]) -> AnyArray:
    """Return for each row which of the values it has."""
    texts, code = _codes(column)
    of_text = np.array([values.index(text) for text in texts] or [0], np.int8)
    return np.asarray(of_text[code])


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


_TEXTS = ("phase", "fqn", "module_class", "operator", "group", "kind")


class DatasetTables:
    """Reads a dataset: only the row groups that hold the steps and the ranks that are asked for.

    Args:
        path: its folder.

    Attributes:
        path: the folder.
        ranks: what is known of each rank, in their order.

    Raises:
        ModtraceError: it is none, of another version, or cannot be read; so do the methods.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        head, parts = read_head(self.path), read_parts(self.path)
        self.ranks = sorted((entry for entries in parts.values() for entry in entries), key=lambda entry: entry.rank)
        if not self.ranks:
            raise ModtraceError(f"{self.path}: it holds no rank yet; run `modtrace ranks pack` again")
        self._steps_per_bucket = head.steps_per_bucket
        self._names = list(parts)

    def files(self, table: str) -> list[Path]:
        """Return the files of one of `TABLES`."""
        return [self.path / table / f"{name}.parquet" for name in self._names]

    def buckets(self, *tables: str) -> list[tuple[int, int]]:
        """Return the first step of each bucket and the one behind its last, in order.

        Args:
            tables: which of `TABLES` has something in it; none: any of them.
        """
        length = self._steps_per_bucket
        numbers: set[int] = set()
        with self._damage_named():
            for table in tables or TABLES:
                for fragment in self._dataset(table).get_fragments():
                    steps = [group.statistics["step"] for group in fragment.row_groups]
                    for bounds in steps:
                        numbers.update(range(bounds["min"] // length, bounds["max"] // length + 1))
        return [(number * length, (number + 1) * length) for number in sorted(numbers)]

    def bounds(self) -> Bounds:
        """Return how far the times of each rank are off."""
        return Bounds(
            [one.rank for one in self.ranks],
            [one.bound_ns for one in self.ranks],
            [one.clock for one in self.ranks],
        )

    def collectives(self, first: int, last: int) -> CollectiveTable:
        """Return the collectives of the steps from `first` to before `last`, of all ranks."""
        with self._damage_named():
            return collectives_from_arrow(self._dataset("collectives").to_table(filter=_steps(first, last)))

    def spans(self, ranks: Sequence[int], first: int, last: int) -> SpanTable:
        """Return the spans of some ranks in the steps from `first` to before `last`."""
        low, high = min(ranks), max(ranks)
        chosen = _steps(first, last) & (pc.field("rank") >= low) & (pc.field("rank") <= high)
        chosen &= pc.field("rank").isin(list(ranks))
        with self._damage_named():
            return spans_from_arrow(self._dataset("spans").to_table(filter=chosen))

    def ranges(self, *_: object) -> RangeTable:
        """Return no ranges: a dataset keeps none."""
        number, time = np.empty(0, np.int32), np.empty(0, np.int64)
        return RangeTable([], number, number, number, time, time)

    def steps(self, first: int, last: int) -> StepTable:
        """Return when the steps from `first` to before `last` ended."""
        with self._damage_named():
            return steps_from_arrow(self._dataset("steps").to_table(filter=_steps(first, last)))

    def _dataset(self, table: str) -> Any:
        return _open(tuple((str(file), file.stat().st_mtime_ns) for file in self.files(table)))

    @contextmanager
    def _damage_named(self) -> Iterator[None]:
        try:
            yield
        except (pa.ArrowException, OSError, LookupError, ValueError) as error:
            raise ModtraceError(f"{self.path}: cannot be read: {error}; delete it and pack again") from error


@lru_cache(maxsize=2 * len(TABLES))  # each bucket asks for them
def _open(files: tuple[tuple[str, int], ...]) -> Any:
    """Open the Parquet files of a table, known by their paths and the times at which they were changed."""
    options = ds.ParquetReadOptions(dictionary_columns=list(_TEXTS))
    return ds.dataset([path for path, _ in files], format=ds.ParquetFileFormat(read_options=options))


def _steps(first: int, last: int) -> Any:
    return (pc.field("step") >= first) & (pc.field("step") < last)
