"""A report as `.zip`: the trace, a page that shows it, a summary and the environment; nothing private."""

from __future__ import annotations

import logging
import os

from ..report import LIMIT, report_of_timeline, write_archive
from ..timeline import Timeline

__all__ = ["write_report"]

_log = logging.getLogger("modtrace")


def write_report(
    timeline: Timeline, path: str | os.PathLike[str], *, anonymize: bool = False, limit: int = LIMIT
) -> None:
    """Write what one attaches to an issue.

    Args:
        timeline: what it is about.
        path: a `.zip`.
        anonymize: replace names of modules and classes by aliases.
        limit: bytes that it may have; of a longer timeline it holds the last steps, and a warning is logged.

    Raises:
        WriteError: nothing of the timeline fits, or the file cannot be written; an existing file is intact.
    """
    report = report_of_timeline(timeline, anonymize=anonymize, limit=limit)
    write_archive(report.files, path)
    if report.cut is not None:
        _log.warning("%s holds %s, so that it has no more than %d MB", os.fspath(path), report.cut, limit // 10**6)
