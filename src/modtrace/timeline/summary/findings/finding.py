"""One finding, and how findings are shown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ...._tables import MS, NAME, PERCENT, Column, Table, fields_of, markdown_text
from ..slow_steps import short_ms

TRACE = "TRACE"
"""What commands call the file that the summary is of."""
MAX_FINDINGS = 7
_NEARLY = 0.101
"""How far from whole times: a first step begins late, and has no evaluation before it."""


class Finding(NamedTuple):
    """Something that stands out in a recording.

    Attributes:
        what: what it is, in a few words: `slower than its siblings`.
        where: the fully qualified name of a module, or the name of a range; None if it is neither.
        part: the part of a step that it is in, see `PartTimes`; None if it is no part of a step's time.
        ns_per_step: what it costs on average in a step, in nanoseconds; 0 if it is not a cost in time.
        share: of the time of all whole steps, from 0 to 1.
        evidence: the figures, in a sentence.
        next: a command that shows more; `TRACE` is the file.
    """

    what: str
    where: str | None
    part: str | None
    ns_per_step: int
    share: float
    evidence: str
    next: str


def ms_range(values: Iterable[float]) -> str:
    """Return `0.3-0.5 ms` for some nanoseconds, or `0.3 ms` if they are alike."""
    in_order = sorted(values)
    low, high = short_ms(in_order[0]), short_ms(in_order[-1])
    return high if low == high else f"{low.removesuffix(' ms')}-{high}"


def times_text(number: float) -> str:
    """Return `once`, `twice`, `3 times`, `1.2 times`: whole times if nearly all steps have them."""
    rounded = float(round(number)) if abs(number - round(number)) <= _NEARLY else round(number, 1)
    return {1.0: "once", 2.0: "twice"}.get(rounded, f"{rounded:,.4g} times")


_COLUMNS = (
    Column("finding", "what", NAME),
    Column("where", "where", NAME),
    Column("ms a step", "ns_per_step", MS, hidden_if="zero"),
    Column("%", "share", PERCENT, hidden_if="zero"),
    Column("evidence", "evidence", NAME),
    Column("next", "next", NAME),
)


def findings_table(findings: Sequence[Finding], looked_at: str) -> Table:
    """Return the table of findings, and what was looked at."""
    return Table(_COLUMNS, findings, fields_of(Finding), notes=[closing_line(findings, looked_at)], noun="finding")


def findings_markdown(findings: Sequence[Finding], looked_at: str, above: Sequence[str]) -> str:
    """Return the findings as GitHub has them, below a line about the recording; nothing if nothing was looked at."""
    table = findings_table(findings, looked_at)._replace(sentences=[*map(markdown_text, above)])
    if findings or not looked_at:
        return str(table.to("md")) if looked_at else ""
    return "\n\n".join([*map(markdown_text, above), *table.notes]) + "\n"


def closing_line(findings: Sequence[Finding], looked_at: str) -> str:
    """Say that nothing else stands out, or of all that was looked at nothing."""
    if len(findings) < MAX_FINDINGS:
        return "nothing else stands out" if findings else f"nothing stands out; looked at: {looked_at}"
    return ""


def findings_lines(
    findings: Sequence[Finding], looked_at: str, limit: int | None = None, evidence: int | None = None
) -> list[str]:
    """Return a line for each finding, another for the first `evidence`, one at the end; nothing without a look."""
    if not looked_at:
        return []
    lines = []
    for number, found in enumerate(findings[:limit], 1):
        cost = f": {short_ms(found.ns_per_step)} a step, {found.share:.1%}" if found.ns_per_step else ""
        lines.append(f"{number}. {f'{found.where} · ' if found.where else ''}{found.what}{cost}")
        if evidence is None or number <= evidence:
            lines.append(f"   {found.evidence}; next: {found.next}")
    hidden = len(findings[limit:]) if limit is not None else 0
    return [*lines, f"{hidden} more" if hidden else closing_line(findings, looked_at)]
