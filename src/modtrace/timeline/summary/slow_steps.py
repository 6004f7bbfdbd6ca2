"""The parts of each step, and the slow steps with their causes: a part, and the module in it."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..._arrays import AnyArray, Int64Array
from ..._interrupts import cached_property
from ..timeline import LazyRows
from .module_rows import Groups
from .parts import OTHER, DividedSteps, divide_piece, order_parts
from .step_bounds import NO_STEPS, OPTIMIZER, STEP, StepBounds, once_per_timeline
from .step_times import warm_up_steps
from .units import GroupTimes, join_times, median, nearest_rank

if TYPE_CHECKING:
    from ..timeline import Timeline


class PartTimes(NamedTuple):
    """One part of all steps; times are integer nanoseconds.

    Attributes:
        part: "data loading", "forward", "loss", "backward", "recompute", "communication", "optimizer", "gc", "compile",
            "saving", "evaluation", the name of a user's range, or "other". The loss is from the end of forward to the
            start of backward, and includes the time of a loss module outside the model that it calls. Communication is
            the time in which the thread of the step did nothing else.
        total_ns: time in all whole steps; the totals of all parts add up to the time of these steps. If no step is
            whole, all steps count.
        p50_ns: median over these steps.
        p95_ns: 95th percentile over these steps.
        share: share of the time of these steps, from 0 to 1.
    """

    part: str
    total_ns: int
    p50_ns: int
    p95_ns: int
    share: float


class SlowPart(NamedTuple):
    """The part that made a step slow.

    Attributes:
        part: name of the part.
        took_ns: its time in the step.
        usual_ns: its median time.
        range: name of its longest range; empty without ranges.
        module: the innermost module that explains the difference; empty if no module does.
    """

    part: str
    took_ns: int
    usual_ns: int
    range: str = ""
    module: str = ""


class StepParts(NamedTuple):
    """The parts of one step.

    Attributes:
        step: number of the step, from 0.
        parts: nanoseconds by part, without parts of 0 ns; they add up to the duration of the step.
        cause: for a step that is much slower than others of its name, a sentence about the part that made it slow; else
            None. Evaluation does not make a step slow: the sentence is about the time without it.
        name: "step", or the name of the call or range that is the step.
        slow_by: the part in `cause`; None without a cause.
    """

    step: int
    parts: Mapping[str, int]
    cause: str | None = None
    name: str = STEP
    slow_by: SlowPart | None = None


@dataclass(frozen=True, eq=False)
class StepsInParts(LazyRows[StepParts]):
    """Steps in parts, as columns.

    Attributes:
        bounds: number, start, end and name of each step.
        ns: int64[steps, parts], the time of each step in each part.
        parts: names of the parts.
        causes: by index of a slow step, ascending: `StepParts.cause` and `.slow_by`.
    """

    bounds: StepBounds = NO_STEPS
    ns: Int64Array = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    parts: Sequence[str] = ()
    causes: Mapping[int, tuple[str, SlowPart]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.bounds.number)

    @cached_property
    def index_of(self) -> dict[int, int]:
        """The index of each step by its number."""
        return {number: index for index, number in enumerate(self.bounds.number.tolist())}

    def take(self, rows: AnyArray | slice) -> StepsInParts:
        """Return the steps at the indices `rows`."""
        old_indices = enumerate(np.arange(len(self))[rows].tolist() if self.causes else ())
        causes = {index: self.causes[old] for index, old in old_indices if old in self.causes}
        return StepsInParts(self.bounds.take(rows), self.ns[rows], self.parts, causes)

    def _make(self, rows: slice) -> Iterator[StepParts]:
        columns = zip(self.bounds.number[rows].tolist(), self.bounds.name[rows], self.ns[rows].tolist(), strict=True)
        for index, (number, name, row) in enumerate(columns, rows.start):
            cause, slow_by = self.causes.get(index, (None, None))
            parts = {part: ns for part, ns in zip(self.parts, row, strict=True) if ns}
            yield StepParts(number, parts, cause, name, slow_by)


def sum_up_parts(steps: StepsInParts) -> list[PartTimes]:
    """Return the times of each part of the steps, in the order of `order_parts`.

    If the steps have several names, percentiles cover the name with the longest total.
    """
    step_ns, rows_by_name = steps.ns.sum(axis=1), steps.bounds.by_name()
    total_ns = {name: int(step_ns[rows].sum()) for name, rows in rows_by_name.items()}
    longest_ns = max(total_ns.values(), default=0)
    longest_rows = [rows for name, rows in rows_by_name.items() if total_ns[name] == longest_ns]
    chosen_rows = np.concatenate([np.zeros(0, np.int64), *longest_rows])
    is_used = [ns.any() or name == OTHER for name, ns in zip(steps.parts, steps.ns.T, strict=True)]
    times = []
    for part in order_parts(steps.parts, np.array(is_used)) if len(steps) else ():
        ns = steps.ns[:, part]
        share = int(ns.sum()) / int(step_ns.sum()) if step_ns.any() else 0.0
        p50_ns, p95_ns = median(ns[chosen_rows]), nearest_rank(ns[chosen_rows], 0.95)
        times.append(PartTimes(steps.parts[part], int(ns.sum()), p50_ns, p95_ns, share))
    return times


_MIN_EXCESS_SHARE = 0.25
"""A slow step exceeds the median step by at least this share of the median."""
_MIN_EXCESS_NS = 5_000_000
"""A slow step exceeds the median step by at least these nanoseconds: the system may stop any thread for so long."""
_MIN_DEVIATIONS = 8
"""The part that made a step slow exceeds its median as a slow step does, and by 8 median absolute deviations."""
_RARE_PARTS = ("gc", "compile")
"""Parts whose median is over all steps, because most steps do not have them."""
_PARTS_WITH_RANGES = ("optimizer", "compile", "saving")
"""Parts whose longest range is named in the sentence."""
_MIN_STEPS_OF_PART = 3
"""Minimum number of steps with any other part for its median to be over these steps, not over all."""


def explain_steps(divided: DividedSteps, *, forward_of_calls: bool = False) -> StepsInParts:
    """Return the parts of the steps, and the causes of the slow steps.

    A call with a longer prompt has more work, so forward is a cause only with `forward_of_calls`: see `name_places`.
    """
    bounds, ns, names, longest = divided[:4]
    causes: dict[int, tuple[str, SlowPart]] = {}
    for rows in bounds.by_name().values() if len(ns) else ():
        row_of = {step: row for row, step in enumerate(rows.tolist())} if longest else {}
        ranges = {(row_of[step], category): name for (step, category), name in longest.items() if step in row_of}
        cause_of_row = _causes(bounds.take(rows), ns[rows], names, ranges, forward_of_calls)
        causes |= {int(rows[row]): cause for row, cause in cause_of_row.items()}
    return StepsInParts(bounds, ns, names, dict(sorted(causes.items())))


def slow_from_ns(median_ns: float) -> float:
    """Return the duration above which a step is slow."""
    return median_ns + max(_MIN_EXCESS_SHARE * median_ns, _MIN_EXCESS_NS)


def _causes(
    bounds: StepBounds, ns: Int64Array, names: Sequence[str], longest: Mapping[tuple[int, str], str], by_forward: bool
) -> dict[int, tuple[str, SlowPart]]:
    """Return, for each slow step, the sentence about its cause, and the part."""
    causes: dict[int, tuple[str, SlowPart]] = {}
    whole_rows = np.flatnonzero(bounds.is_whole)
    if len(whole_rows) < 4:
        return causes
    evaluation = names.index("evaluation")
    evaluates = ns[:, evaluation] > 0
    ns = ns.copy()
    ns[:, evaluation] = 0
    duration = ns.sum(axis=1)
    usual_ns, deviation_ns = np.array(
        [_median_and_deviation(part, name in _RARE_PARTS) for part, name in zip(ns[whole_rows].T, names, strict=True)]
    ).T
    median_ns = float(np.median(duration[whole_rows]))
    limit = slow_from_ns(median_ns)
    excess = ns - usual_ns
    made_slow = excess > np.maximum(limit - median_ns, _MIN_DEVIATIONS * deviation_ns)
    # First steps are slow because they set things up: only a rare part counts, and only if it is the main cause.
    warm_up = whole_rows[: max(warm_up_steps(duration[whole_rows]), int(bounds.number[whole_rows[0]] == 0))]
    made_slow[warm_up] &= (excess[warm_up] == excess[warm_up].max(axis=1, keepdims=True)) & np.isin(names, _RARE_PARTS)
    if bounds.step_by != OPTIMIZER:  # a longer prompt is more work, also between ranks
        forward, communication = names.index("forward"), names.index("communication")
        made_slow[:, communication] &= ~made_slow[:, forward]
        made_slow[:, forward] &= by_forward
    slow = (duration > limit) & made_slow.any(axis=1)
    for index in whole_rows[slow[whole_rows]].tolist():
        part = int(np.argmax(np.where(made_slow[index], excess[index], 0)))
        range_name = longest.get((index, names[part]), "") if names[part] in _PARTS_WITH_RANGES else ""
        sentence = (
            f"{bounds.name[index]} {bounds.number[index]}: {short_ms(duration[index])}"
            f"{' without evaluation' if evaluates[index] else ''}, "
            f"of which {short_ms(ns[index, part])} {names[part]}{f' ({range_name})' if range_name else ''}; "
            f"usually {short_ms(usual_ns[part])}"
        )
        causes[index] = sentence, SlowPart(names[part], int(ns[index, part]), int(usual_ns[part]), range_name)
    return causes


def _median_and_deviation(part_ns: Int64Array, is_rare: bool) -> tuple[float, float]:
    """Return the median of a part, and its median absolute deviation, over the steps that have it, or over all."""
    present = part_ns[part_ns > 0]
    sample = part_ns if is_rare or len(present) < _MIN_STEPS_OF_PART else present
    median = float(np.median(sample))
    return median, float(np.median(np.abs(sample - median)))


def short_ms(ns: float) -> str:
    """Return short text in milliseconds: two significant digits below 10 ms, whole milliseconds from there on."""
    ms = float(ns) / 1e6
    return f"{ms:,.0f} ms" if ms >= 10 else f"{ms:.2g} ms" if ms >= 0.001 else "0 ms"


@once_per_timeline
def divide_steps(timeline: Timeline, step_by: str) -> StepsInParts:
    """Return the parts of each step of the first process, in the order of `measure_steps`.

    A step that is a call or a range is divided on its thread. Any other step is divided on the thread that spends most
    time in modules and backward passes; if no thread does, in anything with a name.
    """
    return explain_steps(divide_piece(timeline, step_by))


_MODULE_PARTS = ("forward", "backward", "recompute", "loss")
"""Parts in which modules run."""
_MIN_SHARE_OF_PART = 0.5
"""A module is named if its excess is at least this share of the part's excess over its usual time."""
_MIN_SHARE_OF_OUTER = 0.8
"""An inner module is named instead if its excess is at least this share of the largest excess."""


