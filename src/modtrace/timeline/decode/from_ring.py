"""A ring's snapshot → a timeline."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic_ns

import numpy as np

from ...ring import FIRST_STEP, Kind, RingSnapshot
from ..contents import (
    BACKWARD_PASSES,
    FLOPS,
    MEMORY,
    MISSING_BYTES,
    OPEN_AT_END,
    PASSES,
    STEPS_END_WITH,
    WHOLE_RUN,
    CounterSeries,
    Mark,
    Process,
    Stats,
    Track,
)
from ..join import put_modules_before, with_slices
from ..memory import peaks_of
from ..slices import BACKWARD_PASS, Slices, join_columns
from ..timeline import Timeline
from .analysis import RingAnalysis
from .collectives import assign_communication_tracks, build_collectives
from .device_spans import add_device_spans
from .memory import held_memory
from .module_spans import ModuleSpans, decode_modules
from .open_calls import lasts_too_long
from .path_spans import clip_and_nest
from .ranges import add_ranges
from .spans import assign_tracks

_SYNC_PREFIX = "modtrace.sync"


def build_timeline(ring: RingSnapshot | RingAnalysis) -> Timeline:
    """Build the timeline of what a ring held.

    Args:
        ring: what was read, or its analysis if that answers other questions too.
    """
    analysis = ring if isinstance(ring, RingAnalysis) else RingAnalysis(ring)
    return assemble_timeline(analysis, decode_modules(analysis), analysis)


def assemble_timeline(analysis: RingAnalysis, modules: ModuleSpans, end: RingAnalysis) -> Timeline:
    """Return the timeline of spans of modules and of the other events of a ring.

    Args:
        analysis: of the ring; of a large one the events of calls and nodes may be left out.
        modules: the spans of modules.
        end: of the end of the ring, with all events.
    """
    snapshot, lookup = analysis.snapshot, analysis.lookup
    rank = snapshot.metadata.get("rank")
    process = Process(
        int(str(snapshot.metadata.get("pid", 0))),
        rank if isinstance(rank, int) else None,
        str(snapshot.metadata.get("program", "python")),
    )
    tracks, track = assign_tracks(modules.columns["track"], lookup.threads, process)
    communication, details = build_collectives(analysis)
    tracks, communication = assign_communication_tracks(tracks, communication, lookup.threads, process)
    counters, memory = _counters(analysis, process), held_memory(analysis)
    columns, flops = modules.columns | {"track": track}, modules.flops
    count, is_large = len(track), end is not analysis
    modules.columns.clear()  # there is memory for them once
    timeline = Timeline(
        Slices.empty() if is_large else Slices.of(**columns),
        names=lookup.names,
        tracks=tracks,
        stats=Stats(
            recorded=snapshot.slots.recorded,
            overwritten=snapshot.slots.overwritten,
            torn=snapshot.slots.torn,
            unfinished=modules.unfinished,
            unstarted=modules.unstarted,
            unattributed=modules.unattributed,
        ),
        marks=_marks(analysis, counters),
        counters=counters,
        # Which host it was matters to those who watch the ring, not to those who get the trace.
        metadata={key: value for key, value in snapshot.metadata.items() if key not in ("host", FIRST_STEP)}
        | {WHOLE_RUN: describe_whole_run(analysis, count)}
        | _open_at_end(end)
        | ({MISSING_BYTES: snapshot.missing_bytes} if snapshot.missing_bytes else {})
        | ({} if flops is None else {FLOPS: flops.metadata})
        | ({MEMORY: memory.to_json()} if memory is not None else {})
        | ({STEPS_END_WITH: BACKWARD_PASSES} if analysis.step_ends.with_passes else {}),
        span_args={} if is_large else modules.span_args,
    )
    timeline = add_device_spans(timeline, analysis)
    tracks, passes = _backward_passes(analysis, timeline.tracks, process)
    timeline, ranges, range_args = add_ranges(timeline, analysis, tracks, process, modules.evaluations)
    first = len(communication) + len(passes)
    span_args = {first + row: args for row, args in range_args.items()}
    timeline = with_slices(timeline, join_columns([communication, passes, ranges]), span_args, details)
    return put_modules_before(timeline, columns, modules.span_args) if is_large else timeline


def describe_whole_run(analysis: RingAnalysis, spans: int | None) -> dict[str, float | None]:
    """Return what is known of the whole recording; its spans are not once some events were overwritten."""
    snapshot, ends = analysis.snapshot, analysis.step_ends
    is_whole = not snapshot.slots.overwritten
    kept = max(0, len(ends.number) - (not is_whole))  # of the first step that ends, the begin was overwritten
    first = snapshot.metadata.get(FIRST_STEP)
    steps = len(ends.number) if is_whole else None
    if steps is None and isinstance(first, int) and len(ends.number):
        steps = int(ends.number[-1]) - first + 1
    read = [record["monotonic"] for record in snapshot.records if record["kind"] == "anchor"]
    times = [*read, *analysis.all_events.time[-1:].tolist()]
    seconds = (max(times) - read[0]) / 1e9 if read else None
    return {"steps": steps, "spans": spans if is_whole else None, "seconds": seconds, "kept_steps": kept}


def _open_at_end(analysis: RingAnalysis) -> dict[str, object]:
    """Return the metadata of what the process died in, or is in for long; see `OPEN_AT_END`."""
    snapshot = analysis.snapshot
    if any(record["kind"] == "stop" for record in snapshot.records) or snapshot.missing_bytes:
        return {}
    stacks = [stack for stack in analysis.open_stacks if stack.calls]
    if not stacks:
        return {}
    stack = min(stacks, key=lambda stack: stack.calls[-1].is_range)
    call = stack.calls[-1]
    end_ns = monotonic_ns() if snapshot.known_pid else int(analysis.all_events.time.max())
    usual_ns = analysis.usual_durations([call]).get((call.fqn, call.phase))
    if snapshot.writer != "dead" and not lasts_too_long(call, end_ns - call.since_ns, usual_ns):
        return {}
    seconds = (end_ns - call.since_ns) / 1e9
    usual_seconds = None if usual_ns is None else usual_ns / 1e9
    place = {"thread": stack.thread, "place": call.place, "seconds": seconds, "usual_seconds": usual_seconds}
    return {OPEN_AT_END: place}


def _marks(analysis: RingAnalysis, counters: Sequence[CounterSeries]) -> list[Mark]:
    events, clock, ends = analysis.events, analysis.clock, analysis.step_ends
    end_ns = clock.to_other(events.time[ends.event])
    marks = [
        Mark(time, "step", f"step {number}") for time, number in zip(end_ns.tolist(), ends.number.tolist(), strict=True)
    ]
    marks += [Mark(time, "mark", text) for time, text in peaks_of(counters)]
    marked = np.flatnonzero(events.kind == Kind.MARK)
    for index, time in zip(marked.tolist(), clock.to_other(events.time[marked]).tolist(), strict=True):
        text = analysis.lookup.texts[events.name[index]]
        # A sync mark's value is the wait between the two clock readings that its time is the middle of.
        marks.append(Mark(time, "sync" if text.startswith(_SYNC_PREFIX) else "mark", text))
    return sorted(marks)


def _backward_passes(analysis: RingAnalysis, tracks: Sequence[Track], process: Process) -> tuple[list[Track], Slices]:
    """Return the tracks with those of backward passes behind them, and the passes."""
    events, clock, threads = analysis.events, analysis.clock, analysis.lookup.threads
    thread, begin, end = analysis.passes
    if not len(thread):
        return [*tracks], Slices.empty()
    start_ns = clock.to_other(np.where(begin >= 0, events.time[begin], events.time.min()))
    end_ns = clock.to_other(np.where(end >= 0, events.time[end], events.time.max()))
    # One whose end is lost cannot outlast the one around it.
    until, _, _ = clip_and_nest(thread, start_ns, end_ns, np.arange(len(thread)))
    first_seen = [*dict.fromkeys(thread[np.lexsort((-end_ns, start_ns))].tolist())]
    rows = Slices.of_kind(
        BACKWARD_PASS,
        start_ns,
        end=until,
        track=[len(tracks) + first_seen.index(number) for number in thread.tolist()],
        step=analysis.steps_before(np.maximum(2 * begin + 1, 0)),
        complete=(begin >= 0) & (end >= 0) & (until == end_ns),
    )
    return [*tracks, *(Track(PASSES, name, tid, process) for name, tid in map(threads.__getitem__, first_seen))], rows


def _counters(analysis: RingAnalysis, process: Process) -> list[CounterSeries]:
    events, clock = analysis.all_events, analysis.clock
    samples = np.flatnonzero(events.kind == Kind.COUNTER)
    counters = []
    for name in np.unique(events.name[samples]).tolist():
        own = samples[events.name[samples] == name]
        own = own[np.argsort(events.time[own], kind="stable")]
        time = clock.to_other(events.time[own])
        counters.append(CounterSeries(analysis.lookup.texts[name], "bytes", process, time, events.value[own]))
    return counters
