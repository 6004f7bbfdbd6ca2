"""Which call made an autograd node: the innermost one whose range of sequence numbers holds the node's."""

from __future__ import annotations

import numpy as np

from ..._typing import AnyArray, BoolArray, Int64Array
from ...ring.slot_format import FORWARD_THREAD_MASK, NO_NAME, SEQUENCE_MASK, Events, Kind
from .call_tree import Brackets

__all__ = ["attribute", "enclosing_call"]


_ROUNDS = 4
"""Backward passes through graphs that a backward pass made, each deeper by one, that are followed."""


def enclosing_call(brackets: Brackets) -> Int64Array:
    """Return for each bracket the index of the innermost call around it, through nodes, or -1."""
    call: Int64Array = brackets.parent.copy()
    while True:
        through = (call >= 0) & brackets.node[call]
        if not through.any():
            return call
        call[through] = brackets.parent[call[through]]


def attribute(brackets: Brackets, events: Events, torch_threads: Int64Array) -> Int64Array:
    """Return for each node the index of the call it belongs to; -1 for calls, and for nodes of no known call.

    Args:
        brackets: calls and nodes.
        events: where they came from.
        torch_threads: torch's number of each thread of the name table, -1 where it is not known.
    """
    call = np.full(len(brackets), -1, np.int64)
    _by_key(brackets, call)
    native = brackets.node & (brackets.origin >= 0)
    if native.any():
        _by_sequence(brackets, events, torch_threads, native, call)
    return call


def _by_key(brackets: Brackets, call: Int64Array) -> None:
    """The portable engine notes the call itself."""
    nodes = np.flatnonzero(brackets.node & (brackets.origin < 0) & (brackets.name != NO_NAME))
    calls = np.flatnonzero(~brackets.node)
    if not len(nodes) or not len(calls):
        return
    # Rows of (name, key) are compared as one number.
    shift = np.int64(1 << 32)
    identity = brackets.name[calls] * shift + brackets.key[calls]
    order = np.argsort(identity, kind="stable")
    wanted = brackets.name[nodes] * shift + brackets.key[nodes]
    place = np.minimum(np.searchsorted(identity[order], wanted), len(calls) - 1)
    found = calls[order[place]]
    match = identity[order[place]] == wanted
    call[nodes[match]] = found[match]


def _by_sequence(
    brackets: Brackets, events: Events, torch_threads: Int64Array, native: BoolArray, call: Int64Array
) -> None:
    around = enclosing_call(brackets)
    builds = _graph_builders(brackets, events)
    nodes = np.flatnonzero(native)
    origin = brackets.origin[nodes]
    steps = [
        (nodes[origin == torch & FORWARD_THREAD_MASK], *_steps(brackets, around, thread, builds))
        for thread, torch in enumerate(torch_threads.tolist())
        if torch >= 0
    ]
    for _ in range(_ROUNDS if builds else 1):
        before = call.copy()
        for wanted, sequence, top, builder in steps:
            if len(wanted) and len(sequence):
                place = np.searchsorted(sequence, brackets.sequence[wanted], side="right") - 1
                at = np.maximum(place, 0)
                inner = np.where(builder[at] >= 0, before[builder[at]], top[at])
                call[wanted] = np.where(place >= 0, inner, -1)
        if np.array_equal(before, call):
            break


def _steps(
    brackets: Brackets, around: Int64Array, thread: int, builds: dict[int, tuple[int, int]]
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return what is innermost on a thread from each sequence number on.

    Returns:
        sequence: int64[n], ascending.
        top: int64[n], the innermost call from there on, or -1.
        builder: int64[n], the node whose running makes the nodes from there on, or -1.
    """
    calls = np.flatnonzero((brackets.thread == thread) & ~brackets.node)
    builders = np.array([node for node in builds if brackets.thread[node] == thread], np.int64)
    ranges = np.array([builds[node] for node in builders.tolist()], np.int64).reshape(-1, 2)
    none = np.full(len(calls), -1, np.int64)
    alone = np.full(len(builders), -1, np.int64)
    position = np.concatenate([brackets.opened[calls], brackets.closed[calls], *_ends(brackets, builders)])
    sequence = np.concatenate([brackets.sequence[calls], brackets.sequence_out[calls], ranges[:, 0], ranges[:, 1]])
    top = np.concatenate([calls, around[calls], alone, around[builders]])
    builder = np.concatenate([none, none, builders, alone])
    known = sequence >= 0
    # What was clipped closes together with what is around it, and that comes last.
    tie = np.concatenate([none, -brackets.opened[calls], alone, -brackets.opened[builders]])
    order = np.lexsort((tie[known], position[known]))
    return sequence[known][order], top[known][order], builder[known][order]


def _ends(brackets: Brackets, index: Int64Array) -> list[AnyArray]:
    return [brackets.opened[index], brackets.closed[index]]


def _graph_builders(brackets: Brackets, events: Events) -> dict[int, tuple[int, int]]:
    """Return the nodes that ran with create_graph, with the thread's sequence numbers before and after each."""
    notes = np.flatnonzero(events.kind == Kind.GRAPH_BUILT)
    if not len(notes):
        return {}
    nodes = np.flatnonzero(brackets.node & (brackets.origin >= 0))
    by_open = {(int(brackets.opened[node]) - 1) // 2: int(node) for node in nodes}
    by_close = {(int(brackets.closed[node]) - 1) // 2: int(node) for node in nodes}
    previous: dict[int, int] = {}
    before: dict[int, int] = {}
    ranges: dict[int, tuple[int, int]] = {}
    mask = SEQUENCE_MASK
    # A note follows its node's begin and comes just before its end, on the same thread.
    for at in np.flatnonzero(np.isin(events.kind, (Kind.GRAPH_BUILT, Kind.NODE_BEGIN, Kind.NODE_END))).tolist():
        thread = int(events.thread[at])
        kind = events.kind[at]
        last = previous.get(thread)
        if kind == Kind.GRAPH_BUILT and last in by_open:
            before[by_open[last]] = int(events.value[at]) & mask
        elif kind == Kind.NODE_END and last is not None and events.kind[last] == Kind.GRAPH_BUILT:
            node = by_close.get(at)
            if node is not None and node in before:
                ranges[node] = (before[node], int(events.value[last]) & mask)
        previous[thread] = at
    return ranges
