"""The header of a summary: the recording, its steps and its losses, in a few lines."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..._arrays import BoolArray
from ..._tables import counted, duration_text, ms_text
from ..collectives import Collectives
from ..contents import LEFT_OUT, MISSING_BYTES, OPEN_AT_END, STEPS_END_WITH, UNSAVED, WHOLE_RUN, unsaved_sentence
from ..memory import format_bytes
from ..select import first_process_tracks
from ..slices import RECOMPUTE, Arg
from .module_rows import outer_modules
from .step_bounds import CALL, GENERATE, OPTIMIZER
from .step_times import Steps
from .units import UnitTimes, median, nearest_rank

if TYPE_CHECKING:
    from ..timeline import Timeline


_SHOWN_OPERATORS = 4


class OperatorTotals(NamedTuple):
    """All calls of one operator.

    Attributes:
        calls: number of calls.
        nbytes: bytes of their tensors on this rank, see `Collective.nbytes`.
        call_ns: total time from call to return.
        wait_ns: total time that threads waited for them, as far as modtrace sees it.
    """

    calls: int
    nbytes: int
    call_ns: int
    wait_ns: int


class Overview(NamedTuple):
    """The recording as a whole.

    Attributes:
        roots: names of the outermost modules and compiled functions, the most often called first. A name below another
            root is left out.
        processes: names of the processes (`rank 0 · python`).
        engine: "native" or "python"; empty if unknown.
        torch: version of torch; empty if unknown.
        spans: number of spans.
        modules: number of modules that have spans.
        losses: counts of missing data that are not 0: `overwritten` and `torn` (events), `unfinished`, `unstarted` and
            `incomplete` (spans), `missing_bytes` (cut off the end of a ring's file). `unattributed` is not a loss: it
            counts runs of autograd nodes outside all modules, such as the nodes of a loss function.
        recomputed: number of modules that checkpointing ran again as a whole, by class.
        compiled: number of modules inside each module or function that torch.compile compiled, by name.
        told_apart: names that several modules had; for each, the names that modtrace gave to all but the first module.
        steps_end_with: "backward passes" if no optimizer of torch stepped and no step was marked; else empty.
        whole_run: the `steps`, `spans` and `seconds` of the recording from its start, and `kept_steps`, the number of
            whole steps at its end that the ring still has. Unknown values are None; None if all are unknown.
        kept: `whole_run` as a sentence if the ring overwrote events; else empty.
        open_at_end: if the process died or hung inside a call or range: the `thread`, the `place`, the `seconds` that
            it lasted and its `usual_seconds`; else None.
        unsaved: description of the data that is lost because the process died before it saved; else empty.
        steps_of: the process whose steps the summary has (`rank 0`) if there are several processes; else empty.
        step_by: kind of step: "optimizer" if optimizers or `Recording.step` end steps, "call", "range NAME", or a
            class of modules.
        communication: collectives by operator; a module's times include those that it called or waited for.
    """

    roots: Sequence[str]
    processes: Sequence[str]
    engine: str
    torch: str
    spans: int
    modules: int
    losses: Mapping[str, int]
    recomputed: Mapping[str, int]
    communication: Mapping[str, OperatorTotals]
    compiled: Mapping[str, int]
    steps_of: str = ""
    told_apart: Mapping[str, Sequence[str]] = {}
    steps_end_with: str = ""
    whole_run: Mapping[str, float | None] | None = None
    kept: str = ""
    open_at_end: Mapping[str, Any] | None = None
    unsaved: str = ""
    step_by: str = OPTIMIZER


_LOSSES = {
    "overwritten": "events overwritten",
    "torn": "events torn",
    "unfinished": "spans without their end",
    "unstarted": "spans without their start",
    "incomplete": "spans incomplete",
    MISSING_BYTES: "bytes cut off the end of the ring's file",
    LEFT_OUT: "events of the profiler left out",
}


_MIN_OPEN_SECONDS = 0.001


class SpanCounts(NamedTuple):
    """Counts of the spans of a timeline, or of a piece of it."""

    span_count: int  # number of spans
    incomplete_count: int  # number of incomplete spans
    roots: Counter[int]  # outermost spans by name, as index into the names of the timeline
    used_names: set[int]  # the indices of all names
    rerun_names: set[int]  # the indices of the names of outermost recomputed spans
    communication: Mapping[str, OperatorTotals]  # collectives by operator
    own_communication: Mapping[str, OperatorTotals]  # collectives of the first process, whose steps count
    compiled: Mapping[str, int]  # number of modules inside each compiled module or function

    @classmethod
    def joined(cls, pieces: Sequence[SpanCounts]) -> SpanCounts:
        """Return the counts of several pieces of a timeline."""
        return cls(
            sum(piece.span_count for piece in pieces),
            sum(piece.incomplete_count for piece in pieces),
            sum((piece.roots for piece in pieces), Counter[int]()),
            set().union(*(piece.used_names for piece in pieces)),
            set().union(*(piece.rerun_names for piece in pieces)),
            _sum_by_operator(item for piece in pieces for item in piece.communication.items()),
            _sum_by_operator(item for piece in pieces for item in piece.own_communication.items()),
            {name: count for piece in pieces for name, count in piece.compiled.items()},
        )


def count_spans(timeline: Timeline) -> SpanCounts:
    """Return the counts of a timeline's spans."""
    columns = timeline.columns
    is_root = columns.parent < 0
    roots, counts = np.unique(columns.name[is_root], return_counts=True)
    collectives = timeline.collectives
    reruns = (columns.phase == RECOMPUTE) & (is_root | (columns.phase[columns.parent] != RECOMPUTE))
    return SpanCounts(
        span_count=len(columns),
        incomplete_count=int(np.count_nonzero(~columns.complete)),
        roots=Counter(dict(zip(roots.tolist(), counts.tolist(), strict=True))),
        used_names=set(np.unique(columns.name).tolist()),
        rerun_names=set(np.unique(columns.name[reruns]).tolist()),
        communication=sum_up_communication(collectives),
        own_communication=sum_up_communication(collectives, first_process_tracks(timeline)[collectives.track]),
        compiled={name: len(modules) for name, modules in compiled_names(timeline).items()},
    )


def describe_recording(timeline: Timeline, counts: SpanCounts) -> Overview:
    """Return the overview of a recording. `counts` may cover several pieces; `timeline` is then the last of them."""
    names = timeline.names
    roots = Counter[str]()
    for name, count in sorted(counts.roots.items()):
        roots[names[name].fqn] += count
    fqns = list(dict.fromkeys(names[name].fqn for name in sorted(counts.used_names)))
    outer = outer_modules(fqns)
    rerun_modules = {names[name].fqn: names[name].module_class for name in sorted(counts.rerun_names)}
    losses = {name: count for name, count in timeline.stats.items() if count and name != "recorded"}
    return Overview(
        roots=[root for root, _ in roots.most_common() if not outer[root]],
        processes=list(dict.fromkeys(track.process.name for track in timeline.tracks)),
        engine=str(timeline.metadata.get("engine", "")),
        torch=str(timeline.metadata.get("torch", "")),
        spans=counts.span_count,
        modules=len(fqns),
        losses=losses
        | ({"incomplete": counts.incomplete_count} if counts.incomplete_count else {})
        | {name: missing for name in (MISSING_BYTES, LEFT_OUT) if (missing := timeline.metadata.get(name))},
        recomputed=dict(Counter(rerun_modules.values()).most_common()),
        communication=counts.communication,
        compiled=counts.compiled,
        steps_of=_steps_of(timeline),
        told_apart=_find_told_apart(fqns),
        steps_end_with=str(timeline.metadata.get(STEPS_END_WITH, "")),
        whole_run=_whole_run(timeline),
        kept=kept_sentence(timeline),
        open_at_end=_open_at_end(timeline),
        unsaved=str(timeline.metadata.get(UNSAVED, "")),
    )


def _whole_run(timeline: Timeline) -> dict[str, float | None] | None:
    """Return the counts of the whole recording from the metadata, None for a missing one; None without any."""
    counts = timeline.metadata.get(WHOLE_RUN)
    return None if counts is None else {name: counts.get(name) for name in ("steps", "spans", "seconds", "kept_steps")}


def _open_at_end(timeline: Timeline) -> dict[str, Any] | None:
    """Return the metadata about the call in which a process died; None if a key is missing."""
    open_call = timeline.metadata.get(OPEN_AT_END, {})
    return dict(open_call) if {"thread", "place", "seconds", "usual_seconds"} <= open_call.keys() else None


def _open_line(open_call: Mapping[str, Any] | None) -> str:
    """Return a line about the call in which a process died or hung; empty if there is no such call."""
    if open_call is None:
        return ""
    seconds, usual_seconds = open_call["seconds"], open_call["usual_seconds"]
    text = f"at the end {open_call['thread']} was in {open_call['place']}"
    text += f" for {duration_text(seconds)}" if seconds >= _MIN_OPEN_SECONDS else ""
    return text + (f" (usually {duration_text(usual_seconds)})" if usual_seconds is not None else "")


def kept_sentence(timeline: Timeline) -> str:
    """Return a sentence: how much of a recording its ring kept, and the capacity that keeps all; empty if it did."""
    whole_run = _whole_run(timeline)
    if not timeline.stats.overwritten or whole_run is None or MISSING_BYTES in timeline.metadata:
        return ""
    kept_count, steps = whole_run["kept_steps"], whole_run["steps"]
    total_text = f" of {counted(int(steps), 'step')}" if steps is not None else " steps"
    if not kept_count and not steps:  # no step was marked
        kept_count = timeline.stats.recorded - timeline.stats.overwritten
        total_text = f" of {timeline.stats.recorded:,} events"
    digits = max(0, len(str(timeline.stats.recorded)) - 2)
    capacity = -(-timeline.stats.recorded // 10**digits) * 10**digits
    return f"Kept the last {int(kept_count or 0):,}{total_text} (ring full); `--capacity {capacity}` keeps all"


def overview_lines(overview: Overview, steps: Steps, units: Sequence[UnitTimes] = ()) -> list[str]:
    """Return the header of a summary: the modules, the steps, the losses, and the costs of recompute."""
    engine, torch = overview.engine and f"{overview.engine} engine", overview.torch and f"torch {overview.torch}"
    titles = shortened(overview.roots), shortened(overview.processes), ", ".join(filter(None, (engine, torch)))
    steps_line = _units_line(overview, steps, units) if units else _steps_line(steps, overview.steps_of)
    lines = [" · ".join(filter(None, titles)), steps_line]
    if overview.steps_end_with:
        lines.append(f"steps end with {overview.steps_end_with} that reach parameters: no optimizer of torch stepped")
    lines += [_open_line(overview.open_at_end), overview.kept, _losses_line(overview)]
    lines += [_told_apart_line(overview.told_apart), _recompute_line(overview, steps), _compiled_line(overview)]
    return [line for line in (*lines, communication_line(overview.communication)) if line]


def _losses_line(overview: Overview) -> str:
    """Return a line with the number of spans and the losses; empty for a trace without spans."""
    losses = ", ".join(f"{overview.losses[name]:,} {text}" for name, text in _LOSSES.items() if name in overview.losses)
    if not overview.spans and not losses:
        return ""
    line = f"{counted(overview.spans, 'span')} of {counted(overview.modules, 'module')}"
    if losses:
        line += f"; lost: {losses}"
    if overview.unsaved:
        line += f"; {unsaved_sentence(overview.unsaved)}"
    elif not losses:
        line += "; nothing was lost"
    if runs := overview.losses.get("unattributed", 0):
        line += f"; {counted(runs, 'run')} of autograd nodes outside all modules, such as the loss"
    return line


def steps_note(overview: Overview | None) -> str:
    """Return a note that names the process whose steps these are; empty if there is only one process."""
    if overview is None or not overview.steps_of:
        return ""
    has_ranks = overview.steps_of.startswith("rank ")
    return f"steps of {overview.steps_of}" + ("; modtrace ranks slow compares ranks" if has_ranks else "")


def _find_told_apart(fqns: Sequence[str]) -> dict[str, list[str]]:
    """Return the names with a `#`, by the text before it, if that text is a name or the start of one."""
    numbered: dict[str, dict[str, None]] = {}
    for fqn in fqns:
        for sign in re.finditer(r"#[^.#]+(?=\.|$)", fqn):
            numbered.setdefault(fqn[: sign.start()], {})[fqn[: sign.end()]] = None
    return {
        name: list(numbered_names)
        for name, numbered_names in numbered.items()
        if any(fqn == name or fqn.startswith(f"{name}.") for fqn in fqns)
    }


def _told_apart_line(told_apart: Mapping[str, Sequence[str]]) -> str:
    """Return sentences about the names that several modules had."""
    sentences = []
    for name, new_names in told_apart.items():
        renaming = f"the second is {new_names[0]}" if len(new_names) == 1 else f"the others are {shortened(new_names)}"
        or_more = " or more" if new_names[-1].endswith("+") else ""
        sentences.append(f"{len(new_names) + 1}{or_more} modules were named {name}; {renaming}")
    return shortened(sentences, separator=". ")


def _steps_of(timeline: Timeline) -> str:
    """Return the name of the process whose steps count; empty if there is only one process."""
    processes = list(dict.fromkeys(track.process for track in timeline.tracks))
    if len(processes) < 2:
        return ""
    first = processes[0]
    return first.name if first.rank is None else f"rank {first.rank}"


def _steps_line(steps: Steps, steps_of: str) -> str:
    """Return a line with the number and the durations of the whole steps."""
    whole_steps = steps.take(steps.columns.whole)
    if not steps:
        return "no spans"
    if not whole_steps:
        return f"no whole step is marked: all {ms_text(int(steps.columns.duration_ns.sum()))} count as 100 %"
    training_ns, slowest = whole_steps.columns.training_ns, whole_steps.slowest[0]
    text = f"{counted(len(whole_steps), 'whole step')}{f' of {steps_of}' if steps_of else ''}"
    text += f", median {ms_text(median(training_ns))}"
    if len(whole_steps) > 1:
        text += f", p95 {ms_text(nearest_rank(training_ns, 0.95))}"
        text += f", slowest {ms_text(slowest.training_ns)} (step {slowest.step})"
    evaluation_ns = whole_steps.columns.evaluation_ns
    if count := int(np.count_nonzero(evaluation_ns)):
        text += f", without the {ms_text(int(evaluation_ns.sum()))} of evaluation in {counted(count, 'step')}"
    return text


def _units_line(overview: Overview, steps: Steps, units: Sequence[UnitTimes]) -> str:
    """Return a line that defines steps that no marks end, with the number of steps of each name."""
    if overview.step_by == CALL:
        unit_name = "an outermost call (--step-by chooses others)"
    else:
        unit_name = overview.step_by if overview.step_by.startswith("range ") else f"a call of {overview.step_by}"
    unit_counts = []
    for unit in (unit for unit in units if not unit.stage and not unit.thread):
        inside = f" ({counted(unit.calls, 'call')} inside)" if unit.calls != unit.measured else ""
        library = " of transformers" if unit.unit == GENERATE else ""
        unit_counts.append(f"{unit.measured:,} × {unit.unit}{library}{inside}")
    process = f" of {overview.steps_of}" if overview.steps_of else ""
    cut_steps = int(np.count_nonzero(~steps.columns.whole))
    not_whole = f"; {counted(cut_steps, 'step')} not recorded whole" if cut_steps else ""
    return f"a step is {unit_name}: {shortened(unit_counts)}{process}{not_whole}"


def _recompute_line(overview: Overview, steps: Steps) -> str:
    """Return a line about the time that checkpointing costs; empty if no module ran again."""
    columns = steps.counted.columns
    if not columns.recompute_ns.any():
        return ""
    recompute_ns = median(columns.recompute_ns)
    share = columns.recompute_ns.sum() / columns.duration_ns.sum()
    modules = ", ".join(f"{counted(count, 'module')} of {name}" for name, count in overview.recomputed.items())
    return f"checkpointing costs {ms_text(recompute_ns)} of a step (median; {share:.1%} of all), to run {modules} again"


def compiled_names(timeline: Timeline) -> dict[str, list[str]]:
    """Return the modules inside each region that torch.compile made (`["0: Linear"]`), by the region's name."""
    names, columns = timeline.names, timeline.columns
    texts = columns.arg(Arg.COMPILED_MODULES)
    value_by_name = dict(zip(columns.name[texts.rows].tolist(), texts.values.tolist(), strict=True))
    modules = {names[name].fqn: texts.text(value) for name, value in value_by_name.items()}
    return {fqn: text.split(", ") if text else [] for fqn, text in sorted(modules.items())}


def _compiled_line(overview: Overview) -> str:
    """Return a line with the spans whose inner modules torch.compile fused: these have no spans of their own."""
    if not overview.compiled:
        return ""
    compiled = overview.compiled.items()
    regions = [name + (f" with {counted(count, 'module')} inside" if count else "") for name, count in compiled]
    return f"compiled, each one span: {shortened(regions)}"


def sum_up_communication(collectives: Collectives, chosen: BoolArray | bool = True) -> Mapping[str, OperatorTotals]:
    """Return the totals of chosen rows by operator, the most often called first; `""`: waits for unknown operators."""
    duration = collectives.end - collectives.start
    operators = [name.operator for name in collectives.names] + [""]

    def totals(index: int) -> OperatorTotals:
        rows = chosen & (collectives.name == index)
        calls, waits = rows & ~collectives.is_wait, rows & collectives.is_wait
        sums = (int(column.sum()) for column in (calls, collectives.nbytes[calls], duration[calls], duration[waits]))
        return OperatorTotals(*sums)

    return _sum_by_operator((operators[index], totals(index)) for index in np.unique(collectives.name).tolist())


def _sum_by_operator(totals: Iterable[tuple[str, OperatorTotals]]) -> dict[str, OperatorTotals]:
    """Return the sums of the totals by operator, the most often called first."""
    sums: dict[str, OperatorTotals] = {}
    for name, added in totals:
        sums[name] = OperatorTotals(*map(sum, zip(added, sums.get(name, (0, 0, 0, 0)), strict=True)))
    return dict(sorted(sums.items(), key=lambda item: (-item[1].calls, item[0])))


def communication_line(totals: Mapping[str, OperatorTotals]) -> str:
    """Return a line about collectives; empty if there are none.

    Example:
        `communication: 24 all_reduce (1.20 MiB), 3 barrier; calls take 1.234 ms, waits 12.345 ms`
    """
    if not totals:
        return ""
    called = [(operator, total) for operator, total in totals.items() if total.calls]
    parts = []
    for operator, total in called[:_SHOWN_OPERATORS]:
        parts.append(f"{total.calls:,} {operator}" + (f" ({format_bytes(total.nbytes)})" if total.nbytes else ""))
    unnamed = sum(total.calls for _, total in called[_SHOWN_OPERATORS:])
    parts += [f"{unnamed:,} others"] if unnamed else []
    call_ns = sum(total.call_ns for total in totals.values())
    wait_ns = sum(total.wait_ns for total in totals.values())
    calls = ", ".join(parts) or "only waits"
    return f"communication: {calls}; calls take {ms_text(call_ns)}, waits {ms_text(wait_ns)}"


def shortened(names: Sequence[object], limit: int = 3, separator: str = ", ") -> str:
    """Return the first `limit` names, and the number of the others."""
    unnamed = len(names) - limit
    return separator.join(map(str, names[:limit])) + (f" and {unnamed:,} more" if unnamed > 0 else "")
