"""FLOPs of modules and steps, the rates that they make of the time, and the tables of both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..._arrays import BoolArray, Int64Array, sums_at
from ..._tables import GIGA, MODULE, MS, NAME, NUMBER, PERCENT, TEXT, Column, Table, Unit, counted, fields_of
from ..contents import COUNTED, REPLAY_CLASS
from ..nesting import without_inner
from ..slices import BACKWARD, PHASES, RECOMPUTE, UNKNOWN_FLOPS, Arg, Slices
from .module_rows import ModuleTimes
from .overview import shortened
from .step_times import Steps
from .units import median

if TYPE_CHECKING:
    from ..timeline import Timeline
    from .device_summary import DeviceSummary

_CPU = "cpu "


class SpanFlops(NamedTuple):
    """The FLOPs, or bytes, of each span; arrays of equal length."""

    total: Int64Array  # int64, with the spans of its phase inside it; 0 where unknown
    self_flops: Int64Array  # int64, without them
    known: BoolArray  # bool, False if these are unknown

    def in_steps(self, columns: Slices, step: Int64Array, numbers: Int64Array) -> Int64Array:
        """Return int64[phases, steps], FLOPs in each of the steps."""
        spans = np.flatnonzero(np.isin(step, numbers))
        place = columns.phase[spans], np.searchsorted(numbers, step[spans])
        return sums_at((len(PHASES), len(numbers)), place, self.self_flops[spans])


class FlopModule(NamedTuple):
    """The FLOPs of one module.

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
        bytes_forward: of the inputs and the outputs of the operators that were counted, each once, in forward.
        bytes_backward: those of backward.
        bytes_recompute: those of recompute.
        recompute_in_backward: of `flops_recompute`, those of functions, no modules, that a checkpoint ran again: their
            time and their bytes are in backward.
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
    bytes_forward: int = 0
    bytes_backward: int = 0
    bytes_recompute: int = 0
    recompute_in_backward: int = 0


class PhaseRate(NamedTuple):
    """The rate at which one module computes in one phase, and the limit of that.

    Attributes:
        fqn: the module's fully qualified name; empty in a summary by class.
        module_class: the name of its class.
        phase: "forward", "backward" or "recompute".
        flops: in this phase, with inner modules.
        time_ns: what it took: of the device, of the host if the device is the CPU.
        flops_per_second: `flops` by `time_ns`.
        peak_share: what share of the device's peak that is; None if the peak is not known.
        bytes_accessed: of the inputs and the outputs of the operators that were counted, each once: they read and
            write at least that, if no cache holds it.
        bytes_per_second: `bytes_accessed` by `time_ns`; None if these are not known.
        intensity: `flops` by `bytes_accessed`; the same.
        bound_by: what limits these operators on a roofline of the device: "compute", or "memory" if what it moves in a
            second times `intensity` is below its peak; None if either is not known.
        attainable_share: what share of that limit `flops_per_second` is.
    """

    fqn: str
    module_class: str
    phase: str
    flops: int
    time_ns: int
    flops_per_second: float
    peak_share: float | None = None
    bytes_accessed: int = 0
    bytes_per_second: float | None = None
    intensity: float | None = None
    bound_by: str | None = None
    attainable_share: float | None = None

    def with_peak(self, tflops: float | None, bandwidth: float | None) -> PhaseRate:
        """Return it for a device of this peak, in 10¹² FLOP/s, and this bandwidth, in 10¹² bytes/s."""
        share, bound, attainable = self.flops_per_second / (tflops * 1e12) if tflops else None, None, None
        if tflops and bandwidth and self.intensity:
            limit = min(tflops, self.intensity * bandwidth)
            bound, attainable = "memory" if limit < tflops else "compute", self.flops_per_second / (limit * 1e12)
        return self._replace(peak_share=share, bound_by=bound, attainable_share=attainable)


