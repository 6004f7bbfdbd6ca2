"""What one drops into a bug report: a trace, a page that shows it, a summary, the environment; private by default."""

from __future__ import annotations

from .archive import archive, write_archive
from .assemble import LIMIT, Report, report_of_timeline, report_of_trace

__all__ = ["LIMIT", "Report", "archive", "report_of_timeline", "report_of_trace", "write_archive"]
