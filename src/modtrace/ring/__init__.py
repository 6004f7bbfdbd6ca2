"""The ring buffer: fixed-size event slots in memory or in a file, and the table of what their numbers stand for.

Engines write it, `timeline.build` reads it; a file can be read by another process while it is written, and after the
writer was killed.
"""

from __future__ import annotations

from .file import MAGIC, RingSnapshot, read_ring
from .name_table import NameTable, Record
from .ring import Ring
from .slot_format import Events, Kind
from .slots import SlotSnapshot, WriteSlot

__all__ = [
    "MAGIC",
    "Events",
    "Kind",
    "NameTable",
    "Record",
    "Ring",
    "RingSnapshot",
    "SlotSnapshot",
    "WriteSlot",
    "read_ring",
]