class StepFlops(NamedTuple):
    """The FLOPs of one step, and which share of the peak they are.

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
    """The FLOPs of modules and steps, and what was not counted.

    Attributes:
        rows: a row per row of the summary.
        by_step: what each step cost.
        counted_in: the steps in which operators were counted; calls alike in others have the same.
        outside: FLOPs outside of modules in these steps.
        unknown: spans whose FLOPs are unknown: no call like theirs was counted.
        without_formula: operators that ran and have no formula.
        unseen: compiled modules and functions, and replayed graphs. What generated kernels or a graph compute in them
            is not counted.
        dtypes: FLOPs that were counted, by device and type of numbers (`cpu float32`).
        peak_tflops: the highest rate of the device, 10¹² FLOP/s; None if it is not known.
        rates: of each row and each phase in which it has FLOPs; none if the device has no times.
        peak_tbytes: what the device's memory moves at most, 10¹² bytes/s; None if it is not known.
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
    rates: Sequence[PhaseRate] = ()
    peak_tbytes: float | None = None

    @property
    def on_cpu(self) -> bool:
        """Whether the CPU computed all that was counted."""
        return bool(self.dtypes) and all(name.startswith(_CPU) for name in self.dtypes)

    def timed(self, times_ns: Mapping[tuple[str, str], Sequence[int]]) -> FlopSummary:
        """Return it with the rates of the modules that have times, of forward, backward and recompute, each alone."""
        rows, rates = [], []
        for row in self.rows:
            took: Sequence[int] = times_ns.get((row.fqn, row.module_class), ())
            whole_ns = sum(took)
            if row.flops is not None and whole_ns:
                row = row._replace(flops_per_second=row.flops / whole_ns * 1e9)
            rows.append(row)
            rerun = row.recompute_in_backward
            flops = (row.flops_forward, (row.flops_backward or 0) + rerun, (row.flops_recompute or 0) - rerun)
            nbytes = (row.bytes_forward, row.bytes_backward, row.bytes_recompute)
            rates += [
                PhaseRate(
                    *(row.fqn, row.module_class, phase, count, ns, count / ns * 1e9),
                    bytes_accessed=moved,
                    bytes_per_second=moved / ns * 1e9 if moved else None,
                    intensity=count / moved if moved else None,
                ).with_peak(self.peak_tflops, self.peak_tbytes)
                for phase, count, moved, ns in zip(PHASES, flops, nbytes, took, strict=False)
                if count and ns
            ]
        return self._replace(rows=rows, rates=rates)

    def with_peak(self, tflops: float | None, steps: Steps) -> FlopSummary:
        """Return it with another peak, 10¹² FLOP/s, or without one."""
        taken_ns = {step.step: step.training_ns for step in steps.take(steps.columns.whole)}
        by_step = []
        for step in self.by_step:
            most = (tflops or 0) * 1e3 * taken_ns.get(step.step, 0)
            used = ((step.flops - step.recompute) / most, step.flops / most) if most else (None, None)
            by_step.append(StepFlops(step.step, step.flops, step.recompute, *used))
        rates = [rate.with_peak(tflops, self.peak_tbytes) for rate in self.rates]
        return self._replace(peak_tflops=tflops, by_step=by_step, rates=rates)


def read_flops(timeline: Timeline, *wanted: str) -> list[SpanFlops]:
    """Return what each span of a module cost, for each arg that says it; nothing if no operators were counted."""
    columns = timeline.columns
    if Arg.FLOPS not in columns.args and COUNTED not in timeline.metadata:
        return []
    is_known = columns.arg(Arg.FLOPS).dense(len(columns), 0) != UNKNOWN_FLOPS
    in_phase = np.where(columns.phase == columns.phase[columns.parent], columns.parent, -1)
    totals = [np.maximum(columns.arg(arg).dense(len(columns), 0), 0) for arg in wanted]
    return [SpanFlops(total, np.maximum(without_inner(total, in_phase), 0), is_known) for total in totals]


def step_flops(timeline: Timeline) -> int | None:
    """Return the median of what steps cost, in FLOPs; None if nothing was counted."""
    span_flops, step = read_flops(timeline, Arg.FLOPS), timeline.columns.step
    if not span_flops:
        return None
    flops = sums_at(int(step.max(initial=0)) + 1, step, span_flops[0].self_flops)
    return median(flops[flops > 0].tolist())


class GroupFlops(NamedTuple):
    """The FLOPs of groups of modules: int64[phases, groups] each, but for `in_steps`."""

    spans: Int64Array  # how many spans there are
    known: Int64Array  # of how many of these FLOPs are known
    flops: Int64Array  # of all calls, with inner modules
    self_flops: Int64Array  # the same without them, in each row
    rerun: Int64Array  # FLOPs of what ran again in backward
    nbytes: Int64Array  # of the operators that were counted
    in_steps: Int64Array  # int64[phases, steps], FLOPs in each step

    @property
    def columns(self) -> dict[str, list[int | None]]:
        """The FLOPs of each phase as fields of `ModuleTimes`; None if none of a group's are known."""
        flops = np.where((self.spans > 0) & (self.known == 0), None, self.flops)  # type: ignore[call-overload]
        return {f"flops_{phase}": of_phase for phase, of_phase in zip(PHASES, flops.tolist(), strict=True)}


