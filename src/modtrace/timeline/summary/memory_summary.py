"""Memory that modules allocated and kept, and its holders at the peak: rows and tables."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..._arrays import INT64_MIN, Int64Array
from ..._tables import MODULE, NAME, PERCENT, Column, Table, Unit, fields_of
from ..contents import MEMORY
from ..memory import NO_MODULE, OUTSIDE_CALLS, Holders, find_holders, format_bytes, grown_in, measure_calls
from ..slices import FORWARD, PHASES, RECOMPUTE
from .module_rows import Groups
from .step_bounds import StepBounds

if TYPE_CHECKING:
    from ..timeline import Timeline


_NONE = INT64_MIN
_MAX_GROWTH_DIFFERENCE = 0.2
"""Maximum relative difference between a place's growth and the growth in all: first steps allocate more, or less."""


class MemoryModule(NamedTuple):
    """The memory of one module, in bytes; None if memory was not counted throughout any call of that phase.

    Attributes:
        fqn: the module's fully qualified name; empty in a summary by class.
        module_class: the name of its class.
        retained_bytes: bytes held at the end of a forward call minus bytes held at its start; median of the calls, the
            lower one of two middle values.
        retained_recompute_bytes: `retained_bytes` of the calls that a checkpoint ran again.
        peak_bytes: maximum held inside a call or a span of backward, minus the bytes held at its start; of all phases.
        peak_forward_bytes: the maximum in forward.
        peak_backward_bytes: the maximum in backward.
        peak_recompute_bytes: the maximum in recompute.
        saved_bytes: bytes that its calls, with inner modules, keep for a backward pass: allocated with gradients
            enabled, and freed in or after the pass. The mean over the last passes of the recording.
    """

    fqn: str
    module_class: str
    retained_bytes: int | None
    retained_recompute_bytes: int | None
    peak_bytes: int | None
    peak_forward_bytes: int | None
    peak_backward_bytes: int | None
    peak_recompute_bytes: int | None
    saved_bytes: int | None = None


class Holder(NamedTuple):
    """The bytes of one holder at the peak.

    Attributes:
        fqn: fully qualified name of a module; `parameters`, `gradients` or `optimizer state`, if these are known;
            `no module` for memory that grows from step to step outside all these; or `other`: all other memory that
            was held before the step or allocated outside modules.
        bytes: bytes that the module's own calls in that step, without inner ones, held at the peak; all that they ever
            allocated and still hold if this grows.
        saved_bytes: estimate of the part held for the backward pass, at most `MemoryModule.saved_bytes` without inner
            modules; None if unknown.
    """

    fqn: str
    bytes: int
    saved_bytes: int | None = None


class MemorySummary(NamedTuple):
    """The memory of tensors in bytes: on the GPU, or without one the CPU memory allocated while the process recorded.

    Attributes:
        rows: one per module or class, in the order of the summary's rows.
        peak_bytes: maximum of the bytes held at one time.
        peak_ns: time of the peak in Unix nanoseconds.
        peak_seconds: time of the peak in seconds from the first sample.
        peak_step: number of the step with the peak; None if the peak is outside steps.
        holders: holders at the peak, largest first, `other` last; they sum to `peak_bytes`.
        process: name of the process with the highest peak; empty if only one process counted memory.
        sentences: sentences about failed allocations and growth from step to step, of the whole recording.
        grown_in: place outside modules that allocates the growing memory: `in` a range, or `between` two things; empty
            if no memory grows there, or the place is not clear.
    """

    rows: tuple[MemoryModule, ...]
    peak_bytes: int
    peak_ns: int
    peak_seconds: float
    peak_step: int | None
    holders: tuple[Holder, ...]
    process: str = ""
    sentences: tuple[str, ...] = ()
    grown_in: str = ""


class MeasuredMemory(NamedTuple):
    """The memory of one piece of a timeline."""

    calls: Int64Array  # int64[4, n]: phase, group, bytes retained, and the number of calls that retained these bytes
    peak_bytes: Int64Array  # int64[phases, groups], maximum held inside a call; negative if no call was counted
    holders: Holders  # holders at the peak of the piece
    step: int | None  # number of the step with the peak; None if it is outside steps
    growth_bytes: Mapping[str, int]  # growth of each place outside modules, if memory grows there
    step_count: int  # number of steps


