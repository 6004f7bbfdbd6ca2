"""The tables of ranks as Arrow tables, and how their columns are stored in Parquet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from ..._typing import AnyArray
from ...timeline import PHASES, Name
from ..distinct import number_distinct
from ..rank_tables import ROW_KINDS, CollectiveTable, SpanTable, StepTable

__all__ = [
    "arrow_collectives",
    "arrow_spans",
    "arrow_steps",
    "collectives_from_arrow",
    "parquet_options",
    "spans_from_arrow",
    "steps_from_arrow",
]

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


def arrow_spans(table: SpanTable) -> pa.Table:
    """Return spans with their names and phases as texts."""
    return pa.table(
        {
            "rank": table.rank,
            "step": table.step,
            "track": table.track.astype(np.int16),
            "phase": _texts(PHASES, table.phase),
            "fqn": _texts([name.fqn for name in table.names], table.name),
            "module_class": _texts([name.module_class for name in table.names], table.name),
            "call": table.call,
            "start_ns": table.start,
            "duration_ns": table.duration,
            "self_ns": table.self_time,
            "depth": table.depth.astype(np.int16),
        }
    )


def arrow_collectives(table: CollectiveTable) -> pa.Table:
    """Return collectives and waits with operators, groups and kinds as texts."""
    return pa.table(
        {
            "rank": table.rank,
            "step": table.step,
            "operator": _texts(table.operators, table.operator),
            "group": _texts(table.groups, table.group),
            "peer": table.peer,
            "kind": _texts(ROW_KINDS, table.kind),
            "counter": table.counter,
            "start_ns": table.start,
            "end_ns": table.end,
            "done_ns": table.done,
            "bytes": table.nbytes,
        }
    )


def arrow_steps(table: StepTable) -> pa.Table:
    """Return when steps ended."""
    return pa.table({"rank": table.rank, "step": table.step, "end_ns": table.end})


def spans_from_arrow(table: pa.Table) -> SpanTable:
    """Return the spans of an Arrow table; their names lack what a slice is called."""
    fqns, fqn = _codes(table["fqn"])
    classes, module_class = _codes(table["module_class"])
    pairs, name = np.unique(fqn.astype(np.int64) * max(len(classes), 1) + module_class, return_inverse=True)
    phases, phase = _codes(table["phase"])
    of_phase = np.array([PHASES.index(text) for text in phases] or [0], np.int8)
    numbers = {column: table[column].to_numpy() for column in ("rank", "step", "track", "call", "depth")}
    start, duration, self_time = (table[column].to_numpy() for column in ("start_ns", "duration_ns", "self_ns"))
    return SpanTable(
        [Name("", fqns[pair // len(classes)], classes[pair % len(classes)]) for pair in pairs.tolist()],
        numbers["rank"],
        numbers["step"],
        numbers["track"].astype(np.int32),
        of_phase[phase],
        name.astype(np.int32),
        numbers["call"],
        start,
        duration,
        self_time,
        numbers["depth"].astype(np.int32),
    )


def collectives_from_arrow(table: pa.Table) -> CollectiveTable:
    """Return the collectives of an Arrow table."""
    operators, operator = _codes(table["operator"])
    groups, group = _codes(table["group"])
    kinds, kind = _codes(table["kind"])
    of_kind = np.array([ROW_KINDS.index(text) for text in kinds] or [0], np.int8)
    rank, step, peer, *times = (
        table[column].to_numpy()
        for column in ("rank", "step", "peer", "counter", "start_ns", "end_ns", "done_ns", "bytes")
    )
    return CollectiveTable(operators, groups, rank, step, operator, group, peer, of_kind[kind], *times)


def steps_from_arrow(table: pa.Table) -> StepTable:
    """Return the steps of an Arrow table."""
    return StepTable(*(table[column].to_numpy() for column in ("rank", "step", "end_ns")))


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
