"""FLOPs of modules and steps, their rates per second, and the tables of both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import numpy as np

from ..._arrays import BoolArray, Int64Array, sums_at
from ..._tables import GIGA, MODULE, MS, NAME, NUMBER, PERCENT, TEXT, Column, Table, Unit, counted, fields_of
from ..contents import COUNTED, REPLAY_CLASS
from ..nesting import without_inner
from ..slices import BACKWARD, PHASES, RECOMPUTE, UNKNOWN_FLOPS, Arg, Phase, Slices
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

    total_flops: Int64Array  # int64, with inner spans of the same phase; 0 if unknown
    self_flops: Int64Array  # int64, without inner spans
    is_known: BoolArray  # bool, False if the FLOPs are unknown

    def in_steps(self, columns: Slices, step: Int64Array, numbers: Int64Array) -> Int64Array:
        """Return int64[phases, steps], the FLOPs in each of the steps `numbers`."""
        spans = np.flatnonzero(np.isin(step, numbers))
        cell = columns.phase[spans], np.searchsorted(numbers, step[spans])
        return sums_at((len(PHASES), len(numbers)), cell, self.self_flops[spans])


class FlopModule(NamedTuple):
    """The FLOPs of one module.

    Attributes:
        fqn: the module's fully qualified name; empty in a summary by class.
        module_class: the name of its class.
        calls: number of forward calls.
        flops: FLOPs of all calls and phases, with inner modules; None if unknown.
        self_flops: the part of `flops` without inner modules.
        flops_per_second: `flops` divided by the time of the device, or by the host's time if the device is the CPU;
            None if the device has no times.
        flops_forward: the part of `flops` in forward.
        flops_backward: the part of `flops` in backward.
        flops_recompute: the part of `flops` in recompute; None if it is 0.
        bytes_forward: bytes of the inputs and outputs of the counted operators in forward, each counted once.
        bytes_backward: bytes of these in backward.
        bytes_recompute: bytes of these in recompute.
        recompute_in_backward: the part of `flops_recompute` in functions (not modules) that a checkpoint ran again:
            their time and bytes are in backward.
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


RooflineLimit: TypeAlias = Literal["compute", "memory"]


class PhaseRate(NamedTuple):
    """The rate at which one module computes in one phase, and the limit of this rate.

    Attributes:
        fqn: the module's fully qualified name; empty in a summary by class.
        module_class: the name of its class.
        phase: "forward", "backward" or "recompute".
        flops: FLOPs in this phase, with inner modules.
        time_ns: duration on the device, or on the host if the device is the CPU.
        flops_per_second: `flops` divided by `time_ns`.
        peak_share: `flops_per_second` divided by the device's peak; None if the peak is unknown.
        bytes_accessed: bytes of the inputs and outputs of the counted operators, each counted once: the least that they
            read and write if no cache holds it.
        bytes_per_second: `bytes_accessed` divided by `time_ns`; None if the bytes are unknown.
        intensity: `flops` divided by `bytes_accessed`; None if the bytes are unknown.
        bound_by: the limit in the device's roofline model: "memory" if bandwidth times `intensity` is below the peak,
            else "compute"; None if the peak, the bandwidth or the bytes are unknown.
        attainable_share: `flops_per_second` divided by that limit; None if unknown.
    """

    fqn: str
    module_class: str
    phase: Phase
    flops: int
    time_ns: int
    flops_per_second: float
    peak_share: float | None = None
    bytes_accessed: int = 0
    bytes_per_second: float | None = None
    intensity: float | None = None
    bound_by: RooflineLimit | None = None
    attainable_share: float | None = None

    def with_peak(self, tflops: float | None, bandwidth: float | None) -> PhaseRate:
        """Return a copy for a device of this peak in 10¹² FLOP/s and this bandwidth in 10¹² bytes/s."""
        if not tflops:
            return self._replace(peak_share=None, bound_by=None, attainable_share=None)
        rate = self._replace(peak_share=self.flops_per_second / (tflops * 1e12), bound_by=None, attainable_share=None)
        if not bandwidth or not self.intensity:
            return rate
        limit = min(tflops, self.intensity * bandwidth)
        bound: RooflineLimit = "memory" if limit < tflops else "compute"
        return rate._replace(bound_by=bound, attainable_share=self.flops_per_second / (limit * 1e12))


class StepFlops(NamedTuple):
    """The FLOPs of one step, and their share of the peak.

    Attributes:
        step: number of the step.
        flops: FLOPs of all modules and phases.
        recompute: the part of `flops` in recompute.
        mfu: model FLOPs utilization: `flops` without `recompute`, as a share of the peak; None if the peak is unknown.
        hfu: hardware FLOPs utilization: `flops` as a share of the peak; None if the peak is unknown.
    """

    step: int
    flops: int
    recompute: int
    mfu: float | None = None
    hfu: float | None = None


