"""Rules for modules that differ from their siblings in time, calls, class, FLOPs or memory, or are called again."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ...._arrays import AnyArray, Int64Array
from ...contents import place_in_lists
from ...memory import format_bytes
from ..module_rows import ModuleTimes
from ..overview import shortened
from ..slow_steps import short_ms
from .finding import MIN_SHARE, MIN_STEPS_FOR_MEDIANS, Finding, RuleInput, ms_range, only_option, times_text
from .noted import MIN_SAME_INPUTS, NotedSteps

_MIN_BYTES = 1 << 20
_MIN_RATIO = 2.0
"""Minimum ratio of an outlier to its largest sibling."""
_MIN_CALLS_RATIO = 1.5
"""Minimum ratio of an outlier's calls, or of its FLOPs in a call, to the median of its siblings."""
_MIN_MEDIAN_RATIO = 1.5
"""Minimum ratio of the median steps: on a busy machine, 10th percentiles can differ by more."""
_MAX_SPREAD = 1.6
"""Maximum ratio of the largest sibling to their median; modules of one class with more differ in size."""
_MIN_RATIO_OF_UNLIKE = 10.0
"""Minimum ratio to the largest sibling in one list pattern with a wider spread, as all tiny modules have."""
_COLD_NS = 500_000
"""Extra time in ns that is normal for the first module: its caches are cold, and threads may have slept before."""
_MAX_UNLIKENESS = 3.0
"""Maximum ratio of the ratios to siblings in forward and backward for larger inputs; a hook slows only one phase."""
_MIN_INNER_SHARE = 0.7
"""Minimum share of a module's excess that an inner module has to be named instead."""


class _Siblings(NamedTuple):
    """Modules that should behave alike.

    Attributes:
        rows: indices of their rows.
        pattern: shell pattern of their names.
        in_list: whether they have one list pattern; otherwise they have one class and one parent.
    """

    rows: Int64Array
    pattern: str
    in_list: bool


class _Outlier(NamedTuple):
    """A row that differs from its siblings; `excess` is its value minus their median."""

    row: int
    excess: float
    siblings: _Siblings


def find_outliers(rule_input: RuleInput, notes: NotedSteps) -> Iterator[Finding]:
    """Yield modules that are slower than their siblings in most steps, then those with more FLOPs or memory."""
    rows, groups = rule_input.rows, list(_group_siblings(rule_input, notes))
    reported: set[int] = set()
    if rule_input.steps >= MIN_STEPS_FOR_MEDIANS:
        min_ns, median_ns = rule_input.min_share_ns, rule_input.module_median_ns
        for outlier in _keep_innermost(rule_input, _find_outliers(rule_input.p10_ns, groups, min_ns)):
            is_slower = median_ns[outlier.row] > _MIN_MEDIAN_RATIO * median_ns[outlier.siblings.rows].max()
            is_cold = outlier.row < outlier.siblings.rows.min() and outlier.excess <= min_ns + _COLD_NS
            is_explained = _is_larger(rule_input, outlier) or _is_by_recompute(rule_input, outlier)
            if is_slower and not is_cold and not is_explained:
                reported.add(outlier.row)
                yield _make_time_finding(rule_input, outlier, notes, median_ns)
        yield from _find_own_outliers(rule_input, [group for group in groups if group.in_list], reported, notes)
    flops = np.array([_flops_of_call(row) for row in rows])
    retained_bytes = np.array([row.retained_bytes or 0 for row in rows])
    peak_bytes = rule_input.summary.memory.peak_bytes if rule_input.summary.memory is not None else 0
    for outlier in _keep_innermost(rule_input, _find_outliers(flops, groups, MIN_SHARE * flops.max(initial=0.0))):
        if outlier.row not in reported:
            reported.add(outlier.row)
            ratio = flops[outlier.row] / max(float(np.median(flops[outlier.siblings.rows])), 1.0)
            text = f"{ratio:.3g} times as many a call"
            yield _make_other_finding(rule_input, outlier, "has more FLOPs than its siblings", text)
    min_bytes = max(MIN_SHARE * peak_bytes, _MIN_BYTES)
    for outlier in _keep_innermost(rule_input, _find_outliers(retained_bytes, groups, min_bytes)):
        if outlier.row not in reported:
            usual = format_bytes(int(np.median(retained_bytes[outlier.siblings.rows])))
            text = f"a forward call keeps {format_bytes(int(retained_bytes[outlier.row]))}, its siblings {usual}"
            yield _make_other_finding(rule_input, outlier, "keeps more memory than its siblings", text, "--memory")


