"""The events of a ring, or of a piece of it → a timeline; first the spans of modules, then everything else.

events     Net enter 10 · fc enter 12 · fc exit 15 · Net exit 20 · step 0 ends 21
modules    Net 10–20, and in it fc 12–15, both in step 0
timeline   these, the mark `step 0`, and the slices of other tracks
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from time import monotonic_ns
from typing import Any, NamedTuple

import numpy as np

from ..._arrays import AnyArray, Int64Array, Numbering, split_by
from ...ring import FIRST_STEP, Kind, RingSnapshot
from ...ring.file_format import parse_object
from ...ring.slot_format import SEQUENCE_MASK, SYNC_PREFIX
from .. import contents, slices
from ..contents import CounterSeries, Mark, Process, Stats, Track
from ..join import with_slices
from ..memory import peaks_of
from ..metadata import OPTIMIZER_NOTES, SHAPE_OF_STEP_NOTES, fit, fit_metadata
from ..nesting import clip_and_nest, find_parents, without_inner
from ..slices import Arg, ArgColumn, Args, Slices
from ..timeline import Timeline
from .analysis import RingAnalysis, event_before, usual_duration
from .attribution import count_outside_runs
from .device_spans import add_device_spans
from .held_memory import HeldMemory, held_memory
from .intervals import find_key
from .open_calls import OpenCall, lasts_too_long
from .range_slices import Evaluations, add_ranges, build_collectives, find_evaluations
from .span_costs import CountedCalls, describe_counted, find_flops
from .spans import SpanRows, build_span_rows, number_tracks


def build_timeline(ring: RingSnapshot | RingAnalysis) -> Timeline:
    """Build the timeline of a ring, or of an analysis of it that the caller uses further."""
    analysis = ring if isinstance(ring, RingAnalysis) else RingAnalysis(ring)
    return assemble_timeline(analysis, decode_modules(analysis), held_memory(analysis))


def assemble_timeline(
    analysis: RingAnalysis,
    modules: "ModuleSpans",
    memory: HeldMemory | None,
    open_at_end: Mapping[str, object] | None = None,
) -> Timeline:
    """Return the timeline of the spans of modules and of the other events of a ring.

    If `modules` has no columns, but only counts and tracks, the timeline has only the other events. `open_at_end` is
    the result of `describe_open`.
    """
    snapshot, slots, lookup = analysis.snapshot, analysis.snapshot.slots, analysis.lookup
    lost_counts = modules.unfinished_count, modules.unstarted_count, modules.unattributed_count
    field = snapshot.metadata.get
    process = Process(field("pid", 0), field("rank"), field("program", "python"), field("role", ""))
    tracks = [Track(("forward", "backward")[key % 2], *lookup.threads[key // 2], process) for key in modules.tracks]
    tracks, communication = build_collectives(analysis, tracks, process)
    texts = lookup.texts
    counters = [CounterSeries(texts[name], "bytes", process, *samples) for name, samples in modules.counters.items()]
    timeline = Timeline(
        Slices.of(modules.args, **modules.columns) if modules.columns else Slices.empty(),
        names=lookup.names,
        tracks=tracks,
        stats=Stats(slots.recorded, slots.overwritten, slots.torn, *lost_counts),
        marks=_marks(analysis, counters),
        counters=counters,
        # The host's name is for whoever watches the ring; a trace may be sent to others.
        metadata=fit_metadata({key: v for key, v in snapshot.metadata.items() if key not in ("host", FIRST_STEP)})
        | {contents.WHOLE_RUN: describe_whole_run(snapshot, analysis.step_ends.number, modules.span_count)}
        | (describe_open(analysis, lambda _: [analysis]) if open_at_end is None else dict(open_at_end))
        | ({contents.MISSING_BYTES: snapshot.missing_bytes} if snapshot.missing_bytes else {})
        | ({contents.COUNTED: describe_counted(analysis, *modules.flops)} if analysis.ring.has_flops else {})
        | ({contents.COMPILED: lookup.graphs} if lookup.graphs else {})
        | ({contents.MEMORY: memory.to_dict()} if memory is not None else {})
        | ({contents.STEPS_END_WITH: contents.BACKWARD_PASSES} if analysis.step_ends.with_passes else {})
        | (
            {contents.OPTIMIZERS: optimizers}
            if (optimizers := fit(_records(snapshot, "optimizer"), OPTIMIZER_NOTES, []))
            else {}
        )
        | ({contents.STEP_NOTES: notes} if (notes := _step_notes(snapshot)) else {}),
        groups=[*lookup.groups.values()],
    )
    timeline = add_device_spans(timeline, analysis)
    tracks, passes = _backward_passes(analysis, timeline.tracks, process)
    timeline, ranges = add_ranges(timeline, analysis, tracks, process, modules.evaluations)
    return with_slices(timeline, slices.join_columns([communication, passes, ranges]))


def _records(snapshot: RingSnapshot, kind: str) -> list[dict[str, Any]]:
    """Return the records of one kind in the name table, without their key `kind`."""
    records = [record for record in snapshot.records if record["kind"] == kind]
    return [{name: value for name, value in record.items() if name != "kind"} for record in records]


def _step_notes(snapshot: RingSnapshot) -> dict[str, Any]:
    """Return the last facts about sampled steps; empty if there are none."""
    last = next(iter(_records(snapshot, "steps")[-1:]), {})
    notes = fit(parse_object(last["notes"].encode()) if last else None, SHAPE_OF_STEP_NOTES, None)
    return {} if notes is None else {**notes, "steps": last["steps"]}


def describe_whole_run(snapshot: RingSnapshot, ended_steps: Int64Array, spans: int | None) -> dict[str, float | None]:
    """Return the `WHOLE_RUN` metadata, given the numbers of ended steps; no spans if events were overwritten."""
    is_whole = not snapshot.slots.overwritten
    kept_steps = max(0, len(ended_steps) - (not is_whole))  # the start of the first step to end was overwritten
    first = snapshot.metadata.get(FIRST_STEP)
    steps = len(ended_steps) if is_whole else None
    if steps is None and first is not None and len(ended_steps):
        steps = int(ended_steps[-1]) - first + 1
    anchors = [record["monotonic"] for record in snapshot.records if record["kind"] == "anchor"]
    times = [*anchors, *snapshot.slots.events.time_ns[-1:].tolist()]
    seconds = (max(times) - anchors[0]) / 1e9 if anchors else None
    return {"steps": steps, "spans": spans if is_whole else None, "seconds": seconds, "kept_steps": kept_steps}


def describe_open(
    analysis: RingAnalysis, parts_with: Callable[[OpenCall], Iterable[RingAnalysis]]
) -> dict[str, object]:
    """Return the metadata `OPEN_AT_END`, if the process died or hangs in a call or range, and `UNSAVED`.

    The analysis covers the end of the ring from a moment at which no call was open. `parts_with` returns the parts of
    the ring that show the usual duration of a call.
    """
    snapshot = analysis.snapshot
    if snapshot.missing_bytes or any(record["kind"] == "stop" for record in snapshot.records):
        return {}
    unsaved: dict[str, object] = {contents.UNSAVED: snapshot.unsaved} if snapshot.unsaved else {}
    stacks = [stack for stack in analysis.open_stacks if stack.calls]
    if not stacks:
        return unsaved
    stack = min(stacks, key=lambda stack: stack.calls[-1].is_range)
    call = stack.calls[-1]
    end_ns = monotonic_ns() if snapshot.known_pid else int(analysis.all_events.time_ns.max())
    usual_ns = usual_duration(parts_with(call), call)
    if snapshot.writer != "dead" and not lasts_too_long(call, end_ns - call.since_ns, usual_ns):
        return {}
    seconds = (end_ns - call.since_ns) / 1e9
    usual_seconds = None if usual_ns is None else usual_ns / 1e9
    place = {"thread": stack.thread, "place": call.place, "seconds": seconds, "usual_seconds": usual_seconds}
    return {**unsaved, contents.OPEN_AT_END: place}


def _marks(analysis: RingAnalysis, counters: Sequence[CounterSeries]) -> list[Mark]:
    """Return the ends of steps, the memory peaks, and the marks of the user and of alignments, in order of time."""
    events, clock, ends = analysis.events, analysis.clock, analysis.step_ends
    end_ns = clock.to_other(events.time_ns[ends.event])
    marks = [Mark.of_step(time, number) for time, number in zip(end_ns.tolist(), ends.number.tolist(), strict=True)]
    marks += [Mark(time, "mark", text) for time, text in peaks_of(counters)]
    marked = np.flatnonzero(events.kind == Kind.MARK)
    for index, time in zip(marked.tolist(), clock.to_other(events.time_ns[marked]).tolist(), strict=True):
        text = analysis.lookup.texts[events.name[index]]
        # The time of a sync mark is the middle of two clock readings; its value is their distance.
        marks.append(Mark(time, "sync" if text.startswith(SYNC_PREFIX) else "mark", text))
    return sorted(marks)


def _backward_passes(analysis: RingAnalysis, tracks: Sequence[Track], process: Process) -> tuple[list[Track], Slices]:
    """Return the tracks, followed by the tracks of backward passes, and the passes."""
    events, clock, threads = analysis.events, analysis.clock, analysis.lookup.threads
    thread, start, end = analysis.passes
    if not len(thread):
        return [*tracks], Slices.empty()
    start_ns = clock.to_other(np.where(start >= 0, events.time_ns[start], analysis.extent[0]))
    end_ns = clock.to_other(np.where(end >= 0, events.time_ns[end], analysis.extent[1]))
    # A pass whose end is lost cannot outlast the pass around it.
    until, _, _ = clip_and_nest(thread, start_ns, end_ns, np.arange(len(thread)))
    first_seen = [*dict.fromkeys(thread[np.lexsort((-end_ns, start_ns))].tolist())]
    rows = Slices.of_kind(
        slices.BACKWARD_PASS,
        start_ns,
        end=until,
        track=len(tracks) + find_key(np.array(first_seen), thread),
        step=analysis.steps_before(np.maximum(2 * start + 1, 0)),
        complete=(start >= 0) & (end >= 0) & (until == end_ns),
    )
    return [
        *tracks,
        *(Track(contents.PASSES, name, tid, process) for name, tid in map(threads.__getitem__, first_seen)),
    ], rows


Samples = tuple[Int64Array, Int64Array]
"""The times of a counter's samples in Unix nanoseconds, and their values."""


