"""What is wrong with a trace: the faults that viewers drop, hide or draw wrongly without a word."""

from __future__ import annotations

import os

from .event import Violation

__all__ = ["Violation", "check"]


def check(path: str | os.PathLike[str]) -> list[Violation]:
    """Check a Chrome JSON or Perfetto trace, plain or gzipped, of modtrace or of anything else.

    Returns:
        What breaks a rule, in the order of the rules and then of the file; empty for a good trace.

    Raises:
        TraceError: the file itself cannot be opened.
    """
    from ..read.formats import format_of
    from . import source, structure
    from .layout import lay_out

    violations: list[Violation] = []
    data = source.read(path, violations)
    if data is None:
        return violations
    if format_of(data) == "chrome":
        from .chrome import read
    else:
        from .perfetto import read  # slow to import
    layout = lay_out(read(data, violations))
    for rule in structure.RULES:
        violations.extend(rule(layout))
    return violations
