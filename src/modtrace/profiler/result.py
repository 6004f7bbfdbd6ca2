"""What a merge did, for the caller and in the metadata of the trace it wrote."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from .._errors import TraceError
from ..formats.escape import escaped_json
from ..timeline import Summary

__all__ = [
    "END_PACKET",
    "MERGED",
    "MERGED_PACKET",
    "MergeResult",
    "Path",
    "metadata_json",
    "refuse_merged",
    "trailer_json",
]

MERGED = "modtrace"
"""The top-level key under which a merged trace says how it was made."""

MERGED_PACKET = f"{MERGED}_merge"
"""The name of the metadata that says the same in the first packets of a merged `.pftrace`."""

END_PACKET = f"{MERGED}_end"
"""The name of the metadata in the last packet of a merged `.pftrace`: without it the file was cut off."""

Path = str | os.PathLike[str]


@dataclass(frozen=True)
class MergeResult:
    """What a merge did.

    Attributes:
        path: the file it wrote.
        alignment: how well the recording lies over the trace; empty where there was no recording.
        spans: how many spans were written above the process' threads.
        gpu_spans: how many above the streams of GPUs.
        summary: what each module took.
        notes: what the user should know.
        metadata: what the trace's metadata says; JSON values.
    """

    path: str
    alignment: str
    spans: int
    gpu_spans: int
    summary: Summary
    notes: list[str] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{self.path}: {self.spans} spans above threads, {self.gpu_spans} above GPU streams"]
        return "\n".join([*lines, *([self.alignment] if self.alignment else []), *self.notes])


def refuse_merged(keys: Mapping[str, Any], path: str) -> None:
    """Refuse a trace that was merged before.

    Raises:
        TraceError: it was.
    """
    if MERGED in keys:
        raise TraceError(
            path,
            "this trace was merged before and holds its recording: open it as it is, or merge the profiler's own trace",
        )


def metadata_json(metadata: Mapping[str, Any]) -> bytes:
    """Return the metadata of a merge as JSON; names that no JSON can hold, by halves of characters, as look-alikes."""
    try:
        return orjson.dumps(metadata)
    except orjson.JSONEncodeError:
        return orjson.dumps(escaped_json(dict(metadata), {}))


def trailer_json(metadata: Mapping[str, Any], tail: bytes, keys: Mapping[str, Any], head: bytes) -> bytes:
    """Return what follows the events.

    Args:
        metadata: of the merge.
        tail: the profiler's bytes from the `]` on; empty where they are cut off, or close a bare array.
        keys: the profiler's top-level keys.
        head: its bytes before the events.
    """
    trailer = b'\n],\n"%b":%b' % (MERGED.encode(), metadata_json(metadata))
    if tail:
        return trailer + tail[1:]
    base = keys.get("baseTimeNanoseconds")
    if base is not None and b'"baseTimeNanoseconds"' not in head:
        trailer += b',\n"baseTimeNanoseconds":%d' % base
    return trailer + b"\n}\n"