class FlopSummary(NamedTuple):
    """The FLOPs of modules and steps, and the work that was not counted.

    Attributes:
        rows: one for each row of the summary.
        by_step: FLOPs of each step.
        counted_in: numbers of the steps in which operators were counted; similar calls in other steps get their FLOPs.
        outside: FLOPs outside modules in these steps.
        unknown: number of spans whose FLOPs are unknown, because no similar call was counted.
        without_formula: names of operators that ran and have no formula.
        unseen: names of compiled modules and functions, and of replayed graphs. FLOPs of their generated kernels and
            graphs are not counted.
        dtypes: counted FLOPs by device and dtype (`cpu float32`).
        peak_tflops: highest rate of the device in 10¹² FLOP/s; None if unknown.
        rates: one for each row and phase with FLOPs; empty if the device has no times.
        peak_tbytes: bandwidth of the device's memory in 10¹² bytes/s; None if unknown.
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
        """Whether all counted operators ran on the CPU."""
        return bool(self.dtypes) and all(name.startswith(_CPU) for name in self.dtypes)

    def timed(self, times_ns: Mapping[tuple[str, str], Sequence[int]]) -> FlopSummary:
        """Return a copy with rates. `times_ns`: for modules, the times of forward, backward and recompute."""
        rows, rates = [], []
        for row in self.rows:
            phases_ns: Sequence[int] = times_ns.get((row.fqn, row.module_class), ())
            total_ns = sum(phases_ns)
            if row.flops is not None and total_ns:
                row = row._replace(flops_per_second=row.flops / total_ns * 1e9)
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
                for phase, count, moved, ns in zip(PHASES, flops, nbytes, phases_ns, strict=False)
                if count and ns
            ]
        return self._replace(rows=rows, rates=rates)

    def with_peak(self, tflops: float | None, steps: Steps) -> FlopSummary:
        """Return a copy with another peak in 10¹² FLOP/s, or without one."""
        training_ns = {step.step: step.training_ns for step in steps.take(steps.columns.whole)}
        by_step = []
        for step in self.by_step:
            mfu = hfu = None
            if peak_flops := (tflops or 0) * 1e3 * training_ns.get(step.step, 0):
                mfu, hfu = (step.flops - step.recompute) / peak_flops, step.flops / peak_flops
            by_step.append(StepFlops(step.step, step.flops, step.recompute, mfu, hfu))
        rates = [rate.with_peak(tflops, self.peak_tbytes) for rate in self.rates]
        return self._replace(peak_tflops=tflops, by_step=by_step, rates=rates)


def read_flops(timeline: Timeline, *args: str) -> list[SpanFlops]:
    """Return the FLOPs or bytes of modules' spans, one table per span arg; empty if no operators were counted."""
    columns = timeline.columns
    if Arg.FLOPS not in columns.args and COUNTED not in timeline.metadata:
        return []
    is_known = columns.arg(Arg.FLOPS).dense(len(columns), 0) != UNKNOWN_FLOPS
    in_phase = np.where(columns.phase == columns.phase[columns.parent], columns.parent, -1)
    totals = [np.maximum(columns.arg(arg).dense(len(columns), 0), 0) for arg in args]
    return [SpanFlops(total, np.maximum(without_inner(total, in_phase), 0), is_known) for total in totals]


def step_flops(timeline: Timeline) -> int | None:
    """Return the median of the steps' FLOPs; None if no operators were counted."""
    span_flops, step = read_flops(timeline, Arg.FLOPS), timeline.columns.step
    if not span_flops:
        return None
    flops = sums_at(int(step.max(initial=0)) + 1, step, span_flops[0].self_flops)
    return median(flops[flops > 0].tolist())


class GroupFlops(NamedTuple):
    """The FLOPs of groups of modules: int64[phases, groups] each, except `in_steps`."""

    spans: Int64Array  # number of spans
    known: Int64Array  # number of spans whose FLOPs are known
    flops: Int64Array  # FLOPs of all calls, with inner modules
    self_flops: Int64Array  # FLOPs of all calls, without inner modules
    rerun: Int64Array  # FLOPs that a checkpoint computed again in backward
    nbytes: Int64Array  # bytes of the counted operators
    in_steps: Int64Array  # int64[phases, steps], FLOPs in each step

    @property
    def columns(self) -> dict[str, list[int | None]]:
        """The FLOPs of each phase as fields of `ModuleTimes`; None for a group whose FLOPs are all unknown."""
        flops = np.where((self.spans > 0) & (self.known == 0), None, self.flops)  # type: ignore[call-overload]
        return {f"flops_{phase}": counts for phase, counts in zip(PHASES, flops.tolist(), strict=True)}


