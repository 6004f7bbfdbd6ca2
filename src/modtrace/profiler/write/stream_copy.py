"""A JSON trace that is written while its events are read, and what is added behind them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ...formats.trace_kind import BYTE_ORDER_MARK
from ...write.atomic_file import Sink
from ..result import trailer_json
from ..trace.event_stream import Chunk, EventStream

__all__ = ["copy_chunks", "write_added", "write_end"]


def readable_envelope(data: bytes) -> bytes:
    """Return what stands around a trace's events without what readers refuse: a byte order mark, bytes of no UTF-8."""
    return data.removeprefix(BYTE_ORDER_MARK).decode("utf-8", "replace").encode()


def copy_chunks(stream: EventStream, sink: Sink) -> Iterator[Chunk]:
    """Yield the chunks of a trace, each once its bytes are written, behind what stands before the events."""
    sink.write(b'{"traceEvents":[' if stream.bare else readable_envelope(stream.head))
    comma = b""
    for chunk in stream.chunks():
        sink.write(comma)
        sink.write(chunk.raw)
        comma = b","
        yield chunk


def write_added(sink: Sink, texts: Iterable[bytes], *, follow: bool) -> None:
    """Write events behind those of the trace.

    Args:
        sink: what to write to.
        texts: each one or more events, with commas between them.
        follow: whether the trace has events before them.
    """
    for text in texts:
        sink.write(b",\n" if follow else b"\n")
        sink.write(text)
        follow = True


def write_end(sink: Sink, stream: EventStream, metadata: Mapping[str, Any]) -> None:
    """Write what follows the events: the metadata of the merge, and what followed them in the trace."""
    tail = b"" if stream.bare else readable_envelope(stream.tail)
    sink.write(trailer_json(metadata, tail, stream.keys, stream.head))
