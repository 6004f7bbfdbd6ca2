"""What spans took outside the spans inside them, and which spans are outermost in their group."""

import numpy as np

from ..._typing import BoolArray, Int64Array
from ..slices import Slices


def self_times(columns: Slices) -> Int64Array:
    """Return int64[n]: what each span took outside the spans directly inside it, in ns."""
    duration = columns.end - columns.start
    self_ns: Int64Array = duration.copy()
    has_parent = columns.parent >= 0
    np.subtract.at(self_ns, columns.parent[has_parent], duration[has_parent])
    return self_ns


def times_in_phase(columns: Slices) -> Int64Array:
    """Return int64[n]: what each span took, in ns, without the spans of other phases inside it."""
    duration = columns.end - columns.start
    in_phase_ns: Int64Array = duration.copy()
    phase, parent = columns.phase, columns.parent
    other = np.flatnonzero(parent >= 0)
    other = other[phase[other] != phase[parent[other]]]
    outer = parent[other]
    while len(other):
        np.subtract.at(in_phase_ns, outer, duration[other])
        further = parent[outer]
        climbs = (further >= 0) & (phase[further] == phase[outer])
        other, outer = other[climbs], further[climbs]
    return in_phase_ns


def is_outermost(columns: Slices, group: Int64Array) -> BoolArray:
    """Return bool[n]: False for a span inside one of its group, with only spans of the same phase between them."""
    outermost = np.ones(len(columns), np.bool_)
    span = np.flatnonzero(columns.parent >= 0)
    outer = columns.parent[span]
    while len(span):
        same_phase = columns.phase[outer] == columns.phase[span]
        span, outer = span[same_phase], outer[same_phase]
        same_group = group[outer] == group[span]
        outermost[span[same_group]] = False
        outer = columns.parent[outer]
        climbs = ~same_group & (outer >= 0)
        span, outer = span[climbs], outer[climbs]
    return outermost
