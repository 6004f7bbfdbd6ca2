"""A ring's snapshot → a timeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..._typing import Int64Array
from ...ring import Events, Kind, RingSnapshot
from ..columns import Columns
from ..contents import BACKWARD_PASSES, STEPS_END_WITH, BackwardPass, CounterSeries, Mark, Process, Stats
from ..timeline import Timeline
from .attribution import attribute_nodes, count_outside_runs
from .call_tree import build_intervals
from .clock import Clock
from .device import add_device_spans
from .module_events import module_events
from .name_lookup import NameLookup
from .own_args import find_own_args
from .pair_collectives import assign_communication_tracks, build_collectives
from .passes import pair_passes
from .span_rows import assign_tracks, build_span_rows, find_parents
from .steps import step_ends

__all__ = ["build_timeline"]

_SYNC_PREFIX = "modtrace.sync"


def build_timeline(snapshot: RingSnapshot) -> Timeline:
    """Build the timeline of what a ring held."""
    all_events = snapshot.slots.events
    lookup = NameLookup(snapshot.records, all_events)
    events = module_events(all_events)
    clock = Clock(snapshot.records)
    rank = snapshot.metadata.get("rank")
    process = Process(
        int(str(snapshot.metadata.get("pid", 0))),
        rank if isinstance(rank, int) else None,
        str(snapshot.metadata.get("program", "python")),
    )
    intervals = build_intervals(events)
    call = attribute_nodes(intervals, events, lookup.torch_threads)
    rows = build_span_rows(intervals, call)
    tracks, track = assign_tracks(rows, lookup.threads, process)
    collectives = build_collectives(
        all_events, lookup.texts, snapshot.records, clock.to_unix, lambda index: _steps(all_events, 2 * index + 1)
    )
    tracks, collectives = assign_communication_tracks(tracks, collectives, lookup.threads, process)
    timeline = Timeline(
        columns=Columns.of(
            **{field: rows[field] for field in ("name", "phase", "depth", "call", "link")},
            start=clock.to_unix(rows["start"]),
            end=clock.to_unix(rows["end"]),
            track=track,
            parent=find_parents(track, rows["depth"]),
            step=_steps(events, rows["start_position"]),
            complete=rows["has_start"] & rows["has_end"],
        ),
        names=lookup.names,
        tracks=tracks,
        stats=Stats(
            recorded=snapshot.slots.recorded,
            overwritten=snapshot.slots.overwritten,
            torn=snapshot.slots.torn,
            unfinished=int(np.count_nonzero(~rows["has_end"])),
            unstarted=int(np.count_nonzero(~rows["has_start"])),
            unattributed=count_outside_runs(intervals, call),
        ),
        marks=_marks(events, lookup.texts, clock),
        counters=_counters(events, lookup.texts, clock, process),
        backward_passes=_backward_passes(events, lookup.threads, clock, process),
        # Which host it was matters to those who watch the ring, not to those who get the trace.
        metadata={key: value for key, value in snapshot.metadata.items() if key != "host"}
        | ({STEPS_END_WITH: BACKWARD_PASSES} if step_ends(events).with_passes else {}),
        span_args=find_own_args(events, lookup.texts, snapshot.records, rows),
    )
    timeline = add_device_spans(
        timeline, all_events, intervals, call, clock.to_unix, lambda position: _steps(events, position)
    )
    return replace(timeline, collectives=replace(collectives, track_names=timeline.track_names))


def _steps(events: Events, start_position: Int64Array) -> Int64Array:
    """Return for each span the number of steps that had ended before it."""
    ends = step_ends(events)
    if not len(ends.event):
        return np.zeros(len(start_position), np.int64)
    ended = np.concatenate([ends.number[:1], ends.number + 1])
    return ended[np.searchsorted(2 * ends.event, start_position)]


def _marks(events: Events, texts: Sequence[str], clock: Clock) -> list[Mark]:
    ends = step_ends(events)
    end_ns = clock.to_unix(events.time[ends.event])
    marks = [
        Mark(time, "step", f"step {number}") for time, number in zip(end_ns.tolist(), ends.number.tolist(), strict=True)
    ]
    marked = np.flatnonzero(events.kind == Kind.MARK)
    for index, time in zip(marked.tolist(), clock.to_unix(events.time[marked]).tolist(), strict=True):
        text = texts[events.name[index]]
        # A sync mark's value is the wait between the two clock readings that its time is the middle of.
        marks.append(Mark(time, "sync" if text.startswith(_SYNC_PREFIX) else "mark", text))
    return sorted(marks)


def _backward_passes(
    events: Events, threads: Sequence[tuple[str, int]], clock: Clock, process: Process
) -> list[BackwardPass]:
    thread, begin, end = pair_passes(events)
    if not len(thread):
        return []
    known = (begin >= 0) & (end >= 0)
    start_ns = clock.to_unix(np.where(begin >= 0, events.time[begin], events.time.min()))
    end_ns = clock.to_unix(np.where(end >= 0, events.time[end], events.time.max()))
    found = []
    ends_around: dict[int, list[int]] = {}
    order = np.lexsort((-end_ns, start_ns))
    columns = (thread, start_ns, end_ns, known)
    for number, start, end, whole in zip(*(column[order].tolist() for column in columns), strict=True):
        around = ends_around.setdefault(number, [])
        while around and around[-1] <= start:
            around.pop()
        # One whose end is lost cannot outlast the one around it.
        until = min([end, *around[-1:]])
        around.append(until)
        name, tid = threads[number]
        found.append(BackwardPass(start, until, name, tid, process, whole and until == end))
    return found


def _counters(events: Events, texts: Sequence[str], clock: Clock, process: Process) -> list[CounterSeries]:
    samples = np.flatnonzero(events.kind == Kind.COUNTER)
    counters = []
    for name in np.unique(events.name[samples]).tolist():
        own = samples[events.name[samples] == name]
        own = own[np.argsort(events.time[own], kind="stable")]
        time = clock.to_unix(events.time[own])
        counters.append(CounterSeries(texts[name], "bytes", process, time, events.value[own]))
    return counters
