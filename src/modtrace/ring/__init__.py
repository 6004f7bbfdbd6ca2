"""What one event is, the ring over memory or a file, and reading it back, dead or alive."""

from __future__ import annotations

from .file import MAGIC, RingImage, read_ring
from .name_table import NameTable, Record
from .ring import Ring
from .slot_format import Events, Kind
from .slots import Reading, Write

__all__ = ["MAGIC", "Events", "Kind", "NameTable", "Reading", "Record", "Ring", "RingImage", "Write", "read_ring"]
