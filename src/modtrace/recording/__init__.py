"""Recordings: their start and stop, what writes their events, and what a signal saves."""

from .make_recording import record
from .recording import Recording, current

__all__ = ["Recording", "current", "record"]
