"""torch.compile captures the same graphs without a recording and under each engine, in fresh processes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from modtrace.record_options import EngineName
from tests.support.captured_graphs import CASES
from tests.support.forked_python import start_forked
from tests.support.test_scale import EFFORT

pytestmark = pytest.mark.usefixtures("native_engine")

Told = dict[str, dict[str, Any]]
ENGINES: tuple[EngineName, ...] = ("native", "python")


@pytest.fixture(scope="module")
def told() -> dict[str, Told]:
    """Captures of each case, per engine and for `none`."""
    engines = ("none", "native") if EFFORT == "quick" else ("none", *ENGINES)
    processes = {engine: start_forked("-m", "tests.support.captured_graphs", engine) for engine in engines}
    outputs = {engine: process.communicate()[0] for engine, process in processes.items()}
    assert {process.returncode for process in processes.values()} == {0}
    return {engine: json.loads(output.splitlines()[-1]) for engine, output in outputs.items()}


@pytest.mark.parametrize("engine", ["native", pytest.param("python", marks=pytest.mark.full)])
@pytest.mark.parametrize("case", CASES)
def test_graphs_and_breaks_are_those_without_a_recording(told: dict[str, Told], case: str, engine: EngineName) -> None:
    plain, recorded = told["none"][case], told[engine][case]

    assert len(plain["graphs"]) >= 1
    assert recorded["graphs"] == plain["graphs"]
    assert recorded["breaks"] == plain["breaks"]
    # Numbers of graphs compiled and recompiled, and the failures.
    for group in ("stats", "graph_break", "unimplemented"):
        assert (recorded["counters"].get(group) or {}) == (plain["counters"].get(group) or {})


@pytest.mark.parametrize("engine", ["native", pytest.param("python", marks=pytest.mark.full)])
def test_ranges_of_a_compiled_loop_are_recorded_and_break_no_graph(told: dict[str, Told], engine: EngineName) -> None:
    plain, recorded = (told[which]["clipping, collecting and saving"] for which in ("none", engine))

    # Graphs: the model for two batch lengths, up to the collection, up to saving; before torch 2.15 also the rest.
    # torch 2.8 compiles only the model, as it breaks no graph in a loop.
    assert (len(plain["graphs"]), plain["breaks"]) in ((4, 3), (3, 4), (2, 0))
    assert recorded["breaks"] == plain["breaks"]
    recompiled = "torch.compile 0/1: tensor 'x' size mismatch at index 0. expected 2, actual 3"
    of_the_user = {"clip", "norm", "clip_grad_norm_", "torch.save", "Optimizer.step#SGD.step", recompiled}
    assert of_the_user <= set(recorded["ranges"])
    assert "garbage collection" in recorded["ranges"]


@pytest.mark.parametrize("engine", ["native", pytest.param("python", marks=pytest.mark.full)])
@pytest.mark.parametrize("case", CASES)
def test_spans_are_of_the_users_modules_with_their_backward(
    told: dict[str, Told], case: str, engine: EngineName
) -> None:
    names = told[engine][case]["names"]

    root = {"a training step": "step", "activation checkpoints": "Checkpointed"}.get(case, "Net")
    # A wrapper that does work of its own has a span too.
    shown = {root, "DistributedDataParallel"} if case.startswith("DistributedDataParallel") else {root}
    phases = ("forward",) if case.startswith("compiled autograd") else ("forward", "backward")
    assert {f"{phase} {fqn}" for fqn in shown for phase in phases} <= set(names)
    # No span of a graph that torch.compile made itself, and none of a recompute.
    assert [name for name in names if name.split()[0] == "recompute" or "Graph" in name or "Wrapper" in name] == []
