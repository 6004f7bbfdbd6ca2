"""A trace of torch.profiler → the timeline of its modules."""

import os
from dataclasses import replace

from ..formats.chrome_values import base_time_ns
from ..formats.event_stream import EventStream
from ..formats.trace_file import TraceFile
from ..profiler.event_collector import EventCollector
from ..profiler.overlay import overlay
from ..timeline import Timeline


def load_profile(path: str | os.PathLike[str]) -> Timeline:
    """Make a timeline of what the profiler noted of modules; what cannot be known is in its metadata, as `notes`.

    Raises:
        TraceError: it is no such trace, or nothing of it can be read.
    """
    collector = EventCollector()
    with TraceFile(path) as file:
        stream = EventStream(file)
        for chunk in stream.chunks():
            collector.add(chunk.events)
        base = base_time_ns(stream.keys, file.path)
        events = collector.events()
        made = overlay(None, events, stream.keys, file.path)
    timeline = made.recording(events, base, stream.dropped + collector.malformed)
    return replace(
        timeline, metadata={**timeline.metadata, "notes": [*made.notes, *stream.notes(), *collector.notes()]}
    )
