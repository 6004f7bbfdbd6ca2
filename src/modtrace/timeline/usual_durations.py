"""How long a module usually takes: from the calls of it that a ring still holds."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from .._typing import BoolArray, Int64Array
from ..ring import Events, RingSnapshot
from ..ring.slot_format import CALL_ENTER_KINDS, CALL_EXIT_KINDS, RECOMPUTE_BIT
from .decode import NameLookup, attribute_nodes, build_intervals, module_events
from .decode.pairing import pair_calls
from .open_calls import AFTER_BACKWARD, OpenCall

__all__ = ["usual_durations"]

_MAX_BACKWARD_EVENTS = 1 << 16
"""Whose node it was takes longer to find than when a call ended: only the last events are asked."""


def usual_durations(snapshot: RingSnapshot, calls: Iterable[OpenCall]) -> dict[tuple[str, str], int]:
    """Return the median duration in ns of each of the modules, by fully qualified name and phase.

    For "backward" it is that of one autograd node, or run of nodes, of the module, as `OpenCall.since_ns` counts. A
    module without any ended call in the ring is not in the result, nor is a wait after backward.
    """
    wanted = {(call.fqn, call.phase) for call in calls if call.phase != AFTER_BACKWARD}
    if not wanted:
        return {}
    events = snapshot.slots.events
    events = module_events(events)
    lookup = NameLookup(snapshot.records, events)
    durations: dict[tuple[str, str], Int64Array] = {}
    node_name, node_duration = (
        _ended_nodes(events, lookup.torch_threads)
        if any(phase == "backward" for _, phase in wanted)
        else (np.empty(0, np.int64), np.empty(0, np.int64))
    )
    for fqn, phase in wanted:
        names = np.array([number for number, name in enumerate(lookup.names) if name.fqn == fqn], np.int64)
        if phase == "backward":
            found = _positive(node_duration[np.isin(node_name, names)])
        else:
            found = _call_durations(events, names, recompute=phase == "recompute")
        if len(found):
            durations[fqn, phase] = found
    return {key: int(np.median(found)) for key, found in durations.items()}


def _call_durations(events: Events, names: Int64Array, *, recompute: bool) -> Int64Array:
    is_call = np.isin(events.kind, (*CALL_ENTER_KINDS, *CALL_EXIT_KINDS))
    pairs = pair_calls(events.take(np.flatnonzero(is_call & np.isin(events.name, names))))
    is_whole = (pairs["start_position"] >= 0) & (pairs["end_position"] >= 0)
    is_asked = is_whole & ((pairs["call_key"] & RECOMPUTE_BIT != 0) == recompute)
    return _positive(pairs["end"][is_asked] - pairs["start"][is_asked])


def _ended_nodes(events: Events, torch_threads: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return the name of the call that made each ended node, and how long the node ran, in ns."""
    recent = events.take(np.arange(max(len(events) - _MAX_BACKWARD_EVENTS, 0), len(events)))
    intervals = build_intervals(recent)
    call = attribute_nodes(intervals, recent, torch_threads)
    is_ended: BoolArray = intervals.is_node & intervals.has_start & intervals.has_end & (call >= 0)
    return intervals.name[call[is_ended]], (intervals.end - intervals.start)[is_ended]


def _positive(durations: Int64Array) -> Int64Array:
    return durations[durations > 0]