def measure_memory(timeline: "Timeline", groups: Groups, steps: StepBounds) -> MeasuredMemory | None:
    """Return the memory of a piece of a timeline; None if it was not recorded."""
    calls, holders = measure_calls(timeline), find_holders(timeline)
    if calls is None or holders is None:
        return None
    columns, is_known = timeline.columns, calls.is_known
    phase, group = columns.phase[is_known].astype(np.int64), groups.of_name[columns.name[is_known]]
    amounts, count = np.unique(np.stack([phase, group, calls.retained_bytes[is_known]]), axis=1, return_counts=True)
    peaks = np.full((len(PHASES), len(groups)), _NONE)
    np.maximum.at(peaks, (phase, group), calls.peak_bytes[is_known])
    step = next(
        iter(steps.number[(steps.start_ns <= holders.time_ns) & (holders.time_ns < steps.end_ns)].tolist()), None
    )
    growth = grown_in(timeline) if _growth_outside(timeline) else {}
    return MeasuredMemory(np.concatenate([amounts, [count]]), peaks, holders, step, growth, len(steps.number))


def _growth_outside(timeline: "Timeline") -> int:
    """Return the bytes per step by which memory allocated outside modules grows; 0 if it does not grow."""
    growth: int = timeline.metadata.get(MEMORY, {}).get("grows_by", {}).get(NO_MODULE, 0)
    return max(growth, 0)


def _place_of_growth(pieces: Sequence[MeasuredMemory], step_growth: int) -> str:
    """Return the place whose retained bytes grow by `step_growth` per step; empty if no place does."""
    growth: Counter[str] = Counter()
    for piece in pieces:
        growth.update(piece.growth_bytes)
    steps = max(sum(piece.step_count for piece in pieces), 1)
    place = min(growth, key=lambda place: abs(growth[place] / steps - step_growth), default="")
    is_near = abs(growth[place] / steps - step_growth) <= _MAX_GROWTH_DIFFERENCE * step_growth
    return place if is_near else ""


def summarize_memory(
    timeline: "Timeline", groups: Groups, order: list[int], pieces: Sequence[MeasuredMemory]
) -> MemorySummary | None:
    """Return the memory of all pieces, the last of which is `timeline`; None if it was not recorded."""
    if not pieces:
        return None
    phase, group, retained, call_count = np.concatenate([piece.calls for piece in pieces], axis=1)
    medians = [
        _medians(group[rows], retained[rows], call_count[rows]) for rows in (phase == FORWARD, phase == RECOMPUTE)
    ]
    peaks = np.full((len(PHASES), len(groups)), _NONE)
    for piece in pieces:
        # Groups of ranges follow groups of modules, and not all pieces have them.
        count = min(len(groups), piece.peak_bytes.shape[1])
        np.maximum(peaks[:, :count], piece.peak_bytes[:, :count], out=peaks[:, :count])
    table = np.vstack([peaks.max(axis=0), peaks])
    peak_rows = np.where(table == _NONE, None, table).T.tolist()  # type: ignore[call-overload]
    peak_piece = max(pieces, key=lambda piece: piece.holders.held_bytes)
    peak, first_ns = peak_piece.holders, pieces[0].holders.start_ns
    facts = timeline.metadata.get(MEMORY, {})
    saved = {} if peak.process else facts.get("saved", {})  # with several processes, it is unknown whose these are
    rows = tuple(
        MemoryModule(
            groups.fqns[index],
            groups.classes[index],
            *(median_of_group.get(index) for median_of_group in medians),
            *peak_rows[index],
        )._replace(saved_bytes=_sum_inside(saved, groups.fqns[index]))
        for index in order
    )
    holders = [
        Holder(fqn, count, min(count, saved[fqn]) if fqn in saved else None) for fqn, count in peak.by_fqn.items()
    ]
    return MemorySummary(
        rows=rows,
        peak_bytes=peak.held_bytes,
        peak_ns=peak.time_ns,
        peak_seconds=(peak.time_ns - first_ns) / 1e9,
        peak_step=peak_piece.step,
        holders=(*holders, Holder("other", peak.other)),
        process=peak.process,
        sentences=tuple(facts.get("sentences", ())),
        grown_in=_place_of_growth(pieces, _growth_outside(timeline)),
    )


