"""The ring buffer: fixed-size event slots in memory or in a file, and the table of what their numbers mean.

Engines write it, `timeline.decode` reads it; another process can read a file while it is written, and after the writer
was killed.
"""

from .file_format import FIRST_STEP, MAGIC, STACKS_SIGNAL, Record
from .kept_rings import find_rings, newest_rings, stacks_path, whole_run_path
from .read_file import RingSnapshot, has_news, read_ring, read_ring_rank, read_ring_records, ring_serials
from .ring import NameTable, Ring, WriteSlot
from .slot_format import Events, Kind

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
