"""Summary: one row per module, sorted, limited, and written in many forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .module_times import GpuTotals, ModuleTimes
from .render_csv import render_csv
from .render_html import render_html
from .render_json import from_json_values, render_json, to_json_values
from .render_markdown import render_markdown
from .render_text import render_text

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["SORT_KEYS", "Summary"]

SORT_KEYS = ("gpu", "self", "forward", "backward", "recompute", "calls", "name")
"""What a summary can be sorted by: `gpu` is GPU self time, `self` CPU self time, the phases are CPU totals."""

_SORT_FIELDS = {"gpu": "gpu_self_ns", "calls": "calls"}


@dataclass(frozen=True, slots=True)
class Summary:
    """One row per module, in the order in which the modules were first called.

    Attributes:
        rows: the rows shown.
        modules: how many rows there were before any limit.
        incomplete: spans whose enter or exit is missing; they count with the time that is known of them.
        overwritten: events that the ring had to drop, which no row can count.
        gpu: the GPU time of the whole trace; None where no GPU was profiled, and then there are no GPU columns.

    Examples:
        >>> print(timeline.summary().sort_by("backward", 10))
        >>> Path("summary.md").write_text(timeline.summary().to_markdown())
    """

    rows: Sequence[ModuleTimes]
    modules: int
    incomplete: int = 0
    overwritten: int = 0
    gpu: GpuTotals | None = None

    def sort_by(self, key: str | None = None, limit: int | None = None) -> Summary:
        """Sort the rows, times and calls descending, names ascending, and keep the first `limit` of them.

        Args:
            key: one of `SORT_KEYS`; None: GPU self time where there are GPU columns, else CPU self time.
            limit: how many rows to keep; None: all.

        Raises:
            ValueError: the key is not one of them, or is "gpu" where there are no GPU columns.
        """
        key = key or ("gpu" if self.gpu else "self")
        known = SORT_KEYS if self.gpu else SORT_KEYS[1:]
        if key not in known:
            raise ValueError(f"this summary sorts by {', '.join(known)}, not by {key!r}")
        if key == "name":
            rows = sorted(self.rows, key=lambda row: row.fqn)
        else:
            field = _SORT_FIELDS.get(key, f"{key}_ns")
            rows = sorted(self.rows, key=lambda row: getattr(row, field), reverse=True)
        return replace(self, rows=rows[:limit])

    @property
    def footer(self) -> str:
        """The GPU time of the whole trace, and which rows and time are missing; empty where there is nothing to say."""
        hidden = self.modules - len(self.rows)
        counts = [
            (hidden, f"{hidden} more modules"),
            (self.incomplete, f"{self.incomplete} spans incomplete"),
            (self.overwritten, f"{self.overwritten} events overwritten"),
        ]
        missing = ", ".join(text for count, text in counts if count)
        if self.gpu is None:
            return missing
        times = zip(("kernels", "memcpys", "memsets"), self.gpu, strict=True)
        gpu = "GPU: " + ", ".join(f"{name} {ns / 1e6:.3f} ms" for name, ns in times)
        return f"{gpu}; {missing}" if missing else gpu

    def to_markdown(self) -> str:
        """Return a GitHub table, times in ms; module names can neither break it nor render as anything but text."""
        return render_markdown(self)

    def to_csv(self) -> str:
        """Return CSV with a header line; times in ns, unprintable characters of names as escapes."""
        return render_csv(self)

    def to_html(self) -> str:
        """Return one HTML `<table>`, times in ms."""
        return render_html(self)

    def to_json(self) -> str:
        """Return a JSON object: `rows` (times in ns), `modules`, `incomplete`, `overwritten`, and `gpu` if profiled."""
        return render_json(self)

    def to_json_values(self, *, sparse: bool = False) -> dict[str, Any]:
        """Return what `to_json` writes as JSON values.

        Args:
            sparse: leave out what is 0 in a row.
        """
        return to_json_values(self, sparse=sparse)

    @classmethod
    def from_json_values(cls, values: Mapping[str, Any]) -> Summary:
        """Read what `to_json_values` returned, sparse or not.

        Raises:
            KeyError: `values` is something else.
            TypeError: `values` is something else.
        """
        return cls(**from_json_values(values))

    def __str__(self) -> str:
        return render_text(self)

    def __rich__(self) -> RenderableType:
        from .render_rich import render_rich  # a summary can be made and written without rich

        return render_rich(self)

    def _repr_html_(self) -> str:
        """Show the table in a notebook."""
        return self.to_html()
