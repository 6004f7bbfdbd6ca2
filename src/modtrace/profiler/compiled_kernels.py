"""The modules of kernels inside compiled regions, drawn inside the spans of these.

A profile names each call of a graph that Inductor compiled, and inside it each operator and kernel. The recording has
the kernels that a graph calls, in order, and the modules of each. The n-th kernel of a name in the profile is the n-th
of that name in the recording, if both have as many. No span goes on over a kernel that is not in the profile.

A kernel of one module is a span of that. One that is fused of several is a span of class `fused` in the module around
all of them. Its time is divided among them by the bytes that the nodes of each read and write, equally if they are not
known.
"""

import contextlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from .._arrays import Int32Array, Int64Array, Numbering, split_by
from ..timeline import PHASES, Name, Slices, Timeline
from ..timeline.contents import COMPILED, FUSED_TIMES, NOT_IN_PROFILE, WITH_REMEDY, compiled_graphs, why_unknown
from ..timeline.join import with_modules
from ..timeline.nesting import LabelledInterval, find_parents, spans_from_intervals
from ..timeline.slices import BACKWARD, Arg, ArgColumn, in_start_order, join_columns
from ..timeline.summary.overview import shortened
from .event_collector import EventColumns, ProfilerEvents
from .recorded_part import innermost_spans

FUSED = "fused"
"""The class of a kernel that is fused of several modules."""
TIMES = "kernel_times"
"""A key of a graph's record: by module, the ns that its kernels took in each phase, and how many ns were divided."""
_NAME = re.compile(r"(?:extern_kernels\.(?:bias_)?|torch\.ops\.\w+\.|aten\.|graph_\d+_)?([^.]+)(?:\.\w+)?")
_TEMPLATE = re.compile(r"(?:\w+_)?kernel")
_MAX_LABEL = 60


class _Kernel(NamedTuple):
    """A call of a kernel: its share of each module, by path, and the phase."""

    name: str
    shares: Mapping[str, float]
    phase: int


@dataclass(frozen=True)
class _Graph:
    """A compiled graph: its record in the metadata, the classes of its modules, and its kernels."""

    record: dict[str, Any]
    classes: Mapping[str, str]
    kernels: Sequence[_Kernel]


class KernelCall(NamedTuple):
    """A kernel that ran in a compiled region: the record of its graph, its modules, and its row among the operators."""

    graph: _Graph
    kernel: _Kernel
    row: int


def with_kernel_modules(timeline: Timeline, events: ProfilerEvents) -> tuple[Timeline, list[KernelCall], list[str]]:
    """Return the timeline with spans of the modules inside compiled regions, the kernels that ran, and notes.

    Args:
        timeline: the recording, in the trace's time.
        events: the trace's.
    """
    calls, ops = events.graph_calls, events.graph_ops
    if COMPILED not in timeline.metadata or not len(calls):
        # An older torch does not name the calls of graphs in a profile either.
        reasons = _why_unknown(timeline.metadata)
        return timeline, [], [f"kernels in {fqn} have no modules: {why}" for fqn, why in reasons.items()]
    columns, names = timeline.columns, Numbering[Name]()
    name_numbers = np.array([names[name] for name in timeline.names] or [0], np.int32)
    region = innermost_spans(timeline).on_threads(events.threads[calls.track], calls.start)
    fqns = [timeline.names[columns.name[outer]].fqn if outer >= 0 else "" for outer in region.tolist()]
    graphs, rows_of_call = _known_graphs(timeline.metadata), _top_level(calls, ops)
    spans: list[tuple[int, ...]] = []
    kernel_calls: list[KernelCall] = []
    unknown, unseen = Counter[str](), Counter[int]()
    for number in np.argsort(calls.start, kind="stable").tolist():
        outer, fqn, rows = int(region[number]), fqns[number], rows_of_call[number]
        called = [_plain(ops.names[name]) for name in ops.name[rows].tolist()]
        # Without a cache all graphs of a region have one key: the one counts whose kernels are called.
        candidates = graphs.get((fqn, calls.names[calls.name[number]]), ())
        matched = [(graph, _match(graph.kernels, called)) for graph in candidates]
        if not matched:
            unknown[fqn] += 1
            continue
        graph, places = max(matched, key=_share_called)
        in_graph = [(place, row) for place, row in zip(places, rows, strict=True) if place >= 0]
        unseen[outer] += len(graph.kernels) - len(in_graph)
        kernel_calls += [KernelCall(graph, graph.kernels[place], row) for place, row in in_graph]
        intervals = _intervals(graph, fqn, places, rows, ops, names)
        depth, low, high = int(columns.depth[outer]) + 1, int(columns.start[outer]), int(columns.end[outer])
        spans += [
            (max(s.start, low), min(s.end, high), *s.key, depth + s.depth, outer)  # type: ignore[misc]
            for s in spans_from_intervals(intervals)
            if max(s.start, low) < min(s.end, high)
        ]
    without = [outer for outer, count in unseen.items() if count]
    notes = _notes(timeline, len(calls), unknown, unseen)
    if without:
        columns = _with_reason(columns, without, WITH_REMEDY[NOT_IN_PROFILE])
        timeline = with_modules(timeline, columns)
    if spans:
        timeline = _with_spans(timeline, spans, name_numbers, names)
    return timeline, kernel_calls, notes


