"""Traces of torch.profiler in JSON: the module tracks of a merged one, or those made of its `nn.Module` slices."""

from __future__ import annotations

import os
from dataclasses import replace

from ..formats.chrome_values import base_time_ns
from ..formats.event_stream import EventStream
from ..formats.merge_metadata import MERGED, gpu_work_in
from ..formats.trace_file import TraceFile
from ..profiler.event_collector import EventCollector
from ..profiler.overlay import overlay
from ..profiler.stream_spans import with_stream_spans
from ..timeline import Timeline
from .recorded_json import RecordedEvents


def load_profile(path: str | os.PathLike[str]) -> Timeline:
    """Read the recording out of a merged trace, or make a timeline of what the profiler noted of modules.

    What cannot be known of the second is in the timeline's metadata, as `notes`.

    Raises:
        TraceError: it is no such trace, or nothing of it can be read.
    """
    merged, collector = RecordedEvents(merged=True), EventCollector()
    with TraceFile(path) as file:
        stream = EventStream(file)
        for chunk in stream.chunks():
            merged.take(chunk.events)
            collector.add(chunk.events)
        base = base_time_ns(stream.keys, file.path)
        if merged or MERGED in stream.keys:
            metadata = stream.keys.get(MERGED)
            timeline = merged.merged_timeline(file.path, base, metadata)
            return replace(timeline, gpu_work=gpu_work_in(file.path, metadata))
        events = collector.events()
        made = overlay(None, events, stream.keys, file.path)
    timeline = with_stream_spans(made.timeline, events, made.devices)
    slices = timeline.slices
    return replace(
        timeline,
        slices=replace(slices, start=slices.start + base, end=slices.end + base),
        metadata={**timeline.metadata, "notes": [*made.notes, *stream.notes]},
    )
