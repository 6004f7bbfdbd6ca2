"""From a file to the bytes of a trace."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

from .._errors import TraceError
from ..formats.trace_kind import format_of
from .model import Violation

__all__ = ["read"]


def read(path: str | os.PathLike[str], violations: list[Violation]) -> bytes | None:
    """Return a trace's bytes, unzipped; None, and a violation, where there is no trace to speak of."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise TraceError(path, f"cannot be read: {error.strerror}") from error
    if data[:2] == b"\x1f\x8b":
        data = _unzipped(data, violations)
    if not data.strip():
        violations.append(Violation("not-a-trace", "there is nothing in it"))
        return None
    if format_of(data) is None:
        violations.append(
            Violation("not-a-trace", f"neither Chrome JSON nor a Perfetto trace: it starts with {data[:8]!r}")
        )
        return None
    return data


def _unzipped(data: bytes, violations: list[Violation]) -> bytes:
    """Unzip every member; what comes before a fault counts, and the fault is noted with its byte in the file."""
    whole, rest = [], data
    while rest:
        member = zlib.decompressobj(wbits=31)
        try:
            whole.append(member.decompress(rest))
        except zlib.error as error:
            at = len(data) - len(rest)
            violations.append(Violation("unreadable", f"byte {at}: not gzip in the member that starts here: {error}"))
            break
        if not member.eof:
            violations.append(Violation("unreadable", f"byte {len(data)}: the gzip stream is cut off"))
            break
        rest = member.unused_data.lstrip(b"\0")
    return b"".join(whole)
