"""Comparing programs whose modules mostly changed together: by the machine, or because they do other work.

Every recording has modules and parts of known times, each multiplied by the factor of its work, by the machine's
speed, and by noise.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import nn

import modtrace
from modtrace.compare.compare import compare_runs
from modtrace.compare.run_times import ModuleRun, RunTimes, Typical, measure_run
from modtrace.compare.verdicts import Change
from tests.support.models.decoders import gpt
from tests.support.part_timeline import part_timeline
from tests.support.timelines import with_args

LAYERS = [f"Net.h.{layer}" for layer in range(12)]
STILL = ("Net.position", "Net.schedule")
"""Modules whose input has no batch."""
PHASES = ("forward", "backward")
WORK = {
    "batch": 2.0,
    "half the batch": 0.5,
    "sequence": 2.0,
    "micro-batches": 2.0,
    "layers twice": 2.0,
    "type": 1.4,
}
"""Factor of a layer's time, by the change of its work."""


def recording(
    random: np.random.Generator,
    work: float = 1.0,
    *,
    machine: float = 1.0,
    square: bool = False,
    calls: int = 1,
    of_layer: Mapping[str, float] | None = None,
    optimizer: bool = True,
    exact: str | None = None,
) -> RunTimes:
    """A recording with 1 % of noise in each module and 3 % in the machine.

    Args:
        random: draws the noise.
        work: factor of the time of layers.
        machine: factor of all times.
        square: whether every third layer has the square of `work` as its factor, as attention does.
        calls: number of calls of a layer in a step.
        of_layer: further factors of single layers.
        optimizer: whether the optimizer is recorded.
        exact: `FLOPs of a call of` or `shapes of a call of` if that is recorded for each layer.
    """
    speed = machine * random.normal(1, 0.03)

    def measured(ns: float, calls: int = 1) -> ModuleRun:
        return ModuleRun(Typical(ns * speed * random.normal(1, 0.01), 1e-6), 30, calls, calls, calls)

    modules: dict[tuple[str, str], ModuleRun] = {}
    environment: dict[str, str] = {}
    for number, fqn in enumerate(LAYERS):
        layer_factor = (work**2 if square and number % 3 == 0 else work) * (of_layer or {}).get(fqn, 1.0)
        modules |= {(fqn, phase): measured(1e5 * (number + 1) * layer_factor, calls) for phase in PHASES}
        if exact:
            environment[f"{exact} {fqn}"] = f"{layer_factor:g}"
    modules |= {(fqn, phase): measured(1e5) for fqn in STILL for phase in PHASES}
    parts = {"data loading": 1e6 * work, "forward": 8e6 * work, "backward": 8e6 * work} | (
        {"optimizer": 3e6} if optimizer else {}
    )
    measured_parts = {part: measured(ns) for part, ns in parts.items()}
    step = Typical(sum(part.time.time_ns for part in measured_parts.values()), 1e-6)
    return RunTimes(modules, {fqn: "Layer" for fqn, _ in modules}, step, 30, 0, environment, measured_parts)


def compared(
    seed: int, per_side: int = 6, *, optimizer: bool = True, exact: str | None = None, **new: object
) -> modtrace.Diff:
    random = np.random.default_rng(seed)
    base, other = (
        [recording(random, optimizer=optimizer, exact=exact, **options) for _ in range(per_side)]  # type: ignore[arg-type]
        for options in ({}, new)
    )
    return compare_runs(base, other, {})


def rows(comparison: modtrace.Diff) -> list[tuple[str, str]]:
    changes: list[Change] = [*comparison.changes, *comparison.parts]
    return [(change.fqn, change.verdict) for change in changes if change.verdict in {"slower", "faster"}]


EXACT = [None, "FLOPs of a call of", "shapes of a call of"]
"""Recordings without the optimizer are compared on one machine only: only the optimizer shows its speed."""
SCENES = [
    (kind, exact, machine, optimizer)
    for kind in WORK
    for exact in EXACT
    for machine, optimizer in ((0.8, True), (1.0, True), (1.5, True), (1.0, False))
]


@pytest.mark.parametrize(("kind", "exact", "machine", "optimizer"), SCENES)
def test_other_work_makes_no_unchanged_module_faster_or_slower(
    kind: str, exact: str | None, machine: float, optimizer: bool
) -> None:
    work, calls = WORK[kind], 2 if kind in {"micro-batches", "layers twice"} else 1
    for seed in range(4):
        comparison = compared(
            seed, work=work, machine=machine, square=kind == "sequence", calls=calls, exact=exact, optimizer=optimizer
        )
        verdicts = rows(comparison)
        wrong = "faster" if work > 1 else "slower"
        assert [row for row in verdicts if row[0] in {*STILL, "optimizer"} or row[1] == wrong] == []
        known = exact is not None or calls > 1
        assert (comparison.common_cause == "work") == known
        if known and optimizer:
            # On the slower machine too: the optimizer shows how much slower it is.
            assert {name for name, _ in verdicts} >= {*LAYERS, "forward", "backward"}
            assert comparison.sentence.split("; ")[-3].endswith(": most of them did other work")
        if not known:
            assert any("whether the machine or the work changed is not known" in part for part in comparison.header)


@pytest.mark.parametrize("optimizer", [True, False])
@pytest.mark.parametrize("exact", EXACT)
@pytest.mark.parametrize("machine", [0.7, 1.5, 3.0])
def test_a_machine_that_slows_all_equally_changes_nothing(machine: float, exact: str | None, optimizer: bool) -> None:
    for seed in range(4):
        comparison = compared(seed, machine=machine, exact=exact, optimizer=optimizer)

        assert rows(comparison) == []
        assert comparison.common_ratio == pytest.approx(machine, rel=0.1)
        assert comparison.common_cause == ("unknown" if exact is None else "machine")


