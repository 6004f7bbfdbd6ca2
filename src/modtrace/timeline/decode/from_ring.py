"""The events of a ring, or of a piece of it → a timeline; first the spans of modules, then all else.

events     Net enter 10 · fc enter 12 · fc exit 15 · Net exit 20 · step 0 ends 21
modules    Net 10–20, and in it fc 12–15, both of step 0
timeline   these, the mark `step 0`, and what is on other tracks
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
    """Build the timeline of what a ring held, or of its analysis if that answers other questions too."""
    analysis = ring if isinstance(ring, RingAnalysis) else RingAnalysis(ring)
    return assemble_timeline(analysis, decode_modules(analysis), held_memory(analysis))


def assemble_timeline(
    analysis: RingAnalysis,
    modules: "ModuleSpans",
    memory: HeldMemory | None,
    open_at_end: Mapping[str, object] | None = None,
) -> Timeline:
    """Return the timeline of spans of modules, and of the other events of a ring; perhaps of these alone.

    Then `modules` says how many there are, and their tracks. `open_at_end` is what `describe_open` says of the ring's
    end.
    """
    snapshot, slots, lookup = analysis.snapshot, analysis.snapshot.slots, analysis.lookup
    not_whole = modules.unfinished, modules.unstarted, modules.unattributed
    of_process = snapshot.metadata.get
    process = Process(of_process("pid", 0), of_process("rank"), of_process("program", "python"), of_process("role", ""))
    tracks = [Track(("forward", "backward")[key % 2], *lookup.threads[key // 2], process) for key in modules.tracks]
    tracks, communication = build_collectives(analysis, tracks, process)
    texts = lookup.texts
    counters = [CounterSeries(texts[name], "bytes", process, *samples) for name, samples in modules.counters.items()]
    timeline = Timeline(
        Slices.of(modules.args, **modules.columns) if modules.columns else Slices.empty(),
        names=lookup.names,
        tracks=tracks,
        stats=Stats(slots.recorded, slots.overwritten, slots.torn, *not_whole),
        marks=_marks(analysis, counters),
        counters=counters,
        # Which host it was matters to those who watch the ring, not to those who get the trace.
        metadata=fit_metadata({key: v for key, v in snapshot.metadata.items() if key not in ("host", FIRST_STEP)})
        | {contents.WHOLE_RUN: describe_whole_run(snapshot, analysis.step_ends.number, modules.spans)}
        | (describe_open(analysis, lambda _: [analysis]) if open_at_end is None else dict(open_at_end))
        | ({contents.MISSING_BYTES: snapshot.missing_bytes} if snapshot.missing_bytes else {})
        | ({contents.COUNTED: describe_counted(analysis, *modules.flops)} if analysis.ring.has_flops else {})
        | ({contents.COMPILED: lookup.graphs} if lookup.graphs else {})
        | ({contents.MEMORY: memory.to_dict()} if memory is not None else {})
        | ({contents.STEPS_END_WITH: contents.BACKWARD_PASSES} if analysis.step_ends.with_passes else {})
        | (
            {contents.OPTIMIZERS: optimizers}
            if (optimizers := fit(_noted(snapshot, "optimizer"), OPTIMIZER_NOTES, []))
            else {}
        )
        | ({contents.STEP_NOTES: notes} if (notes := _step_notes(snapshot)) else {}),
        groups=[*lookup.groups.values()],
    )
    timeline = add_device_spans(timeline, analysis)
    tracks, passes = _backward_passes(analysis, timeline.tracks, process)
    timeline, ranges = add_ranges(timeline, analysis, tracks, process, modules.evaluations)
    return with_slices(timeline, slices.join_columns([communication, passes, ranges]))


def _noted(snapshot: RingSnapshot, kind: str) -> list[dict[str, Any]]:
    """Return the records of one kind in the name table, without the kind."""
    noted = [record for record in snapshot.records if record["kind"] == kind]
    return [{name: value for name, value in record.items() if name != "kind"} for record in noted]


def _step_notes(snapshot: RingSnapshot) -> dict[str, Any]:
    """Return the last notes of few steps; empty if there are none."""
    last = next(iter(_noted(snapshot, "steps")[-1:]), {})
    notes = fit(parse_object(last["notes"].encode()) if last else None, SHAPE_OF_STEP_NOTES, None)
    return {} if notes is None else {**notes, "steps": last["steps"]}


def describe_whole_run(snapshot: RingSnapshot, ended: Int64Array, spans: int | None) -> dict[str, float | None]:
    """Return what is known of the whole recording; its spans are not once some events were overwritten."""
    is_whole = not snapshot.slots.overwritten
    kept = max(0, len(ended) - (not is_whole))  # of the first step that ends, the begin was overwritten
    first = snapshot.metadata.get(FIRST_STEP)
    steps = len(ended) if is_whole else None
    if steps is None and first is not None and len(ended):
        steps = int(ended[-1]) - first + 1
    read = [record["monotonic"] for record in snapshot.records if record["kind"] == "anchor"]
    times = [*read, *snapshot.slots.events.time[-1:].tolist()]
    seconds = (max(times) - read[0]) / 1e9 if read else None
    return {"steps": steps, "spans": spans if is_whole else None, "seconds": seconds, "kept_steps": kept}


def describe_open(
    analysis: RingAnalysis, parts_with: Callable[[OpenCall], Iterable[RingAnalysis]]
) -> dict[str, object]:
    """Return the metadata of what the process died in, or is in for long, and what is lost; `OPEN_AT_END`, `UNSAVED`.

    The analysis is of the end of the ring, and begins where no call was open. `parts_with` returns the parts of the
    ring that say how long a call usually takes.
    """
    snapshot = analysis.snapshot
    if snapshot.missing_bytes or any(record["kind"] == "stop" for record in snapshot.records):
        return {}
    lost: dict[str, object] = {contents.UNSAVED: snapshot.unsaved} if snapshot.unsaved else {}
    stacks = [stack for stack in analysis.open_stacks if stack.calls]
    if not stacks:
        return lost
    stack = min(stacks, key=lambda stack: stack.calls[-1].is_range)
    call = stack.calls[-1]
    end_ns = monotonic_ns() if snapshot.known_pid else int(analysis.all_events.time.max())
    usual_ns = usual_duration(parts_with(call), call)
    if snapshot.writer != "dead" and not lasts_too_long(call, end_ns - call.since_ns, usual_ns):
        return {}
    seconds = (end_ns - call.since_ns) / 1e9
    usual_seconds = None if usual_ns is None else usual_ns / 1e9
    place = {"thread": stack.thread, "place": call.place, "seconds": seconds, "usual_seconds": usual_seconds}
    return {**lost, contents.OPEN_AT_END: place}


def _marks(analysis: RingAnalysis, counters: Sequence[CounterSeries]) -> list[Mark]:
    """Return the ends of steps, the peaks of memory, and what the user or an alignment marked, in their order."""
    events, clock, ends = analysis.events, analysis.clock, analysis.step_ends
    end_ns = clock.to_other(events.time[ends.event])
    marks = [Mark.of_step(time, number) for time, number in zip(end_ns.tolist(), ends.number.tolist(), strict=True)]
    marks += [Mark(time, "mark", text) for time, text in peaks_of(counters)]
    marked = np.flatnonzero(events.kind == Kind.MARK)
    for index, time in zip(marked.tolist(), clock.to_other(events.time[marked]).tolist(), strict=True):
        text = analysis.lookup.texts[events.name[index]]
        # A sync mark's value is the wait between the two clock readings that its time is the middle of.
        marks.append(Mark(time, "sync" if text.startswith(SYNC_PREFIX) else "mark", text))
    return sorted(marks)


def _backward_passes(analysis: RingAnalysis, tracks: Sequence[Track], process: Process) -> tuple[list[Track], Slices]:
    """Return the tracks with those of backward passes after them, and the passes."""
    events, clock, threads = analysis.events, analysis.clock, analysis.lookup.threads
    thread, begin, end = analysis.passes
    if not len(thread):
        return [*tracks], Slices.empty()
    start_ns = clock.to_other(np.where(begin >= 0, events.time[begin], analysis.extent[0]))
    end_ns = clock.to_other(np.where(end >= 0, events.time[end], analysis.extent[1]))
    # One whose end is lost cannot outlast the one around it.
    until, _, _ = clip_and_nest(thread, start_ns, end_ns, np.arange(len(thread)))
    first_seen = [*dict.fromkeys(thread[np.lexsort((-end_ns, start_ns))].tolist())]
    rows = Slices.of_kind(
        slices.BACKWARD_PASS,
        start_ns,
        end=until,
        track=len(tracks) + find_key(np.array(first_seen), thread),
        step=analysis.steps_before(np.maximum(2 * begin + 1, 0)),
        complete=(begin >= 0) & (end >= 0) & (until == end_ns),
    )
    return [
        *tracks,
        *(Track(contents.PASSES, name, tid, process) for name, tid in map(threads.__getitem__, first_seen)),
    ], rows


Samples = tuple[Int64Array, Int64Array]
"""When a counter was sampled, Unix nanoseconds, and the samples."""


def find_samples(analysis: RingAnalysis) -> dict[int, Samples]:
    """Return the samples of each counter in the order of their times, by the number of its text."""
    samples = analysis.all_events.take(analysis.all_events.kind == Kind.COUNTER)
    time = analysis.clock.to_other(samples.time)
    order = np.argsort(time, kind="stable")
    by_name = split_by(samples.name[order], order)
    return {int(samples.name[rows[0]]): (time[rows], samples.value[rows]) for rows in by_name}


class ModuleSpans(NamedTuple):
    """The spans of modules, and what was sampled beside them."""

    columns: dict[str, AnyArray]  # as of `Slices`, in the order of their begins
    spans: int  # how many there are, also where their columns are left out
    tracks: Sequence[int]  # of each track twice the thread in the name table, plus one for a backward track
    args: Args  # what only some spans have
    evaluations: Evaluations  # where threads evaluate
    unfinished: int  # spans without their end
    unstarted: int  # spans without their begin
    unattributed: int  # runs of nodes of no known call
    counters: Mapping[int, Samples]  # the samples of each counter, by the number of its text
    flops: tuple[int, int] = (0, 0)  # counted outside of modules, and how many spans have unknown ones


def decode_modules(
    analysis: RingAnalysis, counted: CountedCalls | None = None, tracks: Numbering[int] | None = None
) -> ModuleSpans:
    """Return the spans of modules that events say.

    If it is a part of a ring, `counted` has what calls of the ring cost, and `tracks` the numbers of the tracks of
    earlier parts: it gets those of this one.
    """
    rows, clock = build_span_rows(analysis.intervals, analysis.call_of_node, analysis.forward_call), analysis.clock
    tracks = Numbering() if tracks is None else tracks
    track: Int64Array = number_tracks(rows["thread"] * 2 + rows["on_backward"], tracks)
    parent = find_parents(track, rows["depth"])
    flops = find_flops(analysis, rows, parent, counted)
    columns: dict[str, AnyArray] = {
        **{field: rows[field] for field in ("name", "phase", "depth", "call", "link")},
        "start": clock.to_other(rows["start"]),
        "end": clock.to_other(rows["end"]),
        "track": track,
        "parent": parent,
        "step": analysis.steps_before(rows["start_position"]),
        "complete": rows["has_start"] & rows["has_end"],
    }
    return ModuleSpans(
        columns={field: column.astype(slices.DTYPES[field], copy=False) for field, column in columns.items()},
        spans=len(track),
        tracks=[*tracks],
        args={**_find_args(analysis, rows, parent), **({} if flops is None else flops.args)},
        evaluations=find_evaluations(analysis, rows),
        unfinished=int(np.count_nonzero(~rows["has_end"])),
        unstarted=int(np.count_nonzero(~rows["has_start"])),
        unattributed=count_outside_runs(analysis.intervals, analysis.call_of_node),
        counters=find_samples(analysis),
        flops=(0, 0) if flops is None else flops[1:],
    )


def join_modules(parts: Sequence[ModuleSpans]) -> ModuleSpans:
    """Return what parts of a ring that follow each other say of modules, without their columns and args."""
    counters: dict[int, Samples] = {}
    for name in sorted({name for part in parts for name in part.counters}):
        samples = zip(*(part.counters[name] for part in parts if name in part.counters), strict=True)
        time, value = map(np.concatenate, samples)
        order = np.argsort(time, kind="stable")
        counters[name] = time[order], value[order]
    evaluations = Evaluations(*map(np.concatenate, zip(*(part.evaluations for part in parts), strict=True)))
    counts = [(part.spans, part.unfinished, part.unstarted, part.unattributed, *part.flops) for part in parts]
    spans, unfinished, unstarted, unattributed, outside, unknown = map(sum, zip(*counts, strict=True))
    lost = unfinished, unstarted, unattributed
    return ModuleSpans({}, spans, parts[-1].tracks, {}, evaluations, *lost, counters, (outside, unknown))


def _find_args(analysis: RingAnalysis, rows: SpanRows, parent: Int64Array) -> Args:
    """Return the shapes of calls' inputs, what is known of what was compiled, and nodes that are many or unused."""

    def of_names(texts: Mapping[int, str]) -> ArgColumn:
        chosen = np.flatnonzero(np.isin(rows["name"], [*texts]))
        return ArgColumn.of_texts(chosen, [texts[name] for name in rows["name"][chosen].tolist()])

    return slices.without_empty(
        {
            Arg.SHAPES: _find_shapes(analysis, rows),
            Arg.COMPILED_MODULES: of_names(analysis.lookup.compiled),
            Arg.COMPILED_UNKNOWN: of_names(analysis.lookup.unknown),
            **_find_nodes(analysis, rows, parent),
        }
    )


def _find_nodes(analysis: RingAnalysis, rows: SpanRows, parent: Int64Array) -> Args:
    """Return how many nodes calls made of which none ran, outermost ones, and how many those made that made many."""
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
    """Return the shapes of the inputs of calls: their event follows that of the call's enter, on the same thread."""
    events = analysis.events
    shapes = np.flatnonzero(events.kind == Kind.SHAPES)
    if not len(shapes):
        return slices.NO_ARG
    calls = np.flatnonzero((rows["phase"] != slices.BACKWARD) & (rows["start_position"] >= 0))
    enter = event_before(events, shapes, events.kind != Kind.SHAPES)
    call = np.append(calls, -1)[find_key(rows["start_position"][calls], 2 * enter + 1)]
    texts = map(analysis.lookup.texts.__getitem__, events.name[shapes[call >= 0]].tolist())
    return ArgColumn.of_texts(call[call >= 0], texts)
