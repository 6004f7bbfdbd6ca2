"""Find what is wrong with a trace: faults that viewers drop, hide or draw wrongly without saying so."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from .._errors import RingError, TraceError
from .model import Violation

__all__ = ["Violation", "check"]


def check(path: str | os.PathLike[str]) -> list[Violation]:
    """Check a Chrome JSON or Perfetto trace, plain or gzipped, written by modtrace or by anything else.

    Of a report's `.zip` the trace inside is checked, of a ring file what `modtrace convert` makes of it.

    Args:
        path: the file.

    Returns:
        One violation per broken rule and place: first those of the file and of single events in file order, then
        those between events, rule by rule. Empty for a good trace.

    Raises:
        TraceError: the file itself cannot be opened.

    Example:
        >>> for violation in check("step.json"):
        ...     print(violation.rule, violation.message)
    """
    from ..formats.trace_kind import format_of
    from .read_bytes import read_trace_bytes
    from .structure_rules import STRUCTURE_RULES
    from .track_layout import lay_out

    violations: list[Violation] = []
    with tempfile.TemporaryDirectory(prefix="modtrace-") as folder:
        try:
            trace = _trace_of(path, Path(folder))
        except RingError as error:
            return [Violation("not-a-trace", str(error))]
        data = read_trace_bytes(trace, violations)
    if data is None:
        return violations
    if format_of(data) == "chrome":
        from .chrome_rules import read_chrome as read_events
    else:
        from .perfetto_rules import read_perfetto as read_events  # protobuf is slow to import
    layout = lay_out(read_events(data, violations))
    for rule in STRUCTURE_RULES:
        violations.extend(rule(layout))
    return violations


def _trace_of(path: str | os.PathLike[str], folder: Path) -> Path:
    """Return the file that is checked; it is made in `folder` where `path` is no trace but holds one."""
    from ..read import FileKind, extract_trace, file_kind_by_head, load

    try:
        trace = extract_trace(path, folder)
    except TraceError:
        return Path(path)  # its bytes are judged as they are
    if file_kind_by_head(trace) is FileKind.RING:
        made = folder / "ring.pftrace"
        load(trace).save(made)
        return made
    return trace