def _find_own_outliers(
    rule_input: RuleInput, groups: Sequence[_Siblings], reported: set[int], notes: NotedSteps
) -> Iterator[Finding]:
    """Yield modules with inner ones whose own time far exceeds their siblings', if no module near them is reported."""
    is_holder = np.array([row.fqn in rule_input.holders for row in rule_input.rows], np.bool_)
    own_ns, own_p10_ns = np.where(is_holder, rule_input.own_median_ns, 0.0), rule_input.own_p10_ns
    fqns = {rule_input.rows[row].fqn for row in reported}
    outer_fqns = {outer for fqn in fqns for outer in rule_input.outer[fqn]}
    min_ns = max(rule_input.min_share_ns, rule_input.min_ns)
    for outlier in _find_outliers(own_ns, groups, min_ns, _MIN_RATIO_OF_UNLIKE).values():
        fqn = rule_input.rows[outlier.row].fqn
        # In the 10th percentile too: a busy machine stops one of them in most steps.
        is_longer = own_p10_ns[outlier.row] > _MIN_RATIO_OF_UNLIKE * own_p10_ns[outlier.siblings.rows].max()
        if is_longer and fqn not in fqns | outer_fqns and fqns.isdisjoint(rule_input.outer[fqn]):
            reported.add(outlier.row)
            yield _make_time_finding(rule_input, outlier, notes, own_ns)


def list_pattern(rule_input: RuleInput, fqn: str) -> str:
    """Return the name with `*` for its indices in lists, see `place_in_lists`."""
    return place_in_lists(fqn, rule_input.outer)


def _group_siblings(rule_input: RuleInput, notes: NotedSteps) -> Iterator[_Siblings]:
    by_key: dict[tuple[str, str], list[int]] = {}
    for index, row in enumerate(rule_input.rows):
        if not row.fqn or not rule_input.call_counts.calls[index]:
            continue
        pattern, parent = list_pattern(rule_input, row.fqn), row.fqn.rpartition(".")[0]
        if "*" in pattern and notes.has_siblings(pattern):
            by_key.setdefault((pattern, ""), []).append(index)
        by_key.setdefault((f"{parent}.*", row.module_class), []).append(index)
    for (pattern, module_class), members in by_key.items():
        if len(members) >= (4 if module_class else 3):
            yield _Siblings(np.array(members), pattern, in_list=not module_class)


