"""A timeline as bytes: the table in a written trace, from which the timeline is read again without loss.

A table consists of blocks, each with a header in JSON and columns after it. The last block has names, tracks, marks,
counters and metadata; all other blocks have slices. The minimum of a column is subtracted from its values. Its first
plane is the lowest byte of each value, the second the next byte, and so on; a plane is compressed if that saves space.

    values  1790000000000000100, …160, …190        start: differences
    header  [3, 1790000000000000100, 30, [0]]      count, first value, minimum difference, compressed size of each plane
    plane   30 30 0                                the differences 60, 60 and 30, minus 30; the first one is not used
"""

from __future__ import annotations

import itertools
import json
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import orjson

from .._arrays import INT64_MAX, INT64_MIN, AnyArray, BoolArray, Int64Array, number_values
from .._errors import WriteError
from .._version import __version__
from ..timeline import PHASES, CounterSeries, GpuWork, Group, Mark, Name, Process, Slices, Stats, Timeline, Track
from ..timeline.metadata import fit_metadata
from ..timeline.slices import DTYPES, KINDS, MODULE, ArgColumn, Args, join_args, sort_by_start
from .limits import check_nested_json, escaped_json

FORMAT_VERSION = 2
"""The version of a table; a reader refuses other versions."""

_BLOCK_ROWS = 1 << 18
_SIZES = struct.Struct("<II")
"""The sizes in bytes of a block's header and columns, written before the block."""
_LEVEL = 1
_PROBE_BYTES = 1 << 12
"""Size of the part of a plane that is compressed first, to check whether compression saves space."""
_MAX_PACKED_RATIO = 0.7
"""Maximum ratio of compressed to plain size for a plane to be compressed."""
_FREE_HEAD_BYTES = 1 << 22
"""Size that the header of a block may have regardless of the size of the trace."""
_DIFFERENCES = frozenset({"start", "link", "call", "step", "rows", "time"})
"""Columns that are stored as differences, which are small."""

_EDITED = (ArithmeticError, AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError)
DAMAGED = (*_EDITED, struct.error, zlib.error)
"""Errors that reading a changed or damaged table raises."""


class TableWriter:
    """The table of a timeline whose modules may come part by part."""

    def __init__(self) -> None:
        self._blocks: list[bytes] = []
        self._rows = 0
        self._is_used: BoolArray = np.zeros(0, np.bool_)

    def add(self, part: Timeline) -> None:
        """Add the modules of a part; the last part also has all other slices."""
        self._add(part.columns)
        self._last_part = part

    def _add(self, slices: Slices, first_row: int = 0) -> None:
        """Add slices, whose first one is row `first_row` in the numbering of parents."""
        for first in range(0, len(slices), _BLOCK_ROWS):
            last = min(first + _BLOCK_ROWS, len(slices))
            part = slices.take(slice(first, last))
            columns = {name: getattr(part, name) for name in DTYPES}
            columns["end"] = part.end - part.start
            columns["parent"] = np.where(part.parent >= 0, first_row + np.arange(first, last) - part.parent, 0)
            self._note_names(part.name)
            self._blocks.append(_pack(columns, part.args, {"rows": last - first}))
        self._rows += len(slices)

    def _note_names(self, name: AnyArray) -> None:
        count = int(name.max(initial=-1)) + 1
        if count > len(self._is_used):
            self._is_used = np.pad(self._is_used, (0, count - len(self._is_used)))
        self._is_used[name[name >= 0]] = True

    def finish(self) -> bytes:
        """Return the table, with the names of slices; raises WriteError if the metadata are not JSON values."""
        timeline = self._last_part
        module_count = len(timeline.columns)
        self._add(timeline.slices.take(slice(module_count, None)), module_count)
        processes = processes_of(timeline)
        name_numbers = np.flatnonzero(self._is_used)
        names = [timeline.names[number] for number in name_numbers.tolist()]
        moments = np.array([mark.time_ns for mark in timeline.marks], np.int64)
        columns: dict[str, AnyArray] = {"name numbers": name_numbers, "time of marks": moments}
        for number, counter in enumerate(timeline.counters):
            columns |= {f"time {number}": counter.time, f"value {number}": counter.value}
        head = {
            "format": FORMAT_VERSION,
            "version": __version__,
            "rows": self._rows,
            "names": [[name[field] for name in names] for field in range(len(Name._fields))],
            "processes": [[*process] for process in processes],
            "tracks": [[*track[:3], processes.index(track.process), *track[4:]] for track in timeline.tracks],
            "marks": [[mark.kind for mark in timeline.marks], [mark.text for mark in timeline.marks]],
            "counters": [[c.name, c.unit, processes.index(c.process)] for c in timeline.counters],
            "groups": [[*group] for group in timeline.groups],
            "stats": asdict(timeline.stats),
            "metadata": dict(timeline.metadata),
            "begin_ns": timeline.begin_ns,
            "trained": None if timeline.trained is None else sorted(timeline.trained),
            "gpu_work": None if timeline.gpu_work is None else timeline.gpu_work.to_json_values(),
        }
        return b"".join([*self._blocks, _pack(columns, {}, head)])


