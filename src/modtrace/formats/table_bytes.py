"""A timeline as bytes: what a written trace carries, so that it is read again as it was.

A table is blocks, each with a header in JSON and columns behind it. All but the last hold slices; the last holds the
rest. A column is a number that all values have in common, and planes. The first plane is the lowest byte of each value,
the second the next byte, and so on; each is packed if that saves room.

    values  1790000000000000100, …160, …190        start: differences
    header  [1790000000000000100, 30, [3]]         first value, least difference, bytes of each plane
    plane   0 30 0                                 the differences less 30
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
from ..timeline.slices import DTYPES, KINDS, MODULE, ArgColumn, Args, in_start_order, join_args
from .limits import check_nested_json, escaped_json

FORMAT_VERSION = 2
"""The version of a table; a reader refuses others."""

_BLOCK_ROWS = 1 << 18
_SIZES = struct.Struct("<II")
"""Before each block: the bytes of its header, and of its columns."""
_LEVEL = 1
_PROBE = 1 << 12
"""Bytes of a plane that are packed first, to see whether that saves room."""
_WORTH = 0.7
_LEAST_HEAD = 1 << 22
"""Bytes that the header of a block may have beside what the trace holds too."""
_DIFFERENCES = frozenset({"start", "link", "call", "step", "rows", "time"})
"""Columns of which the differences are small."""

_EDITED = (ArithmeticError, AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError)
DAMAGED = (*_EDITED, struct.error, zlib.error)
"""The errors that reading a table raises if it is not as it was written."""


class TableWriter:
    """The table of a timeline whose modules may come part by part."""

    def __init__(self) -> None:
        self._blocks: list[bytes] = []
        self._rows = 0
        self._used: BoolArray = np.zeros(0, np.bool_)

    def add(self, part: Timeline) -> None:
        """Add the modules of a part; the last part has all other slices too."""
        self._add(part.columns)
        self._last = part

    def _add(self, slices: Slices, before: int = 0) -> None:
        """Add slices, with parents that count from so many before them."""
        for first in range(0, len(slices), _BLOCK_ROWS):
            last = min(first + _BLOCK_ROWS, len(slices))
            part = slices.take(slice(first, last))
            columns = {name: getattr(part, name) for name in DTYPES}
            columns["end"] = part.end - part.start
            columns["parent"] = np.where(part.parent >= 0, before + np.arange(first, last) - part.parent, 0)
            self._note_names(part.name)
            self._blocks.append(_pack(columns, part.args, {"rows": last - first}))
        self._rows += len(slices)

    def _note_names(self, name: AnyArray) -> None:
        most = int(name.max(initial=-1)) + 1
        if most > len(self._used):
            self._used = np.pad(self._used, (0, most - len(self._used)))
        self._used[name[name >= 0]] = True

    def finish(self) -> bytes:
        """Return the table, with the names of slices; raises WriteError if the metadata are no JSON values."""
        timeline = self._last
        modules = len(timeline.columns)
        self._add(timeline.slices.take(slice(modules, None)), modules)
        processes = processes_of(timeline)
        used = np.flatnonzero(self._used)
        names = [timeline.names[row] for row in used.tolist()]
        moments = np.array([mark.time_ns for mark in timeline.marks], np.int64)
        columns: dict[str, AnyArray] = {"name numbers": used, "time of marks": moments}
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
    """Return the processes of a timeline in the order in which its tracks, then its counters, name them."""
    return list(dict.fromkeys([t.process for t in timeline.tracks] + [c.process for c in timeline.counters]))


def pack_table(timeline: Timeline) -> bytes:
    """Return the table of a timeline."""
    writer = TableWriter()
    writer.add(timeline)
    return writer.finish()


def unpack_table(data: bytes, most: int) -> Timeline:
    """Return a table's timeline, of at most `most` slices, samples and characters, or raise one of `DAMAGED`."""
    *blocks, (head, rest, _) = list(_unpack(data, most))
    if head["format"] != FORMAT_VERSION:
        raise ValueError(f"its table has format {head['format']}, and this version reads {FORMAT_VERSION}")
    if sum(block["rows"] for block, _, _ in blocks) != head["rows"]:
        raise ValueError("its table is not whole")
    columns = {name: np.empty(head["rows"], kind) for name, kind in DTYPES.items()}
    first, args = 0, list[tuple[int, Args]]()
    for block, part, args_of_block in blocks:
        last = first + block["rows"]
        part["end"] += part["start"]
        part["parent"] = np.where(part["parent"] > 0, np.arange(first, last) - part["parent"], -1)
        for name, column in columns.items():
            column[first:last] = part[name]
        _check_args(args_of_block, block["rows"])
        args.append((first, args_of_block))
        first = last
    names = [Name(*texts) for texts in zip(*head["names"], strict=True)]
    _check_texts(names)
    numbers = np.append(-1, rest["name numbers"])
    place = np.searchsorted(numbers, columns["name"])
    if np.any(np.append(numbers, numbers[:1])[place] != columns["name"]):
        raise ValueError("the name of a slice is not there")
    columns["name"] = (place - 1).astype(np.int32)
    processes = [Process(*process) for process in head["processes"]]
    slices = Slices(**columns, args=join_args(args))
    _check(slices, len(names), len(head["tracks"]))
    slices = in_start_order(slices)  # of threads that took turns, parts can begin before others end
    marks = [*zip(*head["marks"], strict=True)]
    _check_texts([*marks, *((track[0], track[1]) for track in head["tracks"])])
    return Timeline(
        slices=slices,
        names=names,
        tracks=[Track(kind, thread, tid, processes[n], *device) for kind, thread, tid, n, *device in head["tracks"]],
        stats=Stats(**head["stats"]),
        marks=[Mark(time, *mark) for time, mark in zip(rest["time of marks"].tolist(), marks, strict=True)],
        counters=[
            CounterSeries(name, unit, processes[process], rest[f"time {number}"], rest[f"value {number}"])
            for number, (name, unit, process) in enumerate(head["counters"])
        ],
        metadata=fit_metadata(head["metadata"]),
        groups=[Group(name, tuple(ranks), description) for name, ranks, description in head["groups"]],
        gpu_work=None if head["gpu_work"] is None else GpuWork.from_json_values(head["gpu_work"]),
        begin_ns=head["begin_ns"],
        trained=None if head["trained"] is None else frozenset(head["trained"]),
    )


