"""What is wrong with a trace: the faults that viewers drop, hide or draw wrongly without a word."""

from __future__ import annotations

import os

from .model import Violation

__all__ = ["Violation", "check"]


def check(path: str | os.PathLike[str]) -> list[Violation]:
    """Check a Chrome JSON or Perfetto trace, plain or gzipped, of modtrace or of anything else.

    Returns:
        What breaks a rule, in the order of the rules and then of the file; empty for a good trace.

    Raises:
        TraceError: the file itself cannot be opened.
    """
    from ..formats.trace_kind import format_of
    from . import read_bytes as source
    from . import structure_rules as structure
    from .track_layout import lay_out

    violations: list[Violation] = []
    data = source.read(path, violations)
    if data is None:
        return violations
    if format_of(data) == "chrome":
        from .chrome_rules import read
    else:
        from .perfetto_rules import read  # slow to import
    layout = lay_out(read(data, violations))
    for rule in structure.RULES:
        violations.extend(rule(layout))
    return violations
