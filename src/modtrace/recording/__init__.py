"""Recordings: their start and stop, what writes their events, and what a signal saves."""

from ..track.ranges import NamedRange
from ..track.ranges import named_range as range  # noqa: A004  # only as modtrace.range
from .make_recording import record
from .recording import Recording, current

__all__ = ["NamedRange", "Recording", "current", "range", "record"]