def describe_flops(
    timeline: Timeline,
    rows: Sequence[ModuleTimes],
    costs: GroupFlops,
    steps: Steps,
    *,
    device: DeviceSummary | None,
    compiled: Iterable[str],
) -> FlopSummary:
    """Return the FLOPs of modules and steps; `timeline` is the whole recording, or its last piece."""
    counts = timeline.metadata.get(COUNTED, {})
    dtypes = counts.get("dtypes", {})
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
        by_step=[StepFlops(*row) for row in in_step.tolist()],
        counted_in=counts.get("steps", []),
        outside=counts.get("outside", 0),
        unknown=counts.get("unknown", 0),
        without_formula=counts.get("without_formula", []),
        unseen=[*compiled, *replays],
        dtypes=dtypes,
        peak_tbytes=peak_tbytes(name),
    ).with_peak(peak_tflops(name, dtype), steps)
    device_rows = () if device is None else device.rows
    times = {
        (row.fqn, row.module_class): (row.forward_ns, row.backward_ns, row.recompute_ns)
        for row in (rows if summary.on_cpu else device_rows)
    }
    return summary.timed(times)


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
    "self: without inner modules; GFLOP/s: with inner modules"
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
    "bytes: only of the inputs and outputs of the counted operators; "
    "backward: with the FLOPs that checkpointed functions compute again in it"
)


def flop_table(flops: FlopSummary) -> Table:
    """Return the table of modules, the most FLOPs first, and lines about a step."""
    rows = sorted(flops.rows, key=lambda row: row.flops or 0, reverse=True)
    return Table(_COLUMNS, rows, fields_of(FlopModule), flops_lines(flops), (_NOTE,))


def rate_table(flops: FlopSummary) -> Table:
    """Return the table of modules and phases, the most FLOPs first."""
    rows = sorted(flops.rates, key=lambda rate: rate.flops, reverse=True)
    return Table(_RATE_COLUMNS, rows, fields_of(PhaseRate), notes=(_RATE_NOTE,))


def flops_lines(flops: FlopSummary) -> list[str]:
    """Return lines: the FLOPs of a step and their share of the peak, the counted steps, and operators not counted."""
    flops_per_step = median([step.flops for step in flops.by_step])
    at_least = "at least " if flops.unknown else ""
    line = f"a step: {at_least}{flops_per_step / 1e9:,.3f} GFLOP (median)"
    shares = [(step.mfu, step.hfu) for step in flops.by_step if step.mfu is not None and step.hfu is not None]
    if shares:
        mfu, hfu = np.median(shares, axis=0).tolist()
        line += f", MFU {mfu:.1%}" + (f", with recompute HFU {hfu:.1%}" if hfu > mfu else "")
        line += f" of {flops.peak_tflops:,.6g} TFLOP/s"
    if flops.counted_in:
        line += f"; counted in {'step' if len(flops.counted_in) == 1 else 'steps'} {shortened(flops.counted_in)}"
    lines = [line]
    if flops.outside:
        lines.append(f"outside modules: {flops.outside / 1e9:,.3f} GFLOP in these steps")
    if flops.unknown:
        lines.append(f"FLOPs of {counted(flops.unknown, 'span')} are unknown: no similar call was counted")
    if flops.without_formula:
        lines.append(f"not counted, as torch has no formula: {shortened(flops.without_formula)}")
    if flops.unseen:
        lines.append(f"not counted: the work of generated kernels or a replayed graph in {shortened(flops.unseen)}")
    return lines


_16_BITS = ("bfloat16", "float16")
_8_BITS = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
# From data sheets of NVIDIA (for the RTX 4090 its paper on the Ada architecture) and AMD, without sparsity: half of
# NVIDIA's figures with sparsity. The RTX 4090's are for accumulation in 32 bits. float32 is left out: it is unknown
# whether it is computed as TF32. The bandwidth of the B200 is an eighth of the DGX B200's (64 TB/s).
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
"""By a part of the device's name: TFLOP/s in 16 bits, TFLOP/s in 8 bits, and bandwidth of memory in 10¹² bytes/s."""


def peak_tflops(device: str, dtype: str) -> float | None:
    """Return the highest dense rate of a device (`NVIDIA H100 80GB HBM3`) in 10¹² FLOP/s; None if it is unknown."""
    tflops_16_bits, tflops_8_bits, _ = _peaks(device)
    if dtype in _16_BITS:
        return tflops_16_bits
    return tflops_8_bits if dtype in _8_BITS else None


def peak_tbytes(device: str) -> float | None:
    """Return the bandwidth of a device's memory in 10¹² bytes/s; None if it is unknown."""
    return _peaks(device)[2]


def _peaks(device: str) -> tuple[float | None, ...]:
    words = f"{device.replace('-', ' ')} "
    is_part = " MIG " in words  # one MIG instance of a GPU has only a part of its rates
    return next((peaks for name, peaks in _PEAKS.items() if f" {name} " in words and not is_part), (None, None, None))
