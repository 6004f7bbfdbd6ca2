"""What one step says of who was late, and of the modules in which it was."""

from __future__ import annotations

from typing import Literal, NamedTuple

__all__ = ["OUTSIDE", "ModuleExcess", "StepFinding", "Verdict"]

OUTSIDE = ""
"""The name of what ran in no module: the optimizer, the loss, loading a batch."""

Verdict = Literal["late", "even", "cannot tell"]


class ModuleExcess(NamedTuple):
    """A module that took a rank more time than others.

    Attributes:
        fqn: its fully qualified name, or `OUTSIDE`.
        phase: one of `timeline.PHASES`; empty outside modules.
        excess_ns: its self time in the late arrivals of a step, less the median of the other ranks', ns.
        own_ns: that self time.
    """

    fqn: str
    phase: str
    excess_ns: int
    own_ns: int


class StepFinding(NamedTuple):
    """One step; times are ns.

    Attributes:
        step: its number.
        verdict: "late", one rank kept the others waiting; "even", none did by more than they all vary; "cannot tell",
            one did by less than how far the times of two ranks are off.
        rank: that rank.
        cost_ns: by how much it was more late than the median rank: increments of its lateness, without its waits.
        saved_ns: by how much earlier the others would have gone on had it been like the median.
        lateness_ns: the most that it was behind the median of the others in this step.
        bound_ns: how far that is off at most.
        noise_ns: what `cost_ns` must exceed to be told from how much all vary.
        modules: where it took more than the others, the worst first; only where the verdict is "late".
        duration_ns: of the step, the median of all ranks; 0 where it is not known.
    """

    step: int
    verdict: Verdict
    rank: int
    cost_ns: int
    saved_ns: int
    lateness_ns: int
    bound_ns: int
    noise_ns: int
    modules: tuple[ModuleExcess, ...] = ()
    duration_ns: int = 0
