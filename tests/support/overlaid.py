"""A recording laid over a hand-made trace, aligned to the nanosecond."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from modtrace import Timeline
from modtrace.profiler.event_collector import EventCollector
from modtrace.profiler.overlay import Overlay, Trace, overlay
from modtrace.timeline import Mark

from .kineto import BASE, x

__all__ = ["overlaid"]


def overlaid(
    timeline: Timeline | None, *events: Any, late_ns: int | None = 0, capture: Trace | None = None, **keys: Any
) -> Overlay:
    """Return the overlay of a recording and a trace; a sync mark per µs gives the clock's offset, to the nanosecond."""
    collector = EventCollector()
    if timeline is not None and late_ns is not None:
        times = [event["ts"] for event in events if event["ph"] == "X"]
        span = range(max(1, round(min(times))) * 1000, round(max(times)) * 1000 + 1, 1000) if times else ()
        texts = {time: f"modtrace.sync#{time}" for time in span}
        events = (*events, *(x("cpu_op", text, time, time) for time, text in texts.items()))
        marks = [Mark(BASE + time + late_ns, "sync", text) for time, text in texts.items()]
        timeline = replace(timeline, marks=[*timeline.marks, *marks])
    collector.add(json.loads(json.dumps(events)))
    return overlay(timeline, collector.events(), {"baseTimeNanoseconds": BASE} | keys, "trace.json", capture)
