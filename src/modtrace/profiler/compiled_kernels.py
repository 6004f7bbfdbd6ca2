"""Spans of the modules whose kernels ran inside compiled regions.

A profile names each call of a graph that Inductor compiled, and inside it each operator and kernel. The recording has
the kernels that a graph calls, in order, and the modules of each. The n-th kernel of a name in the profile is the n-th
of that name in the recording, if their numbers are equal. A span does not extend over a kernel missing in the profile.

A kernel of one module is part of a span of this module. A kernel fused from several modules is a span of class `fused`
inside the module around all of these. Its time is divided among them by the bytes that their nodes read and write, or
equally if the bytes are not known.
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
from ..timeline.slices import BACKWARD, Arg, ArgColumn, join_columns, sort_by_start
from ..timeline.summary.overview import shortened
from .event_collector import EventColumns, ProfilerEvents
from .recorded_part import innermost_spans

FUSED = "fused"
"""The class of a kernel that is fused from several modules."""
TIMES = "kernel_times"
"""Key of a graph's record: for each module the ns of its kernels in each phase, and the part that was divided."""
_NAME = re.compile(r"(?:extern_kernels\.(?:bias_)?|torch\.ops\.\w+\.|aten\.|graph_\d+_)?([^.]+)(?:\.\w+)?")
_TEMPLATE = re.compile(r"(?:\w+_)?kernel")
_MAX_LABEL = 60


class _Kernel(NamedTuple):
    """A call of a kernel."""

    name: str
    shares: Mapping[str, float]  # each module's share of the kernel's time, by path
    phase: int


@dataclass(frozen=True)
class _Graph:
    """A compiled graph."""

    record: dict[str, Any]  # the graph's record in the metadata
    classes: Mapping[str, str]  # classes of the modules, by path
    kernels: Sequence[_Kernel]


class KernelCall(NamedTuple):
    """A kernel that ran in a compiled region."""

    graph: _Graph
    kernel: _Kernel
    row: int  # the kernel's row among the operators


def with_kernel_modules(timeline: Timeline, events: ProfilerEvents) -> tuple[Timeline, list[KernelCall], list[str]]:
    """Return the timeline with spans of the modules inside compiled regions, the kernels that ran, and notes.

    Args:
        timeline: the recording, in the trace's time.
        events: the events of the trace.
    """
    calls, ops = events.graph_calls, events.graph_ops
    if COMPILED not in timeline.metadata or not len(calls):
        # Profiles of an older torch do not contain the calls of graphs.
        reasons = _why_unknown(timeline.metadata)
        return timeline, [], [f"kernels in {fqn} have no modules: {why}" for fqn, why in reasons.items()]
    columns, names = timeline.columns, Numbering[Name]()
    name_numbers = np.array([names[name] for name in timeline.names] or [0], np.int32)
    region = innermost_spans(timeline).on_threads(events.threads[calls.track], calls.start_ns)
    fqns = [timeline.names[columns.name[outer]].fqn if outer >= 0 else "" for outer in region.tolist()]
    graphs, rows_of_call = _known_graphs(timeline.metadata), _top_level(calls, ops)
    spans: list[tuple[int, ...]] = []
    kernel_calls: list[KernelCall] = []
    unknown, missing = Counter[str](), Counter[int]()
    for number in np.argsort(calls.start_ns, kind="stable").tolist():
        outer, fqn, rows = int(region[number]), fqns[number], rows_of_call[number]
        op_names = [_plain(ops.names[name]) for name in ops.name[rows].tolist()]
        # Without a cache all graphs of a region have the same key: the graph with the most called kernels counts.
        candidates = graphs.get((fqn, calls.names[calls.name[number]]), ())
        matches = [(graph, _match(graph.kernels, op_names)) for graph in candidates]
        if not matches:
            unknown[fqn] += 1
            continue
        graph, indices = max(matches, key=_called_share)
        kernel_rows = [(index, row) for index, row in zip(indices, rows, strict=True) if index >= 0]
        missing[outer] += len(graph.kernels) - len(kernel_rows)
        kernel_calls += [KernelCall(graph, graph.kernels[index], row) for index, row in kernel_rows]
        intervals = _intervals(graph, fqn, indices, rows, ops, names)
        depth, low, high = int(columns.depth[outer]) + 1, int(columns.start[outer]), int(columns.end[outer])
        spans += [
            (max(s.start_ns, low), min(s.end_ns, high), *s.key, depth + s.depth, outer)  # type: ignore[misc]
            for s in spans_from_intervals(intervals)
            if max(s.start_ns, low) < min(s.end_ns, high)
        ]
    incomplete_spans = [outer for outer, count in missing.items() if count]
    notes = _notes(timeline, len(calls), unknown, missing)
    if incomplete_spans:
        columns = _add_reason(columns, incomplete_spans, WITH_REMEDY[NOT_IN_PROFILE])
        timeline = with_modules(timeline, columns)
    if spans:
        timeline = _add_spans(timeline, spans, name_numbers, names)
    return timeline, kernel_calls, notes


