"""What modules cost in FLOPs, how well the time was used, and the table of that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..._tables import Table, first_lines, record_table
from ..._terminal import counted, printable, wrapped
from ..._typing import BoolArray, Int64Array
from ..contents import FLOPS, UNKNOWN_FLOPS
from ..slices import PHASES, RECOMPUTE, Columns
from .module_rows import ModuleTimes
from .peak_rates import peak_tflops
from .percentiles import median
from .step_times import StepTimes

if TYPE_CHECKING:
    from ..timeline import Timeline
    from .device_summary import DeviceSummary

_CPU = "cpu "
_REPLAY = "CUDAGraph"


class SpanFlops(NamedTuple):
    """What each span cost; arrays of equal length.

    Attributes:
        total: int64, with the spans of its phase inside it; 0 where unknown.
        own: int64, without them.
        known: bool, False if its own FLOPs are unknown.
    """

    total: Int64Array
    own: Int64Array
    known: BoolArray

    def is_unknown(self, columns: Columns, group: Int64Array, groups: int) -> BoolArray:
        """Return bool[phases, groups]: whether a group has spans in a phase, and the FLOPs of none are known."""
        spans, known = np.zeros((2, len(PHASES), groups), np.int64)
        np.add.at(spans, (columns.phase, group), 1)
        np.add.at(known, (columns.phase, group), self.known)
        unknown: BoolArray = (spans > 0) & (known == 0)
        return unknown

    def in_steps(self, columns: Columns, step: Int64Array, numbers: Sequence[int]) -> Int64Array:
        """Return int64[phases, steps], FLOPs in each of the steps.

        Args:
            columns: the spans.
            step: the number of the step of each.
            numbers: the steps.
        """
        order = np.argsort(numbers, kind="stable")
        at = np.searchsorted(np.array(numbers, np.int64)[order], step)
        spans = np.flatnonzero(np.isin(step, numbers))
        flops = np.zeros((len(PHASES), len(numbers)), np.int64)
        np.add.at(flops, (columns.phase[spans], order[at[spans]]), self.own[spans])
        return flops


class FlopModule(NamedTuple):
    """What one module cost.

    Attributes:
        fqn: the module's fully qualified name; empty in a summary by class.
        module_class: the name of its class.
        calls: how often its forward ran.
        flops: of all calls and phases, with inner modules; None if they are unknown.
        self_flops: of it, without inner modules.
        flops_per_second: `flops` by the time of the device, by that of the host if the device is the CPU; None if the
            device has no times.
        flops_forward: of `flops`, those of forward.
        flops_backward: those of backward.
        flops_recompute: those of recompute; None if there are none.
    """

    fqn: str
    module_class: str
    calls: int
    flops: int | None
    self_flops: int
    flops_per_second: float | None
    flops_forward: int | None
    flops_backward: int | None
    flops_recompute: int | None


class StepFlops(NamedTuple):
    """What one step cost, and how well it used its time.

    Attributes:
        step: its number.
        flops: of the modules, in all phases.
        recompute: of it, in recompute.
        mfu: model FLOPs utilization: the share of the peak that `flops` without `recompute` are; None if the peak is
            not known.
        hfu: hardware FLOPs utilization: the same with `recompute`.
    """

    step: int
    flops: int
    recompute: int
    mfu: float | None = None
    hfu: float | None = None


class FlopSummary(NamedTuple):
    """What the modules cost as a whole.

    Attributes:
        rows: a row per row of the summary.
        by_step: what each step cost.
        counted_in: the steps in which operators were counted; calls alike in others have the same.
        outside: FLOPs outside of modules in these steps.
        unknown: spans whose FLOPs are unknown: no call like theirs was counted.
        without_formula: operators that ran and have no formula.
        unseen: compiled modules and functions, and replayed graphs: what Triton or a graph runs in them is not counted.
        dtypes: FLOPs that were counted, by device and type of numbers (`cpu float32`).
        peak_tflops: the highest rate of the device, 10¹² FLOP/s; None if it is not known.
    """

    rows: Sequence[FlopModule]
    by_step: Sequence[StepFlops]
    counted_in: Sequence[int]
    outside: int
    unknown: int
    without_formula: Sequence[str]
    unseen: Sequence[str]
    dtypes: Mapping[str, int]
    peak_tflops: float | None = None

    def with_peak(self, tflops: float | None, steps: Sequence[StepTimes]) -> FlopSummary:
        """Return it with another peak.

        Args:
            tflops: 10¹² FLOP/s, or None.
            steps: of the summary.
        """
        taken_ns = {step.step: step.training_ns for step in steps if step.whole}
        by_step = []
        for step in self.by_step:
            most = (tflops or 0) * 1e3 * taken_ns.get(step.step, 0)
            used = ((step.flops - step.recompute) / most, step.flops / most) if most else (None, None)
            by_step.append(StepFlops(step.step, step.flops, step.recompute, *used))
        return self._replace(peak_tflops=tflops, by_step=by_step)


def read_flops(timeline: Timeline) -> SpanFlops | None:
    """Return what each span of a module cost; None if no operators were counted."""
    columns = timeline.columns
    known = np.ones(len(columns), np.bool_)
    total = np.zeros(len(columns), np.int64)
    texts = [(row, args[FLOPS]) for row, args in timeline.span_args.items() if row < len(columns) and FLOPS in args]
    if not texts and FLOPS not in timeline.metadata:
        return None
    for row, text in texts:
        known[row] = text != UNKNOWN_FLOPS
        total[row] = min(int(text), np.iinfo(np.int64).max) if text.isdecimal() else 0
    own = total.copy()
    inner = np.flatnonzero(columns.parent >= 0)
    inner = inner[columns.phase[inner] == columns.phase[columns.parent[inner]]]
    np.subtract.at(own, columns.parent[inner], total[inner])
    return SpanFlops(total, np.maximum(own, 0), known)


def step_flops(timeline: Timeline) -> int | None:
    """Return the median of what steps cost, in FLOPs; None if nothing was counted."""
    found, step = read_flops(timeline), timeline.columns.step
    if found is None:
        return None
    flops = np.zeros(int(step.max(initial=0)) + 1, np.int64)
    np.add.at(flops, step, found.own)
    return median(flops[flops > 0].tolist())


def with_flops(rows: Sequence[ModuleTimes], total: Int64Array, unknown: BoolArray) -> list[ModuleTimes]:
    """Return the rows with their FLOPs.

    Args:
        rows: of the summary.
        total: int64[phases, rows].
        unknown: bool[phases, rows], whether these are unknown.
    """
    values = np.where(unknown, None, total).T.tolist()  # type: ignore[call-overload]
    return [
        row._replace(flops_forward=forward, flops_backward=backward, flops_recompute=recompute)
        for row, (forward, backward, recompute) in zip(rows, values, strict=True)
    ]


def describe_flops(
    timeline: Timeline,
    rows: Sequence[ModuleTimes],
    self_flops: Sequence[int],
    flops_in_steps: Int64Array,
    steps: Sequence[StepTimes],
    device: DeviceSummary | None,
) -> FlopSummary:
    """Return what modules and steps cost.

    Args:
        timeline: what was recorded.
        rows: the rows of the summary, with FLOPs.
        self_flops: of each row.
        flops_in_steps: int64[phases, steps], FLOPs in each step.
        steps: of the summary.
        device: what devices did, if that is known.
    """
    said = _mapping(timeline.metadata.get(FLOPS))
    dtypes = {str(name): value for name, value in _mapping(said.get("dtypes")).items() if type(value) is int}
    on_cpu = bool(dtypes) and all(name.startswith(_CPU) for name in dtypes)
    device_ns = {} if device is None else {row.fqn: row.total_ns for row in device.rows}
    modules = []
    for row, own in zip(rows, self_flops, strict=True):
        in_phases = row.flops_forward, row.flops_backward, row.flops_recompute or None
        parts = [part for part in in_phases if part is not None]
        flops, took_ns = sum(parts) if parts else None, row.total_ns if on_cpu else device_ns.get(row.fqn, 0)
        rate = flops / took_ns * 1e9 if flops is not None and took_ns else None
        modules.append(FlopModule(row.fqn, row.module_class, row.calls, flops, own, rate, *in_phases))
    in_step = zip(steps, flops_in_steps.sum(axis=0).tolist(), flops_in_steps[RECOMPUTE].tolist(), strict=True)
    name, _, dtype = max(dtypes, key=dtypes.__getitem__, default="").rpartition(" ")
    outside, unknown = (value if type(value := said.get(key)) is int else 0 for key in ("outside", "unknown"))
    counted_in, without = (
        value if isinstance(value := said.get(key), list) else [] for key in ("steps", "without_formula")
    )
    return FlopSummary(
        modules,
        [StepFlops(step.step, flops, again) for step, flops, again in in_step],
        [step for step in counted_in if type(step) is int],
        outside,
        unknown,
        [str(operator) for operator in without],
        _unseen(timeline),
        dtypes,
    ).with_peak(peak_tflops(name, dtype), steps)


def _unseen(timeline: Timeline) -> list[str]:
    compiled = [row for row, args in timeline.span_args.items() if "compiled_modules" in args]
    names = [timeline.names[name] for name in np.unique(timeline.columns.name[compiled]).tolist()]
    return [name.fqn for name in (*names, *(name for name in timeline.names if name.module_class == _REPLAY))]


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


_COLUMNS: tuple[tuple[str, str, int], ...] = (
    ("module", "fqn", 0),
    ("class", "module_class", 3),
    ("calls", "calls", 2),
    ("GFLOP", "flops", 0),
    ("self", "self_flops", 1),
    ("forward", "flops_forward", 4),
    ("backward", "flops_backward", 4),
    ("recompute", "flops_recompute", 4),
    ("GFLOP/s", "flops_per_second", 0),
)
"""Heading, field, and rank: the column with the highest is hidden first if the table is too wide; 0: never."""
_NOTE = "GFLOP: of all calls, in all phases and in each; self: outside of inner modules"
_MAX_NAMED = 3


def render_flops(flops: FlopSummary | None, limit: int | None = None, width: int | None = None) -> str:
    """Return what a step cost and how well it used its time, and the table of modules; nothing if none was counted."""
    if flops is None:
        return ""
    lines = [part for line in flops_lines(flops) for part in wrapped(printable(line), width)]
    return "\n".join([*lines, *first_lines(flop_table(flops), limit, width, "row"), *wrapped(_NOTE, width)])


def flop_table(flops: FlopSummary) -> Table:
    """Return the table of modules, the one that costs most first; FLOPs in 10⁹."""
    return record_table(_COLUMNS, sorted(flops.rows, key=lambda row: row.flops or 0, reverse=True), _cell)


def _cell(value: str | float | None, field: str) -> str:
    """Return a name, a count, or FLOPs in 10⁹."""
    return "" if value is None else f"{float(value) / 1e9:,.3f}" if "flops" in field else str(value)


def flops_lines(flops: FlopSummary) -> list[str]:
    """Say what a step costs, what share of the peak that is, when operators were counted and which could not be."""
    usual = median([step.flops for step in flops.by_step])
    at_least = "at least " if flops.unknown else ""
    line = f"a step: {at_least}{usual / 1e9:,.3f} GFLOP (median)"
    used = [(step.mfu, step.hfu) for step in flops.by_step if step.mfu is not None and step.hfu is not None]
    if used:
        mfu, hfu = (float(np.median(one)) for one in zip(*used, strict=True))
        line += f", MFU {mfu:.1%}" + (f", with recompute HFU {hfu:.1%}" if hfu > mfu else "")
        line += f" of {flops.peak_tflops:,.6g} TFLOP/s"
    if flops.counted_in:
        line += f"; counted in {'step' if len(flops.counted_in) == 1 else 'steps'} {_first(flops.counted_in)}"
    lines = [line]
    if flops.outside:
        lines.append(f"outside of modules: {flops.outside / 1e9:,.3f} GFLOP in these steps")
    if flops.unknown:
        lines.append(f"FLOPs of {counted(flops.unknown, 'span')} are unknown: no call alike was counted")
    if flops.without_formula:
        lines.append(f"not counted, as torch has no formula: {_first(flops.without_formula)}")
    if flops.unseen:
        lines.append(f"not counted: what Triton or a replayed graph runs inside of {_first(flops.unseen)}")
    return lines


def _first(values: Sequence[object]) -> str:
    more = len(values) - _MAX_NAMED
    return ", ".join(map(str, values[:_MAX_NAMED])) + (f" and {more} more" if more > 0 else "")
