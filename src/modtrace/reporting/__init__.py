"""Bug reports: a `.zip` with a trace, a page that shows it, a summary and the environment; private by default."""

from .assemble import MAX_REPORT_BYTES, Report, report, zip_bytes

__all__ = ["MAX_REPORT_BYTES", "Report", "report", "zip_bytes"]