def find_samples(analysis: RingAnalysis) -> dict[int, Samples]:
    """Return the samples of each counter in the order of their times, by the number of its text."""
    samples = analysis.all_events.take(analysis.all_events.kind == Kind.COUNTER)
    time = analysis.clock.to_other(samples.time_ns)
    order = np.argsort(time, kind="stable")
    by_name = split_by(samples.name[order], order)
    return {int(samples.name[rows[0]]): (time[rows], samples.value[rows]) for rows in by_name}


class ModuleSpans(NamedTuple):
    """The spans of modules, and the counters sampled meanwhile."""

    columns: dict[str, AnyArray]  # columns of `Slices`, in the order of start; empty in joined parts of a ring
    span_count: int  # number of spans, even if `columns` is empty
    tracks: Sequence[int]  # per track: twice the thread's index in the name table, plus one for a backward track
    args: Args  # values that few spans have
    evaluations: Evaluations  # the evaluations of threads
    unfinished_count: int  # number of spans without their end
    unstarted_count: int  # number of spans without their start
    unattributed_count: int  # number of runs of nodes without a known call
    counters: Mapping[int, Samples]  # samples of each counter, by the number of its text
    flops: tuple[int, int] = (0, 0)  # FLOPs counted outside modules, and the number of spans with unknown FLOPs


