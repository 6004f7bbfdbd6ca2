"""What the readers of all formats collect → `Timeline`; spans above the streams of GPUs → tracks of it."""

import itertools
import re
from array import array
from collections.abc import Mapping, MutableSequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from .._numbering import Numbering
from .._typing import AnyArray, Int64Array
from ..formats.escape import restore, restored_name
from ..formats.slice_args import FileSlice, groups_from_header, others_of_file
from ..timeline import PHASES, CounterSeries, Mark, Name, Process, Slices, Stats, Timeline, Track
from ..timeline.join import add_gpu_tracks, put_modules_before
from ..timeline.nesting import nest_by_time
from ..timeline.slices import DTYPES

_FIELDS = ("name", "phase", "call", "step", "complete", "link")
"""Of each span, besides its lane and its times."""


@dataclass
class SpanColumns:
    """What a file's events say but for the times of spans, a column for each field.

    Attributes:
        lane: the lane of each span, by its number in the header.
        name: index into `names`.
        names: label, qualified name and class of each name, by its index.
        span_args: what some spans say beyond the fixed fields, by position.
        marks: (time, kind, text).
        samples: per counter of the header its times and values.
        slices: those that are no modules', with the lane in place of the track.
    """

    lane: MutableSequence[int] = field(default_factory=lambda: array("q"))
    phase: MutableSequence[int] = field(default_factory=lambda: array("q"))
    name: MutableSequence[int] = field(default_factory=lambda: array("q"))
    call: MutableSequence[int] = field(default_factory=lambda: array("q"))
    step: MutableSequence[int] = field(default_factory=lambda: array("q"))
    link: MutableSequence[int] = field(default_factory=lambda: array("q"))
    complete: MutableSequence[int] = field(default_factory=lambda: array("q"))
    names: Numbering[tuple[str, str, str]] = field(default_factory=Numbering)
    span_args: dict[int, Mapping[str, str]] = field(default_factory=dict)
    marks: list[Mark] = field(default_factory=list)
    samples: dict[int, tuple[list[int], list[int]]] = field(default_factory=dict)
    slices: list[FileSlice] = field(default_factory=list)

    def take(self, kept: Int64Array, lane: Int64Array) -> "SpanColumns":
        """Return some spans, by their ascending positions, on other lanes; marks, samples and slices are left out.

        Args:
            kept: their positions.
            lane: of all spans.
        """
        columns: dict[str, Any] = {name: np.array(getattr(self, name), np.int64)[kept] for name in _FIELDS}
        columns["lane"] = lane[kept]
        place = {int(row): position for position, row in enumerate(kept) if row in self.span_args}
        own_args = {place[row]: args for row, args in self.span_args.items() if row in place}
        return SpanColumns(**columns, names=self.names, span_args=own_args)


def build_timeline_from(header: Mapping[str, Any], rows: SpanColumns, start: Int64Array, end: Int64Array) -> Timeline:
    """Build the timeline of a file.

    Args:
        header: what it says of the recording as a whole.
        rows: its events; the columns are taken out of it.
        start: int64, per span, Unix nanoseconds.
        end: int64, per span, Unix nanoseconds.

    Raises:
        ValueError: what should be a text is none, or a span ends before it starts.
    """
    for text in itertools.chain.from_iterable([*rows.names, *((mark.kind, mark.text) for mark in rows.marks)]):
        if not isinstance(text, str):
            raise ValueError(f"{text!r} is no text")
    for column, count in ((rows.phase, len(PHASES)), (rows.lane, len(header["lanes"]))):
        codes = np.array(column, np.int64)
        if np.any((codes < 0) | (codes >= count)):
            raise ValueError(f"a span is of phase or lane {codes[(codes < 0) | (codes >= count)][0]}")
    if np.any(end < start):
        raise ValueError("a span ends before it starts")
    processes = [Process(*(process[field] for field in Process._fields)) for process in header["processes"]]
    tracks = [Track(**{**track, "process": processes[track["process"]]}) for track in header["tracks"]]
    track_of_lane = np.array([lane["track"] for lane in header["lanes"]], np.int32)
    columns: dict[str, AnyArray] = {"start": start, "end": end, "track": track_of_lane[np.array(rows.lane, np.int64)]}
    for name in _FIELDS:
        columns[name] = np.array(getattr(rows, name), DTYPES[name])
        setattr(rows, name, array("q"))
    nested = nest_by_time(Slices.of(**columns))
    columns |= {"depth": nested.depth, "parent": nested.parent}
    order, position = np.lexsort((nested.depth, nested.start)), np.full(len(nested) + 1, -1)
    position[order] = np.arange(len(order))
    del nested, start, end  # there is memory for the columns once
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
