"""A ring's events of devices → spans above their streams."""

from __future__ import annotations

from .add_spans import add_device_spans
from .device_clocks import device_clocks
from .points import QueuedEvents, collective_points, queued_events, stream_ids

__all__ = ["QueuedEvents", "add_device_spans", "collective_points", "device_clocks", "queued_events", "stream_ids"]
