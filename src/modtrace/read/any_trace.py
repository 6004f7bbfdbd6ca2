"""What kind of file a trace is, and what has to become of it before it can be looked at."""

from __future__ import annotations

import enum
import gzip
import io
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from ..formats.trace_kind import format_of
from ..ring.file import MAGIC

if TYPE_CHECKING:
    from ..timeline import Timeline

__all__ = ["Kind", "drawable", "kind_of", "timeline_of"]


class Kind(enum.Enum):
    """What a file is, by its content."""

    RING = "a ring file"
    SAVED = "a trace that modtrace saved, in JSON"
    PROFILE = "a trace of torch.profiler"
    MERGED = "a merged trace, in JSON"
    PACKETS = "a trace in Perfetto's format"
    MERGED_PACKETS = "a merged trace, in Perfetto's format"
    OTHER = "something else"


def kind_of(path: str | os.PathLike[str]) -> Kind:
    """Return what a file is.

    Raises:
        TraceError: it cannot be read, or is JSON but no trace.
    """
    from ..profiler import read_merge_metadata
    from ..profiler.trace.event_stream import EventStream
    from ..profiler.trace.trace_file import TraceFile

    with TraceFile(path) as source:
        head = next(source.blocks(), b"")
    if head.startswith(MAGIC):
        return Kind.RING
    format_ = format_of(head)
    if format_ == "chrome":
        with TraceFile(path) as source:
            said = EventStream(source).keys.get("otherData")
        if isinstance(said, dict) and "modtrace" in said:
            return Kind.SAVED
        return Kind.PROFILE if read_merge_metadata(path) is None else Kind.MERGED
    if format_ == "perfetto":
        return Kind.PACKETS if read_merge_metadata(path) is None else Kind.MERGED_PACKETS
    return Kind.OTHER


def drawable(path: str | os.PathLike[str], folder: Path) -> tuple[Path, list[str]]:
    """Return a file that the Perfetto UI draws module tracks of, and what the user should know.

    It is the file itself, or one that was made of it in `folder`.

    Raises:
        RingError: a ring file is damaged beyond reading.
        TraceError: it is no trace, or broken.
    """
    kind = kind_of(path)
    made = folder / "trace.pftrace"
    if kind is Kind.PROFILE:
        from ..profiler import merge

        return made, merge(path, None, made).notes
    if kind in (Kind.RING, Kind.OTHER):
        timeline_of(path, kind).save(made)
        return made, []
    return Path(path), []


def timeline_of(path: str | os.PathLike[str], kind: Kind | None = None) -> Timeline:
    """Return the timeline in any trace: recorded, merged, or made from what a profiler's trace knows of modules.

    Args:
        path: the file.
        kind: what it is, where that is known already.

    Raises:
        RingError: a ring file is damaged beyond reading.
        TraceError: it is no trace, or broken.
    """
    from . import load

    kind = kind or kind_of(path)
    if kind is Kind.PROFILE:
        return _reconstructed(path)
    if kind is Kind.MERGED:
        return _merged(path)
    if kind is Kind.MERGED_PACKETS:
        return _merged_packets(path)
    return load(path)


def _reconstructed(path: str | os.PathLike[str]) -> Timeline:
    from ..profiler.attribute.overlay import overlay
    from ..profiler.trace.event_columns import EventCollector
    from ..profiler.trace.event_stream import EventStream
    from ..profiler.trace.trace_file import TraceFile, base_time_ns

    collector = EventCollector()
    with TraceFile(path) as source:
        stream = EventStream(source)
        for chunk in stream.chunks():
            collector.add(chunk.events)
        timeline = overlay(None, collector.events(), stream.keys, source.path).timeline
        base = base_time_ns(stream.keys, source.path)
    columns = replace(timeline.columns, start=timeline.columns.start + base, end=timeline.columns.end + base)
    return replace(timeline, columns=columns)


def _merged(path: str | os.PathLike[str]) -> Timeline:
    from ..profiler.trace.event_stream import EventStream
    from ..profiler.trace.trace_file import TraceFile, base_time_ns
    from .merged_json import ModuleRows

    rows = ModuleRows()
    with TraceFile(path) as source:
        stream = EventStream(source)
        for chunk in stream.chunks():
            rows.add(chunk.events)
        base = base_time_ns(stream.keys, source.path)
    return rows.timeline(base)


def _merged_packets(path: str | os.PathLike[str]) -> Timeline:
    """Read the recording's packets, which are as they always are, without the profiler's."""
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace

    from ..formats.packet_stream import read_packet_batches
    from ..formats.perfetto_ids import PROFILER_SEQUENCE
    from ..profiler.trace.trace_file import TraceFile
    from .perfetto import BATCH, load_perfetto

    kept = io.BytesIO()
    with TraceFile(path) as source:
        unpacked = gzip.open if source.gzipped else open
    with unpacked(path, "rb") as file:
        for _, part in read_packet_batches(Path(path), cast(BinaryIO, file), BATCH):
            packets = [p for p in Trace.FromString(part).packet if p.trusted_packet_sequence_id != PROFILER_SEQUENCE]
            kept.write(Trace(packet=packets).SerializeToString())
    kept.seek(0)
    return load_perfetto(Path(path), kept)
