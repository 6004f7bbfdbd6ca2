"""The ring buffer: fixed-size event slots in memory or in a file, and the table of what their numbers stand for.

Engines write it, `timeline.decode` reads it; a file can be read by another process while it is written, and after the
writer was killed.
"""

from __future__ import annotations

from .file_format import MAGIC
from .name_table import NameTable, Record
from .read_file import RingSnapshot, read_ring, read_ring_rank, read_ring_records
from .ring import Ring
from .slot_format import Events, Kind
from .slots import SlotSnapshot, WriteSlot
from .stacks_file import STACKS_SIGNAL, is_signal_caught, is_signal_handled_now, stacks_path

__all__ = [
    "MAGIC",
    "STACKS_SIGNAL",
    "Events",
    "Kind",
    "NameTable",
    "Record",
    "Ring",
    "RingSnapshot",
    "SlotSnapshot",
    "WriteSlot",
    "is_signal_caught",
    "is_signal_handled_now",
    "read_ring",
    "read_ring_rank",
    "read_ring_records",
    "stacks_path",
]