def processes_of(timeline: Timeline) -> list[Process]:
    """Return the distinct processes of a timeline's tracks, then of its counters, in their order."""
    return list(dict.fromkeys([t.process for t in timeline.tracks] + [c.process for c in timeline.counters]))


def pack_table(timeline: Timeline) -> bytes:
    """Return the table of a timeline."""
    writer = TableWriter()
    writer.add(timeline)
    return writer.finish()


def unpack_table(data: bytes, max_items: int) -> Timeline:
    """Return a table's timeline, of up to `max_items` slices and samples, or raise one of `DAMAGED`."""
    *blocks, (head, last_columns, _) = list(_unpack(data, max_items))
    if head["format"] != FORMAT_VERSION:
        raise ValueError(f"its table has format {head['format']}, and this version reads {FORMAT_VERSION}")
    if sum(block["rows"] for block, _, _ in blocks) != head["rows"]:
        raise ValueError("its table is incomplete")
    columns = {name: np.empty(head["rows"], dtype) for name, dtype in DTYPES.items()}
    first, args = 0, list[tuple[int, Args]]()
    for block, part, block_args in blocks:
        last = first + block["rows"]
        part["end"] += part["start"]
        part["parent"] = np.where(part["parent"] > 0, np.arange(first, last) - part["parent"], -1)
        for name, column in columns.items():
            column[first:last] = part[name]
        _check_args(block_args, block["rows"])
        args.append((first, block_args))
        first = last
    names = [Name(*texts) for texts in zip(*head["names"], strict=True)]
    _check_texts(names)
    numbers = np.append(-1, last_columns["name numbers"])
    index = np.searchsorted(numbers, columns["name"])
    if np.any(np.append(numbers, numbers[:1])[index] != columns["name"]):
        raise ValueError("the name of a slice is missing")
    columns["name"] = (index - 1).astype(np.int32)
    processes = [Process(*process) for process in head["processes"]]
    slices = Slices(**columns, args=join_args(args))
    _check(slices, len(names), len(head["tracks"]))
    slices = sort_by_start(slices)  # parts of threads that took turns may overlap
    marks = [*zip(*head["marks"], strict=True)]
    _check_texts([*marks, *((track[0], track[1]) for track in head["tracks"])])
    return Timeline(
        slices=slices,
        names=names,
        tracks=[Track(kind, thread, tid, processes[n], *device) for kind, thread, tid, n, *device in head["tracks"]],
        stats=Stats(**head["stats"]),
        marks=[Mark(time, *mark) for time, mark in zip(last_columns["time of marks"].tolist(), marks, strict=True)],
        counters=[
            CounterSeries(name, unit, processes[process], last_columns[f"time {index}"], last_columns[f"value {index}"])
            for index, (name, unit, process) in enumerate(head["counters"])
        ],
        metadata=fit_metadata(head["metadata"]),
        groups=[Group(name, tuple(ranks), description) for name, ranks, description in head["groups"]],
        gpu_work=None if head["gpu_work"] is None else GpuWork.from_json_values(head["gpu_work"]),
        begin_ns=head["begin_ns"],
        trained=None if head["trained"] is None else frozenset(head["trained"]),
    )


def _check(slices: Slices, names: int, tracks: int) -> None:
    """Raise if a slice refers to a missing name, track or parent, or ends before it starts."""
    bounds = {"name": (-1, names), "track": (0, tracks), "phase": (0, len(PHASES)), "kind": (0, len(KINDS))}
    for name, (minimum, end) in bounds.items():
        column = getattr(slices, name)
        if np.any((column < minimum) | (column >= end)):
            raise ValueError(f"the {name} of a slice is missing")
    if np.any(slices.name[slices.kind == MODULE] < 0):
        raise ValueError("a module has no name")
    if np.any(slices.parent >= np.arange(len(slices))) or np.any(slices.parent < -1):
        raise ValueError("a slice comes before its parent")
    if np.any(slices.end < slices.start):
        raise ValueError("a slice ends before it starts")


def _check_args(args: Args, rows: int) -> None:
    """Raise if the args of a block refer to missing rows or texts."""
    for name, column in args.items():
        minimum, end = (INT64_MIN, INT64_MAX) if column.texts is None else (0, len(column.texts))
        is_ordered = len(column.values) == len(column) and np.all(np.diff(column.rows, prepend=-1) > 0)
        if not is_ordered or column.rows[-1] >= rows or np.any((column.values < minimum) | (column.values >= end)):
            raise ValueError(f"the {name} of a slice is missing")
        _check_texts([column.texts or ()])


def _check_texts(rows: Iterable[Iterable[object]]) -> None:
    for text in itertools.chain.from_iterable(rows):
        if not isinstance(text, str):
            raise ValueError(f"{text!r} is not a text")


