"""How long a module usually takes: from the calls of it that a ring still holds."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from .._typing import BoolArray, Int64Array
from ..ring import Events, RingSnapshot
from ..ring.slot_format import CALL_ENTER_KINDS, CALL_EXIT_KINDS, RECOMPUTE_BIT
from .build import NameLookup, attribute_nodes, build_intervals, is_communication
from .build.pairing import pair_calls
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
    events = events.take(~is_communication(events))
    lookup = NameLookup(snapshot.records, events)
    durations: dict[tuple[str, str], Int64Array] = {}
    for fqn, phase in wanted:
        names = np.array([number for number, name in enumerate(lookup.names) if name.fqn == fqn], np.int64)
        if phase == "backward":
            found = _backward_durations(events, names, lookup.torch_threads)
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


def _backward_durations(events: Events, names: Int64Array, torch_threads: Int64Array) -> Int64Array:
    recent = events.take(np.arange(max(len(events) - _MAX_BACKWARD_EVENTS, 0), len(events)))
    intervals = build_intervals(recent)
    call = attribute_nodes(intervals, recent, torch_threads)
    is_ended: BoolArray = intervals.is_node & intervals.has_start & intervals.has_end & (call >= 0)
    is_asked = is_ended & np.isin(intervals.name[call], names)
    return _positive(intervals.end[is_asked] - intervals.start[is_asked])


def _positive(durations: Int64Array) -> Int64Array:
    return durations[durations > 0]