def decode_modules(
    analysis: RingAnalysis, counted: CountedCalls | None = None, tracks: Numbering[int] | None = None
) -> ModuleSpans:
    """Return the spans of modules.

    For a part of a ring, `counted` has the costs of calls in the whole ring, and `tracks` the numbers of the tracks of
    earlier parts, to which the tracks of this part are added.
    """
    rows, clock = build_span_rows(analysis.intervals, analysis.call_of_node, analysis.forward_call), analysis.clock
    tracks = Numbering() if tracks is None else tracks
    track: Int64Array = number_tracks(rows["thread"] * 2 + rows["on_backward"], tracks)
    parent = find_parents(track, rows["depth"])
    flops = find_flops(analysis, rows, parent, counted)
    columns: dict[str, AnyArray] = {
        **{field: rows[field] for field in ("name", "phase", "depth", "call", "link")},
        "start": clock.to_other(rows["start_ns"]),
        "end": clock.to_other(rows["end_ns"]),
        "track": track,
        "parent": parent,
        "step": analysis.steps_before(rows["start_position"]),
        "complete": rows["has_start"] & rows["has_end"],
    }
    return ModuleSpans(
        columns={field: column.astype(slices.DTYPES[field], copy=False) for field, column in columns.items()},
        span_count=len(track),
        tracks=[*tracks],
        args={**_find_args(analysis, rows, parent), **({} if flops is None else flops.args)},
        evaluations=find_evaluations(analysis, rows),
        unfinished_count=int(np.count_nonzero(~rows["has_end"])),
        unstarted_count=int(np.count_nonzero(~rows["has_start"])),
        unattributed_count=count_outside_runs(analysis.intervals, analysis.call_of_node),
        counters=find_samples(analysis),
        flops=(0, 0) if flops is None else flops[1:],
    )


