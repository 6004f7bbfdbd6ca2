"""Change: one module and phase before and after, and what is known of the difference."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["CLOCK_NS", "VERDICTS", "Change"]

VERDICTS = ("slower", "faster", "same", "cannot tell", "added", "removed")

CLOCK_NS = 1_000
"""What takes less in a step is shorter than clocks and their reading tell: it has no verdict, and no part is of it."""


class Change(NamedTuple):
    """One module in one phase, before and after; times are nanoseconds of self time per step in which it was called.

    Where it is called in another part of the steps than before, they are per step.

    Times are typical ones: the mean of the faster half of the steps, which other programs' work changes least.

    Attributes:
        fqn: the module's fully qualified name; empty for the step as a whole, whose times are durations.
        phase: "forward", "backward" or "recompute", on the CPU; "GPU forward" and so on for what its kernels took;
            "step" for the step as a whole.
        base_ns: what it took before.
        new_ns: what it took after.
        difference_ns: what it takes more beside what all modules changed alike, at the speed of the machine before:
            about `new_ns` divided by the `common_ratio` of the comparison, less `base_ns`.
        low_ns: lower end of the confidence interval of the difference; with as many modules as are compared, all
            intervals hold together with 95 %. None where there is no estimate: a side has it in no recording or in too
            few, or it takes less than 1 µs.
        high_ns: its upper end.
        base_calls: spans per step in which there are any before, the median; where these are another part of the steps
            than after, the mean over all steps (0.1: called in every tenth).
        new_calls: the same after.
        calls_changed: True where the steps before and after have different numbers of spans, but for one in twenty, or
            another part of them has any.
        verdict: one of `VERDICTS`.
        base_recordings: how many recordings before have it; those without it do not count for its time.
        new_recordings: how many after.
    """

    fqn: str
    phase: str
    base_ns: int
    new_ns: int
    difference_ns: int
    low_ns: int | None
    high_ns: int | None
    base_calls: float
    new_calls: float
    calls_changed: bool
    verdict: str
    base_recordings: int
    new_recordings: int

    @property
    def ratio(self) -> float:
        """The difference as a part of what it was before; infinite where that was less than 1 µs, the clock's limit."""
        if self.base_ns >= CLOCK_NS:
            return self.difference_ns / self.base_ns
        return float("inf" if self.new_ns >= CLOCK_NS else 0)
