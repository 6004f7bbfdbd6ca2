"""Durations for people."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["format_durations"]


def format_durations(seconds: Sequence[float]) -> str:
    """Return seconds for people, of several the shortest and the longest."""
    shortest, longest = _format_seconds(min(seconds)), _format_seconds(max(seconds))
    return shortest if shortest == longest else f"{shortest} to {longest}"


def _format_seconds(seconds: float) -> str:
    if 0 < seconds < 0.00005:
        return "<0.1 ms"
    if seconds < 0.0095:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"