def _notes(timeline: Timeline, call_count: int, unknown: Counter[str], unseen: Counter[int]) -> list[str]:
    """Say of how many calls the graph is unknown, by region, and how many kernels the profile lacks, by span."""
    notes = []
    if unknown:
        why = ", ".join(f"{fqn} is {why}" for fqn, why in _why_unknown(timeline.metadata).items() if fqn in unknown)
        notes.append(
            f"{unknown.total()} of {call_count} calls of compiled graphs have no modules: "
            f"{why or 'their kernels are not known'}"
        )
    if unseen.total():
        name = timeline.columns.name
        fqns = dict.fromkeys(timeline.names[name[outer]].fqn for outer, count in unseen.items() if count)
        notes.append(
            f"{unseen.total()} kernels of compiled regions are not in the profile (in {shortened([*fqns])}), so no "
            "module has their time; those in C++ are with torch._inductor.config.cpp.enable_kernel_profile = True"
        )
    return notes


def _with_spans(
    timeline: Timeline, spans: Sequence[tuple[int, ...]], name_numbers: Int32Array, names: Iterable[Name]
) -> Timeline:
    """Return the timeline with spans inside its own: start, end, name, phase, depth, and the span around.

    Their names are numbers of `names`, which has each name of the timeline at its place in `name_numbers`.
    """
    start, end, name, phase, depth, outer = np.array(spans, np.int64).T
    columns = timeline.columns
    track, call, step = columns.track[outer], columns.call[outer], columns.step[outer]
    added = Slices.of(start=start, end=end, name=name, phase=phase, depth=depth, track=track, call=call, step=step)
    renamed = replace(columns, name=name_numbers[columns.name])
    joined = in_start_order(join_columns([renamed, added]))
    joined = replace(joined, parent=find_parents(joined.track, joined.depth))
    return with_modules(replace(timeline, names=[*names]), joined)


