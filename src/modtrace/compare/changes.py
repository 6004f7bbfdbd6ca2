"""Change: one module and phase before and after, and what is known of the difference."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["VERDICTS", "Change"]

VERDICTS = ("slower", "faster", "same", "cannot tell", "added", "removed")


class Change(NamedTuple):
    """One module in one phase, before and after; times are nanoseconds of self time per step in which it was called.

    Times are typical ones: the mean of the faster half of the steps, which other programs' work changes least.

    Attributes:
        fqn: the module's fully qualified name; empty for the step as a whole, whose times are durations.
        phase: "forward", "backward" or "recompute", on the CPU; "GPU forward" and so on for what its kernels took;
            "step" for the step as a whole.
        base_ns: what it took before.
        new_ns: what it took after.
        difference_ns: what it takes more beside what all modules changed alike: about `new_ns` less `base_ns` times the
            `common_ratio` of the comparison.
        low_ns: lower end of the confidence interval of the difference; with as many modules as are compared, all
            intervals hold together with 95 %.
        high_ns: its upper end.
        base_calls: spans per step before, the median.
        new_calls: spans per step after, the median.
        calls_changed: True where the steps before and after have different numbers of spans, but for one in twenty.
        verdict: one of `VERDICTS`.
    """

    fqn: str
    phase: str
    base_ns: int
    new_ns: int
    difference_ns: int
    low_ns: int
    high_ns: int
    base_calls: int
    new_calls: int
    calls_changed: bool
    verdict: str

    @property
    def ratio(self) -> float:
        """The difference as a part of what it was before; infinite where that was 0."""
        return self.difference_ns / self.base_ns if self.base_ns else float("inf" if self.new_ns else 0)
