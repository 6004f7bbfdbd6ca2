"""Merged traces in Perfetto's format: the recording's packets without the profiler's."""

from __future__ import annotations

import gzip
import io
from pathlib import Path
from typing import BinaryIO, cast

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace

from ..formats.packet_stream import read_packet_batches
from ..formats.perfetto_ids import PROFILER_SEQUENCE
from ..profiler.trace.trace_file import TraceFile
from ..timeline import Timeline
from .saved_perfetto import BATCH, load_perfetto

__all__ = ["load_merged_perfetto"]


def load_merged_perfetto(path: Path) -> Timeline:
    """Read the recording out of a merged trace.

    Raises:
        TraceError: it cannot be read, is cut off, or is no such trace.
    """
    kept = io.BytesIO()
    with TraceFile(path) as source:
        unpacked = gzip.open if source.gzipped else open
    with unpacked(path, "rb") as file:
        for _, part in read_packet_batches(path, cast(BinaryIO, file), BATCH):
            packets = [p for p in Trace.FromString(part).packet if p.trusted_packet_sequence_id != PROFILER_SEQUENCE]
            kept.write(Trace(packet=packets).SerializeToString())
    kept.seek(0)
    return load_perfetto(path, kept)