def describe_flops(
    timeline: Timeline,
    rows: Sequence[ModuleTimes],
    costs: GroupFlops,
    steps: Steps,
    *,
    device: DeviceSummary | None,
    compiled: Iterable[str],
) -> FlopSummary:
    """Return what modules and steps cost; the timeline is all that was recorded, or its last piece."""
    noted = timeline.metadata.get(COUNTED, {})
    dtypes = noted.get("dtypes", {})
    modules = []
    columns = costs.self_flops.sum(axis=0), costs.rerun[BACKWARD], costs.nbytes.T
    for row, self_flops, rerun, nbytes in zip(rows, *(column.tolist() for column in columns), strict=True):
        in_phases = row.flops_forward, row.flops_backward, row.flops_recompute or None
        in_known = [flops for flops in in_phases if flops is not None]
        total = sum(in_known) if in_known else None
        costs_of_row = *in_phases, *nbytes, rerun
        modules.append(FlopModule(row.fqn, row.module_class, row.calls, total, self_flops, None, *costs_of_row))
    in_step = np.stack([steps.columns.step, costs.in_steps.sum(axis=0), costs.in_steps[RECOMPUTE]], axis=1)
    name, _, dtype = max(dtypes, key=dtypes.__getitem__, default="").rpartition(" ")
    replays = [name.fqn for name in timeline.names if name.module_class == REPLAY_CLASS]
    summary = FlopSummary(
        rows=modules,
        by_step=[StepFlops(*of_step) for of_step in in_step.tolist()],
        counted_in=noted.get("steps", []),
        outside=noted.get("outside", 0),
        unknown=noted.get("unknown", 0),
        without_formula=noted.get("without_formula", []),
        unseen=[*compiled, *replays],
        dtypes=dtypes,
        peak_tbytes=peak_tbytes(name),
    ).with_peak(peak_tflops(name, dtype), steps)
    timed = rows if summary.on_cpu else () if device is None else device.rows
    return summary.timed(
        {(row.fqn, row.module_class): (row.forward_ns, row.backward_ns, row.recompute_ns) for row in timed}
    )


_COLUMNS = (
    Column("module", "fqn", MODULE),
    Column("class", "module_class", NAME, 3),
    Column("calls", "calls", NUMBER, 2),
    Column("GFLOP", "flops", GIGA),
    Column("self", "self_flops", GIGA, 1, repeats=("flops",)),
    Column("forward", "flops_forward", GIGA, 4, repeats=("flops",)),
    Column("backward", "flops_backward", GIGA, 4),
    Column("recompute", "flops_recompute", GIGA, 4),
    Column("GFLOP/s", "flops_per_second", GIGA),
)
_NOTE = (
    "GFLOP: of all calls with their inner modules, in all phases and in each, so that rows overlap; "
    "self: without inner modules; GFLOP/s: of the former"
)
_RATE_COLUMNS = (
    Column("module", "fqn", MODULE),
    Column("class", "module_class", NAME, 5),
    Column("phase", "phase", TEXT),
    Column("GFLOP", "flops", GIGA, 2),
    Column("ms", "time_ns", MS, 1),
    Column("GFLOP/s", "flops_per_second", GIGA),
    Column("% of peak", "peak_share", PERCENT),
    Column("GB/s", "bytes_per_second", GIGA, 4),
    Column("FLOP/byte", "intensity", Unit("number", "{:,.1f}".format), 3),
    Column("bound by", "bound_by", TEXT),
    Column("% of limit", "attainable_share", PERCENT),
)
_RATE_NOTE = (
    "GFLOP: with inner modules; GFLOP/s: by the time of the phase, without other phases inside it; "
    "bytes: of the inputs and the outputs of the operators that are counted, and no others; "
    "backward: with what checkpointed functions compute again in it"
)


