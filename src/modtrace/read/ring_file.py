"""A ring file → a timeline, with what a watcher knows of the run beyond it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..ring import read_ring
from ..timeline import Timeline, build_timeline
from ..timeline.contents import WHOLE_RUN
from ..watching.read_whole_run import read_whole_run


def load_ring(path: Path) -> Timeline:
    """Read a ring file.

    Raises:
        RingError: it is damaged beyond reading.
    """
    snapshot = read_ring(path)
    timeline = build_timeline(snapshot)
    known, whole = timeline.metadata[WHOLE_RUN], read_whole_run(path, snapshot.records)
    if whole is None or not isinstance(known, dict):
        return timeline
    is_all = not whole["missed_events"]
    seen = {field: whole[field] for field in ("steps", "spans") if is_all and known[field] is None}
    return replace(timeline, metadata={**timeline.metadata, WHOLE_RUN: known | seen})