def _pack(columns: Mapping[str, AnyArray], args: Args, head: Mapping[str, object]) -> bytes:
    """Return a block of columns and args; `head` is added to its header."""
    planes = list[bytes]()
    column_heads = {name: _pack_column(name, column, planes) for name, column in columns.items()}
    arg_heads = {}
    for name, column in args.items():
        values, texts = column.values, column.texts
        if texts is not None:  # texts that no slice has may be private
            used_numbers, values = number_values(values)
            texts = [texts[number] for number in used_numbers.tolist()]
        heads = [_pack_column("rows", column.rows, planes), _pack_column("values", values, planes)]
        arg_heads[name] = [*heads, texts]
    text = zlib.compress(_json({**head, "columns": column_heads, "args": arg_heads}), _LEVEL)
    body = b"".join(planes)
    return b"".join((_SIZES.pack(len(text), len(body)), text, body))


def _unpack(data: bytes, max_items: int) -> Iterator[tuple[dict[str, Any], dict[str, Int64Array], Args]]:
    """Yield the header, the columns and the args of each block."""
    end = 0
    while end < len(data):
        head_size, body_size = _SIZES.unpack_from(data, end)
        start = end + _SIZES.size
        end = start + head_size + body_size
        if end > len(data):
            raise ValueError("its table is cut off")
        text = _inflated(data[start : start + head_size], 2 * max_items + _FREE_HEAD_BYTES)
        check_nested_json(text)
        head = json.loads(text)
        body = memoryview(data)[start + head_size : end]
        columns, offset = {}, 0
        for name, column_head in head["columns"].items():
            columns[name], offset = _unpack_column(name, column_head, body, offset, max_items)
        args = {}
        for name, (rows, values, texts) in head["args"].items():
            row, offset = _unpack_column("rows", rows, body, offset, max_items)
            value, offset = _unpack_column("values", values, body, offset, max_items)
            args[name] = ArgColumn(row, value, texts)
        yield head, columns, args


def _pack_column(name: str, column: AnyArray, planes: list[bytes]) -> list[object]:
    """Return the entry of a column in the header, and append its planes."""
    values = column.astype(np.int64)
    if not len(values):
        return [0, 0, 0, []]
    first = int(values[0])
    if name.partition(" ")[0] in _DIFFERENCES:
        values = np.append(np.diff(values[:2]), np.diff(values)) if len(values) > 1 else np.zeros(1, np.int64)
    minimum = int(values.min())
    excess = (values - minimum).view(np.uint64)
    sizes = list[int]()
    for shift in range(0, int(excess.max()).bit_length(), 8):
        plane = (excess >> np.uint64(shift)).astype(np.uint8).tobytes()
        packed = zlib.compress(plane[:_PROBE_BYTES], _LEVEL)
        if len(packed) < _MAX_PACKED_RATIO * min(len(plane), _PROBE_BYTES):
            packed = zlib.compress(plane, _LEVEL) if len(plane) > _PROBE_BYTES else packed
            planes.append(packed)
            sizes.append(len(packed))
        else:
            planes.append(plane)
            sizes.append(0)
    return [len(values), first, minimum, sizes]


def _unpack_column(name: str, head: Sequence[Any], body: memoryview, offset: int, limit: int) -> tuple[Int64Array, int]:
    """Return a column of up to `limit` values, and the offset of the next column."""
    count, first, minimum, sizes = head
    if not 0 <= count <= limit or len(sizes) > np.dtype(np.int64).itemsize:
        raise ValueError(f"a column has {count} values")
    excess = np.zeros(count, np.uint64)
    for number, size in enumerate(sizes):
        plane: bytes | memoryview = body[offset : offset + (size or count)]
        offset += len(plane)
        plane = _inflated(plane, count) if size else plane
        excess |= np.frombuffer(plane, np.uint8, count).astype(np.uint64) << np.uint64(8 * number)
    values = excess.view(np.int64) + minimum
    if name.partition(" ")[0] in _DIFFERENCES and count:
        values[0] = first
        values = np.cumsum(values)
    return values, offset


def _inflated(packed: bytes | memoryview, max_bytes: int) -> bytes:
    """Return decompressed bytes; raises ValueError if there are more than `max_bytes`."""
    data = zlib.decompressobj().decompress(packed, max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError("its table unpacks to more than the trace holds")
    return data


def _json(value: Mapping[str, object]) -> bytes:
    """Return JSON; lone surrogates are escaped by the slower `json` module."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    except (TypeError, ValueError) as error:
        try:
            return json.dumps(value).encode()
        except (TypeError, ValueError):
            raise _no_json(error) from error


def make_header(timeline: Timeline) -> dict[str, Any]:
    """Return the header of a trace: version, stats, metadata; raises WriteError if the metadata are not JSON values."""
    try:
        metadata = orjson.loads(orjson.dumps(escaped_json(dict(timeline.metadata))))
    except orjson.JSONEncodeError as error:
        raise _no_json(error) from error
    written = {"format": FORMAT_VERSION, "version": __version__}
    return {"modtrace": written, "stats": dict(timeline.stats), "metadata": metadata}


def _no_json(error: Exception) -> WriteError:
    return WriteError(f"the metadata of a timeline must be JSON values: {error}")
