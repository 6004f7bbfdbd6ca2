"""Bug reports: a `.zip` with a trace, a page that shows it, a summary and the environment; private by default."""

from __future__ import annotations

from .archive import write_archive, zip_bytes
from .assemble import MAX_REPORT_BYTES, Report, report_file, report_timeline, write_report

__all__ = ["MAX_REPORT_BYTES", "Report", "report_file", "report_timeline", "write_archive", "write_report", "zip_bytes"]
