"""Timelines without a recording: a GPT-2 at work, and arbitrary ones drawn by hypothesis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from modtrace import Timeline, timeline
from modtrace.formats.limits import UNNAMED
from modtrace.ring import RingSnapshot
from modtrace.timeline import BACKWARD, FORWARD, CounterSeries, Mark, Name, Process, RingAnalysis, Slices, Stats, Track
from modtrace.timeline.nesting import nest_by_time
from modtrace.timeline.slices import ArgColumn, Args, TrackKind, sort_by_start

__all__ = ["EPOCH", "HOSTILE", "Plain", "gpt2_timeline", "slice_args", "timeline_of", "timelines", "with_args"]

EPOCH = 1_755_000_000_123_456_789


def build_timeline(ring: RingSnapshot | RingAnalysis) -> Timeline:
    """Return the timeline of a ring's content, as `modtrace.load` returns it."""
    return Timeline.of(timeline.build_timeline(ring))


def gpt2_timeline(spans: int, layers: int = 12, seed: int = 0) -> Timeline:
    """Return at least `spans` spans of training steps of a GPT-2: its real module names, µs-scale random times."""
    names, parents = _gpt2(layers)
    modules = len(names)
    steps = -(-spans // (2 * modules))
    random = np.random.default_rng(seed)
    first = _pass(parents, [*range(modules)])
    # Backward visits the modules in the mirrored order, and takes about twice as long.
    mirrored = _pass(parents, _mirrored(parents))
    parts = []
    clock = EPOCH
    for step in range(steps):
        for phase, order, scale in ((FORWARD, first, 1), (BACKWARD, mirrored, 2)):
            gaps = random.integers(2_000, 24_000 * scale, len(order))
            moments = clock + np.cumsum(gaps)
            clock = int(moments[-1]) + 50_000
            enter, leave = np.empty(modules, np.int64), np.empty(modules, np.int64)
            kinds = np.array([kind for kind, _ in order])
            which = np.array([module for _, module in order])
            enter[which[kinds == 0]] = moments[kinds == 0]
            leave[which[kinds == 1]] = moments[kinds == 1]
            parts.append((enter, leave, phase, step))
    depth = np.zeros(modules, np.int32)
    for module in range(1, modules):
        depth[module] = depth[parents[module]] + 1
    repeat = len(parts)
    offset = np.repeat(np.arange(repeat), modules) * modules
    parent = np.tile(np.array(parents), repeat)
    steps_of_spans = np.repeat([part[3] for part in parts], modules)
    phases = np.repeat([part[2] for part in parts], modules)
    columns = Slices.of(
        start=np.concatenate([part[0] for part in parts]),
        end=np.concatenate([part[1] for part in parts]),
        name=np.tile(np.arange(modules), repeat),
        phase=phases,
        track=phases == BACKWARD,
        depth=np.tile(depth, repeat),
        parent=np.where(parent < 0, -1, parent + offset),
        call=steps_of_spans,
        step=steps_of_spans,
        link=steps_of_spans * modules + np.tile(np.arange(modules), repeat),
        complete=np.ones(repeat * modules, bool),
    )
    process = Process(48213, 0)
    return Timeline(
        slices=sort_by_start(columns),
        names=names,
        tracks=[Track(kind, "MainThread", 48213, process) for kind in ("forward", "backward")],
        stats=Stats(recorded=4 * repeat * modules),
        marks=[Mark(int(parts[2 * step + 1][1].max()) + 1_000, "step", f"step {step}") for step in range(steps)],
        metadata={"engine": "native", "torch": "2.13.0"},
    )


def _gpt2(layers: int) -> tuple[list[Name], list[int]]:
    """Return the modules of a GPT-2 in the order of their calls, and the index of each one's caller."""
    names: list[Name] = []
    parents: list[int] = []

    def add(parent: int, path: str, module_class: str) -> int:
        fqn = f"{names[parent].fqn}.{path}" if parent >= 0 else module_class
        names.append(Name(f"{path}: {module_class}" if parent >= 0 else module_class, fqn, module_class))
        parents.append(parent)
        return len(names) - 1

    model = add(-1, "", "GPT2LMHeadModel")
    body = add(model, "transformer", "GPT2Model")
    for path, module_class in (("wte", "Embedding"), ("wpe", "Embedding"), ("drop", "Dropout")):
        add(body, path, module_class)
    for layer in range(layers):
        block = add(body, f"h.{layer}", "GPT2Block")
        add(block, "ln_1", "LayerNorm")
        attention = add(block, "attn", "GPT2Attention")
        for path, module_class in (
            ("c_attn", "Conv1D"),
            ("attn_dropout", "Dropout"),
            ("c_proj", "Conv1D"),
            ("resid_dropout", "Dropout"),
        ):
            add(attention, path, module_class)
        add(block, "ln_2", "LayerNorm")
        mlp = add(block, "mlp", "GPT2MLP")
        for path, module_class in (
            ("c_fc", "Conv1D"),
            ("act", "NewGELUActivation"),
            ("c_proj", "Conv1D"),
            ("dropout", "Dropout"),
        ):
            add(mlp, path, module_class)
    add(body, "ln_f", "LayerNorm")
    add(model, "lm_head", "Linear")
    return names, parents


def _mirrored(parents: list[int]) -> list[int]:
    """Return the pre-order in which every module's children are reversed."""
    children: dict[int, list[int]] = {}
    for module, parent in enumerate(parents):
        children.setdefault(parent, []).append(module)
    order = []
    stack = [0]
    while stack:
        module = stack.pop()
        order.append(module)
        stack.extend(children.get(module, []))
    return order


def _pass(parents: list[int], order: list[int]) -> list[tuple[int, int]]:
    """Return enter (0) and exit (1) of every module, when they are entered in `order`."""
    events: list[tuple[int, int]] = []
    stack: list[int] = []
    for module in order:
        while stack and stack[-1] != parents[module]:
            events.append((1, stack.pop()))
        events.append((0, module))
        stack.append(module)
    events.extend((1, module) for module in reversed(stack))
    return events


HOSTILE = (
    'quo"te',
    "back\\slash\\",
    "new\nline\ttab\r",
    "emoji 😀 ünïcödé",
    "NUL\0inside",
    "DEL\x7finside",
    "lone \ud83d surrogate \udce9",
    "</script><!--",
    "%s %d {} ${x}",
    "\\u0041 \\n",
    "x" * 10_000,
    "",
    " ",
)
"""Names that have broken a reader of traces."""


def timeline_of(
    *rows: tuple[int, int, str],
    track: int = 0,
    kinds: tuple[TrackKind, ...] = ("forward", "backward"),
    base: int = EPOCH,
    **fields: Any,
) -> Timeline:
    """Return a timeline of (start, end, label) in nanoseconds after `base`, on one track; `fields` are columns."""
    names = [Name(label, f"Net.{label}", "Layer") for label in dict.fromkeys(label for _, _, label in rows)]
    position = {name.label: index for index, name in enumerate(names)}
    count = len(rows)
    columns = Slices.of(
        **{
            "start": [base + start for start, _, _ in rows],
            "end": [base + end for _, end, _ in rows],
            "name": [position[label] for _, _, label in rows],
            "phase": np.full(count, FORWARD),
            "track": np.full(count, track),
            "depth": np.zeros(count),
            "parent": np.full(count, -1),
            "call": np.arange(count),
            "step": np.zeros(count),
            "link": np.full(count, -1),
            "complete": np.ones(count),
            **fields,
        }
    )
    process = Process(4242, 0)
    tracks = [Track(kind, "MainThread", 4242, process) for kind in kinds]
    return Timeline(slices=sort_by_start(nest_by_time(columns)), names=names, tracks=tracks)


Texts = st.one_of(
    st.sampled_from(HOSTILE),
    st.text(st.characters(exclude_categories=()), max_size=8),
    st.from_regex(r"[a-z]{1,4}(\.[a-z0-9]{1,3}){0,2}", fullmatch=True),
)
# Distinct texts stay distinct in every format only if no text equals the displayed form of another.
Plain = Texts.filter(lambda text: not any(char in text for char in "＼␀") and text != UNNAMED)
Times = st.one_of(st.integers(0, 3), st.integers(0, 5_000_000), st.just(999_999_999_999))


_MODULE_TRACKS: st.SearchStrategy[TrackKind] = st.sampled_from(["forward", "backward"])


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    """Draw any timeline: several tracks, nested, empty and adjoining spans, arrows, marks, counters, arguments."""
    processes = draw(st.lists(st.builds(Process, st.integers(0, 5), st.sampled_from([None, 0, 1]), Plain), max_size=2))
    tracks = [
        Track(kind, draw(Plain), draw(st.integers(0, 9)), process)
        for process in dict.fromkeys(processes)
        for kind in draw(st.lists(_MODULE_TRACKS, min_size=1, max_size=3))
    ]
    names = [Name(*draw(st.tuples(Plain, Plain, Plain))) for _ in range(draw(st.integers(1, 4)))]
    rows: list[tuple[int, int, int]] = []
    for track in range(len(tracks)):
        rows += ((start, end, track) for start, end in _intervals(draw(st.lists(_moves, max_size=24))))
    count = len(rows)

    def column(elements: st.SearchStrategy[int]) -> list[int]:
        return draw(st.lists(elements, min_size=count, max_size=count))

    base = draw(st.sampled_from([0, EPOCH]))
    columns = Slices.of(
        start=[base + start for start, _, _ in rows],
        end=[base + end for _, end, _ in rows],
        name=column(st.integers(0, len(names) - 1)),
        phase=column(st.integers(0, 2)),
        track=[track for _, _, track in rows],
        depth=np.zeros(count),
        parent=np.full(count, -1),
        call=column(st.integers(0, 2**40)),
        step=column(st.integers(0, 300)),
        link=column(st.one_of(st.integers(-1, 4), st.just(2**61))),
        complete=column(st.integers(0, 1)),
    )
    columns = sort_by_start(nest_by_time(columns))
    own = st.dictionaries(Plain.map(lambda text: f"own {text}"), Plain, min_size=1, max_size=2)
    marks = st.builds(
        Mark,
        Times.map(lambda time: base + time),
        st.sampled_from(["step", "mark"]),
        Plain.map(lambda text: f"m {text}"),
    )
    return with_args(
        Timeline(
            slices=columns,
            names=names,
            tracks=tracks,
            stats=draw(st.builds(Stats, *[st.integers(0, 2**40)] * 6)),
            marks=sorted(draw(st.lists(marks, max_size=3)), key=lambda mark: mark.time_ns),
            counters=_counters(draw, base, tracks),
            metadata=draw(
                st.dictionaries(Plain, st.one_of(Plain, st.integers(-(2**40), 2**40), st.none()), max_size=3)
            ),
        ),
        draw(st.dictionaries(st.integers(0, count - 1), own, max_size=3)) if count else {},
    )


def slice_args(of_row: Mapping[int, Mapping[str, int | str]]) -> Args:
    """Return the args of slices, by row."""
    args = {}
    for name in dict.fromkeys(name for own in of_row.values() for name in own):
        rows = [row for row, own in of_row.items() if name in own]
        values: list[Any] = [of_row[row][name] for row in rows]
        is_text = isinstance(values[0], str)
        args[name] = ArgColumn.of_texts(rows, values) if is_text else ArgColumn.of_numbers(rows, values)
    return args


def with_args(timeline: Timeline, of_row: Mapping[int, Mapping[str, int | str]]) -> Timeline:
    """Return the timeline with these args in place of its own."""
    return replace(timeline, slices=replace(timeline.slices, args=slice_args(of_row)))


_moves = st.tuples(st.booleans(), Times)


def _intervals(moves: list[tuple[bool, int]]) -> list[tuple[int, int]]:
    """Begin a span or end the innermost span, each some time after the move before."""
    ended, stack, clock = [], [], 0
    for begins, later in moves:
        clock += later
        if begins:
            stack.append(clock)
        elif stack:
            ended.append((stack.pop(), clock))
    return ended + [(start, clock) for start in stack]


def _counters(draw: st.DrawFn, base: int, tracks: list[Track]) -> list[CounterSeries]:
    counters = []
    for number, track in enumerate(tracks[:2]):
        times = sorted(draw(st.lists(Times, max_size=4)))
        values = [draw(st.integers(0, 2**40)) for _ in times]
        counters.append(
            CounterSeries(
                f"{number} {draw(Plain)}",
                draw(st.sampled_from(["bytes", "%"])),
                track.process,
                np.array([base + time for time in times], np.int64),
                np.array(values, np.int64),
            )
        )
    return counters
