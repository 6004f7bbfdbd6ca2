"""Memory that modules took and kept, and who held it at the peak: rows and tables."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..._arrays import INT64_MIN, Int64Array
from ..._tables import MODULE, NAME, PERCENT, Column, Table, Unit, fields_of
from ..contents import MEMORY
from ..memory import OUTSIDE, OUTSIDE_CALLS, Holders, find_holders, format_bytes, grown_in, measure_calls
from ..slices import FORWARD, PHASES, RECOMPUTE
from .module_rows import Groups
from .step_bounds import StepBounds

if TYPE_CHECKING:
    from ..timeline import Timeline


_NONE = INT64_MIN
_NEAR = 0.2
"""By which share what grows in a place may differ from what grows in all: the first steps have more, or less."""


class MemoryModule(NamedTuple):
    """The memory of one module, in bytes; None if no call of that phase was counted from begin to end.

    Attributes:
        fqn: the module's fully qualified name; empty in a summary by class.
        module_class: the name of its class.
        retained_bytes: what a forward call kept: held at its end less held at its begin; of the calls the median, the
            lower one of two in the middle.
        retained_recompute_bytes: the same of what a checkpoint ran again.
        peak_bytes: the most held inside a call, or a span of backward, less held at its begin; of all phases.
        peak_forward_bytes: of it, in forward.
        peak_backward_bytes: of it, in backward.
        peak_recompute_bytes: of it, in recompute.
        saved_bytes: what its calls, with inner modules, keep for a backward pass: what they allocated with gradients
            that is freed in or after the pass; the mean of the last passes of the recording.
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
        fqn: its fully qualified name; `parameters`, `gradients`, `optimizer state`, if these are known; `no module` for
            what grows from step to step outside of all these; or `other`: what else was held before the step, and
            outside of modules.
        bytes: what its own calls in that step kept by then, outside of inner ones; all that they hold if that grows.
        saved_bytes: how much of that is for the backward pass, an estimate: at most what its calls keep for one; None
            if that is not known.
    """

    fqn: str
    bytes: int
    saved_bytes: int | None = None


class MemorySummary(NamedTuple):
    """The memory of tensors, in bytes: on the GPU, else on the CPU of what was allocated while the process recorded.

    Attributes:
        rows: a row per module or class, in the order of the summary's.
        peak_bytes: the most that they held at once.
        peak_ns: when, Unix nanoseconds.
        peak_seconds: when, in seconds from the first sample.
        peak_step: the number of the step that it is in; None if it is in none.
        holders: who held it, largest first, `other` last: they sum to `peak_bytes`.
        process: the name of the process that held most; empty if only one counted.
        sentences: why an allocation failed, and what grows from step to step, of the whole recording.
        grown_in: where outside of modules what grows is allocated: `in` a range, or `between` two things; empty if
            nothing grows there, or that is not clear.
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
    """The memory of one piece of a timeline, to which that of the others is added."""

    calls: Int64Array  # int64[4, n]: phase, group, bytes retained, and how many calls retained as much
    peaks: Int64Array  # int64[phases, groups], the most held inside a call; negative where none was counted
    held: Holders  # who held most, when they did
    step: int | None  # the number of the step that this is in; None if it is in none
    grown: Mapping[str, int]  # by how many bytes what is held grew in each place outside of modules, if that grows
    steps: int  # how many there are


def measure_memory(timeline: "Timeline", groups: Groups, steps: StepBounds) -> MeasuredMemory | None:
    """Return what modules of a piece of a timeline took; None if it does not say."""
    calls, held = measure_calls(timeline), find_holders(timeline)
    if calls is None or held is None:
        return None
    columns, is_known = timeline.columns, calls.known
    phase, group = columns.phase[is_known].astype(np.int64), groups.of_name[columns.name[is_known]]
    amounts, count = np.unique(np.stack([phase, group, calls.retained[is_known]]), axis=1, return_counts=True)
    peaks = np.full((len(PHASES), len(groups)), _NONE)
    np.maximum.at(peaks, (phase, group), calls.peak[is_known])
    step = next(iter(steps.number[(steps.start <= held.time_ns) & (held.time_ns < steps.end)].tolist()), None)
    grown = grown_in(timeline) if _grows_outside(timeline) else {}
    return MeasuredMemory(np.concatenate([amounts, [count]]), peaks, held, step, grown, len(steps.number))


def _grows_outside(timeline: "Timeline") -> int:
    """Return by how many bytes a step that grows which no module allocates; 0 if it does not."""
    grows: int = timeline.metadata.get(MEMORY, {}).get("grows_by", {}).get(OUTSIDE, 0)
    return max(grows, 0)


def _place_of_growth(pieces: Sequence[MeasuredMemory], grows: int) -> str:
    """Return the place that grows by so many bytes a step: elsewhere what is allocated is freed, or comes to less."""
    grown: Counter[str] = Counter()
    for piece in pieces:
        grown.update(piece.grown)
    steps = max(sum(piece.steps for piece in pieces), 1)
    place = min(grown, key=lambda place: abs(grown[place] / steps - grows), default="")
    return place if place and abs(grown[place] / steps - grows) <= _NEAR * grows else ""