def _notes(timeline: Timeline, call_count: int, unknown: Counter[str], missing: Counter[int]) -> list[str]:
    """Return notes on calls of unknown graphs (counts by region) and kernels missing in the profile (by span)."""
    notes = []
    if unknown:
        why = ", ".join(f"{fqn} is {why}" for fqn, why in _why_unknown(timeline.metadata).items() if fqn in unknown)
        notes.append(
            f"{unknown.total()} of {call_count} calls of compiled graphs have no modules: "
            f"{why or 'their kernels are not known'}"
        )
    if missing.total():
        name = timeline.columns.name
        fqns = dict.fromkeys(timeline.names[name[outer]].fqn for outer, count in missing.items() if count)
        notes.append(
            f"{missing.total()} kernels of compiled regions are not in the profile (in {shortened([*fqns])}), so no "
            "module has their time; those in C++ are with torch._inductor.config.cpp.enable_kernel_profile = True"
        )
    return notes


def _add_spans(
    timeline: Timeline, spans: Sequence[tuple[int, ...]], name_numbers: Int32Array, names: Iterable[Name]
) -> Timeline:
    """Return the timeline with additional spans, each given as start, end, name, phase, depth, and outer span.

    Their names are indices into `names`; `name_numbers` maps the timeline's indices of names to these.
    """
    start, end, name, phase, depth, outer = np.array(spans, np.int64).T
    columns = timeline.columns
    track, call, step = columns.track[outer], columns.call[outer], columns.step[outer]
    new = Slices.of(start=start, end=end, name=name, phase=phase, depth=depth, track=track, call=call, step=step)
    old = replace(columns, name=name_numbers[columns.name])
    joined = sort_by_start(join_columns([old, new]))
    joined = replace(joined, parent=find_parents(joined.track, joined.depth))
    return with_modules(replace(timeline, names=[*names]), joined)


