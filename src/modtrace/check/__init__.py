"""Find what is wrong with a trace: faults that viewers drop, hide or draw wrongly without saying so."""

from __future__ import annotations

import os

from .model import Violation

__all__ = ["Violation", "check"]


def check(path: str | os.PathLike[str]) -> list[Violation]:
    """Check a Chrome JSON or Perfetto trace, plain or gzipped, written by modtrace or by anything else.

    Args:
        path: the trace.

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
    data = read_trace_bytes(path, violations)
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
