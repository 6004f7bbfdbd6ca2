"""What the readers of all formats collect → `Timeline`; spans above the streams of GPUs → tracks of it."""

import itertools
import re
from array import array
from collections.abc import Mapping, MutableSequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from .._numbering import Numbering
from .._typing import AnyArray, Int32Array, Int64Array
from ..formats.escape import restore, restored_name
from ..formats.slice_args import FileSlice, groups_from_header, others_of_file
from ..timeline import PHASES, CounterSeries, Mark, Name, Process, Slices, Stats, Timeline, Track
from ..timeline.join import add_gpu_tracks, put_modules_before
from ..timeline.nesting import nest_times
from ..timeline.slices import DTYPES

_FIELDS = ("start", "end", "name", "phase", "call", "step", "complete", "link")
"""Of each span, besides its lane."""


@dataclass
class SpanColumns:
    """What a file's events say, a column for each field, as narrow as in `Slices`: there can be millions of spans.

    Attributes:
        start: when each span starts, Unix nanoseconds.
        end: when it ends.
        lane: the lane of each span, by its number in the header.
        name: index into `names`.
        names: label, qualified name and class of each name, by its index.
        span_args: what some spans say beyond the fixed fields, by position.
        marks: (time, kind, text).
        samples: per counter of the header its times and values.
        slices: those that are no modules', with the lane in place of the track.
    """

    start: MutableSequence[int] = field(default_factory=lambda: array("q"))
    end: MutableSequence[int] = field(default_factory=lambda: array("q"))
    lane: MutableSequence[int] = field(default_factory=lambda: array("i"))
    phase: MutableSequence[int] = field(default_factory=lambda: array("b"))
    name: MutableSequence[int] = field(default_factory=lambda: array("i"))
    call: MutableSequence[int] = field(default_factory=lambda: array("q"))
    step: MutableSequence[int] = field(default_factory=lambda: array("q"))
    link: MutableSequence[int] = field(default_factory=lambda: array("q"))
    complete: MutableSequence[int] = field(default_factory=lambda: array("b"))
    names: Numbering[tuple[str, str, str]] = field(default_factory=Numbering)
    span_args: dict[int, Mapping[str, str]] = field(default_factory=dict)
    marks: list[Mark] = field(default_factory=list)
    samples: dict[int, tuple[list[int], list[int]]] = field(default_factory=dict)
    slices: list[FileSlice] = field(default_factory=list)

    def extend(self, name: str, values: Int64Array) -> None:
        """Append numbers to a column.

        Raises:
            ValueError: one is too large for it.
        """
        column = getattr(self, name)
        narrow = values.astype(f"i{column.itemsize}")
        if np.any(narrow != values):
            raise ValueError(f"{name} of a span is {values[narrow != values][0]}")
        column.frombytes(narrow.tobytes())

    def take_out(self, name: str) -> AnyArray:
        """Return a column, not copied, and keep none here: there is memory for all of them once."""
        column = np.asarray(getattr(self, name))
        setattr(self, name, array("q"))
        return column.astype(DTYPES.get(name, np.int32), copy=False)

    def move_to(self, lane: Int32Array) -> "SpanColumns":
        """Take out the spans, to other lanes; marks, samples and slices are left out.

        Args:
            lane: of each span; -1: it is left out too.
        """
        is_kept, rows = lane >= 0, np.array([*self.span_args], np.int64)
        columns: dict[str, Any] = {name: self.take_out(name)[is_kept] for name in _FIELDS}
        columns["lane"] = lane[is_kept]
        places = zip((np.cumsum(is_kept) - 1)[rows].tolist(), is_kept[rows].tolist(), strict=True)
        args = {row: args for (row, kept), args in zip(places, self.span_args.values(), strict=True) if kept}
        return SpanColumns(**columns, names=self.names, span_args=args)


