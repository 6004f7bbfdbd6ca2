"""Spans above the streams of GPUs, as a merged trace has them → tracks of the timeline."""

import re
from typing import NamedTuple

import numpy as np

from ..formats.escape import restored_name
from ..timeline import PHASES, Name, Slices, Timeline
from ..timeline.join import add_gpu_tracks

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
