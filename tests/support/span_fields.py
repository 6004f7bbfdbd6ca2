"""The fields that tests give to the slices of modules."""

from __future__ import annotations

from modtrace.timeline.slices import DTYPES

__all__ = ["SPAN_FIELDS"]

SPAN_FIELDS = [field for field in DTYPES if field not in ("kind", "detail")]
"""All fields except those that a table of modules can omit."""
