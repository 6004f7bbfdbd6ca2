"""Steps that take longer and longer: what they are given grows, or what the program keeps."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...._arrays import AnyArray, Int64Array
from ...._tables import counted
from ..slow_steps import short_ms
from .finding import Finding, Measured
from .siblings import place_of

_LEAST_RUN, _MOST_STEPS = 12, 0.75
"""Steps of a run that is long enough for quarters of three, and the share of all steps that such runs have."""
_FALLS_TO, _NEAR = 0.75, 8
"""A run ends where half of so many steps take at most this share of what three quarters of those before take at least,
as where a new request begins."""
_GROWS, _GROWS_ALONE, _FEW_RUNS, _EVEN = 1.5, 2.0, 2, 0.1
"""How many times as long as the first quarters of runs the last ones take, more if there are so few runs, as a machine
can get busier twice; and what share of that each quarter adds at least: a second length of inputs is one jump."""
_EXCEED = 0.9
"""Share of the pairs of a step in a last and one in a first quarter of which the later one takes longer: on a busy
machine levels alone rise by chance."""
_MOSTLY = 0.7
"""What share of what is added a part or a module has for it to be named."""


def find_growing_steps(measured: Measured) -> Iterator[Finding]:
    """Yield that steps take longer and longer, from each time on that they are short again, and what does."""
    ns = measured.duration_ns
    runs = [run for run in _runs(ns) if len(run) >= _LEAST_RUN]
    if sum(map(len, runs)) < _MOST_STEPS * max(measured.steps, 1):
        return
    quarters = [np.concatenate(each) for each in zip(*(np.array_split(run[1:], 4) for run in runs), strict=True)]
    # A busy machine makes steps longer, and none shorter.
    levels = np.array([np.percentile(ns[quarter], 25) for quarter in quarters])
    more = levels[-1] - levels[0]
    least = _GROWS if len(runs) > _FEW_RUNS else _GROWS_ALONE
    if levels[-1] < least * levels[0] or np.diff(levels).min() < _EVEN * more:
        return
    first, last = quarters[0], quarters[-1]
    if np.searchsorted(np.sort(ns[first]), ns[last]).mean() < _EXCEED * len(first):
        return
    low, high = float(np.median(ns[first])), float(np.median(ns[last]))
    per_step = sum(float(np.maximum(ns[run] - low, 0).sum()) for run in runs) / measured.steps
    added = measured.ns[last].mean(axis=0) - measured.ns[first].mean(axis=0)
    part = measured.parts[int(np.argmax(added))] if added.max() >= _MOSTLY * added.sum() else None
    evidence = f"from {short_ms(low)} to {short_ms(high)} in "
    evidence += f"{counted(len(runs), 'run')} of {max(map(len, runs))} steps" if len(runs) > 1 else f"{len(ns)} steps"
    place, where, inner = _place(measured, measured.module_ns(last) - measured.module_ns(first), float(added.sum()))
    if part == "backward":
        evidence += ", in backward alone: the graphs of earlier steps are kept, without detach()"
    elif where is not None:
        evidence += f", in {place}, {'in all modules inside' if inner >= _MOSTLY else 'in its own time'}"
        is_whole = inner >= _MOSTLY and not measured.trains
        evidence += ": inputs grow, as those of a model that gets all tokens again, without a cache" if is_whole else ""
    what = "takes longer from step to step"
    yield measured.finding(what, where, part, evidence=evidence, show="--by step", ns=per_step)


def _place(measured: Measured, added: AnyArray, most_of: float) -> tuple[str, str | None, float]:
    """Return the innermost place that most is added in, the module there or around, and the share of inner ones."""
    by_place: dict[str, list[int]] = {}
    for index, row in enumerate(measured.rows):
        by_place.setdefault(place_of(measured, row.fqn), []).append(index)
    more = {place: float(added[members].sum()) for place, members in by_place.items()}
    known = [place for place, ns in more.items() if ns >= _MOSTLY * most_of > 0]
    if not known:
        return "", None, 0.0
    place = max(known, key=lambda place: (place.count("."), more[place]))
    fqns = {measured.rows[index].fqn for index in by_place[place]}
    inner = [index for index, row in enumerate(measured.rows) if fqns.intersection(measured.outer[row.fqn][:1])]
    first = measured.rows[by_place[place][0]].fqn
    where = next(iter(measured.outer[first]), None) if len(fqns) > 1 else first
    return place, where, float(added[inner].sum()) / more[place]


def _runs(ns: Int64Array) -> list[Int64Array]:
    """Return the indices of steps in runs, each from where steps are short again on."""
    if len(ns) < 2 * _NEAR:
        return [np.arange(len(ns))]
    windows = np.sort(np.lib.stride_tricks.sliding_window_view(ns, _NEAR), axis=1)
    falls = np.ones(len(ns))
    falls[_NEAR : 1 - _NEAR] = windows[_NEAR:, _NEAR // 2] / np.maximum(windows[:-_NEAR, _NEAR // 4], 1)
    low = np.flatnonzero(falls <= _FALLS_TO).tolist()
    cuts = [at for at in low if falls[at] == falls[at - _NEAR + 1 : at + _NEAR].min()]
    return np.split(np.arange(len(ns)), cuts)
