"""A ring's snapshot → a timeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..._typing import AnyArray, Int32Array, Int64Array
from ...ring import Events, Kind, Record, RingSnapshot
from ...ring.slot_format import CALL_ENTER_KINDS, CALL_EXIT_KINDS, CALL_INDEX_MASK
from ..columns import BACKWARD, FORWARD, RECOMPUTE, Columns
from ..timeline import CounterSeries, Mark, Name, Process, Stats, Timeline, Track
from .attribution import attribute
from .backward_spans import Slices, backward_slices, chain_lengths
from .call_tree import Brackets, find_brackets
from .clock import Clock
from .recompute import originals

__all__ = ["build_timeline"]

Rows = dict[str, AnyArray]

_SYNC = "modtrace.sync"


def build_timeline(snapshot: RingSnapshot) -> Timeline:
    """Build the timeline of what a ring held."""
    events = snapshot.slots.events
    tables = Tables(snapshot.records, events)
    clock = Clock(snapshot.records)
    rank = snapshot.metadata.get("rank")
    process = Process(
        int(str(snapshot.metadata.get("pid", 0))),
        rank if isinstance(rank, int) else None,
        str(snapshot.metadata.get("program", "python")),
    )
    brackets = find_brackets(events)
    call = attribute(brackets, events, tables.torch_threads)
    length = chain_lengths(brackets)
    shown = _outermost(brackets, call)
    slices = backward_slices(brackets, shown, length)
    rows = _rows(brackets, slices, originals(brackets, call), _inner_depths(brackets, shown, length))
    rows = {field: column[np.lexsort((rows["depth"], rows["opened"], rows["start"]))] for field, column in rows.items()}
    tracks, rows["track"] = _tracks(rows, tables.threads, process)
    opened = rows.pop("opened")
    unattributed = brackets.node & (call < 0)
    return Timeline(
        columns=Columns.of(
            **{field: rows[field] for field in ("name", "phase", "track", "depth", "call", "link")},
            start=clock.wall(rows["start"]),
            end=clock.wall(rows["end"]),
            parent=_parents(rows["track"], rows["depth"]),
            step=_steps(events, opened),
            complete=rows["started"] & rows["finished"],
        ),
        names=tables.names,
        tracks=tracks,
        stats=Stats(
            recorded=snapshot.slots.recorded,
            overwritten=snapshot.slots.overwritten,
            torn=snapshot.slots.torn,
            unfinished=int(np.count_nonzero(~rows["finished"])),
            unstarted=int(np.count_nonzero(~rows["started"])),
            unattributed=int(np.count_nonzero(unattributed)),
        ),
        marks=_marks(events, tables.texts, clock),
        counters=_counters(events, tables.texts, clock, process),
        # Which host it was matters to those who watch the ring, not to those who get the trace.
        metadata={key: value for key, value in snapshot.metadata.items() if key != "host"},
        span_args=_shapes(events, tables.texts, opened, rows["phase"]),
    )


class Tables:
    """The name table by number; numbers that the events use and the table lacks (a cut file) get a stand-in.

    Attributes:
        names: of modules.
        texts: of marks, counters and shapes.
        threads: (name, tid).
        torch_threads: int64, torch's number of each thread, or -1.
    """

    def __init__(self, records: Sequence[Record], events: Events) -> None:
        names: dict[int, Name] = {}
        texts: dict[int, str] = {}
        threads: dict[int, tuple[str, int]] = {}
        torch_threads: dict[int, int] = {}
        for record in records:
            kind = record["kind"]
            if kind == "name":
                names[record["id"]] = Name(record["label"], record["fqn"], record["class"])
            elif kind == "text":
                texts[record["id"]] = record["text"]
            elif kind == "thread":
                threads[record["id"]] = (record["name"], record["tid"])
                torch_threads[record["id"]] = record["torch_thread_id"]
        spans = np.isin(events.kind, (*CALL_ENTER_KINDS, *CALL_EXIT_KINDS))
        worded = np.isin(events.kind, (Kind.MARK, Kind.COUNTER, Kind.SHAPES))
        self.names: Sequence[Name] = _filled(names, events.name[spans], lambda n: Name(f"#{n}", f"#{n}", "?"))
        self.texts: Sequence[str] = _filled(texts, events.name[worded], lambda n: f"#{n}")
        self.threads: Sequence[tuple[str, int]] = _filled(threads, events.thread, lambda n: (f"thread #{n}", n))
        self.torch_threads = np.array(_filled(torch_threads, events.thread, lambda _: -1), np.int64)


def _filled(known: Mapping[int, Any], used: Int32Array, stand_in: Any) -> list[Any]:
    # A damaged slot can hold any number; what is used decides how many there are, not how large the numbers get.
    count = max(known, default=-1) + 1
    beyond = used[used >= count]
    count = max(count, int(beyond.max()) + 1 if len(beyond) else 0)
    return [known[number] if number in known else stand_in(number) for number in range(count)]


def _outermost(brackets: Brackets, call: Int64Array) -> Int64Array:
    """Return `call` without the nodes that another node of their task and call runs as a part of itself.

    An in-place operation on a view makes such a node: it holds the operation's own.
    """
    around = brackets.parent
    inside = brackets.node & (around >= 0) & brackets.node[around]
    return np.where(inside & (brackets.task == brackets.task[around]) & (call == call[around]), -1, call)


def _inner_depths(brackets: Brackets, call: Int64Array, length: Int64Array) -> Int64Array:
    """Return for each bracket at which depth of the backward track that which it holds lies."""
    inner = np.zeros(len(brackets), np.int64)
    again = brackets.recompute
    for depth in range(int(brackets.depth.max()) + 1 if len(brackets) else 0):
        at = np.flatnonzero(brackets.depth == depth)
        around = np.where(brackets.parent[at] >= 0, inner[brackets.parent[at]], 0)
        chain = np.where(call[at] >= 0, length[call[at]], 0)
        inner[at] = around + np.where(brackets.node[at], chain, again[at])
    return inner


def _forward_depths(brackets: Brackets) -> Int64Array:
    """Return for each bracket how many forward calls are around it."""
    other = brackets.node | brackets.recompute
    inside = brackets.parent >= 0
    if not np.any(~other & inside & other[brackets.parent]):
        return brackets.depth
    # In a damaged file a node can hold a forward call.
    depth = np.zeros(len(brackets), np.int64)
    for level in range(1, int(brackets.depth.max()) + 1):
        at = np.flatnonzero(brackets.depth == level)
        depth[at] = depth[brackets.parent[at]] + ~other[brackets.parent[at]]
    return depth


def _rows(brackets: Brackets, slices: Slices, original: Int64Array, inner: Int64Array) -> Rows:
    """Return one row per span: the calls, then the backward slices."""
    calls = np.flatnonzero(~brackets.node)
    again = brackets.recompute[calls]
    around = np.where(brackets.parent >= 0, inner[brackets.parent], 0) if len(brackets) else inner
    known = original[slices.call]
    link = np.full(len(brackets), -1, np.int64)
    linked = np.unique(known)
    link[linked] = np.arange(len(linked))

    def both(of_calls: AnyArray, of_slices: AnyArray) -> AnyArray:
        return np.concatenate([of_calls, of_slices])

    return {
        "start": both(brackets.start[calls], brackets.start[slices.first]),
        "end": both(brackets.end[calls], brackets.end[slices.last]),
        "opened": both(brackets.opened[calls], brackets.opened[slices.first]),
        "name": both(brackets.name[calls], brackets.name[slices.call]),
        "phase": both(np.where(again, RECOMPUTE, FORWARD), np.full(len(known), BACKWARD)),
        "thread": both(brackets.thread[calls], brackets.thread[slices.first]),
        "depth": both(
            np.where(again, around[calls], _forward_depths(brackets)[calls]), around[slices.first] + slices.level
        ),
        "call": both(brackets.key[original[calls]], brackets.key[known]) & CALL_INDEX_MASK,
        "link": both(np.where(again, -1, link[calls]), link[known]),
        "started": both(brackets.started[calls], brackets.started[slices.first]),
        "finished": both(brackets.finished[calls], brackets.finished[slices.last]),
    }


def _tracks(rows: Rows, threads: Sequence[tuple[str, int]], process: Process) -> tuple[list[Track], Int64Array]:
    row = rows["thread"] * 2 + (rows["phase"] != FORWARD)
    used, track = np.unique(row, return_inverse=True)
    kinds = ("forward", "backward")
    tracks = []
    for number in used.tolist():
        thread, tid = threads[number // 2]
        tracks.append(Track(kinds[number % 2], thread, tid, process))
    return tracks, track


def _parents(track: Int64Array, depth: Int64Array) -> Int64Array:
    """Return the span around each: the last one before it that lies one less deep on its track."""
    count = len(track)
    stride = np.int64(depth.max() + 2) if count else np.int64(1)
    rank = np.arange(count, dtype=np.int64)
    place = (track * stride + depth) * count + rank
    order = np.argsort(place, kind="stable")
    around = np.searchsorted(place[order], (track * stride + depth - 1) * count + rank) - 1
    return np.where(depth > 0, order[np.maximum(around, 0)], -1) if count else rank


def _steps(events: Events, opened: Int64Array) -> Int64Array:
    """Return for each opening the number of steps that had ended before it."""
    at = np.flatnonzero(events.kind == Kind.STEP)
    if not len(at):
        return np.zeros(len(opened), np.int64)
    ended = np.concatenate([events.value[at[:1]], events.value[at] + 1])
    return ended[np.searchsorted(2 * at, opened)]


def _marks(events: Events, texts: Sequence[str], clock: Clock) -> list[Mark]:
    at = np.flatnonzero((events.kind == Kind.STEP) | (events.kind == Kind.MARK))
    marks = []
    for index, time in zip(at.tolist(), clock.wall(events.time[at]).tolist(), strict=True):
        if events.kind[index] == Kind.STEP:
            marks.append(Mark(time, "step", f"step {int(events.value[index])}"))
        else:
            text = texts[events.name[index]]
            # A sync mark's value is the wait between the two clock readings that its time is the middle of.
            marks.append(Mark(time, "sync" if text.startswith(_SYNC) else "mark", text))
    return sorted(marks)


def _counters(events: Events, texts: Sequence[str], clock: Clock, process: Process) -> list[CounterSeries]:
    at = np.flatnonzero(events.kind == Kind.COUNTER)
    counters = []
    for name in np.unique(events.name[at]).tolist():
        own = at[events.name[at] == name]
        own = own[np.argsort(events.time[own], kind="stable")]
        counters.append(CounterSeries(texts[name], "bytes", process, clock.wall(events.time[own]), events.value[own]))
    return counters


def _shapes(events: Events, texts: Sequence[str], opened: Int64Array, phase: AnyArray) -> dict[int, Mapping[str, str]]:
    """Return the shapes of the calls that have them, by position of the span."""
    at = np.flatnonzero(events.kind == Kind.SHAPES)
    if not len(at):
        return {}
    by_thread = np.lexsort((np.arange(len(events)), events.thread))
    before = np.empty(len(events), np.int64)
    before[by_thread] = np.roll(by_thread, 1)
    position = {int(pos): index for index, pos in enumerate(opened.tolist()) if phase[index] != BACKWARD}
    return {
        position[2 * int(before[index]) + 1]: {"shapes": texts[events.name[index]]}
        for index in at.tolist()
        if 2 * int(before[index]) + 1 in position
    }
