"""Spans above the streams of GPUs, as a merged trace has them → tracks of the timeline."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

from ..formats.escape import restored_name
from ..timeline import PHASES, Name, Slices, Timeline
from ..timeline.gpu_tracks import add_gpu_tracks

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
    found = _NUMBER.search(text)
    return int(found[1]) if found else 0


def add_stream_spans(timeline: Timeline, spans: list[StreamSpan]) -> Timeline:
    """Return the timeline with a track per stream that has spans."""
    names = list(timeline.names)
    known = {name: index for index, name in enumerate(names)}
    names_of_spans = [restored_name(span.name) for span in spans]
    for name in names_of_spans:
        if name not in known:
            known[name] = len(names)
            names.append(name)
    streams = sorted({(span.device, span.stream) for span in spans})
    index = {stream: number for number, stream in enumerate(streams)}
    rows = [
        (
            index[span.device, span.stream],
            span.start,
            span.end,
            known[name],
            PHASES.index(span.phase),
            span.call,
            span.step,
        )
        for span, name in zip(spans, names_of_spans, strict=True)
    ]
    stream, start, end, number, phase, call, step = np.array(rows, np.int64).reshape(-1, 7).T
    slices = Slices.of(start=start, end=end, name=number, phase=phase, track=stream, call=call, step=step)
    return add_gpu_tracks(timeline, streams, slices, names)
