"""What a merged trace says of how it was made: the metadata's names, and reading it without parsing the events."""

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import orjson

from .._errors import TraceError
from .._numbering import Numbering
from .._system.files import read_at
from ..timeline import GpuWork, Timeline, Track
from ..timeline.contents import RANGES
from .escape import escaped, escaped_json
from .header import EDITED_FILE_ERRORS, WHAT_TO_DO
from .limits import MAX_TAIL_BYTES, check_nested_json
from .slice_args import FileSlice, add_file_slices
from .trace_file import TraceFile, format_of

MERGED = "modtrace"
"""The top-level key under which a merged trace says how it was made."""

MERGED_PACKET = f"{MERGED}_merge"
"""The name of the metadata that says the same in the first packets of a merged `.pftrace`."""

END_PACKET = f"{MERGED}_end"
"""The name of the metadata in the last packet of a merged `.pftrace`: without it the file was cut off."""

GPU_TABLE = "gpu_table"
"""The name in the metadata of what modules launched on GPUs."""

ANNOTATED_RANGES = "annotated_ranges"
"""The name in the metadata of the recording's ranges that the profiler's annotations show: of each tid, name, category,
start and end in Unix nanoseconds."""

MAX_ANNOTATED = 1 << 15
"""How many of them it has at most, so that the metadata stay small."""

_IN_JSON = f'\n],\n"{MERGED}":'.encode()
_IN_PACKETS = MERGED_PACKET.encode()


def metadata_json(metadata: Mapping[str, Any]) -> bytes:
    """Return the metadata of a merge as JSON; names that no JSON can hold, by halves of characters, as look-alikes."""
    try:
        return orjson.dumps(metadata)
    except orjson.JSONEncodeError:
        return orjson.dumps(escaped_json(dict(metadata)))


def gpu_work_in(path: str, metadata: object) -> GpuWork | None:
    """Return what modules launched on GPUs, from the metadata of a merge; None if it does not say it.

    Raises:
        TraceError: it was edited since.
    """
    values = metadata.get(GPU_TABLE) if isinstance(metadata, dict) else None
    try:
        return None if values is None else GpuWork.from_json_values(values)
    except EDITED_FILE_ERRORS as error:
        raise TraceError(path, f"its {GPU_TABLE} is not as modtrace writes it: {error!r}; {WHAT_TO_DO}") from error


def with_annotated_ranges(timeline: Timeline, path: str, metadata: object) -> Timeline:
    """Return the timeline with the ranges that the metadata of a merge have, on tracks of their own.

    Raises:
        TraceError: it was edited since.
    """
    rows = metadata.get(ANNOTATED_RANGES) if isinstance(metadata, dict) else None
    if not rows or not timeline.tracks:
        return timeline
    threads = {track.tid: track for track in reversed(timeline.tracks) if track.device is None}
    numbers = Numbering[int](len(timeline.tracks))
    try:
        ranges = [
            FileSlice(RANGES, numbers[tid], start, end, escaped(name), {"category": escaped(category)})
            for tid, name, category, start, end in rows
        ]
        added = [
            Track(RANGES, threads[tid].thread if tid in threads else str(tid), tid, timeline.tracks[0].process)
            for tid in numbers
        ]
        return add_file_slices(replace(timeline, tracks=[*timeline.tracks, *added]), ranges, ())
    except EDITED_FILE_ERRORS as error:
        problem = f"its {ANNOTATED_RANGES} are not as modtrace writes them: {error!r}; {WHAT_TO_DO}"
        raise TraceError(path, problem) from error


def read_merge_metadata(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return the metadata that `merge` wrote into a file; None for any other file.

    Raises:
        TraceError: the file cannot be read.
    """
    with TraceFile(path) as source:
        if not source.gzipped:
            # JSON has it behind its events, which need not be read then.
            begin = max(source.size - MAX_TAIL_BYTES, 0)
            metadata = _metadata(read_at(source.fileno(), MAX_TAIL_BYTES, begin))
            if metadata is not None or begin == 0:
                return metadata
        return _search_from_front(source)


def _search_from_front(source: TraceFile) -> dict[str, Any] | None:
    """Look through a whole file: packed, or in Perfetto's format, which has its metadata in front."""
    data = b""
    for block in source.blocks():
        if not data and format_of(block) is None:
            return None  # no trace, as a ring file, of which there can be very much
        found = _IN_JSON in data or _IN_PACKETS in data
        data = (data if found else data[-len(_IN_JSON) - len(_IN_PACKETS) :]) + block
        if len(data) > MAX_TAIL_BYTES:
            break
        if found and (metadata := _metadata(data)) is not None:
            return metadata
    return _metadata(data)


def _metadata(data: bytes) -> dict[str, Any] | None:
    """Return the metadata of a merge if `data` holds all of it."""
    for needle in (_IN_JSON, _IN_PACKETS):
        position = data.rfind(needle)
        # Not the first brace: the bytes in between hold the length of what follows, and one of them may look like it.
        begin = data.find(b'{"', position)
        if position < 0 or begin < 0:
            continue
        try:
            check_nested_json(data[begin:])
            metadata, _ = json.JSONDecoder().raw_decode(data[begin:].decode("utf-8", "ignore"))
        except (ValueError, RecursionError):
            continue
        return metadata if isinstance(metadata, dict) else None
    return None