def build_timeline_from(header: Mapping[str, Any], rows: SpanColumns) -> Timeline:
    """Build the timeline of a file.

    Args:
        header: what it says of the recording as a whole.
        rows: its events; the columns are taken out of it.

    Raises:
        ValueError: what should be a text is none, or a span ends before it starts.
    """
    for text in itertools.chain.from_iterable([*rows.names, *((mark.kind, mark.text) for mark in rows.marks)]):
        if not isinstance(text, str):
            raise ValueError(f"{text!r} is no text")
    lane, columns = rows.take_out("lane"), {name: rows.take_out(name) for name in _FIELDS}
    for codes, count in ((columns["phase"], len(PHASES)), (lane, len(header["lanes"]))):
        if np.any((codes < 0) | (codes >= count)):
            raise ValueError(f"a span is of phase or lane {codes[(codes < 0) | (codes >= count)][0]}")
    if np.any(columns["end"] < columns["start"]):
        raise ValueError("a span ends before it starts")
    processes = [Process(*(process[field] for field in Process._fields)) for process in header["processes"]]
    tracks = [Track(**{**track, "process": processes[track["process"]]}) for track in header["tracks"]]
    track_of_lane = np.array([one["track"] for one in header["lanes"]], np.int32)
    columns["track"] = track_of_lane[lane]
    del lane, codes  # there is memory for the columns once
    columns["depth"], columns["parent"] = nest_times(*(columns[name] for name in ("start", "end", "track")))
    order, position = np.lexsort((columns["depth"], columns["start"])), np.full(len(columns["start"]) + 1, -1)
    position[order] = np.arange(len(order))
    for name in columns:
        columns[name] = columns[name][order]
    columns["parent"] = position[columns["parent"]]
    timeline = Timeline(
        Slices.of(**columns),
        names=[restored_name(name) for name in rows.names],
        tracks=tracks,
        stats=Stats(**header["stats"]),
        marks=sorted((mark._replace(text=restore(mark.text)) for mark in rows.marks), key=lambda m: m.time_ns),
        counters=[
            CounterSeries(
                counter["name"],
                counter["unit"],
                processes[counter["process"]],
                *(np.array(values, np.int64) for values in rows.samples.get(index, ((), ()))),
            )
            for index, counter in enumerate(header["counters"])
        ],
        metadata=dict(header["metadata"]),
        begin_ns=header.get("begin_ns"),
    )
    slices = [file_slice._replace(track=int(track_of_lane[file_slice.track])) for file_slice in rows.slices]
    others = others_of_file(timeline, slices, groups_from_header(header.get("groups", [])))
    span_args = {int(position[row]): restore(args) for row, args in rows.span_args.items()}
    return put_modules_before(others, columns, span_args)


ROW_PREFIX = "modules · "
"""What the name of a row above a stream begins with; the profiler's name of the stream follows."""

_NUMBER = re.compile(r"(?<!\d)(\d{1,18})\s*$")


class StreamSpan(NamedTuple):
    """One span above a stream.

    Attributes:
        device: the number of the GPU.
        stream: the number of the stream on it.
        start: Unix nanoseconds.
        end: Unix nanoseconds.
        name: as it stands in the trace, escaped.
        phase: of the call that launched the work.
        call: that call.
        step: its step.
    """

    device: int
    stream: int
    start: int
    end: int
    name: Name
    phase: str
    call: int
    step: int


def stream_number(text: str) -> int:
    """Return the number at the end of what the profiler calls a stream or a device; 0 where there is none."""
    match = _NUMBER.search(text)
    return int(match[1]) if match else 0


def add_stream_spans(timeline: Timeline, spans: list[StreamSpan]) -> Timeline:
    """Return the timeline with a track per stream that has spans."""
    names_of_spans = [restored_name(span.name) for span in spans]
    recorded = set(timeline.names)
    names = [*timeline.names, *dict.fromkeys(name for name in names_of_spans if name not in recorded)]
    known = {name: index for index, name in enumerate(names)}
    streams = sorted({(span.device, span.stream) for span in spans})
    index = {stream: number for number, stream in enumerate(streams)}
    rows = [
        (index[span.device, span.stream], span.start, span.end, PHASES.index(span.phase), span.call, span.step)
        for span in spans
    ]
    stream, start, end, phase, call, step = np.array(rows, np.int64).reshape(-1, 6).T
    number = np.array([known[name] for name in names_of_spans], np.int64)
    slices = Slices.of(start=start, end=end, name=number, phase=phase, track=stream, call=call, step=step)
    return add_gpu_tracks(timeline, streams, slices, names)