def name_places(
    steps: StepsInParts,
    in_steps: Sequence[GroupTimes],
    usual_ns: Int64Array,
    groups: Groups,
) -> StepsInParts:
    """Return the steps; the sentence of a slow step also names the innermost module that explains it.

    Forward is a cause for a call only if one module of a list is slow: a longer prompt has more work in all of them.
    """
    modules = {*groups.fqns} - {""}
    # The usual time is 0 for a module that runs in fewer than half of the steps.
    ran = sum(np.bincount(piece.group, minlength=len(groups.fqns))[: len(groups.fqns)] for piece in in_steps)
    usual_ns = np.where(2 * ran < np.count_nonzero(steps.bounds.counted), 0, usual_ns)
    places = {index: cause for index, cause in steps.causes.items() if cause[1].part in _MODULE_PARTS and modules}
    numbers = steps.bounds.number[[*places]]
    times = join_times([piece.take(np.isin(piece.step, numbers)) for piece in in_steps])
    times = times.take(np.argsort(times.step, kind="stable"))
    for index, cause in places.items():
        step_times = times.take(slice(*np.searchsorted(times.step, steps.bounds.number[index] + np.arange(2))))
        places[index] = _add_place(cause, step_times, usual_ns, groups)
    causes = {
        index: cause
        for index, cause in {**steps.causes, **places}.items()
        if steps.bounds.name[index] == STEP or cause[1].part != "forward" or _is_in_list(cause[1].module, modules)
    }
    return replace(steps, causes=causes)


def _is_in_list(module: str, called: Container[str]) -> bool:
    words = module.split(".")
    # An `nn.ModuleList` is not called, an `nn.Sequential` is.
    return any(word.isdecimal() and ".".join(words[:index]) not in called for index, word in enumerate(words))


def _add_place(
    cause: tuple[str, SlowPart], times: GroupTimes, usual_ns: Int64Array, groups: Groups
) -> tuple[str, SlowPart]:
    """Return the cause with the innermost module that explains it; `times` belong to the slow step."""
    group, (sentence, slow) = times.group, cause
    excess = times.ns - usual_ns[group]
    if not len(excess) or excess.max() < _MIN_SHARE_OF_PART * (slow.took_ns - slow.usual_ns):
        return cause
    rows = np.flatnonzero(excess >= _MIN_SHARE_OF_OUTER * excess.max()).tolist()
    row = max(rows, key=lambda row: (groups.fqns[group[row]].count("."), excess[row]))
    fqn = groups.fqns[group[row]]
    sentence += f"; {fqn} {short_ms(times.ns[row])}, usually {short_ms(usual_ns[group[row]])}"
    return sentence, slow._replace(module=fqn)
