"""HTML: the offline viewer's page with a timeline inside, in one file that needs no network."""

import base64
import gzip
import json
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import NamedTuple

import numpy as np
import orjson

from .._arrays import AnyArray, Int32Array
from .._files import atomic_writer
from ..formats.own_table import page_table
from ..formats.slice_args import arg_texts
from ..formats.table_bytes import pack_table, processes_of
from ..timeline import Timeline
from ..timeline.memory import find_holders
from ..timeline.slices import Slices, distinct_args
from ..timeline.summary import summarize
from ..timeline.summary.findings import closing_line
from .slices import all_as_modules
from .written_parts import PartTable, first_moment, part_table

_VERSION = 1
_DATA_ELEMENT = b'<script type="application/octet-stream" id="modtrace-data">'
"""The start tag of the element for the data of the page; viewer/index.html has it once."""
_PAGE = resources.files("modtrace.view").joinpath("viewer.html")
_ALIGNMENT = 8
"""Alignment of arrays in bytes: a typed array of the browser must start at a multiple of its element's size."""
_TYPES = {"f64": "<f8", "i32": "<i4", "u8": "u1"}
_INTEGERS = ("name", "track", "depth", "parent", "call", "step")
_MAX_INT32 = np.iinfo(np.int32).max
_GZIP_LEVEL = 6
"""Compression level of gzip: on 190,000 spans, level 9 needs five times as long and saves 2 %."""


class Comparison(NamedTuple):
    """The differences between the two sides of a timeline, which are groups of its processes."""

    titles: tuple[str, str]  # names of the sides
    notes: Sequence[str]  # sentences about the comparison
    # For each module and phase: fully qualified name, phase, ns of both sides, the difference, the ends of its
    # interval (None without one), calls of both sides, and the verdict
    changes: Sequence[tuple[str, str, int, int, int, int | None, int | None, float, float, str]]
    of_span: Int32Array  # int32[n], index into `changes` for each span; -1 for a span without a change


def write_html(timeline: Timeline, path: str | os.PathLike[str], comparison: Comparison | None = None) -> None:
    """Write the viewer's page with the timeline inside; a comparison adds a table, and the colours of spans.

    Raises WriteError if the file cannot be written; an existing file is intact.
    """
    with atomic_writer(path) as file:
        file.write(render_html(timeline, comparison))


def render_html(timeline: Timeline, comparison: Comparison | None = None) -> bytes:
    """Return the viewer's page with the timeline inside, in UTF-8; equal timelines give equal bytes."""
    head, element, tail = _PAGE.read_bytes().partition(_DATA_ELEMENT)
    # Base64 has no "<", so no name can end the script element.
    block = gzip.compress(payload(timeline, comparison), _GZIP_LEVEL, mtime=0)
    rest_of_page = b"/script>\n" + element + base64.b64encode(block) + tail
    return head + page_table(pack_table(timeline), zlib.crc32(head), rest_of_page)


