"""Steps in their parts, which of them are slow, and why: the part that made them so, and the module in it."""

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
            "saving", "evaluation", the name of a range of the user's, or "other". The loss is from the end of forward
            to the begin of backward; and in a loss module what is outside of the model that it calls. Communication is
            the time in which the thread of the step did nothing else.
        total_ns: in all whole steps together; the totals of all parts are the time of these steps. If no step is whole,
            all count.
        p50_ns: the median over these steps.
        p95_ns: what 95 % of them do not exceed.
        share: of the time of these steps, from 0 to 1.
    """

    part: str
    total_ns: int
    p50_ns: int
    p95_ns: int
    share: float


class SlowPart(NamedTuple):
    """The part that made a step slow.

    Attributes:
        part: its name.
        took_ns: what it took in the step.
        usual_ns: what it usually takes.
        range: its longest range; empty if there is none.
        module: the innermost module that took so much more; empty if none did.
    """

    part: str
    took_ns: int
    usual_ns: int
    range: str = ""
    module: str = ""


class StepParts(NamedTuple):
    """The parts of one step.

    Attributes:
        step: its number, from 0.
        parts: nanoseconds by part, without those that are 0; they add up to the duration of the step.
        cause: for a step that is much slower than others of its name, which part made it so, in a sentence; else None.
            Evaluation makes no step slow: the sentence is about the time without it.
        name: "step"; of a step that is a call or a range, what that is called.
        slow_by: the part that `cause` is about; None without one.
    """

    step: int
    parts: Mapping[str, int]
    cause: str | None = None
    name: str = STEP
    slow_by: SlowPart | None = None


@dataclass(frozen=True, eq=False)
class StepsInParts(LazyRows[StepParts]):
    """Steps in parts, as columns."""

    bounds: StepBounds = NO_STEPS
    ns: Int64Array = field(default_factory=lambda: np.zeros((0, 0), np.int64))  # int64[steps, parts]
    parts: Sequence[str] = ()  # their names
    # By index the sentence that says why a step was slow, and the part; in order.
    causes: Mapping[int, tuple[str, SlowPart]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.bounds.number)

    @cached_property
    def index_of(self) -> dict[int, int]:
        """The index of each step by its number."""
        return {number: index for index, number in enumerate(self.bounds.number.tolist())}

    def take(self, rows: AnyArray | slice) -> StepsInParts:
        """Return some of the steps."""
        kept = enumerate(np.arange(len(self))[rows].tolist() if self.causes else ())
        causes = {index: self.causes[old] for index, old in kept if old in self.causes}
        return StepsInParts(self.bounds.take(rows), self.ns[rows], self.parts, causes)

    def _make(self, rows: slice) -> Iterator[StepParts]:
        columns = zip(self.bounds.number[rows].tolist(), self.bounds.name[rows], self.ns[rows].tolist(), strict=True)
        for index, (number, name, row) in enumerate(columns, rows.start):
            cause, slow_by = self.causes.get(index, (None, None))
            parts = {part: took for part, took in zip(self.parts, row, strict=True) if took}
            yield StepParts(number, parts, cause, name, slow_by)


def sum_up_parts(steps: StepsInParts) -> list[PartTimes]:
    """Return each part over some steps, in the order of `order_parts`.

    If the steps have several names, percentiles are of those that took most.
    """
    total, named = steps.ns.sum(axis=1), steps.bounds.by_name()
    took = {name: int(total[rows].sum()) for name, rows in named.items()}
    most = max(took.values(), default=0)
    usual = np.concatenate([np.zeros(0, np.int64), *(rows for name, rows in named.items() if took[name] == most)])
    is_used = [ns.any() or name == OTHER for name, ns in zip(steps.parts, steps.ns.T, strict=True)]
    times = []
    for part in order_parts(steps.parts, np.array(is_used)) if len(steps) else ():
        ns = steps.ns[:, part]
        share = int(ns.sum()) / int(total.sum()) if total.any() else 0.0
        p50_ns, p95_ns = median(ns[usual]), nearest_rank(ns[usual], 0.95)
        times.append(PartTimes(steps.parts[part], int(ns.sum()), p50_ns, p95_ns, share))
    return times


_SLOW_BY = 0.25
"""A slow step takes more than the median step by this share of it."""
_SLOW_NS = 5_000_000
"""And by this, in nanoseconds: for so long the system may stop any thread."""
_SPREADS = 8
"""The part that made a step slow takes as much more, and more by so many times its usual distance from its median."""
_NEVER_USUAL = ("gc", "compile")
_NAMED_PARTS = ("optimizer", "compile", "saving")
"""The parts of which a sentence names the longest range."""
_USUAL_FROM = 3
"""Number of steps that must have any other part so that its median is over these steps."""


def explain_steps(divided: DividedSteps, *, forward_of_calls: bool = False) -> StepsInParts:
    """Return the parts of the steps, and why the slow ones were slow.

    A call with a longer prompt has more to do, so forward makes one slow only if that is asked for: see `name_places`.
    """
    bounds, ns, names, longest = divided[:4]
    causes: dict[int, tuple[str, SlowPart]] = {}
    for rows in bounds.by_name().values() if len(ns) else ():
        row_of = {step: row for row, step in enumerate(rows.tolist())} if longest else {}
        of_rows = {(row_of[step], category): name for (step, category), name in longest.items() if step in row_of}
        of_name = _causes(bounds.take(rows), ns[rows], names, of_rows, forward_of_calls)
        causes |= {int(rows[row]): cause for row, cause in of_name.items()}
    return StepsInParts(bounds, ns, names, dict(sorted(causes.items())))


def slow_from_ns(median_ns: float) -> float:
    """Return what a slow step takes more than, if the median step takes so long."""
    return median_ns + max(_SLOW_BY * median_ns, _SLOW_NS)


def _causes(
    bounds: StepBounds, ns: Int64Array, names: Sequence[str], longest: Mapping[tuple[int, str], str], by_forward: bool
) -> dict[int, tuple[str, SlowPart]]:
    """Return for each slow step the sentence that says why it was, and the part."""
    causes: dict[int, tuple[str, SlowPart]] = {}
    whole = np.flatnonzero(bounds.whole)
    if len(whole) < 4:
        return causes
    evaluation = names.index("evaluation")
    evaluates = ns[:, evaluation] > 0
    ns = ns.copy()
    ns[:, evaluation] = 0
    duration = ns.sum(axis=1)
    usual = np.array([_usual(part, name in _NEVER_USUAL) for part, name in zip(ns[whole].T, names, strict=True)])
    limit = slow_from_ns(median := float(np.median(duration[whole])))
    least = limit - median
    longer = ns - usual[:, 0]
    made_slow = longer > np.maximum(least, _SPREADS * usual[:, 1])
    # First steps are slow by what they set up.
    warm_up = whole[: max(warm_up_steps(duration[whole]), int(bounds.number[whole[0]] == 0))]
    made_slow[warm_up] &= (longer[warm_up] == longer[warm_up].max(axis=1, keepdims=True)) & np.isin(names, _NEVER_USUAL)
    if bounds.step_by != OPTIMIZER:  # a longer prompt is more to do, also between ranks
        forward, communication = names.index("forward"), names.index("communication")
        made_slow[:, communication] &= ~made_slow[:, forward]
        made_slow[:, forward] &= by_forward
    slow = (duration > limit) & made_slow.any(axis=1)
    for index in whole[slow[whole]].tolist():
        part = int(np.argmax(np.where(made_slow[index], longer[index], 0)))
        named = longest.get((index, names[part]), "") if names[part] in _NAMED_PARTS else ""
        sentence = (
            f"{bounds.name[index]} {bounds.number[index]}: {short_ms(duration[index])}"
            f"{' without evaluation' if evaluates[index] else ''}, "
            f"of which {short_ms(ns[index, part])} {names[part]}{f' ({named})' if named else ''}; "
            f"usually {short_ms(usual[part, 0])}"
        )
        causes[index] = sentence, SlowPart(names[part], int(ns[index, part]), int(usual[part, 0]), named)
    return causes


def _usual(part_ns: Int64Array, is_never_usual: bool) -> tuple[float, float]:
    """Return the median of a part, and the median distance from it, over the steps that usually have it."""
    present = part_ns[part_ns > 0]
    chosen = part_ns if is_never_usual or len(present) < _USUAL_FROM else present
    median = float(np.median(chosen))
    return median, float(np.median(np.abs(chosen - median)))


def short_ms(ns: float) -> str:
    """Return milliseconds as one reads them: three digits below 10 ms, whole ones from there on."""
    ms = float(ns) / 1e6
    return f"{ms:,.0f} ms" if ms >= 10 else f"{ms:.2g} ms" if ms >= 0.001 else "0 ms"


@once_per_timeline
def divide_steps(timeline: Timeline, step_by: str) -> StepsInParts:
    """Return the parts of each step of the first process, in the order of `measure_steps`.

    A call or a range is divided on its thread. Any other step is divided on the thread that spends most of it in
    modules and backward passes; if none does, in what has a name.
    """
    return explain_steps(divide_piece(timeline, step_by))


_OF_MODULES = ("forward", "backward", "recompute", "loss")
"""Parts in which modules run."""
_EXPLAINS = 0.5
"""A module is named if it takes at least this share of the time that a part takes too much."""
_AS_GOOD = 0.8
"""An inner module is named instead if it takes at least this share of the one around it."""


def name_places(
    steps: StepsInParts,
    in_steps: Sequence[GroupTimes],
    usual_ns: Int64Array,
    groups: Groups,
) -> StepsInParts:
    """Return the steps, with the innermost module that explains a slow one in its sentence.

    Forward makes no call slow unless that is one module of a list: a longer prompt has more to do in all of them.
    """
    modules = {*groups.fqns} - {""}
    # Usually what runs in fewer than half of the steps takes no time.
    ran = sum(np.bincount(piece.group, minlength=len(groups.fqns))[: len(groups.fqns)] for piece in in_steps)
    usual_ns = np.where(2 * ran < np.count_nonzero(steps.bounds.counted), 0, usual_ns)
    places = {index: cause for index, cause in steps.causes.items() if cause[1].part in _OF_MODULES and modules}
    numbers = steps.bounds.number[[*places]]
    took = join_times([piece.take(np.isin(piece.step, numbers)) for piece in in_steps])
    took = took.take(np.argsort(took.step, kind="stable"))
    for index, cause in places.items():
        of_step = took.take(slice(*np.searchsorted(took.step, steps.bounds.number[index] + np.arange(2))))
        places[index] = _with_place(cause, of_step, usual_ns, groups)
    causes = {
        index: cause
        for index, cause in {**steps.causes, **places}.items()
        if steps.bounds.name[index] == STEP or cause[1].part != "forward" or _is_in_list(cause[1].module, modules)
    }
    return replace(steps, causes=causes)


def _is_in_list(module: str, called: Container[str]) -> bool:
    words = module.split(".")
    # An `nn.ModuleList` is not called, an `nn.Sequential` is.
    return any(word.isdecimal() and ".".join(words[:place]) not in called for place, word in enumerate(words))


def _with_place(
    cause: tuple[str, SlowPart], took: GroupTimes, usual_ns: Int64Array, groups: Groups
) -> tuple[str, SlowPart]:
    group, (sentence, slow) = took.group, cause
    excess = took.ns - usual_ns[group]
    if not len(excess) or excess.max() < _EXPLAINS * (slow.took_ns - slow.usual_ns):
        return cause
    rows = np.flatnonzero(excess >= _AS_GOOD * excess.max()).tolist()
    row = max(rows, key=lambda row: (groups.fqns[group[row]].count("."), excess[row]))
    fqn = groups.fqns[group[row]]
    sentence += f"; {fqn} {short_ms(took.ns[row])}, usually {short_ms(usual_ns[group[row]])}"
    return sentence, slow._replace(module=fqn)
