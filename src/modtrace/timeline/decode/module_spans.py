"""The events of modules and nodes → the spans of modules, of all of a ring or of a part of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from ..._typing import AnyArray
from ...ring import Kind
from ..contents import FLOPS
from ..slices import BACKWARD, DTYPES, append_to
from .analysis import RingAnalysis
from .evaluation import Evaluations, find_evaluations
from .flops import RingFlops, find_flops
from .intervals import count_outside_runs, find_parents
from .spans import SpanRows, build_span_rows


class ModuleSpans(NamedTuple):
    """The spans of modules.

    Attributes:
        columns: as of `Slices`, in the order of their begins; `track` is twice the thread in the name table, plus one
            on a backward track.
        span_args: what single spans hold beyond that, by their index.
        evaluations: where threads evaluate.
        unfinished: spans without their end.
        unstarted: spans without their begin.
        unattributed: runs of nodes of no known call.
        flops: what spans cost; None if no operator was counted.
    """

    columns: dict[str, AnyArray]
    span_args: dict[int, Mapping[str, str]]
    evaluations: Evaluations
    unfinished: int
    unstarted: int
    unattributed: int
    flops: RingFlops | None = None


def decode_modules(analysis: RingAnalysis) -> ModuleSpans:
    """Return the spans of modules that events say."""
    rows, clock = build_span_rows(analysis.intervals, analysis.call, analysis.original), analysis.clock
    track = rows["thread"] * 2 + rows["on_backward"]
    flops = find_flops(analysis, rows, track)
    columns: dict[str, AnyArray] = {
        **{field: rows[field] for field in ("name", "phase", "depth", "call", "link")},
        "start": clock.to_other(rows["start"]),
        "end": clock.to_other(rows["end"]),
        "track": track,
        "parent": find_parents(track, rows["depth"]),
        "step": analysis.steps_before(rows["start_position"]),
        "complete": rows["has_start"] & rows["has_end"],
    }
    return ModuleSpans(
        {field: column.astype(DTYPES[field], copy=False) for field, column in columns.items()},
        _find_span_args(analysis, rows, {} if flops is None else flops.of_span),
        find_evaluations(analysis, rows),
        int(np.count_nonzero(~rows["has_end"])),
        int(np.count_nonzero(~rows["has_start"])),
        count_outside_runs(analysis.intervals, analysis.call),
        flops,
    )


def join_modules(parts: Iterable[ModuleSpans]) -> ModuleSpans:
    """Return the spans of parts of a ring that follow each other; memory holds them once."""
    columns: dict[str, AnyArray] = {}
    span_args: dict[int, Mapping[str, str]] = {}
    evaluations, counts, first_link, first_row = [], np.zeros(3, np.int64), 0, 0
    for part in parts:
        parent, link = part.columns["parent"], part.columns["link"]
        parent[parent >= 0] += first_row
        link[link >= 0] += first_link
        span_args |= {first_row + row: args for row, args in part.span_args.items()}
        first_link, first_row = max(first_link, int(link.max(initial=-1)) + 1), first_row + len(link)
        append_to(columns, part.columns)
        evaluations.append(part.evaluations)
        counts += (part.unfinished, part.unstarted, part.unattributed)
    joined = Evaluations(*map(np.concatenate, zip(*evaluations, strict=True)))
    return ModuleSpans(columns, span_args, joined, *counts.tolist())


def _find_span_args(analysis: RingAnalysis, rows: SpanRows, flops: Mapping[int, str]) -> dict[int, Mapping[str, str]]:
    """Return what single spans hold beyond the fields that all have, by index of the span.

    These are the shapes of a call's inputs, the modules inside of what was compiled, and its FLOPs.
    """
    args: dict[int, dict[str, str]] = {span: {"shapes": text} for span, text in _find_shapes(analysis, rows).items()}
    compiled = analysis.lookup.compiled
    if compiled:
        for span, name in enumerate(rows["name"].tolist()):
            if name in compiled:
                args.setdefault(span, {})["compiled_modules"] = compiled[name]
    shared = {text: {FLOPS: text} for text in set(flops.values())}  # many spans cost the same
    for span, text in flops.items():
        args[span] = args[span] | shared[text] if span in args else shared[text]
    return dict(sorted(args.items()))


def _find_shapes(analysis: RingAnalysis, rows: SpanRows) -> dict[int, str]:
    """Return the shapes of the calls that have them, by index of the span."""
    events, phase = analysis.events, rows["phase"]
    shapes = np.flatnonzero(events.kind == Kind.SHAPES)
    if not len(shapes):
        return {}
    by_thread = np.lexsort((np.arange(len(events)), events.thread))
    before = np.empty(len(events), np.int64)
    before[by_thread] = np.roll(by_thread, 1)
    # The shapes of a call follow its enter, on the same thread.
    span_at = {
        position: span for span, position in enumerate(rows["start_position"].tolist()) if phase[span] != BACKWARD
    }
    enters = (2 * before[shapes] + 1).tolist()
    return {
        span_at[enter]: analysis.lookup.texts[events.name[index]]
        for index, enter in zip(shapes.tolist(), enters, strict=True)
        if enter in span_at
    }
