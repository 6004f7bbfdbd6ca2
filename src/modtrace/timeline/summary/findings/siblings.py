"""Modules that differ from their siblings: in time, calls, class, FLOPs or memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ...._arrays import AnyArray, Int64Array
from ...contents import place_in_lists
from ...memory import format_bytes
from ..module_rows import ModuleTimes
from ..overview import shortened
from .finding import MIN_SHARE, MIN_STEPS, Finding, RuleInput, ms_range, only_option, times_text
from .noted import NotedSteps

_LEAST_BYTES = 1 << 20
_DIFFERS, _MORE_CALLS = 2.0, 1.5
"""How many times as much as its siblings an outlier takes, and how many times as often it is called."""
_LONGER = 1.5
"""The same of its median step: on a busy machine the shortest steps alone can differ by more."""
_ALIKE = 1.6
"""Siblings are alike if the largest takes at most so many times their median. Those of one class that are not alike
have different sizes, and none of them is reported."""
_FAR_FROM = 10.0
"""How many times as much as the largest sibling an outlier takes if those in one place of a list are not alike: tiny
modules never are."""
_COLD_NS = 500_000
"""How much longer the first of them may take: it runs with cold caches and sleeping threads if the step began idle."""
_EXPLAINS = 0.7
"""What share of what a module takes too much an inner one has to take for it to be named instead."""


class _Siblings(NamedTuple):
    """Modules that are alike.

    Attributes:
        rows: their indices.
        pattern: a shell pattern of their names.
        is_place: whether they have the same place in a list; else they are of one class in one module.
    """

    rows: Int64Array
    pattern: str
    is_place: bool


class _Outlier(NamedTuple):
    """A row that differs from its siblings, and how much more it has than is usual among them."""

    row: int
    excess: float
    siblings: _Siblings


def find_outliers(measured: RuleInput, notes: NotedSteps) -> Iterator[Finding]:
    """Yield modules that take more than their siblings in most steps; then those with more FLOPs or memory."""
    rows, groups = measured.rows, list(_sibling_groups(measured, notes))
    named: set[int] = set()
    if measured.steps >= MIN_STEPS:
        least = measured.min_share_ns
        outliers = _innermost(measured, _outliers(measured.p10_ns, groups, least))
        for outlier in outliers:
            is_slower = (
                measured.module_median_ns[outlier.row]
                > _LONGER * measured.module_median_ns[outlier.siblings.rows].max()
            )
            is_cold = outlier.row < outlier.siblings.rows.min() and outlier.excess <= least + _COLD_NS
            if is_slower and not is_cold and not _is_larger(measured, outlier):
                named.add(outlier.row)
                yield _time_finding(measured, outlier, notes, measured.module_median_ns)
        yield from _own_outliers(measured, [group for group in groups if group.is_place], named, notes)
    flops = np.array([_flops_of_call(row) for row in rows])
    kept = np.array([row.retained_bytes or 0 for row in rows])
    most = measured.summary.memory.peak_bytes if measured.summary.memory is not None else 0
    for outlier in _innermost(measured, _outliers(flops, groups, MIN_SHARE * flops.max(initial=0.0))):
        if outlier.row not in named:
            named.add(outlier.row)
            times = flops[outlier.row] / max(float(np.median(flops[outlier.siblings.rows])), 1.0)
            yield _other_finding(
                measured, outlier, "has more FLOPs than its siblings", f"{times:.3g} times as many a call"
            )
    for outlier in _innermost(measured, _outliers(kept, groups, max(MIN_SHARE * most, _LEAST_BYTES))):
        if outlier.row not in named:
            usual = format_bytes(int(np.median(kept[outlier.siblings.rows])))
            text = f"a forward call keeps {format_bytes(int(kept[outlier.row]))}, its siblings {usual}"
            yield _other_finding(measured, outlier, "keeps more memory than its siblings", text, "--memory")


def _own_outliers(
    measured: RuleInput, groups: Sequence[_Siblings], named: set[int], notes: NotedSteps
) -> Iterator[Finding]:
    """Yield modules that hold others and take far more than their siblings beside these, if none is named there."""
    holds = np.array([row.fqn in measured.holders for row in measured.rows], np.bool_)
    own_ns = np.where(holds, measured.own_median_ns, 0.0)
    fqns = {measured.rows[row].fqn for row in named}
    around = {outer for fqn in fqns for outer in measured.outer[fqn]}
    for outlier in _outliers(own_ns, groups, max(measured.min_share_ns, measured.min_ns), _FAR_FROM).values():
        fqn = measured.rows[outlier.row].fqn
        # In their shortest steps too: a busy machine stops one of them in most.
        is_longer = measured.own_p10_ns[outlier.row] > _FAR_FROM * measured.own_p10_ns[outlier.siblings.rows].max()
        if is_longer and fqn not in fqns | around and fqns.isdisjoint(measured.outer[fqn]):
            named.add(outlier.row)
            yield _time_finding(measured, outlier, notes, own_ns)


def place_of(measured: RuleInput, fqn: str) -> str:
    """Return the name with `*` for its places in lists, see `place_in_lists`."""
    return place_in_lists(fqn, measured.outer)


def _sibling_groups(measured: RuleInput, notes: NotedSteps) -> Iterator[_Siblings]:
    by_key: dict[tuple[str, str], list[int]] = {}
    for index, row in enumerate(measured.rows):
        if not row.fqn or not measured.runs.calls[index]:
            continue
        place, around = place_of(measured, row.fqn), row.fqn.rpartition(".")[0]
        if "*" in place and notes.has_siblings(place):
            by_key.setdefault((place, ""), []).append(index)
        by_key.setdefault((f"{around}.*", row.module_class), []).append(index)
    for (pattern, module_class), members in by_key.items():
        if len(members) >= (4 if module_class else 3):
            yield _Siblings(np.array(members), pattern, is_place=not module_class)


def _outliers(
    values: AnyArray, groups: Sequence[_Siblings], least: float, times: float = _DIFFERS
) -> dict[int, _Outlier]:
    """Return the rows that differ from their group, by row; the first group in which a row differs tells how.

    They have so many `times` as much as the largest of siblings that are alike.
    """
    found: dict[int, _Outlier] = {}
    for group in groups:
        each = values[group.rows]
        in_order = np.sort(each)
        rest = in_order[: len(each) - max(1, len(each) // 3)]
        usual, largest = float(np.median(rest)), float(rest[-1])
        alike = largest <= (_ALIKE * usual if len(rest) > 2 else _DIFFERS * float(rest[0]))
        if not alike and not group.is_place:
            continue
        differs = (each > (times if alike else _FAR_FROM) * largest) & (each - usual > least)
        siblings = group._replace(rows=group.rows[~differs])
        for row in group.rows[differs].tolist():
            found.setdefault(row, _Outlier(row, float(values[row] - usual), siblings))
    return found


def _innermost(measured: RuleInput, outliers: dict[int, _Outlier]) -> list[_Outlier]:
    """Leave out modules that differ by one inside them, and those inside of one that differs by several."""
    at = {measured.rows[row].fqn: row for row in outliers}
    left_out: set[int] = set()
    for fqn, row in sorted(at.items(), key=lambda item: -item[0].count(".")):
        around = [at[outer] for outer in measured.outer[fqn] if outer in at]
        if row in left_out:
            continue
        explained = [outer for outer in around if outliers[row].excess >= _EXPLAINS * outliers[outer].excess]
        if len(explained) < len(around):
            left_out.add(row)
        else:
            left_out.update(explained)
    return [outlier for row, outlier in outliers.items() if row not in left_out]


def _is_larger(measured: RuleInput, outlier: _Outlier) -> bool:
    """Whether a module in no list has more to compute: then its backward is longer as well."""
    row, siblings = measured.rows[outlier.row], [measured.rows[index] for index in outlier.siblings.rows.tolist()]
    usual = float(np.median([one.backward_ns / max(one.calls, 1) for one in siblings]))
    return not outlier.siblings.is_place and row.backward_ns / max(row.calls, 1) > _DIFFERS * usual > 0


def _time_finding(measured: RuleInput, outlier: _Outlier, notes: NotedSteps, ns: AnyArray) -> Finding:
    """Return that a module is slower, by such times in a step: of all modules, or what they take themselves."""
    row, siblings = measured.rows[outlier.row], [measured.rows[index] for index in outlier.siblings.rows.tolist()]
    said = [f"{ms_range([ns[outlier.row]])} a step, its siblings {ms_range(ns[outlier.siblings.rows])}"]
    said[0] += " (medians)" if ns is measured.module_median_ns else " themselves, beside inner modules (medians)"
    calls, usual_calls = measured.calls[outlier.row], float(np.median(measured.calls[outlier.siblings.rows]))
    classes = _classes(siblings)
    what = "is slower than its siblings"
    part = _part_of(row, siblings)
    if row.module_class not in classes:
        what = f"is {row.module_class}, its siblings {shortened(classes, 2)}, and slower"
    elif usual_calls and calls >= _MORE_CALLS * usual_calls:
        what = "is called more often than its siblings"
    if usual_calls and calls >= _MORE_CALLS * usual_calls:
        said.append(f"called {times_text(calls)} a step, they {times_text(usual_calls)}")
    else:
        own = _is_own(measured, row, siblings, part)
        said.append(f"mostly its own {part}, outside of inner modules" if own else f"mostly {part}")
        if own and part == "forward":
            said.append(notes.python_text(row.fqn, measured.own_ns(outlier.row)[0]))
    said.extend([notes.size_text(row.fqn), notes.hooks_text(row.fqn), notes.inside_text(row.fqn, float(calls))])
    if row.flops_forward is not None:
        ratio = _flops_of_call(row) / max(float(np.median([_flops_of_call(one) for one in siblings])), 1.0)
        said.append(f"{ratio:.3g} times the FLOPs a call" if ratio >= _MORE_CALLS else "with no more FLOPs a call")
    kept = [one.retained_bytes or 0 for one in siblings]
    if (row.retained_bytes or 0) > _DIFFERS * max(*kept, _LEAST_BYTES):
        said.append(f"keeps {format_bytes(row.retained_bytes or 0)}, they {format_bytes(int(np.median(kept)))}")
    show = only_option(outlier.siblings.pattern)
    return measured.finding(what, row.fqn, part, evidence=", ".join(filter(None, said)), show=show, ns=outlier.excess)


def _other_finding(
    measured: RuleInput, outlier: _Outlier, what: str, evidence: str, option: str = "--flops"
) -> Finding:
    row = measured.rows[outlier.row]
    classes = _classes(measured.rows[index] for index in outlier.siblings.rows.tolist())
    if row.module_class not in classes:
        evidence += f"; it is {row.module_class}, they {shortened(classes, 2)}"
    show = f"{only_option(outlier.siblings.pattern)} {option}"
    return measured.finding(what, row.fqn, evidence=evidence, show=show)


def _flops_of_call(row: ModuleTimes) -> float:
    flops = (row.flops_forward or 0) + (row.flops_backward or 0) + (row.flops_recompute or 0)
    return flops / max(row.calls, 1)


def _classes(siblings: Iterable[ModuleTimes]) -> list[str]:
    return list(dict.fromkeys(sibling.module_class for sibling in siblings))


def _part_of(row: ModuleTimes, siblings: Sequence[ModuleTimes]) -> str:
    """Return the phase in which a call takes most more than those of its siblings."""
    phases = ("forward", "backward", "recompute")
    return phases[int(np.argmax([_more_a_call(row, siblings, f"{phase}_ns") for phase in phases]))]


def _is_own(measured: RuleInput, row: ModuleTimes, siblings: Sequence[ModuleTimes], part: str) -> bool:
    """Whether what a module takes more in a phase is outside of its inner modules, of which it has some."""
    own = _more_a_call(row, siblings, f"{part}_self_ns") >= _EXPLAINS * _more_a_call(row, siblings, f"{part}_ns")
    return own and any(around[:1] == [row.fqn] for around in measured.outer.values())


def _more_a_call(row: ModuleTimes, siblings: Sequence[ModuleTimes], field: str) -> float:
    usual = float(np.median([getattr(one, field) / max(one.calls, 1) for one in siblings]))
    return float(getattr(row, field)) / max(row.calls, 1) - usual
