"""Budgets: written, read back, held against recordings."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

import modtrace
from modtrace.cli.group import group
from modtrace.compare.run_times import ModuleRun, RunTimes
from modtrace.compare.typical import Typical
from modtrace.timeline import FORWARD
from tests.support.timelines import Plain
from tests.unit.test_diff import recording

# Numbers of six digits, as they are written.
numbers = st.floats(1, 1e12).map(lambda number: float(f"{number:.6g}"))
variances = st.floats(0, 1e6).map(lambda number: float(f"{number:.6g}"))
typicals = st.builds(Typical, numbers, variances, numbers)
counts = st.integers(1, 10_000)
phases = st.sampled_from(["forward", "backward", "recompute", "GPU forward"])


@st.composite
def module_runs(draw: st.DrawFn) -> ModuleRun:
    fewest, calls, most = sorted(draw(st.tuples(counts, counts, counts)))
    return ModuleRun(draw(typicals), draw(counts), calls, fewest, most)


@st.composite
def runs(draw: st.DrawFn) -> RunTimes:
    classes = draw(st.dictionaries(Plain, Plain, max_size=5))
    modules = {
        (fqn, phase): draw(module_runs())
        for fqn in classes
        for phase in draw(st.lists(phases, unique=True, max_size=3))
    }
    parts = draw(st.lists(numbers, max_size=3).map(tuple))
    environment = draw(st.dictionaries(Plain, Plain, max_size=3))
    steps = max([draw(counts), *(module.steps for module in modules.values())])
    return RunTimes(modules, classes, draw(typicals), parts, steps, draw(counts), draw(numbers), environment)


@given(st.lists(runs(), min_size=1, max_size=3))
def test_a_budget_is_read_back_as_it_was(tmp_path_factory: pytest.TempPathFactory, measured: list[RunTimes]) -> None:
    path = tmp_path_factory.mktemp("budget") / "budget.json"
    modtrace.Budget(measured).save(path)

    assert modtrace.Budget.load(path) == modtrace.Budget(measured)
    assert modtrace.Budget.load(path).to_json() == path.read_text()


def test_a_budget_says_what_a_comparison_says() -> None:
    base, new = [recording(seed) for seed in range(4)], [recording(9, {("Net.h.3", FORWARD): 1.5})]

    checked, compared = modtrace.Budget.of(base).check(new), modtrace.diff(base, new)

    assert checked.to_text() == compared.to_text()
    assert checked.to_json() == compared.to_json()


def test_a_comparison_with_a_budget_has_no_step_to_show(tmp_path: Path) -> None:
    found = modtrace.Budget.of(recording(0)).check(recording(1))

    with pytest.raises(modtrace.WriteError, match=r"a\.html: a budget holds no step to show; write \.md"):
        found.save(tmp_path / "a.html")
    found.save(tmp_path / "a.md")
    assert (tmp_path / "a.md").read_text() == found.to_markdown()


def written(tmp_path: Path, **changed: object) -> Path:
    """A budget of one recording, with other values."""
    path = tmp_path / "budget.json"
    modtrace.Budget.of(recording(0)).save(path)
    values = json.loads(path.read_text())
    values["recordings"][0].update(changed)
    path.write_text(json.dumps(values))
    return path


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"steps": -1}, "steps: -1 is no count"),
        ({"steps": 0}, "steps: 0 is no count"),
        ({"steps": True}, "True is no count"),
        ({"step": [0, 0.1, 3]}, "step time_ns: 0 is no number of at least 1"),
        ({"step": [10**400, 0.1, 3]}, "is no number of at most 9.22337e+18"),
        ({"step": [5, float("nan"), 3]}, "step variance: nan is no number of at least 0"),
        ({"step": [5, 1e12, 3]}, "step variance: 1000000000000.0 is no number of at most 1e+06"),
        ({"step": [5, 1e308, 3]}, "step variance: 1e+308 is no number of at most 1e+06"),
        ({"step": [5, 0.1, 1e308]}, "step freedom: 1e+308 is no number of at most 9.0072e+15"),
        ({"independent": 1e308}, "independent: 1e+308 is no number of at most 9.0072e+15"),
        ({"modules": [["Net", "Net", {}], ["Net", "Net", {}]]}, "modules: Net is there twice"),
        ({"modules": [["Net", "Net", {"forward": [1, 1, 1, 1, 3, 9, 2]}]]}, "Net forward fewest_calls: 9 are more"),
        ({"modules": [["Net", "Net", {"forward": [1, 1, 1, 31, 1, 1, 1]}]]}, "Net forward steps: 31 are more"),
        ({"step": [5, 0.1]}, "not enough values"),
        ({"environment": {"torch": 2}}, "2 is no text"),
        ({"modules": [["Net", "Net", {"sideways": [1, 1, 1, 1, 1, 1, 1]}]]}, "there is no phase 'sideways'"),
        ({"modules": [["Net", "Net", {"forward": [1, 1, 1, 1, 0, 0, 0]}]]}, "Net forward was never called"),
        ({"modules": [["Net", "Net", {"forward": [1, 1, 1]}]]}, "no budget"),
    ],
)
def test_a_budget_with_wrong_values_is_refused(tmp_path: Path, changed: dict[str, object], message: str) -> None:
    path = written(tmp_path, **changed)

    with pytest.raises(
        modtrace.ModtraceError, match=r"budget\.json: no budget; 'modtrace budget save' makes one"
    ) as found:
        modtrace.Budget.load(path)
    assert message in str(found.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expecting value"),
        ("[]", "no budget"),
        ("[" * 100_000, "no budget"),
        ('{"traceEvents": []}', "'format'"),
        ('{"format": "modtrace budget", "version": 2, "recordings": []}', "its version is 2, this modtrace reads 1"),
        ('{"format": "modtrace budget", "version": true, "recordings": []}', "its version is True"),
        ('{"format": "modtrace budget", "version": 1, "recordings": []}', "it holds no recording"),
    ],
)
def test_another_file_is_no_budget(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)

    with pytest.raises(modtrace.ModtraceError, match=r"other\.json: no budget") as found:
        modtrace.Budget.load(path)
    assert message in str(found.value)


def test_the_largest_variance_is_compared_in_finite_numbers(tmp_path: Path) -> None:
    path = written(tmp_path, step=[9e18, 1e6, 0])
    values = json.loads(path.read_text())
    for _, _, phases in values["recordings"][0]["modules"]:
        for numbers in phases.values():
            numbers[:3] = [9e18, 1e6, 0]
    path.write_text(json.dumps(values))

    found = modtrace.Budget.load(path).check(recording(1))

    outside: list[str] = []
    json.loads(found.to_json(), parse_constant=outside.append)
    assert outside == []
    assert found.above(0.05) == []


def test_a_budget_that_is_not_there_names_the_path() -> None:
    with pytest.raises(modtrace.ModtraceError, match=r"nowhere\.json: cannot be read: No such file"):
        modtrace.Budget.load("nowhere.json")


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(group, ["budget", *map(str, arguments)])


def test_the_commands_save_and_check(tmp_path: Path) -> None:
    base, new, budget = tmp_path / "base", tmp_path / "new", tmp_path / "budget.json"
    for folder, factor in ((base, 1.0), (new, 1.3)):
        folder.mkdir()
        for seed in range(5):
            recording(seed + int(10 * factor), {("Net.h.3", FORWARD): factor}).save(folder / f"{seed}.pftrace")

    saved = invoke("save", base, "-o", budget)

    assert (saved.exit_code, saved.stdout.splitlines()) == (
        0,
        [
            f"{budget}: 9 modules, 150 steps of 5 recordings",
            f"Next: modtrace budget check {budget} NEW.pftrace",
        ],
    )
    assert invoke("check", budget, base).exit_code == 0
    failed = invoke("check", budget, str(new / "*.pftrace"))
    assert failed.exit_code == 1
    assert "Net.h.3 forward is slower by 3" in failed.stderr
    assert invoke("check", budget, new, "--fail-above", "50%").exit_code == 0
    assert invoke("check", budget, new, "-o", tmp_path / "page.html").exit_code == 2
    assert "| `Net.h.3` | forward |" in invoke("check", budget, new, "--format", "markdown").stdout


def test_a_folder_or_pattern_without_recordings_is_an_error(tmp_path: Path) -> None:
    empty = invoke("save", tmp_path, "-o", tmp_path / "budget.json")
    assert (empty.exit_code, "no recording in this folder" in empty.stderr) == (1, True)
    nothing = invoke("save", tmp_path / "*.pftrace", "-o", tmp_path / "budget.json")
    assert (nothing.exit_code, "no file matches" in nothing.stderr) == (1, True)


def test_what_differs_in_the_environment_is_said() -> None:
    def with_torch(seed: int, version: str) -> modtrace.Timeline:
        timeline = recording(seed)
        return replace(timeline, metadata={"torch": version, "pid": 7})

    found = modtrace.Budget.of(with_torch(0, "2.12.0")).check(with_torch(1, "2.13.0"))

    assert found.environment == {"torch": ("2.12.0", "2.13.0")}
    assert "torch: 2.12.0 before, 2.13.0 after" in found.to_text()