def payload(timeline: Timeline, comparison: Comparison | None = None) -> bytes:
    """Return the data of the page: the u32 length of a JSON header, the header, and the columns as plain arrays."""
    parts, holders = (None, None) if comparison else (part_table(timeline), find_holders(timeline))
    summary = None if comparison else summarize(timeline)
    timeline = all_as_modules(timeline)
    base = first_moment(timeline)
    arrays = _Arrays()
    columns = timeline.columns
    rows_with_args, args_of_row, distinct = distinct_args(columns.args)
    processes = processes_of(timeline)
    header = {
        "version": _VERSION,
        "base_ns": str(base),
        "metadata": dict(timeline.metadata),
        "stats": dict(timeline.stats),
        "names": [list(name) for name in timeline.names],
        "processes": [{"pid": process.pid, "rank": process.rank, "name": process.name} for process in processes],
        "tracks": [
            {**track._asdict(), "process": processes.index(track.process), "name": name}
            for track, name in zip(timeline.tracks, timeline.track_names, strict=True)
        ],
        "marks": [[mark.time_ns - base, mark.kind, mark.text] for mark in timeline.marks],
        "args": {
            "rows": arrays.add(rows_with_args, "i32"),
            "kind": arrays.add(args_of_row, "i32"),
            "kinds": [arg_texts(args) for args in distinct],
        },
        "counters": [
            {
                "name": counter.name,
                "unit": counter.unit,
                "process": processes.index(counter.process),
                "time": arrays.add(counter.time - base, "f64"),
                "value": arrays.add(counter.value, "f64"),
            }
            for counter in timeline.counters
        ],
        "arrays": _columns(columns, base, arrays),
    }
    if comparison is not None:
        header["comparison"] = {**comparison._asdict(), "of_span": arrays.add(comparison.of_span, "i32")}
    if summary is not None and summary.looked_at:
        header["findings"] = [finding._asdict() for finding in summary.findings]
        header["findings_end"] = closing_line(summary.findings, summary.looked_at)
    if holders is not None:
        rows = [*holders.by_fqn.items(), ("other", holders.other)]
        header["holders"] = {"time": holders.time_ns - base, "rows": rows}
    if parts is not None:
        header["step_parts"] = _step_parts(parts, base, arrays)
    text = _json(header)
    text += b" " * (-(len(text) + 4) % _ALIGNMENT)
    return b"".join((struct.pack("<I", len(text)), text, *arrays.parts))


def _step_parts(parts: PartTable, base: int, arrays: "_Arrays") -> dict[str, object]:
    return {
        "parts": [*zip(parts.parts, parts.share, strict=True)],
        "names": parts.names,
        "causes": parts.causes,
        "start": arrays.add(parts.start_ns - base, "f64"),
        "duration": arrays.add(parts.end_ns - parts.start_ns, "f64"),
        "whole": arrays.add(parts.is_whole, "u8"),
        "ns": arrays.add(parts.ns.ravel(), "f64"),
    }


def _columns(columns: Slices, base: int, arrays: "_Arrays") -> dict[str, Mapping[str, object]]:
    links = np.full(len(columns), -1, np.int64)
    has_link = columns.link >= 0
    # Readers only compare links, so they get small numbers, which fit an i32.
    links[has_link] = np.unique(columns.link[has_link], return_inverse=True)[1]
    return {
        "start": arrays.add(columns.start - base, "f64"),
        "duration": arrays.add(columns.end - columns.start, "f64"),
        "link": arrays.add(links, "i32"),
        **{name: arrays.add(getattr(columns, name), "i32") for name in _INTEGERS},
        **{name: arrays.add(getattr(columns, name), "u8") for name in ("phase", "complete")},
    }


class _Arrays:
    """Arrays one after the other, each at a multiple of `_ALIGNMENT` bytes."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self._size = 0

    def add(self, values: AnyArray, dtype: str) -> Mapping[str, object]:
        """Append the values as `dtype` (f64 if they do not fit an i32), and return their type, offset and length."""
        if dtype == "i32" and values.size and max(-int(values.min()), int(values.max())) > _MAX_INT32:
            dtype = "f64"
        data = values.astype(_TYPES[dtype]).tobytes()
        offset = self._size
        self.parts.append(data + bytes(-len(data) % _ALIGNMENT))
        self._size += len(self.parts[-1])
        return {"type": dtype, "offset": offset, "length": len(values)}


def _json(header: Mapping[str, object]) -> bytes:
    try:
        return orjson.dumps(header, default=str)
    except TypeError:
        # orjson rejects a lone surrogate in a name and an integer above 64 bits; the slower module can write both. It
        # would write NaN, which no browser reads, so NaN becomes null, as with orjson.
        plain = json.loads(json.dumps(header, default=str), parse_constant=lambda _: None)
        return json.dumps(plain).encode()
