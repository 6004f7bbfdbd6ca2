"""Traces of torch.profiler in JSON: the module tracks of a merged one, or those made of its `nn.Module` slices."""

from __future__ import annotations

import os
from dataclasses import replace

from ..profiler.attribute.overlay import overlay
from ..profiler.result import MERGED
from ..profiler.trace.event_columns import EventCollector
from ..profiler.trace.event_stream import EventStream
from ..profiler.trace.trace_file import TraceFile, base_time_ns
from ..timeline import Timeline
from .merged_json import MergedEvents

__all__ = ["load_profile"]


def load_profile(path: str | os.PathLike[str]) -> Timeline:
    """Read the recording out of a merged trace, or make a timeline of what the profiler noted of modules.

    What cannot be known of the second is in the timeline's metadata, as `notes`.

    Raises:
        TraceError: it is no such trace, or nothing of it can be read.
    """
    merged, collector = MergedEvents(), EventCollector()
    with TraceFile(path) as file:
        stream = EventStream(file)
        for chunk in stream.chunks():
            merged.add(chunk.events)
            collector.add(chunk.events)
        base = base_time_ns(stream.keys, file.path)
        if merged or MERGED in stream.keys:
            return merged.timeline(base)
        made = overlay(None, collector.events(), stream.keys, file.path)
    columns = made.timeline.columns
    return replace(
        made.timeline,
        columns=replace(columns, start=columns.start + base, end=columns.end + base),
        metadata={**made.timeline.metadata, "notes": [*made.notes, *stream.notes]},
    )