def _check(slices: Slices, names: int, tracks: int) -> None:
    """Raise if a slice refers to what is not there, or ends before it begins."""
    bounds = {"name": (-1, names), "track": (0, tracks), "phase": (0, len(PHASES)), "kind": (0, len(KINDS))}
    for name, (least, end) in bounds.items():
        column = getattr(slices, name)
        if np.any((column < least) | (column >= end)):
            raise ValueError(f"the {name} of a slice is not there")
    if np.any(slices.name[slices.kind == MODULE] < 0):
        raise ValueError("a module has no name")
    if np.any(slices.parent >= np.arange(len(slices))) or np.any(slices.parent < -1):
        raise ValueError("a slice is around one before it")
    if np.any(slices.end < slices.start):
        raise ValueError("a slice ends before it starts")


def _check_args(args: Args, rows: int) -> None:
    """Raise if the args of a block refer to rows or texts that are not there."""
    for name, column in args.items():
        least, end = (INT64_MIN, INT64_MAX) if column.texts is None else (0, len(column.texts))
        is_ordered = len(column.values) == len(column) and np.all(np.diff(column.rows, prepend=-1) > 0)
        if not is_ordered or column.rows[-1] >= rows or np.any((column.values < least) | (column.values >= end)):
            raise ValueError(f"the {name} of a slice is not there")
        _check_texts([column.texts or ()])


def _check_texts(rows: Iterable[Iterable[object]]) -> None:
    for text in itertools.chain.from_iterable(rows):
        if not isinstance(text, str):
            raise ValueError(f"{text!r} is no text")


def _pack(columns: Mapping[str, AnyArray], args: Args, head: Mapping[str, object]) -> bytes:
    """Return a block of columns and args, with values for people in its header."""
    planes = list[bytes]()
    described = {name: _pack_column(name, column, planes) for name, column in columns.items()}
    of_args = {}
    for name, column in args.items():
        values, texts = column.values, column.texts
        if texts is not None:  # texts that no slice has are private
            used, values = number_values(values)
            texts = [texts[number] for number in used.tolist()]
        packed = [_pack_column("rows", column.rows, planes), _pack_column("values", values, planes)]
        of_args[name] = [*packed, texts]
    text = zlib.compress(_json({**head, "columns": described, "args": of_args}), _LEVEL)
    body = b"".join(planes)
    return b"".join((_SIZES.pack(len(text), len(body)), text, body))