def _why_unknown(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the reasons for kernels without modules, by region; regions without a known reason are left out."""
    reasons = {fqn: why_unknown(graphs) for fqn, graphs in metadata.get(COMPILED, {}).items()}
    return {fqn: why for fqn, why in reasons.items() if why}


def _add_reason(columns: Slices, rows: Sequence[int], reason: str) -> Slices:
    """Return the spans; those in `rows` have `reason` as an arg, for kernels without modules."""
    reasons = columns.arg(Arg.COMPILED_UNKNOWN)
    values = zip(reasons.rows.tolist(), reasons.values.tolist(), strict=True)
    texts = {row: reasons.text(value) for row, value in values}
    texts |= {row: "; ".join(filter(None, (texts.get(row), reason))) for row in rows}
    return replace(columns, args={**columns.args, Arg.COMPILED_UNKNOWN: ArgColumn.of_texts([*texts], texts.values())})


def with_kernel_times(
    timeline: Timeline, calls: Sequence[KernelCall], events: ProfilerEvents, launch: Int64Array
) -> Timeline:
    """Return the timeline with the times of each module's kernels in its metadata, in place of the kernels.

    The time of a kernel that launched work on a device is the time of this work.

    Args:
        timeline: the recording, in the trace's time.
        calls: the kernels that ran.
        events: the events of the trace.
        launch: for each piece of work on a device the row of its launch, or -1.
    """
    if COMPILED not in timeline.metadata:
        return timeline
    rows = np.array([call.row for call in calls], np.int64)
    durations = _durations(events, events.graph_ops.take(rows), launch)
    times: dict[int, dict[str, list[float]]] = defaultdict(dict)
    fused: dict[int, dict[tuple[str, int], dict[str, float]]] = defaultdict(dict)
    for (graph, kernel, _), duration in zip(calls, durations.tolist(), strict=True):
        if len(kernel.shares) > 1:
            label = _path("", kernel.shares, graph.classes)[-1].fqn
            fused_times = fused[id(graph.record)].setdefault((label, kernel.phase), dict.fromkeys(kernel.shares, 0.0))
            for path, share in kernel.shares.items():
                fused_times[path] += share * duration
        graph_times = times[id(graph.record)]
        total_shares: dict[str, float] = defaultdict(float)
        for path, share in kernel.shares.items():
            for outer_path in ("", *_chain(path, graph.classes)):
                total_shares[outer_path] += share
        for path, share in total_shares.items():
            phase_times = graph_times.setdefault(path, [0.0] * (len(PHASES) + 1))
            phase_times[kernel.phase] += share * duration
            phase_times[-1] += share * duration if share < 1 - 1e-9 else 0
    compiled = {
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
    return replace(timeline, metadata={**timeline.metadata, COMPILED: compiled})


def _rounded(times: Mapping[str, list[float]]) -> dict[str, Any]:
    return {TIMES: [[path, *map(round, counts)] for path, counts in times.items()]} if times else {}


def _fused_times(fused: Mapping[tuple[str, int], Mapping[str, float]]) -> dict[str, Any]:
    rows = [[*name, [[path, round(time)] for path, time in times.items()]] for name, times in fused.items()]
    return {FUSED_TIMES: rows} if rows else {}


def _durations(events: ProfilerEvents, ops: EventColumns, launch: Int64Array) -> Int64Array:
    """Return the ns of each kernel on its thread; if any kernel launched work on a device, the ns of this work."""
    launched = np.flatnonzero(launch >= 0)
    launches = events.launches.take(launch[launched])
    work_ns = np.zeros(len(ops), np.int64)
    order = np.lexsort((ops.start_ns, ops.track))
    for rows in split_by(ops.track[order], order):
        work = np.flatnonzero(launches.track == ops.track[rows[0]])
        row = rows[np.searchsorted(ops.start_ns[rows], launches.start_ns[work], side="right") - 1]
        is_inside = (launches.start_ns[work] >= ops.start_ns[row]) & (launches.start_ns[work] < ops.end_ns[row])
        np.add.at(work_ns, row[is_inside], events.work.duration_ns[launched[work[is_inside]]])
    return work_ns if work_ns.any() else ops.duration_ns


def _known_graphs(metadata: Mapping[str, Any]) -> dict[tuple[str, str], list[_Graph]]:
    """Return the graphs whose kernels are known, by their region and the key of their calls in a profile."""
    graphs: dict[tuple[str, str], list[_Graph]] = defaultdict(list)
    for region, record in compiled_graphs(metadata):
        labels = [name.rpartition(": ") for name, *_ in record.get("work", ())]
        classes = {path: module_class for path, _, module_class in labels if path}
        for entry in record.get("kernels", ()):
            with contextlib.suppress(IndexError):  # the file may be crafted
                if kernels := [_kernel(name, parts, labels) for name, parts in entry.get("kernels", ())]:
                    graphs[region, entry.get("key", "")].append(_Graph(record, classes, kernels))
    return graphs


def _kernel(name: str, parts: Sequence[Any], labels: Sequence[tuple[str, str, str]]) -> _Kernel:
    nbytes: Counter[str] = Counter()
    for module, _, count in parts:
        nbytes[labels[module][0]] += count
    total, modules = sum(nbytes.values()), len(nbytes)
    is_known = bool(total) and all(nbytes.values())
    shares = {path: count / total if is_known else 1 / modules for path, count in nbytes.items()} or {"": 1.0}
    phases = {phase for _, phase, _ in parts}
    return _Kernel(_plain(name), shares, BACKWARD if BACKWARD in phases else max(phases, default=0))


def _plain(name: str) -> str:
    """Return the part of a name that an operator and its call have in common.

    Example:
        >>> [*map(_plain, ["aten::mm", "extern_kernels.bias_addmm", "aten.randint.low_out", "graph_0_cpp_1"])]
        ['mm', 'addmm', 'randint', 'cpp_1']
    """
    name = name.rpartition("::")[2]
    match = _NAME.match(name)
    return match[1] if match else name


def _top_level(calls: EventColumns, ops: EventColumns) -> list[list[int]]:
    """Return the outermost operators inside each call, in order."""
    order = np.lexsort((-ops.end_ns, ops.start_ns, ops.track))
    rows_by_track = {int(ops.track[rows[0]]): (rows, ops.start_ns[rows]) for rows in split_by(ops.track[order], order)}
    rows_by_call: list[list[int]] = []
    for track, start, end in zip(calls.track.tolist(), calls.start_ns.tolist(), calls.end_ns.tolist(), strict=True):
        track_rows, starts = rows_by_track.get(track, (order[:0], order[:0]))
        first, last = np.searchsorted(starts, (start, end))
        rows_by_call.append([])
        last_end = start
        for row in track_rows[first:last].tolist():
            if ops.start_ns[row] >= last_end and ops.end_ns[row] <= end:
                rows_by_call[-1].append(row)
                last_end = int(ops.end_ns[row])
    return rows_by_call


def _called_share(match: tuple[_Graph, Sequence[int]]) -> float:
    graph, indices = match
    return sum(index >= 0 for index in indices) / len(graph.kernels)


def _match(kernels: Sequence[_Kernel], op_names: Sequence[str]) -> list[int]:
    """Return the index of the kernel of each operator; -1 if the numbers of operators and kernels of a name differ."""
    indices_by_name: dict[str, list[int]] = defaultdict(list)
    for index, kernel in enumerate(kernels):
        indices_by_name[kernel.name].append(index)
    count = Counter(op_names)
    # The name of a template, such as for a matrix product, has its sizes in a profile: `gemm_m64n96k64_kernel`.
    uncalled = [index for name, indices in indices_by_name.items() if not count[name] for index in indices]
    template_count = sum(bool(_TEMPLATE.fullmatch(name)) for name in op_names)
    templates = iter(sorted(uncalled) if len(uncalled) == template_count else ())
    kernels_of = {name: iter(indices) for name, indices in indices_by_name.items() if count[name] == len(indices)}
    return [
        next(kernels_of[name] if name in kernels_of else templates if _TEMPLATE.fullmatch(name) else iter(()), -1)
        for name in op_names
    ]


def _chain(path: str, classes: Mapping[str, str]) -> list[str]:
    """Return the paths of the modules around a module of a region, outermost first, and its own path."""
    parts = path.split(".")
    return [prefix for length in range(1, len(parts) + 1) if (prefix := ".".join(parts[:length])) in classes]


def _intervals(
    graph: _Graph, fqn: str, indices: Sequence[int], rows: Sequence[int], ops: EventColumns, names: Numbering[Name]
) -> Iterator[LabelledInterval]:
    """Yield the kernels that a graph ran, each with the name and phase of the spans around it."""
    last_index = -1
    for index, row in zip(indices, rows, strict=True):
        start, end = int(ops.start_ns[row]), int(ops.end_ns[row])
        if index != last_index + 1:
            yield LabelledInterval(start, start, ())
        if index < 0:
            continue
        last_index = index
        kernel = graph.kernels[index]
        yield LabelledInterval(
            start, end, [(names[name], kernel.phase) for name in _path(fqn, kernel.shares, graph.classes)]
        )


def _path(fqn: str, shares: Mapping[str, float], classes: Mapping[str, str]) -> list[Name]:
    """Return the names of a kernel's spans: the modules around all of its modules, and `fused` if it has several."""
    chains = [_chain(path, classes) for path in shares]
    common = [paths[0] for paths in zip(*chains, strict=False) if len(set(paths)) == 1]
    names, outer = [], ""
    for inner in common:
        label = inner[len(outer) + 1 :] if outer else inner
        names.append(Name(f"{label}: {classes[inner]}", f"{fqn}.{inner}", classes[inner]))
        outer = inner
    if len(shares) > 1:
        labels = [path[len(outer) + 1 :] if outer else path for path in shares]
        text = " + ".join(label or "itself" for label in labels)
        label = text if len(text) <= _MAX_LABEL else f"{labels[0] or 'itself'} + {len(labels) - 1} more"
        names.append(Name(f"{label}: {FUSED}", ".".join(filter(None, (fqn, outer, text))), FUSED))
    return names
