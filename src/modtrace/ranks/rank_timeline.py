"""The timeline of one rank, in its own time."""

from __future__ import annotations

from ..read import load
from ..ring import read_ring
from ..timeline import Timeline, build_timeline
from .rank_folder import RankFile

__all__ = ["load_own_time"]

_OWN_ANCHOR = {"kind": "anchor", "monotonic": 0, "wall": 0}


def load_own_time(file: RankFile) -> Timeline:
    """Read a rank's recording in its own time: monotonic nanoseconds of a ring, Unix nanoseconds of a trace.

    Raises:
        ModtraceError: it cannot be read.
    """
    if not file.is_ring:
        return load(file.path)
    snapshot = read_ring(file.path)
    records = [record for record in snapshot.records if record["kind"] != "anchor"]
    return build_timeline(snapshot._replace(records=[*records, _OWN_ANCHOR]))
