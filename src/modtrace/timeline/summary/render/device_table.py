"""What the streams of devices did: a line about all, and a table of modules."""

from __future__ import annotations

from ...._tables import CellKind, Table, to_text, without_columns
from ...._terminal import counted, wrapped
from ..device_summary import DeviceSummary

__all__ = ["device_table", "device_totals", "render_device"]

_COLUMNS: tuple[tuple[str, str, int], ...] = (
    ("module", "fqn", 0),
    ("class", "module_class", 6),
    ("calls", "calls", 4),
    ("total ms", "total_ns", 0),
    ("self", "self_ns", 2),
    ("forward", "forward_ns", 3),
    ("backward", "backward_ns", 3),
    ("recompute", "recompute_ns", 5),
    ("latency p50", "latency_p50_ns", 1),
)
"""Heading, field, and how soon a column is left out where there is no room; 0 never."""
_NOTE = (
    "times from event to event, with what the stream waited for the host; latency: from the begin on a thread until "
    "the stream came by, which a stream that waits for the host does at once"
)


def render_device(device: DeviceSummary | None, limit: int | None = None, width: int | None = None) -> str:
    """Return a line about all streams, and the table of modules; nothing where there is no device."""
    if device is None:
        return ""
    table, _ = without_columns(device_table(device).first_rows(limit), width)
    lines = [*wrapped(device_totals(device), width), *to_text(table, width)]
    hidden = len(device.rows) - len(table.rows)
    if hidden:
        lines.append(counted(hidden, "more module"))
    lines += wrapped(_NOTE, width)
    return "\n".join(lines)


def device_table(device: DeviceSummary) -> Table:
    """Return the table of modules, the one with the longest total first; times in ms."""
    columns = [column for column in _COLUMNS if column[1] != "recompute_ns" or any(r.recompute_ns for r in device.rows)]
    cells = [
        [
            f"{value / 1e6:.3f}" if field.endswith("_ns") else str(value)
            for _, field, _ in columns
            for value in [getattr(row, field)]
        ]
        for row in device.rows
    ]
    kinds: list[CellKind] = ["name" if field in {"fqn", "module_class"} else "number" for _, field, _ in columns]
    return Table([heading for heading, _, _ in columns], cells, kinds, [rank for _, _, rank in columns])


def device_totals(device: DeviceSummary) -> str:
    """Return how long the streams were in modules, their gaps, the bound of the clock, and what was lost."""
    share = 100 * device.in_modules_ns / device.length_ns if device.length_ns else 0.0
    text = (
        f"{counted(device.streams, 'stream')} of devices: in modules {share:.1f} % of {device.length_ns / 1e6:,.3f} ms"
    )
    if device.gaps:
        mean_ns = (device.length_ns - device.in_modules_ns) / device.gaps
        text += f", {counted(device.gaps, 'gap')} of {mean_ns / 1e6:.3f} ms on average"
    text += f"; ±{device.bound_ns / 1e3:.1f} µs on the host's clock"
    if device.dropped:
        text += f"; {counted(device.dropped, 'event')} dropped, as too many were not read yet"
    if device.unread:
        text += f"; {counted(device.unread, 'event')} never read"
    return text
