"""Module tracks from a trace alone: what torch.profiler noted with `with_stack=True`, and nothing that it did not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from .._typing import Int64Array
from ..timeline import FORWARD, RECOMPUTE, Columns, Name, Process, Timeline, Track
from ..timeline.contents import REGION_CLASS
from ..timeline.decode.path_spans import clip_and_nest
from ..timeline.slices import in_start_order
from .backward_nodes import Nodes, find_calls_of_nodes
from .call_lookup import CallIndex
from .event_columns import ProfilerEvents

NO_EVENTS = "the trace has no events: nothing ran under the profiler, or it was exported within its with block"
NO_MODULES = (
    "the trace has neither nn.Module slices nor ranges of record_function, so that no module track could be made; "
    "profile with with_stack=True, or give a recording"
)
REGIONS = (
    "the trace has no nn.Module slices: the tracks are its ranges of record_function; "
    "profile with with_stack=True, or give a recording, for modules"
)
NO_NAMES = (
    "the trace knows modules by class and number, not by attribute: Linear_1 is the second Linear that was called"
)


def reconstruct(events: ProfilerEvents, threads: Int64Array, process: Process) -> tuple[Timeline, list[str]]:
    """Make forward and recompute spans of the `nn.Module:` slices of a trace, else of its `record_function` ranges.

    Args:
        events: the trace's.
        threads: the OS thread of each of its tracks, -1 for tracks of other processes and devices.
        process: the process of these threads.

    Returns:
        A timeline in ns from the trace's base, without backward; and what it cannot know.
    """
    slices, texts, note = events.modules, events.module_names, NO_NAMES
    slices = slices.take(threads[slices.track] >= 0)
    has_modules = bool(len(slices))
    if not has_modules:
        slices, texts, note = events.regions, events.region_names, REGIONS
        slices = slices.take(threads[slices.track] >= 0)
    if not len(slices):
        return Timeline(Columns.empty(), metadata={"reconstructed": True}), [NO_MODULES if events.total else NO_EVENTS]
    nodes = Nodes(events.nodes)
    is_recompute = nodes.innermost.on_threads(slices.track, slices.start) >= 0
    if not has_modules:
        # What is only ever run by backward repeats nothing.
        is_recompute &= np.isin(slices.name, slices.name[~is_recompute])
    tracks: list[Track] = []
    index: dict[tuple[int, bool], int] = {}
    track = np.empty(len(slices), np.int64)
    for row, key in enumerate(zip(slices.track.tolist(), is_recompute.tolist(), strict=True)):
        if key not in index:
            index[key] = len(tracks)
            tid = int(threads[key[0]])
            thread = events.thread_names.get(events.tracks[key[0]], f"thread {tid}")
            tracks.append(Track("backward" if key[1] else "forward", thread, tid, process))
        track[row] = index[key]
    end, parent, depth = clip_and_nest(track, slices.start, slices.end, np.zeros(len(slices), np.int64))
    names, name = _names(texts, slices.name, parent, depth, _module_name if has_modules else _region_name)
    columns = in_start_order(
        Columns.of(
            start=slices.start,
            end=end,
            name=name,
            phase=np.where(is_recompute, RECOMPUTE, FORWARD),
            track=track,
            depth=depth,
            parent=parent,
        )
    )
    columns = replace(columns, call=_numbers(columns))
    timeline = Timeline(columns, names, tuple(tracks), metadata={"reconstructed": True})
    return _name_recomputes_after_forward(timeline, events, threads), [note]


def _module_name(shown: str, outer: Name | None) -> Name:
    """Return the name of a module that the trace calls `Linear_0`, called by another one."""
    module_class = shown.rpartition("_")[0] or shown
    if outer is None:
        return Name(module_class, shown, module_class)
    return Name(f"{shown}: {module_class}", f"{outer.fqn}.{shown}", module_class)


def _region_name(text: str, outer: Name | None) -> Name:
    return Name(text, text if outer is None else f"{outer.fqn}.{text}", REGION_CLASS)


def _names(
    texts: list[str],
    value: Int64Array,
    parent: Int64Array,
    depth: Int64Array,
    make_name: Callable[[str, Name | None], Name],
) -> tuple[list[Name], Int64Array]:
    """Return the names, one for each chain of modules, and the name of each span."""
    index_of: dict[tuple[int, int], int] = {}
    names: list[Name] = []
    name_of: list[int] = [-1] * len(value)
    # A parent has to be named before its children.
    for row in np.argsort(depth, kind="stable").tolist():
        around = name_of[parent[row]] if parent[row] >= 0 else -1
        key = (around, int(value[row]))
        if key not in index_of:
            index_of[key] = len(names)
            names.append(make_name(texts[key[1]], names[around] if around >= 0 else None))
        name_of[row] = index_of[key]
    return names, np.array(name_of, np.int64)


def _numbers(columns: Columns) -> Int64Array:
    """Number the calls of each name, forward and recomputed ones apart."""
    seen: Counter[tuple[int, int]] = Counter()
    numbers = []
    for key in zip(columns.name.tolist(), columns.phase.tolist(), strict=True):
        numbers.append(seen[key])
        seen[key] += 1
    return np.array(numbers, np.int64)


def _name_recomputes_after_forward(timeline: Timeline, events: ProfilerEvents, threads: Int64Array) -> Timeline:
    """Give recomputed calls the name and the number of the forward calls that they repeat.

    A recomputation that runs inside a node of the call, or of one inside it, repeats that call; else the latest one of
    that module that was not repeated yet. What is called in it repeats its namesakes there, in order.
    """
    columns = timeline.columns
    roots = np.flatnonzero((columns.phase == RECOMPUTE) & (columns.parent < 0))
    if not len(roots):
        return timeline
    nodes = find_calls_of_nodes(timeline, events, threads)
    track_of_tid = {int(tid): index for index, tid in enumerate(threads.tolist()) if tid >= 0}
    track = np.array([track_of_tid[timeline.tracks[t].tid] for t in columns.track[roots].tolist()], np.int64)
    node = nodes.innermost.on_threads(track, columns.start[roots])
    calls = CallIndex(timeline)
    attribute_names = [name.fqn.rpartition(".")[2] for name in timeline.names]
    label = [attribute_names[name] for name in columns.name.tolist()]
    children = _children(columns.parent)
    name, call = columns.name.copy(), columns.call.copy()
    repeated: set[int] = set()
    forward: dict[str, list[int]] = {}
    for index in np.flatnonzero(columns.phase == FORWARD).tolist():
        forward.setdefault(label[index], []).append(index)
    for root, inside in zip(roots.tolist(), node.tolist(), strict=True):
        asked = int(nodes.call[inside]) if inside >= 0 else -1
        chain = [c for c in (calls.path(asked) if asked >= 0 else ()) if label[c] == label[root]]
        chain = [c for c in chain if columns.phase[c] == FORWARD]
        latest = [
            c for c in forward.get(label[root], []) if c not in repeated and columns.start[c] < columns.start[root]
        ]
        if not chain and not latest:
            continue
        original = chain[-1] if chain else latest[-1]
        repeated.add(original)
        pairs = [(root, original)]
        while pairs:
            recompute, forward_call = pairs.pop()
            name[recompute], call[recompute] = columns.name[forward_call], columns.call[forward_call]
            unmatched = list(children.get(forward_call, []))
            for inner in children.get(recompute, []):
                match = next((c for c in unmatched if label[c] == label[inner]), None)
                if match is not None:
                    unmatched.remove(match)
                    pairs.append((inner, match))
    return replace(timeline, slices=replace(columns, name=name, call=call))


def _children(parent: Int64Array) -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for index, outer in enumerate(parent.tolist()):
        if outer >= 0:
            children.setdefault(outer, []).append(index)
    return children