def _unpack(data: bytes, most: int) -> Iterator[tuple[dict[str, Any], dict[str, Int64Array], Args]]:
    """Yield the header, the columns and the args of each block."""
    end = 0
    while end < len(data):
        head_size, body_size = _SIZES.unpack_from(data, end)
        begin = end + _SIZES.size
        end = begin + head_size + body_size
        if end > len(data):
            raise ValueError("its table is cut off")
        text = _inflated(data[begin : begin + head_size], 2 * most + _LEAST_HEAD)
        check_nested_json(text)
        head = json.loads(text)
        body = memoryview(data)[begin + head_size : end]
        columns, place = {}, 0
        for name, packed in head["columns"].items():
            columns[name], place = _unpack_column(name, packed, body, place, most)
        args = {}
        for name, (rows, values, texts) in head["args"].items():
            row, place = _unpack_column("rows", rows, body, place, most)
            value, place = _unpack_column("values", values, body, place, most)
            args[name] = ArgColumn(row, value, texts)
        yield head, columns, args


def _pack_column(name: str, column: AnyArray, planes: list[bytes]) -> list[object]:
    """Return what a header says of a column, and append its planes."""
    values = column.astype(np.int64)
    if not len(values):
        return [0, 0, 0, []]
    first = int(values[0])
    if name.partition(" ")[0] in _DIFFERENCES:
        values = np.append(np.diff(values[:2]), np.diff(values)) if len(values) > 1 else np.zeros(1, np.int64)
    least = int(values.min())
    rest = (values - least).view(np.uint64)
    sizes = list[int]()
    for shift in range(0, int(rest.max()).bit_length(), 8):
        plane = (rest >> np.uint64(shift)).astype(np.uint8).tobytes()
        packed = zlib.compress(plane[:_PROBE], _LEVEL)
        if len(packed) < _WORTH * min(len(plane), _PROBE):
            packed = zlib.compress(plane, _LEVEL) if len(plane) > _PROBE else packed
            planes.append(packed)
            sizes.append(len(packed))
        else:
            planes.append(plane)
            sizes.append(0)
    return [len(values), first, least, sizes]


def _unpack_column(name: str, packed: Sequence[Any], body: memoryview, place: int, most: int) -> tuple[Int64Array, int]:
    """Return a column, and where the next one begins."""
    count, first, least, sizes = packed
    if not 0 <= count <= most or len(sizes) > np.dtype(np.int64).itemsize:
        raise ValueError(f"a column has {count} values")
    rest = np.zeros(count, np.uint64)
    for number, size in enumerate(sizes):
        plane: bytes | memoryview = body[place : place + (size or count)]
        place += len(plane)
        plane = _inflated(plane, count) if size else plane
        rest |= np.frombuffer(plane, np.uint8, count).astype(np.uint64) << np.uint64(8 * number)
    values = rest.view(np.int64) + least
    if name.partition(" ")[0] in _DIFFERENCES and count:
        values[0] = first
        values = np.cumsum(values)
    return values, place


def _inflated(packed: bytes | memoryview, most: int) -> bytes:
    """Return unpacked bytes; raises ValueError if there are more of them."""
    unpacking = zlib.decompressobj()
    data = unpacking.decompress(packed, most + 1)
    if len(data) > most:
        raise ValueError("its table unpacks to more than the trace holds")
    return data


def _json(value: Mapping[str, object]) -> bytes:
    """Return JSON, also of lone surrogates, which only the slower module has an escape for."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    except (TypeError, ValueError) as error:
        try:
            return json.dumps(value).encode()
        except (TypeError, ValueError):
            raise _no_json(error) from error


def make_header(timeline: Timeline) -> dict[str, Any]:
    """Return the header of a trace: version, stats, metadata; raises WriteError if the metadata are no JSON values."""
    try:
        metadata = orjson.loads(orjson.dumps(escaped_json(dict(timeline.metadata))))
    except orjson.JSONEncodeError as error:
        raise _no_json(error) from error
    written = {"format": FORMAT_VERSION, "version": __version__}
    return {"modtrace": written, "stats": dict(timeline.stats), "metadata": metadata}


def _no_json(error: Exception) -> WriteError:
    return WriteError(f"the metadata of a timeline must be JSON values: {error}")
