"""Two made-up runs of a small model for `modtrace diff`, and the command that compares them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from click.testing import CliRunner, Result

import modtrace
from modtrace import Timeline
from modtrace.cli.group import group
from modtrace.compare.side_by_side import TypicalStep
from modtrace.compare.verdicts import Change
from modtrace.timeline import BACKWARD, FORWARD, RECOMPUTE, Mark, Name, Process, Slices, Track

FQNS = ("Net", *(f"Net.h.{layer}" for layer in range(8)))


US = 1_000


STEPS = 30


def recording(
    seed: int,
    slower: Mapping[tuple[str, int], float] | None = None,
    *,
    speed: float = 1.0,
    recompute: tuple[str, ...] = (),
    twice: tuple[str, ...] = (),
    rename: Mapping[str, str] | None = None,
    steps: int = STEPS,
) -> Timeline:
    """Return steps of eight layers of 100 µs forward and 200 µs backward, with 3 % noise; `slower` has factors."""
    random = np.random.default_rng(seed)
    rows: list[tuple[int, int, int, int, int, int]] = []
    marks = []
    now = 10**18
    for step in range(steps):
        for phase, us in ((FORWARD, 100), (BACKWARD, 200)):
            root = len(rows)
            rows.append((now, 0, 0, phase, -1, step))
            now += 50 * US
            for layer, fqn in enumerate(FQNS[1:], 1):
                for _ in range(2 if fqn in twice else 1):
                    took = round(us * US * speed * (slower or {}).get((fqn, phase), 1.0) * random.normal(1, 0.03))
                    rows.append((now, now + took, layer, phase, root, step))
                    now += took
                if fqn in recompute and phase == BACKWARD:
                    rows.append((now, now + 90 * US, layer, RECOMPUTE, root, step))
                    now += 90 * US
            rows[root] = (rows[root][0], now, *rows[root][2:])
        now += 500 * US
        marks.append(Mark(now, "step", f"step {step}"))
    start, end, name, phases, parent, step_of = zip(*rows, strict=True)
    columns = Slices.of(
        start=start, end=end, name=name, phase=phases, track=[int(phase != FORWARD) for phase in phases],
        depth=[int(above >= 0) for above in parent], parent=parent, call=step_of, step=step_of,
        link=[-1] * len(rows), complete=[True] * len(rows),
    )  # fmt: skip
    names = [Name(fqn, (rename or {}).get(fqn, fqn), "Block") for fqn in FQNS]
    tracks = [Track(kind, "MainThread", 1, Process(1)) for kind in ("forward", "backward")]
    return Timeline(columns, names, tracks, marks=marks)


def changed(comparison: modtrace.Diff) -> list[tuple[str, str, str]]:
    return [(c.fqn, c.phase, c.verdict) for c in comparison.changes if c.verdict not in {"same", "cannot tell"}]


NO_STEP = TypicalStep(Timeline(Slices.empty()), 0, 0, {})


COMPARISON = modtrace.Diff(
    changes=[
        Change("Net.h|0", "forward", 1_000_000, 1_200_000, 200_000, 150_000, 250_000, 1, 2, True, "slower", 1, 1),
        Change("Net.x", "recompute", 0, 90_000, 90_000, None, None, 0, 1, True, "added", 0, 1),
    ],
    step=Change("", "step", 10_000_000, 10_300_000, 300_000, 100_000, 500_000, 0, 0, False, "slower", 1, 1),
    base_steps=30,
    new_steps=28,
    warm_up=2,
    common_ratio=1.01,
    compared=12,
    runs=(1, 1),
    copies=(0, 0),
    on_both_sides=0,
    _sides=(NO_STEP, NO_STEP),
    spread=0.015,
    environment={"torch": ("2.12.0", "2.13.0")},
    suggested={"Net.old": "Net.new"},
)


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(group, ["diff", *map(str, arguments)])
