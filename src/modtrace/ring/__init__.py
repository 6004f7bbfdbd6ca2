"""What one event is, the ring over memory or a file, and reading it back, dead or alive."""

from __future__ import annotations

from .event import Events, Kind
from .file import MAGIC, RingImage, read_ring
from .names import NameTable, Record
from .ring import Ring
from .slots import Reading, Write

__all__ = ["MAGIC", "Events", "Kind", "NameTable", "Reading", "Record", "Ring", "RingImage", "Write", "read_ring"]
