"""The ring buffer: fixed-size event slots in memory or in a file, and the table of what their numbers mean.

Engines write it, `timeline.decode` reads it; another process can read a file while it is written, and after the writer
was killed.
"""

from __future__ import annotations

from .file import FIRST_STEP, STACKS_SIGNAL
from .file_header import MAGIC
from .kept_rings import find_rings, newest_rings, stacks_path, whole_run_path
from .name_table import NameTable, Record
from .read_file import RingSnapshot, has_news, read_ring, read_ring_rank, read_ring_records, ring_serials
from .ring import Ring, WriteSlot
from .slot_format import Events, Kind
from .validate import SlotSnapshot

__all__ = [
    "FIRST_STEP",
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
    "find_rings",
    "has_news",
    "newest_rings",
    "read_ring",
    "read_ring_rank",
    "read_ring_records",
    "ring_serials",
    "stacks_path",
    "whole_run_path",
]
