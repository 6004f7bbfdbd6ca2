"""What a summary says of torch.distributed: how many collectives, how much they moved, how long threads waited."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from .collectives import Collectives

_SHOWN_OPERATORS = 4


class OperatorTotals(NamedTuple):
    """All calls of one operator.

    Attributes:
        calls: how many.
        nbytes: of their tensors on this rank, see `Collective.nbytes`.
        call_ns: how long the calls took until they returned.
        wait_ns: how long threads waited for them, as far as modtrace sees it.
    """

    calls: int
    nbytes: int
    call_ns: int
    wait_ns: int


def sum_up_communication(collectives: Collectives) -> Mapping[str, OperatorTotals]:
    """Return the totals by operator, the most often called first; waits for what is not known are of `""`."""
    duration = collectives.end - collectives.start
    operators = [name.operator for name in collectives.names] + [""]
    totals: dict[str, OperatorTotals] = {}
    for index in np.unique(collectives.name).tolist():
        rows = collectives.name == index
        calls = rows & ~collectives.is_wait
        before = totals.get(operators[index], OperatorTotals(0, 0, 0, 0))
        totals[operators[index]] = OperatorTotals(
            before.calls + int(np.count_nonzero(calls)),
            before.nbytes + int(collectives.nbytes[calls].sum()),
            before.call_ns + int(duration[calls].sum()),
            before.wait_ns + int(duration[rows & collectives.is_wait].sum()),
        )
    return dict(sorted(totals.items(), key=lambda item: (-item[1].calls, item[0])))


def communication_line(totals: Mapping[str, OperatorTotals]) -> str:
    """Return one line; empty where there are no collectives.

    Example:
        `communication: 24 all_reduce (1.2 MB), 3 barrier; calls take 1.234 ms, waits 12.345 ms`
    """
    if not totals:
        return ""
    called = [(operator, total) for operator, total in totals.items() if total.calls]
    parts = [f"{total.calls:,} {operator}{_bytes(total.nbytes)}" for operator, total in called[:_SHOWN_OPERATORS]]
    more = sum(total.calls for _, total in called[_SHOWN_OPERATORS:])
    parts += [f"{more:,} others"] if more else []
    call_ns, wait_ns = (sum(times) for times in zip(*((t.call_ns, t.wait_ns) for t in totals.values()), strict=True))
    what = ", ".join(parts) or "only waits"
    return f"communication: {what}; calls take {call_ns / 1e6:,.3f} ms, waits {wait_ns / 1e6:,.3f} ms"


def _bytes(count: int) -> str:
    if not count:
        return ""
    value, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 999.95:
            break
        value, unit = value / 1000, larger
    return f" ({value:.0f} B)" if unit == "B" else f" ({value:.1f} {unit})"
