"""A ring's events of devices → spans above their streams."""

from __future__ import annotations

from .add_spans import add_device_spans

__all__ = ["add_device_spans"]