def test_a_program_compared_with_itself_has_no_verdict() -> None:
    for per_side in (2, 6):
        for exact in EXACT:
            assert [seed for seed in range(20) if rows(compared(seed, per_side, exact=exact))] == []


@pytest.mark.parametrize("change", [{}, {"machine": 1.4}, {"work": 2.0}])
@pytest.mark.parametrize("exact", [None, "FLOPs of a call of"])
def test_a_layer_that_became_15_percent_slower_is_found_among_common_changes(
    change: Mapping[str, float], exact: str | None
) -> None:
    for seed in range(4):
        for per_side in (2, 6) if not change else (6,):
            comparison = compared(seed, per_side, exact=exact, of_layer={"Net.h.5": 1.15}, **change)  # type: ignore[arg-type]
            assert ("Net.h.5", "slower") in rows(comparison)
            assert exact is not None or {name for name, _ in rows(comparison)} <= {"Net.h.5"}


def test_a_faster_layer_is_reported_if_the_work_is_known_to_be_equal() -> None:
    faster = {"Net.h.5": 0.8}
    known = compared(0, machine=1.5, exact="FLOPs of a call of", of_layer=faster)
    assert (set(rows(known)), known.common_cause) == ({("Net.h.5", "faster")}, "machine")
    # The layer lasts 1.2 times as long as before. If its work is not known, it may do more work.
    assert rows(compared(0, machine=1.5, of_layer=faster)) == []


def test_one_layer_with_other_flops_is_not_the_work_of_most() -> None:
    comparison = compared(0, machine=1.5, exact="FLOPs of a call of", of_layer={"Net.h.5": 2.0})

    assert (set(rows(comparison)), comparison.common_cause) == ({("Net.h.5", "slower")}, "machine")


def test_without_evidence_an_unchanged_optimizer_is_reported() -> None:
    comparison = compared(0, work=2.0)

    assert comparison.common_cause == "either"
    assert (
        "; modules in general became 9" in comparison.sentence or "; modules in general became 1" in comparison.sentence
    )
    assert any("and the optimizer did not change by the same ratio" in line for line in comparison.header)
    optimizer = next(part for part in comparison.parts if part.fqn == "optimizer")
    # The optimizer's change is shown without the machine's factor.
    assert optimizer.ratio == pytest.approx(0, abs=0.05)
    assert optimizer.low_ns is not None
    assert optimizer.high_ns is not None
    assert optimizer.low_ns / optimizer.base_ns < -0.45 < 0 < optimizer.high_ns / optimizer.base_ns


@pytest.mark.parametrize("by", ["module", "class"])
def test_shapes_of_inputs_are_evidence_if_all_calls_have_equal_shapes(by: str) -> None:
    timeline = part_timeline([{"forward": 80, "optimizer": 20}] * 8)
    fqns = [timeline.names[name].fqn for name in timeline.columns.name]
    shapes = {
        row: {"shapes": f"float32[{row if fqn == 'Net.h.2' else 4}, 8]"} for row, fqn in enumerate(fqns) if fqn != "Net"
    }
    environment = measure_run(with_args(timeline, shapes), by).environment  # type: ignore[arg-type]

    equal = {f"shapes of a call of Net.h.{layer}": "float32[4, 8]" for layer in range(8) if layer != 2}
    assert environment == (equal if by == "module" else {})


def trained(batch: int, shapes: bool) -> modtrace.Timeline:
    """Eight steps of a small GPT, on one thread, because further threads would wait in busy loops."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model, loss = gpt(layers=2, batch=batch)
    optimizer = torch.optim.AdamW(model.parameters())
    with modtrace.record(model=model, shapes=shapes) as recording:
        for _ in range(8):
            loss().backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.set_num_threads(threads)
    return recording.timeline()


@pytest.mark.parametrize("shapes", [True, False])
def test_a_real_batch_twice_as_large_makes_nothing_faster(shapes: bool) -> None:
    torch.manual_seed(0)
    pairs = [(trained(8, shapes), trained(16, shapes)) for _ in range(3)]
    comparison = modtrace.diff(*zip(*pairs, strict=True))

    verdicts = rows(comparison)
    assert [row for row in verdicts if row[1] == "faster" or row[0] in {"optimizer", "GPT.wpe"}] == []
    assert comparison.common_cause == "work"
    assert comparison.environment["inputs of GPT"] == ("int64[8, 32]", "int64[16, 32]")
    shapes_before_and_after = comparison.environment.get("shapes of a call of GPT.h.0.ln_1")
    assert shapes_before_and_after == (("float32[8, 32, 64]", "float32[16, 32, 64]") if shapes else None)
    assert comparison.environment.get("shapes of a call of GPT.wpe") is None


def test_costs_of_calls_belong_to_the_compared_modules_under_any_wrapper() -> None:
    timelines = []
    for wrapped in (False, True):
        model: nn.Module = nn.Sequential(nn.Linear(2, 3))
        model = nn.DataParallel(model) if wrapped else model
        with modtrace.record(shapes=True, flops=True, strip_wrappers=False) as recording:
            for _ in range(2):
                model(torch.ones(4, 2)).sum().backward()
                recording.step()
        timelines.append(recording.timeline())
    plain, around = (measure_run(timeline) for timeline in timelines)

    assert (
        plain.environment["FLOPs of a call of Sequential.0"] == around.environment["FLOPs of a call of DataParallel.0"]
    )
    assert around.environment["shapes of a call of DataParallel.0"] == "float32[4, 2]"
    assert {fqn for fqn, _ in around.modules} >= {"DataParallel.0"}