def join_modules(parts: Sequence[ModuleSpans]) -> ModuleSpans:
    """Return the joined spans of consecutive parts of a ring, without their columns and args."""
    counters: dict[int, Samples] = {}
    for name in sorted({name for part in parts for name in part.counters}):
        samples = zip(*(part.counters[name] for part in parts if name in part.counters), strict=True)
        time, value = map(np.concatenate, samples)
        order = np.argsort(time, kind="stable")
        counters[name] = time[order], value[order]
    evaluations = Evaluations(*map(np.concatenate, zip(*(part.evaluations for part in parts), strict=True)))
    counts = [
        (part.span_count, part.unfinished_count, part.unstarted_count, part.unattributed_count, *part.flops)
        for part in parts
    ]
    spans, unfinished, unstarted, unattributed, outside, unknown = map(sum, zip(*counts, strict=True))
    lost_counts = unfinished, unstarted, unattributed
    return ModuleSpans({}, spans, parts[-1].tracks, {}, evaluations, *lost_counts, counters, (outside, unknown))


def _find_args(analysis: RingAnalysis, rows: SpanRows, parent: Int64Array) -> Args:
    """Return the input shapes of calls, facts about compiled calls, and the counts of many or unused nodes."""

    def column_by_name(texts: Mapping[int, str]) -> ArgColumn:
        index = np.flatnonzero(np.isin(rows["name"], [*texts]))
        return ArgColumn.of_texts(index, [texts[name] for name in rows["name"][index].tolist()])

    return slices.without_empty(
        {
            Arg.SHAPES: _find_shapes(analysis, rows),
            Arg.COMPILED_MODULES: column_by_name(analysis.lookup.compiled),
            Arg.COMPILED_UNKNOWN: column_by_name(analysis.lookup.unknown),
            **_find_nodes(analysis, rows, parent),
        }
    )


def _find_nodes(analysis: RingAnalysis, rows: SpanRows, parent: Int64Array) -> Args:
    """Return the node counts of the outermost calls whose nodes never ran, and of calls that made many nodes."""
    calls = np.flatnonzero(
        (rows["phase"] == slices.FORWARD) & ~rows["on_backward"] & rows["has_start"] & rows["has_end"]
    )
    enter, leave = ((rows[f"{edge}_position"][calls] - 1) // 2 for edge in ("start", "end"))
    value, nodes = analysis.events.value & SEQUENCE_MASK, np.zeros(len(parent), np.int64)
    nodes[calls] = value[leave] - value[enter] & SEQUENCE_MASK
    caller, self_nodes = parent[calls], without_inner(nodes, parent)
    unused = calls[(rows["link"][calls] < 0) & ((caller < 0) | (rows["link"][caller] >= 0)) & (nodes[calls] > 0)]
    many = np.flatnonzero(self_nodes >= slices.MANY_NODES)
    return {
        Arg.UNUSED_NODES: ArgColumn.of_numbers(unused, nodes[unused]),
        Arg.OWN_NODES: ArgColumn.of_numbers(many, self_nodes[many]),
    }


def _find_shapes(analysis: RingAnalysis, rows: SpanRows) -> ArgColumn:
    """Return the input shapes of calls; their event follows the call's enter on the same thread."""
    events = analysis.events
    shapes = np.flatnonzero(events.kind == Kind.SHAPES)
    if not len(shapes):
        return slices.NO_ARG
    calls = np.flatnonzero((rows["phase"] != slices.BACKWARD) & (rows["start_position"] >= 0))
    enter = event_before(events, shapes, events.kind != Kind.SHAPES)
    call = np.append(calls, -1)[find_key(rows["start_position"][calls], 2 * enter + 1)]
    texts = map(analysis.lookup.texts.__getitem__, events.name[shapes[call >= 0]].tolist())
    return ArgColumn.of_texts(call[call >= 0], texts)