def _sum_inside(saved: Mapping[str, int], fqn: str) -> int | None:
    """Return the saved bytes of a module with its inner modules; None if unknown."""
    counts = [count for name, count in saved.items() if fqn and f"{name}.".startswith(f"{fqn}.")]
    return sum(counts) if counts else None


def _medians(group: Int64Array, value: Int64Array, count: Int64Array) -> dict[int, int]:
    """Return the median of each group's values; value i counts `count[i]` times."""
    order = np.lexsort((value, group))
    group, value, total = group[order], value[order], np.cumsum(count[order])
    groups, first = np.unique(group, return_index=True)
    total_before = np.append(0, total)[first]
    counts = np.diff(np.append(total_before, total[-1:]))
    middle = np.searchsorted(total, total_before + (counts - 1) // 2, side="right")
    return dict(zip(groups.tolist(), value[middle].tolist(), strict=True))


_BYTES = Unit("number", format_bytes)
_COLUMNS = (
    Column("module", "fqn", MODULE),
    Column("class", "module_class", NAME, 6),
    Column("retained", "retained_bytes", _BYTES),
    Column("in recompute", "retained_recompute_bytes", _BYTES, 4),
    Column("saved", "saved_bytes", _BYTES, 5),
    Column("peak inside", "peak_bytes", _BYTES),
    Column("forward", "peak_forward_bytes", _BYTES, 2, repeats=("peak_bytes",)),
    Column("backward", "peak_backward_bytes", _BYTES, 1, repeats=("peak_bytes",)),
    Column("recompute", "peak_recompute_bytes", _BYTES, 3),
)
_NOTE = (
    "retained: held at the end of a call minus at its start, median; saved: by its calls for a backward pass, mean; "
    "peak inside: maximum held inside minus at its start, then by phase"
)
_KINDS_NOTE = (
    "parameters: of modules called by then; gradients, optimizer state: allocated by backward passes and optimizers' "
    "steps; other: held before the step, or by no module"
)
_OTHER_NOTE = "other: held before the step (parameters, gradients, the optimizer's state), or by no module"


def memory_table(memory: MemorySummary) -> Table:
    """Return the table of modules, the one with the highest peak first."""
    rows = sorted(memory.rows, key=lambda row: row.peak_bytes or 0, reverse=True)
    sentences = (*memory.sentences, "") if memory.sentences else ()
    return Table(_COLUMNS, rows, fields_of(MemoryModule), sentences, (_NOTE,), "module")


def holders_table(memory: MemorySummary, limit: int | None = None) -> Table:
    """Return the table of holders at the peak: `limit` rows, one row for the holders below them, and `other`."""
    *holders, other = memory.holders
    limit = len(holders) if limit is None else limit
    more = [Holder("more rows", sum(holder.bytes for holder in holders[limit:]))] if holders[limit:] else []
    columns = (
        Column("held at the peak by", "fqn", MODULE),
        Column("bytes", "bytes", _BYTES),
        Column("%", lambda holder: holder.bytes / (memory.peak_bytes or 1), PERCENT),
        Column("of it saved, about", "saved_bytes", _BYTES, 1),
    )
    process = f" in {memory.process}" if memory.process else ""
    step = "" if memory.peak_step is None else f" in step {memory.peak_step},"
    time = f"{step} {memory.peak_seconds:,.3f} s from the start"
    note = _KINDS_NOTE if any(holder.fqn in OUTSIDE_CALLS for holder in memory.holders) else _OTHER_NOTE
    total = f"together {format_bytes(memory.peak_bytes)}{process},{time}; {note}"
    return Table(columns, [*holders[:limit], *more, other], fields_of(Holder), notes=(total,))
