"""Timelines in the shape of a GPT's training steps, set by hand in whole nanoseconds: no torch, no clock."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from modtrace import Timeline
from modtrace.timeline import CounterSeries, Mark, Name, Process, Stats, Track
from modtrace.timeline.slices import BACKWARD, FORWARD, Slices, sort_by_start
from tests.support.span_fields import SPAN_FIELDS

__all__ = ["BASE", "gpt_timeline"]

BASE = 1_790_000_000_123_456_789
"""Unix nanoseconds at which every timeline here starts."""

_BLOCK = (
    ("ln_1", "LayerNorm", 1, ()),
    (
        "attn",
        "GPT2Attention",
        0,
        (("c_attn", "Conv1D", 5, ()), ("c_proj", "Conv1D", 3, ()), ("drop", "Dropout", 1, ())),
    ),
    ("ln_2", "LayerNorm", 1, ()),
    ("mlp", "GPT2MLP", 0, (("c_fc", "Conv1D", 4, ()), ("act", "NewGELU", 2, ()), ("c_proj", "Conv1D", 4, ()))),
)
Part = tuple[str, str, int, tuple["Part", ...]]


def _model(layers: int) -> Part:
    blocks: tuple[Part, ...] = tuple((f"h.{i}", "GPT2Block", 0, _BLOCK) for i in range(layers))
    edges: tuple[Part, ...] = (("wte", "Embedding", 3, ()), ("wpe", "Embedding", 1, ()))
    body: Part = ("transformer", "GPT2Model", 0, (*edges, *blocks, ("ln_f", "LayerNorm", 1, ())))
    return ("GPT2LMHeadModel", "GPT2LMHeadModel", 0, (body, ("lm_head", "Linear", 8, ())))


@dataclass
class _Build:
    """Rows of a timeline under construction; `unit` nanoseconds is the weight 1."""

    unit: int
    rows: list[tuple[int, ...]] = field(default_factory=list)
    names: dict[Name, int] = field(default_factory=dict)
    links: int = 0

    def span(self, part: Part, at: int, inside: tuple[str, int, int], phase: int, track: int, step: int) -> int:
        """Add a part and its inner parts, from `at` on; return its end."""
        label, module_class, weight, children = part
        path, parent, depth = inside
        fqn = f"{path}.{label}" if path else label
        slice_name = f"{label}: {module_class}" if path else label
        name = self.names.setdefault(Name(slice_name, fqn, module_class), len(self.names))
        row = len(self.rows)
        self.rows.append(())
        end = at + self.unit
        for child in children if phase == FORWARD else reversed(children):
            end = self.span(child, end, (fqn, row, depth + 1), phase, track, step)
        # Backward costs twice as much as forward.
        end += self.unit * weight * (2 if phase == BACKWARD else 1)
        self.rows[row] = (at, end, name, phase, track, depth, parent, step, step, step << 32 | name, 1)
        return end


def gpt_timeline(steps: int, layers: int, *, unit: int = 20_000, ranks: int = 1) -> Timeline:
    """Build `steps` training steps of a GPT of `layers` blocks on each rank: forward, backward, marks and a counter.

    `call` and `step` are the number of the step; a call's forward and backward share their link.
    """
    build = _Build(unit)
    model = _model(layers)
    processes = [Process(1000 + rank, rank) for rank in range(ranks)]
    tracks: list[Track] = []
    marks: list[Mark] = []
    counters: list[CounterSeries] = []
    for rank, process in enumerate(processes):
        tracks += [Track("forward", "MainThread", 1, process), Track("backward", "MainThread", 1, process)]
        at, samples = BASE, []
        for step in range(steps):
            middle = build.span(model, at, ("", -1, 0), FORWARD, 2 * rank, step) + unit
            end = build.span(model, middle, ("", -1, 0), BACKWARD, 2 * rank + 1, step)
            samples += [(at, 1 << 30), (middle, 3 << 30), (end, 1 << 30)]
            at = end + 2 * unit
            if rank == 0:
                marks.append(Mark(at, "step", f"step {step}"))
        time, value = (np.array(part, np.int64) for part in zip(*samples, strict=True))
        counters.append(CounterSeries("process RSS", "bytes", process, time, value))
    columns = Slices.of(**dict(zip(SPAN_FIELDS, np.array(build.rows, np.int64).T, strict=True)))
    return Timeline(
        sort_by_start(columns),
        list(build.names),
        tracks,
        Stats(recorded=2 * len(columns)),
        marks,
        counters,
        {"modtrace": "0.1.0", "torch": "2.13.0", "engine": "python"},
    )