def _why_unknown(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return why kernels have no modules, by region; without the regions whose reason is not known."""
    reasons = {fqn: why_unknown(graphs) for fqn, graphs in metadata.get(COMPILED, {}).items()}
    return {fqn: why for fqn, why in reasons.items() if why}


def _with_reason(columns: Slices, rows: Sequence[int], reason: str) -> Slices:
    """Return the spans, with a reason in some rows why kernels in them have no modules."""
    reasons = columns.arg(Arg.COMPILED_UNKNOWN)
    values = zip(reasons.rows.tolist(), reasons.values.tolist(), strict=True)
    texts = {row: reasons.text(value) for row, value in values}
    texts |= {row: "; ".join(filter(None, (texts.get(row), reason))) for row in rows}
    return replace(columns, args={**columns.args, Arg.COMPILED_UNKNOWN: ArgColumn.of_texts([*texts], texts.values())})


def with_kernel_times(
    timeline: Timeline, calls: Sequence[KernelCall], events: ProfilerEvents, launch: Int64Array
) -> Timeline:
    """Return the timeline whose metadata have the times of each module's kernels instead of the kernels.

    A kernel that launched work on a device took the time of that work.

    Args:
        timeline: with compiled graphs in its metadata.
        calls: the kernels that ran.
        events: the trace's.
        launch: for each piece of work on a device the row of its launch, or -1.
    """
    if COMPILED not in timeline.metadata:
        return timeline
    rows = np.array([call.row for call in calls], np.int64)
    took = _durations(events, events.graph_ops.take(rows), launch)
    times: dict[int, dict[str, list[float]]] = defaultdict(dict)
    fused: dict[int, dict[tuple[str, int], dict[str, float]]] = defaultdict(dict)
    for (graph, kernel, _), duration in zip(calls, took.tolist(), strict=True):
        if len(kernel.shares) > 1:
            label = _path("", kernel.shares, graph.classes)[-1].fqn
            of_name = fused[id(graph.record)].setdefault((label, kernel.phase), dict.fromkeys(kernel.shares, 0.0))
            for path, share in kernel.shares.items():
                of_name[path] += share * duration
        of_graph = times[id(graph.record)]
        inside: dict[str, float] = defaultdict(float)
        for path, share in kernel.shares.items():
            for around in ("", *_chain(path, graph.classes)):
                inside[around] += share
        for path, share in inside.items():
            counts = of_graph.setdefault(path, [0.0] * (len(PHASES) + 1))
            counts[kernel.phase] += share * duration
            counts[-1] += share * duration if share < 1 - 1e-9 else 0
    measured = {
        region: [
            {
                **{key: value for key, value in graph.items() if key != "kernels"},
                **_rounded(times[id(graph)]),
                **_fused_times(fused[id(graph)]),
            }
            for graph in graphs
        ]
        for region, graphs in timeline.metadata[COMPILED].items()
    }
    return replace(timeline, metadata={**timeline.metadata, COMPILED: measured})


def _rounded(times: Mapping[str, list[float]]) -> dict[str, Any]:
    return {TIMES: [[path, *map(round, counts)] for path, counts in times.items()]} if times else {}


def _fused_times(fused: Mapping[tuple[str, int], Mapping[str, float]]) -> dict[str, Any]:
    rows = [[*name, [[path, round(time)] for path, time in times.items()]] for name, times in fused.items()]
    return {FUSED_TIMES: rows} if rows else {}


def _durations(events: ProfilerEvents, ops: EventColumns, launch: Int64Array) -> Int64Array:
    """Return the ns of each kernel on its thread; if any launched work on a device, the ns of that work."""
    launched = np.flatnonzero(launch >= 0)
    of_work = events.launches.take(launch[launched])
    took = np.zeros(len(ops), np.int64)
    order = np.lexsort((ops.start, ops.track))
    for rows in split_by(ops.track[order], order):
        work = np.flatnonzero(of_work.track == ops.track[rows[0]])
        row = rows[np.searchsorted(ops.start[rows], of_work.start[work], side="right") - 1]
        is_inside = (of_work.start[work] >= ops.start[row]) & (of_work.start[work] < ops.end[row])
        np.add.at(took, row[is_inside], events.work.duration[launched[work[is_inside]]])
    return took if took.any() else ops.duration


def _known_graphs(metadata: Mapping[str, Any]) -> dict[tuple[str, str], list[_Graph]]:
    """Return the graphs whose kernels are known, by their region and the key of their calls in a profile."""
    graphs: dict[tuple[str, str], list[_Graph]] = defaultdict(list)
    for region, record in compiled_graphs(metadata):
        named = [name.rpartition(": ") for name, *_ in record.get("work", ())]
        classes = {path: module_class for path, _, module_class in named if path}
        for made in record.get("kernels", ()):
            with contextlib.suppress(IndexError):  # of a file of anybody's
                if kernels := [_kernel(name, parts, named) for name, parts in made.get("kernels", ())]:
                    graphs[region, made.get("key", "")].append(_Graph(record, classes, kernels))
    return graphs


def _kernel(name: str, parts: Sequence[Any], named: Sequence[tuple[str, str, str]]) -> _Kernel:
    nbytes: Counter[str] = Counter()
    for module, _, count in parts:
        nbytes[named[module][0]] += count
    total, modules = sum(nbytes.values()), len(nbytes)
    is_known = bool(total) and all(nbytes.values())
    shares = {path: count / total if is_known else 1 / modules for path, count in nbytes.items()} or {"": 1.0}
    phases = {phase for _, phase, _ in parts}
    return _Kernel(_plain(name), shares, BACKWARD if BACKWARD in phases else max(phases, default=0))


def _plain(name: str) -> str:
    """Return the part of a name that an operator and a call of it have in common.

    Example:
        >>> [*map(_plain, ["aten::mm", "extern_kernels.bias_addmm", "aten.randint.low_out", "graph_0_cpp_1"])]
        ['mm', 'addmm', 'randint', 'cpp_1']
    """
    name = name.rpartition("::")[2]
    match = _NAME.match(name)
    return match[1] if match else name


def _top_level(calls: EventColumns, ops: EventColumns) -> list[list[int]]:
    """Return the operators that each call runs itself, in order."""
    order = np.lexsort((-ops.end, ops.start, ops.track))
    by_track = {int(ops.track[rows[0]]): (rows, ops.start[rows]) for rows in split_by(ops.track[order], order)}
    inner: list[list[int]] = []
    for track, start, end in zip(calls.track.tolist(), calls.start.tolist(), calls.end.tolist(), strict=True):
        of_track, starts = by_track.get(track, (order[:0], order[:0]))
        first, last = np.searchsorted(starts, (start, end))
        inner.append([])
        until = start
        for row in of_track[first:last].tolist():
            if ops.start[row] >= until and ops.end[row] <= end:
                inner[-1].append(row)
                until = int(ops.end[row])
    return inner


def _share_called(matched: tuple[_Graph, Sequence[int]]) -> float:
    graph, places = matched
    return sum(place >= 0 for place in places) / len(graph.kernels)


def _match(kernels: Sequence[_Kernel], called: Sequence[str]) -> list[int]:
    """Return the place of each called operator among the kernels; -1 if its name is called more or less often."""
    places: dict[str, list[int]] = defaultdict(list)
    for place, kernel in enumerate(kernels):
        places[kernel.name].append(place)
    count = Counter(called)
    # A template, as of a product, is called by its sizes in a profile: `gemm_m64n96k64_kernel`.
    absent = [place for name, of_name in places.items() if not count[name] for place in of_name]
    unnamed = sum(bool(_TEMPLATE.fullmatch(name)) for name in called)
    templates = iter(sorted(absent) if len(absent) == unnamed else ())
    left = {name: iter(of_name) for name, of_name in places.items() if count[name] == len(of_name)}
    return [
        next(left[name] if name in left else templates if _TEMPLATE.fullmatch(name) else iter(()), -1)
        for name in called
    ]


def _chain(path: str, classes: Mapping[str, str]) -> list[str]:
    """Return the modules around one of a region, the outermost first, and itself."""
    parts = path.split(".")
    return [around for length in range(1, len(parts) + 1) if (around := ".".join(parts[:length])) in classes]


def _intervals(
    graph: _Graph, fqn: str, places: Sequence[int], rows: Sequence[int], ops: EventColumns, names: Numbering[Name]
) -> Iterator[LabelledInterval]:
    """Yield the kernels that a graph ran, each with the keys of the spans around it: their name and phase."""
    before = -1
    for place, row in zip(places, rows, strict=True):
        start, end = int(ops.start[row]), int(ops.end[row])
        if place != before + 1:
            yield LabelledInterval(start, start, ())
        if place < 0:
            continue
        before = place
        kernel = graph.kernels[place]
        yield LabelledInterval(
            start, end, [(names[name], kernel.phase) for name in _path(fqn, kernel.shares, graph.classes)]
        )


def _path(fqn: str, shares: Mapping[str, float], classes: Mapping[str, str]) -> list[Name]:
    """Return the names of the spans of a kernel: the modules around all of its modules; `fused` if it has several."""
    chains = [_chain(path, classes) for path in shares]
    common = [around for around, *others in zip(*chains, strict=False) if all(other == around for other in others)]
    path, around = [], ""
    for inner in common:
        below = inner[len(around) + 1 :] if around else inner
        path.append(Name(f"{below}: {classes[inner]}", f"{fqn}.{inner}", classes[inner]))
        around = inner
    if len(shares) > 1:
        inside = [path[len(around) + 1 :] if around else path for path in shares]
        text = " + ".join(below or "itself" for below in inside)
        label = text if len(text) <= _MAX_LABEL else f"{inside[0] or 'itself'} + {len(inside) - 1} more"
        path.append(Name(f"{label}: {FUSED}", ".".join(filter(None, (fqn, around, text))), FUSED))
    return path
