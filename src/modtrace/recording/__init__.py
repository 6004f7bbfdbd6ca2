"""Recordings: their start and stop, what writes their events, and what a signal saves."""

from ..track.ranges import NamedRange
from ..track.ranges import named_range as range  # noqa: A004  # only as modtrace.range
from .current import current
from .make_recording import record
from .recording import Recording

__all__ = ["NamedRange", "Recording", "current", "range", "record"]