def summarize_memory(
    timeline: "Timeline", groups: Groups, order: list[int], pieces: Sequence[MeasuredMemory]
) -> MemorySummary | None:
    """Return what modules took, of all pieces, of which the timeline is the last; None if it does not say."""
    if not pieces:
        return None
    phase, group, retained, alike = np.concatenate([piece.calls for piece in pieces], axis=1)
    rows_of = phase == FORWARD, phase == RECOMPUTE
    medians = [_medians(group[rows], retained[rows], alike[rows]) for rows in rows_of]
    most = np.full((len(PHASES), len(groups)), _NONE)
    for piece in pieces:
        # Groups of ranges follow those of modules, and not all pieces have them.
        count = min(len(groups), piece.peaks.shape[1])
        np.maximum(most[:, :count], piece.peaks[:, :count], out=most[:, :count])
    table = np.vstack([most.max(axis=0), most])
    peaks = np.where(table == _NONE, None, table).T.tolist()  # type: ignore[call-overload]
    _, _, held, step, *_ = max(pieces, key=lambda piece: piece.held.held)
    begin_ns = pieces[0].held.begin_ns
    facts = timeline.metadata.get(MEMORY, {})
    saved = {} if held.process else facts.get("saved", {})  # of which process it is, is not known
    rows = tuple(
        MemoryModule(
            groups.fqns[index],
            groups.classes[index],
            *(of_groups.get(index) for of_groups in medians),
            *peaks[index],
        )._replace(saved_bytes=_with_inner(saved, groups.fqns[index]))
        for index in order
    )
    holders = [
        Holder(fqn, count, min(count, saved[fqn]) if fqn in saved else None) for fqn, count in held.by_fqn.items()
    ]
    holders.append(Holder("other", held.other))
    sentences = tuple(facts.get("sentences", ()))
    seconds, place = (held.time_ns - begin_ns) / 1e9, _place_of_growth(pieces, _grows_outside(timeline))
    return MemorySummary(rows, held.held, held.time_ns, seconds, step, tuple(holders), held.process, sentences, place)


def _with_inner(saved: Mapping[str, int], fqn: str) -> int | None:
    """Return what a module and those in it keep; None if that is not known."""
    counts = [count for name, count in saved.items() if fqn and f"{name}.".startswith(f"{fqn}.")]
    return sum(counts) if counts else None


def _medians(group: Int64Array, value: Int64Array, count: Int64Array) -> dict[int, int]:
    """Return the median of each group's values, of which there are as many as `count` says."""
    order = np.lexsort((value, group))
    group, value, until = group[order], value[order], np.cumsum(count[order])
    groups, first = np.unique(group, return_index=True)
    before = np.append(0, until)[first]
    counts = np.diff(np.append(before, until[-1:]))
    middle = np.searchsorted(until, before + (counts - 1) // 2, side="right")
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
    "retained: held at the end of a call less at its begin, median; saved: by its calls for a backward pass, mean; "
    "peak inside: the most held inside less at its begin, then by phase"
)
_KINDS_NOTE = (
    "parameters: of modules called by then; gradients, optimizer state: what backward passes and optimizers' steps "
    "allocated; other: held before the step, or by no module"
)
_OTHER_NOTE = "other: held before the step (parameters, gradients, the optimizer's state), or by no module"


def memory_table(memory: MemorySummary) -> Table:
    """Return the table of modules, the one with the highest peak first."""
    rows = sorted(memory.rows, key=lambda row: row.peak_bytes or 0, reverse=True)
    sentences = (*memory.sentences, "") if memory.sentences else ()
    return Table(_COLUMNS, rows, fields_of(MemoryModule), sentences, (_NOTE,), "module")


def holders_table(memory: MemorySummary, limit: int | None = None) -> Table:
    """Return the table of who held most: after `limit` rows the others are one, and `other` is the last."""
    *named, other = memory.holders
    limit = len(named) if limit is None else limit
    rest = [Holder("more rows", sum(holder.bytes for holder in named[limit:]))] if named[limit:] else []
    columns = (
        Column("held at the peak by", "fqn", MODULE),
        Column("bytes", "bytes", _BYTES),
        Column("%", lambda holder: holder.bytes / (memory.peak_bytes or 1), PERCENT),
        Column("of it saved, about", "saved_bytes", _BYTES, 1),
    )
    where = f" in {memory.process}" if memory.process else ""
    step = "" if memory.peak_step is None else f" in step {memory.peak_step},"
    when = f"{step} {memory.peak_seconds:,.3f} s from the start"
    note = _KINDS_NOTE if any(holder.fqn in OUTSIDE_CALLS for holder in memory.holders) else _OTHER_NOTE
    together = f"together {format_bytes(memory.peak_bytes)}{where},{when}; {note}"
    return Table(columns, [*named[:limit], *rest, other], fields_of(Holder), notes=(together,))