def _find_outliers(
    values: AnyArray, groups: Sequence[_Siblings], min_excess: float, min_ratio: float = _MIN_RATIO
) -> dict[int, _Outlier]:
    """Return the outliers by row, each with the first group in which it is one.

    An outlier has at least `min_ratio` times the value of its largest sibling, if the siblings are alike.
    """
    outliers: dict[int, _Outlier] = {}
    for group in groups:
        group_values = values[group.rows]
        lower_values = np.sort(group_values)[: len(group_values) - max(1, len(group_values) // 3)]
        median, largest = float(np.median(lower_values)), float(lower_values[-1])
        is_alike = largest <= (_MAX_SPREAD * median if len(lower_values) > 2 else _MIN_RATIO * float(lower_values[0]))
        if not is_alike and not group.in_list:
            continue
        threshold = (min_ratio if is_alike else _MIN_RATIO_OF_UNLIKE) * largest
        differs = (group_values > threshold) & (group_values - median > min_excess)
        siblings = group._replace(rows=group.rows[~differs])
        for row in group.rows[differs].tolist():
            outliers.setdefault(row, _Outlier(row, float(values[row] - median), siblings))
    return outliers


def _keep_innermost(rule_input: RuleInput, outliers: dict[int, _Outlier]) -> list[_Outlier]:
    """Leave out outliers that one inner outlier explains, and outliers inside one that several explain."""
    row_by_fqn = {rule_input.rows[row].fqn: row for row in outliers}
    omitted: set[int] = set()
    for fqn, row in sorted(row_by_fqn.items(), key=lambda item: -item[0].count(".")):
        outer_rows = [row_by_fqn[outer] for outer in rule_input.outer[fqn] if outer in row_by_fqn]
        if row in omitted:
            continue
        excess = outliers[row].excess
        explained = [outer for outer in outer_rows if excess >= _MIN_INNER_SHARE * outliers[outer].excess]
        if len(explained) < len(outer_rows):
            omitted.add(row)
        else:
            omitted.update(explained)
    return [outlier for row, outlier in outliers.items() if row not in omitted]


def _is_larger(rule_input: RuleInput, outlier: _Outlier) -> bool:
    """Return whether a module in no list has more to compute: then its backward is longer as well."""
    row, siblings = rule_input.rows[outlier.row], [rule_input.rows[index] for index in outlier.siblings.rows.tolist()]
    usual_ns = float(np.median([sibling.backward_ns / max(sibling.calls, 1) for sibling in siblings]))
    return not outlier.siblings.in_list and row.backward_ns / max(row.calls, 1) > _MIN_RATIO * usual_ns > 0


def _is_by_recompute(rule_input: RuleInput, outlier: _Outlier) -> bool:
    """Return whether a module runs again in backward, its siblings do not, and all recompute costs its other excess."""
    siblings = (rule_input.rows[index] for index in outlier.siblings.rows.tolist())
    again_ns, total_ns = rule_input.rows[outlier.row].recompute_ns, float(rule_input.part_ns("recompute").sum())
    is_alone = again_ns > 0 and not any(sibling.recompute_ns for sibling in siblings)
    return is_alone and outlier.excess * rule_input.steps - again_ns <= total_ns


def _make_time_finding(rule_input: RuleInput, outlier: _Outlier, notes: NotedSteps, ns: AnyArray) -> Finding:
    """Return a finding for a slower module; `ns`: median times of all modules in a step, or their own times."""
    row, siblings = rule_input.rows[outlier.row], [rule_input.rows[index] for index in outlier.siblings.rows.tolist()]
    time_text = f"{ms_range([ns[outlier.row]])} a step, its siblings {ms_range(ns[outlier.siblings.rows])}"
    is_total = ns is rule_input.module_median_ns
    clauses = [time_text + (" (medians)" if is_total else " in their own code, without inner modules (medians)")]
    calls, usual_calls = rule_input.calls[outlier.row], float(np.median(rule_input.calls[outlier.siblings.rows]))
    has_more_calls = usual_calls and calls >= _MIN_CALLS_RATIO * usual_calls
    classes = _classes(siblings)
    title = "is slower than its siblings"
    part = _part_of(row, siblings)
    if row.module_class not in classes:
        title = f"is {row.module_class}, its siblings {shortened(classes, 2)}, and slower"
    elif has_more_calls:
        title = "is called more often than its siblings"
    if has_more_calls:
        clauses.append(f"called {times_text(calls)} a step, they {times_text(usual_calls)}")
        clauses.append(notes.same_inputs_text(row.fqn))
    else:
        is_own = _is_own(rule_input, row, siblings, part)
        may_have_larger_inputs = row.module_class in classes and not is_own and not notes.size_text(row.fqn)
        if may_have_larger_inputs and _is_slower_alike(row, siblings):
            clauses.append("forward and backward alike, as with larger inputs")
        else:
            clauses.append(f"mostly its own {part}, outside of inner modules" if is_own else f"mostly {part}")
        if is_own and part == "forward":
            clauses.append(notes.python_text(row.fqn, rule_input.own_ns(outlier.row)[0]))
    clauses.extend([notes.size_text(row.fqn), notes.hooks_text(row.fqn), notes.inside_text(row.fqn, float(calls))])
    if row.flops_forward is not None:
        ratio = _flops_of_call(row) / max(float(np.median([_flops_of_call(sibling) for sibling in siblings])), 1.0)
        clauses.append(
            f"{ratio:.3g} times the FLOPs a call" if ratio >= _MIN_CALLS_RATIO else "with no more FLOPs a call"
        )
    retained_bytes, sibling_bytes = row.retained_bytes or 0, [sibling.retained_bytes or 0 for sibling in siblings]
    if retained_bytes > _MIN_RATIO * max(*sibling_bytes, _MIN_BYTES):
        clauses.append(f"keeps {format_bytes(retained_bytes)}, they {format_bytes(int(np.median(sibling_bytes)))}")
    evidence, show = ", ".join(filter(None, clauses)), only_option(outlier.siblings.pattern)
    return rule_input.finding(title, row.fqn, part, evidence=evidence, show=show, ns=outlier.excess)


def _is_slower_alike(row: ModuleTimes, siblings: Sequence[ModuleTimes]) -> bool:
    """Return whether forward and backward of a call both take much longer than in siblings, by similar ratios."""
    ratios: list[float] = []
    for field in ("forward_ns", "backward_ns"):
        usual = float(np.median([getattr(one, field) / max(one.calls, 1) for one in siblings]))
        ratios.append(getattr(row, field) / max(row.calls, 1) / max(usual, 1.0))
    return min(ratios) > _MIN_RATIO and max(ratios) <= _MAX_UNLIKENESS * min(ratios)


def _make_other_finding(
    rule_input: RuleInput, outlier: _Outlier, title: str, evidence: str, option: str = "--flops"
) -> Finding:
    row = rule_input.rows[outlier.row]
    classes = _classes(rule_input.rows[index] for index in outlier.siblings.rows.tolist())
    if row.module_class not in classes:
        evidence += f"; it is {row.module_class}, they {shortened(classes, 2)}"
    show = f"{only_option(outlier.siblings.pattern)} {option}"
    return rule_input.finding(title, row.fqn, evidence=evidence, show=show)


def _flops_of_call(row: ModuleTimes) -> float:
    flops = (row.flops_forward or 0) + (row.flops_backward or 0) + (row.flops_recompute or 0)
    return flops / max(row.calls, 1)


def _classes(siblings: Iterable[ModuleTimes]) -> list[str]:
    return list(dict.fromkeys(sibling.module_class for sibling in siblings))


def _part_of(row: ModuleTimes, siblings: Sequence[ModuleTimes]) -> str:
    """Return the phase whose time in a call exceeds the siblings' time most."""
    phases = ("forward", "backward", "recompute")
    return phases[int(np.argmax([_excess_of_call(row, siblings, f"{phase}_ns") for phase in phases]))]


def _is_own(rule_input: RuleInput, row: ModuleTimes, siblings: Sequence[ModuleTimes], part: str) -> bool:
    """Return whether a module has inner ones, and most of its excess in a phase is outside these."""
    excess_ns = _excess_of_call(row, siblings, f"{part}_ns")
    is_own = _excess_of_call(row, siblings, f"{part}_self_ns") >= _MIN_INNER_SHARE * excess_ns
    return is_own and any(outer[:1] == [row.fqn] for outer in rule_input.outer.values())


def _excess_of_call(row: ModuleTimes, siblings: Sequence[ModuleTimes], field: str) -> float:
    median = float(np.median([getattr(sibling, field) / max(sibling.calls, 1) for sibling in siblings]))
    return float(getattr(row, field)) / max(row.calls, 1) - median


_MIN_SAME_SHARE = 0.05
"""Minimum share of the median step for such calls, as for loops outside modules: the cause is known."""


def find_repeated(rule_input: RuleInput, notes: NotedSteps, reported: Container[str | None]) -> Iterator[Finding]:
    """Yield the outermost modules that are called again with the same inputs, except `reported` ones."""
    seen: set[str] = set()
    for index, row in sorted(enumerate(rule_input.rows), key=lambda item: item[1].fqn.count(".")):
        repeats, outer = notes.same_inputs.get(row.fqn, 0.0), rule_input.outer[row.fqn]
        if repeats < MIN_SAME_INPUTS or not seen.isdisjoint(outer):
            continue
        seen.add(row.fqn)
        calls = float(rule_input.calls[index])
        ns_per_step = float(rule_input.module_median_ns[index]) * min(repeats / max(calls, 1e-9), 1.0)
        min_ns = max(_MIN_SAME_SHARE * rule_input.median_step_ns, rule_input.min_ns)
        if row.fqn not in reported and ns_per_step >= min_ns:
            evidence = f"called {times_text(calls)} a step, {times_text(repeats)} of these with the tensors of an "
            evidence += f"earlier call, which gives the same result unless it is random: {short_ms(ns_per_step)} a step"
            evidence += f", inside {outer[0]}" if outer else ""
            title, show = "is called again with the same inputs", only_option(row.fqn)
            yield rule_input.finding(title, row.fqn, "forward", evidence=evidence, show=show, ns=ns_per_step)


def find_recompute(rule_input: RuleInput) -> Iterator[Finding]:
    """Yield the modules that checkpoints run again; of several lists, the longest is where it is."""
    total_ns = int(rule_input.part_ns("recompute").sum())
    ns_per_step = total_ns / max(rule_input.steps, 1)
    if not total_ns or ns_per_step < rule_input.min_share_ns:
        return
    overview = rule_input.summary.overview
    classes = overview.recomputed if overview is not None else {}
    recomputed = {row.fqn for row in rule_input.rows if row.recompute_ns and row.module_class in classes}
    outermost = {fqn for fqn in recomputed if recomputed.isdisjoint(rule_input.outer.get(fqn, ()))}
    rows_by_pattern: dict[str, list[ModuleTimes]] = {}
    for row in rule_input.rows:
        rows_by_pattern.setdefault(list_pattern(rule_input, row.fqn), []).append(row)
    names, where, longest_ns = list[str](), None, 0
    for pattern, rows in rows_by_pattern.items():
        again = [row for row in rows if row.fqn in outermost]
        if again:
            part_of = f"{len(again)} of {len(rows)} " if len(again) < len(rows) else ""
            names.append(f"{part_of}{pattern}" if again[1:] else again[0].fqn)
        if (pattern_ns := sum(row.recompute_ns for row in again)) > longest_ns:
            where, longest_ns = again[0].fqn, pattern_ns
    evidence = f"checkpointing runs {shortened(names)} again: {short_ms(ns_per_step)} a step"
    memory_rows = rule_input.summary.memory.rows if rule_input.summary.memory is not None else ()
    saved_bytes = sum(
        max(0, (row.retained_recompute_bytes or 0) - (row.retained_bytes or 0))
        for row in memory_rows
        if row.fqn in outermost
    )
    evidence += f", and saves about {format_bytes(saved_bytes)}" if saved_bytes else ""
    title, show = "runs again in backward (recompute)", "--sort recompute"
    yield rule_input.finding(title, where, "recompute", evidence=evidence, show=show, ns=ns_per_step)
