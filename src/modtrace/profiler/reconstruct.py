"""Module tracks from a trace alone: what torch.profiler noted with `with_stack=True`, and nothing that it did not."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from .._numbering import Numbering
from .._typing import BoolArray, Int64Array
from ..timeline import FORWARD, RECOMPUTE, Columns, Name, Process, Timeline, Track
from ..timeline.contents import REGION_CLASS
from ..timeline.decode.path_spans import clip_and_nest
from ..timeline.decode.spans import count_in_group
from ..timeline.slices import in_start_order
from .backward_nodes import Nodes
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
    numbers = Numbering[tuple[int, bool]]()
    keys = zip(slices.track.tolist(), is_recompute.tolist(), strict=True)
    track = np.array([numbers[key] for key in keys], np.int64)
    tracks = []
    for (number, again), tid in zip(numbers, threads[[number for number, _ in numbers]].tolist(), strict=True):
        thread = events.thread_names.get(events.tracks[number], f"thread {tid}")
        tracks.append(Track("backward" if again else "forward", thread, tid, process))
    end, parent, depth = clip_and_nest(track, slices.start, slices.end, np.zeros(len(slices), np.int64))
    make_name = _module_name if has_modules else _region_name
    names, name = _names(texts, slices.name, parent, np.lexsort((depth, is_recompute)), is_recompute, make_name)
    phase = np.where(is_recompute, RECOMPUTE, FORWARD)
    columns = in_start_order(
        Columns.of(start=slices.start, end=end, name=name, phase=phase, track=track, depth=depth, parent=parent)
    )
    # Calls are numbered for each name, forward and recomputed ones apart.
    order = np.lexsort((columns.phase, columns.name))
    call = np.empty(len(columns), np.int64)
    call[order] = count_in_group([columns.name[order], columns.phase[order]])
    columns = replace(columns, call=call)
    return Timeline(columns, names, tuple(tracks), metadata={"reconstructed": True}), [note]


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
    order: Int64Array,
    is_recompute: BoolArray,
    make_name: Callable[[str, Name | None], Name],
) -> tuple[list[Name], Int64Array]:
    """Return the names, one for each chain of modules, and the name of each span.

    An outermost recomputed call has the name of the forward call that it repeats, which others are around.

    Args:
        texts: what the trace calls modules.
        value: of each span, which of them.
        parent: of each span.
        order: the spans, a parent before its children, and forward ones before recomputed ones.
        is_recompute: of each span.
        make_name: of a text, below the name around it.
    """
    numbers = Numbering[tuple[int, int]]()
    names: list[Name] = []
    name_of: list[int] = [-1] * len(value)
    around_text: dict[int, int] = {}
    for row in order.tolist():
        around = name_of[parent[row]] if parent[row] >= 0 else -1
        if not is_recompute[row]:
            around_text.setdefault(int(value[row]), around)
        elif parent[row] < 0:
            around = around_text.get(int(value[row]), -1)
        name_of[row] = numbers[around, int(value[row])]
        if name_of[row] == len(names):
            names.append(make_name(texts[value[row]], names[around] if around >= 0 else None))
    return names, np.array(name_of, np.int64)
