"""Calls per step: whether a module is called more or less often, within steps or in more or fewer of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from .run_times import RunTimes
from .samples import Key

__all__ = ["Calls", "compare_calls"]

SHARES_OUTSIDE = 0.005
"""How often, of comparisons of a program that calls modules by chance, a share of steps may be said to have changed."""


class Calls(NamedTuple):
    """How often a module is called before and after.

    Attributes:
        base: spans per step before, the median of the steps in which there is any; where the share of these steps
            changed, the mean over all steps.
        new: the same after.
        changed: True where that is another number, or a side has none.
        base_share: in which part of the steps it is called; 1 where that did not change beyond chance.
        new_share: the same after.
        share_reach: by how much chance may have changed the logarithm of `new_share / base_share`.
    """

    base: float
    new: float
    changed: bool
    base_share: float = 1.0
    new_share: float = 1.0
    share_reach: float = 0.0

    @property
    def share_changed(self) -> bool:
        """Whether it is called in another part of the steps."""
        return self.base_share != self.new_share


def compare_calls(before: Sequence[RunTimes], after: Sequence[RunTimes], key: Key, keys: int) -> Calls:
    """Compare how often a module is called.

    Args:
        before: at least one recording.
        after: at least one.
        key: the module and phase.
        keys: of how many modules and phases this is one.
    """
    base, new = ([run.modules[key] for run in side if key in run.modules] for side in (before, after))
    base_calls, new_calls = (
        round(float(np.median([run.calls for run in side]))) if side else 0 for side in (base, new)
    )
    if not (base and new):
        return Calls(base_calls, new_calls, True)
    shares = _changed_shares(before, after, key, keys)
    if shares is not None:
        base_share, new_share, reach = shares
        return Calls(
            round(base_calls * base_share, 2), round(new_calls * new_share, 2), True, base_share, new_share, reach
        )
    more = min(run.fewest_calls for run in new) > max(run.most_calls for run in base)
    fewer = max(run.most_calls for run in new) < min(run.fewest_calls for run in base)
    return Calls(base_calls, new_calls, more or fewer)


def _changed_shares(
    before: Sequence[RunTimes], after: Sequence[RunTimes], key: Key, keys: int
) -> tuple[float, float, float] | None:
    """Return in which part of the steps a module is called before and after, and `share_reach`.

    None unless all recordings of one side have less of it than all of the other, by more than chance does: each step
    may have the module or not, by itself.
    """
    counts = [
        np.array([[run.modules[key].steps if key in run.modules else 0, run.steps] for run in side], np.float64)
        for side in (before, after)
    ]
    base, new = (np.minimum(side[:, 0] / side[:, 1], 1) for side in counts)
    if not (base.max() < new.min() or new.max() < base.min()):
        return None
    called, steps = np.array([side.sum(axis=0) for side in counts]).T
    base_share, new_share = np.minimum(called / steps, 1).tolist()
    pooled = min(float(called.sum() / steps.sum()), 1.0)
    rarity = float((1 / steps).sum())
    errors = NormalDist().inv_cdf(1 - SHARES_OUTSIDE / keys / 2)
    # A step more or less on either side is half a step off on average.
    if abs(new_share - base_share) - rarity / 2 <= errors * math.sqrt(pooled * (1 - pooled) * rarity):
        return None
    return base_share, new_share, errors * math.sqrt(float(((1 - np.array([base_share, new_share])) / called).sum()))