def flop_table(flops: FlopSummary) -> Table:
    """Return the table of modules, the one that costs most first, and what a step cost."""
    rows = sorted(flops.rows, key=lambda row: row.flops or 0, reverse=True)
    return Table(_COLUMNS, rows, fields_of(FlopModule), flops_lines(flops), (_NOTE,))


def rate_table(flops: FlopSummary) -> Table:
    """Return the table of modules and phases, what costs most first."""
    rows = sorted(flops.rates, key=lambda rate: rate.flops, reverse=True)
    return Table(_RATE_COLUMNS, rows, fields_of(PhaseRate), notes=(_RATE_NOTE,))


def flops_lines(flops: FlopSummary) -> list[str]:
    """Say what a step costs, what share of the peak that is, when operators were counted and which could not be."""
    usual = median([step.flops for step in flops.by_step])
    at_least = "at least " if flops.unknown else ""
    line = f"a step: {at_least}{usual / 1e9:,.3f} GFLOP (median)"
    used = [(step.mfu, step.hfu) for step in flops.by_step if step.mfu is not None and step.hfu is not None]
    if used:
        mfu, hfu = np.median(used, axis=0).tolist()
        line += f", MFU {mfu:.1%}" + (f", with recompute HFU {hfu:.1%}" if hfu > mfu else "")
        line += f" of {flops.peak_tflops:,.6g} TFLOP/s"
    if flops.counted_in:
        line += f"; counted in {'step' if len(flops.counted_in) == 1 else 'steps'} {shortened(flops.counted_in)}"
    lines = [line]
    if flops.outside:
        lines.append(f"outside of modules: {flops.outside / 1e9:,.3f} GFLOP in these steps")
    if flops.unknown:
        lines.append(f"FLOPs of {counted(flops.unknown, 'span')} are unknown: no call alike was counted")
    if flops.without_formula:
        lines.append(f"not counted, as torch has no formula: {shortened(flops.without_formula)}")
    if flops.unseen:
        lines.append(
            f"not counted: what generated kernels or a replayed graph compute inside of {shortened(flops.unseen)}"
        )
    return lines


_HALF = ("bfloat16", "float16")
_EIGHT_BITS = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
# From data sheets of NVIDIA (for the RTX 4090 its paper on the Ada architecture) and AMD, without sparsity: half of
# what NVIDIA states with it. The RTX 4090 sums up in 32 bits. Numbers of 32 bits are left out: whether they are
# computed as TF32 is not known. The bandwidth of the B200 is from the DGX B200's (64 TB/s of 8).
_PEAKS: Mapping[str, tuple[float, float | None, float | None]] = {
    "B200": (2250.0, 4500.0, 8.0),
    "H200": (989.4, 1978.9, 4.8),
    "H100 PCIe": (756.0, 1513.0, 2.0),
    "H100 NVL": (835.5, 1671.0, 3.9),
    "H100": (989.4, 1978.9, 3.35),
    "A100 SXM4 80GB": (312.0, None, 2.039),
    "A100 80GB PCIe": (312.0, None, 1.935),
    "A100 SXM4 40GB": (312.0, None, 1.555),
    "A100 PCIE 40GB": (312.0, None, 1.555),
    "A100": (312.0, None, None),
    "L40S": (362.05, 733.0, 0.864),
    "L4": (121.0, 242.5, 0.3),
    "RTX 4090": (165.2, 330.3, 1.008),
    "V100": (125.0, None, 0.9),
    "MI300X": (1307.4, 2614.9, 5.3),
    "MI250X": (383.0, None, None),
}
"""TFLOP/s of numbers of 16 bits, and of 8 bits, and what memory moves, 10¹² bytes/s, by a part of the device's name."""


def peak_tflops(device: str, dtype: str) -> float | None:
    """Return the highest dense rate of a device (`NVIDIA H100 80GB HBM3`) in 10¹² FLOP/s; None if it is not known."""
    half, eight_bits, _ = _peaks(device)
    return half if dtype in _HALF else eight_bits if dtype in _EIGHT_BITS else None


def peak_tbytes(device: str) -> float | None:
    """Return what the memory of a device moves at most, in 10¹² bytes/s; None if it is not known."""
    return _peaks(device)[2]


def _peaks(device: str) -> tuple[float | None, ...]:
    words = f"{device.replace('-', ' ')} "
    is_part = " MIG " in words  # a part of a GPU has a part of its rates
    return next((peaks for name, peaks in _PEAKS.items() if f" {name} " in words and not is_part), (None, None, None))
