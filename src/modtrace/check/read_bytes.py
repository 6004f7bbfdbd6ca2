"""Read a trace file into memory, decompressed."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

from .._errors import TraceError
from ..formats.trace_kind import format_of
from .model import Violation

__all__ = ["read_trace_bytes"]

_GZIP_MAGIC = b"\x1f\x8b"


def read_trace_bytes(path: str | os.PathLike[str], violations: list[Violation]) -> bytes | None:
    """Return a trace's bytes, decompressed; None where the file is no trace.

    Args:
        path: the file.
        violations: takes what is wrong with the file as a whole.

    Raises:
        TraceError: it cannot be opened.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise TraceError(path, f"cannot be read: {error.strerror}") from error
    if data.startswith(_GZIP_MAGIC):
        data = _decompress(data, violations)
    if not data.strip():
        violations.append(Violation("not-a-trace", "there is nothing in it"))
        return None
    if format_of(data) is None:
        violations.append(
            Violation("not-a-trace", f"neither Chrome JSON nor a Perfetto trace: it starts with {data[:8]!r}")
        )
        return None
    return data


def _decompress(data: bytes, violations: list[Violation]) -> bytes:
    """Decompress every gzip member; on a fault keep what came before it and report the byte offset in the file."""
    members, rest = [], data
    while rest:
        member = zlib.decompressobj(wbits=31)
        try:
            members.append(member.decompress(rest))
        except zlib.error as error:
            offset = len(data) - len(rest)
            message = f"byte {offset}: not gzip in the member that starts here: {error}"
            violations.append(Violation("unreadable", message))
            break
        if not member.eof:
            violations.append(Violation("unreadable", f"byte {len(data)}: the gzip stream is cut off"))
            break
        rest = member.unused_data.lstrip(b"\0")
    return b"".join(members)
