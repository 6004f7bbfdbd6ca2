"""Baselines: written, read back, compared with recordings."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import modtrace
from modtrace.compare import save_baseline
from modtrace.compare.run_times import ModuleRun, RunTimes, Typical, is_baseline, read_baseline, write_baseline
from modtrace.timeline import FORWARD
from tests.support.compared_runs import invoke, recording
from tests.support.timelines import Plain

# Baselines are written with six digits.
numbers = st.floats(1, 1e12).map(lambda number: float(f"{number:.6g}"))
variances = st.floats(0, 1e6).map(lambda number: float(f"{number:.6g}"))
typicals = st.builds(Typical, numbers, variances)
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
    environment = draw(st.dictionaries(Plain, Plain, max_size=3))
    steps = max([draw(counts), *(module.steps for module in modules.values())])
    peaks = draw(st.dictionaries(Plain, st.integers(0, 1 << 50), max_size=3))
    return RunTimes(modules, classes, draw(typicals), steps, draw(counts), environment, {}, peaks)


@given(st.lists(runs(), min_size=1, max_size=3))
def test_a_baseline_is_read_back_as_it_was(tmp_path_factory: pytest.TempPathFactory, measured: list[RunTimes]) -> None:
    path = tmp_path_factory.mktemp("baseline") / "baseline.json"
    write_baseline(measured, path)
    text = path.read_text()

    assert is_baseline(path)
    assert read_baseline(path) == measured
    write_baseline(measured, path)
    assert path.read_text() == text


def test_a_baseline_gives_the_results_of_its_recordings(tmp_path: Path) -> None:
    base, new = [recording(seed) for seed in range(4)], [recording(9, {("Net.h.3", FORWARD): 1.5})]
    path = tmp_path / "baseline.json"
    save_baseline(base[1:], path)

    from_baseline, compared = modtrace.diff([base[0], path], new), modtrace.diff(base, new)
    assert (from_baseline.to_text(), from_baseline.runs) == (compared.to_text(), (4, 1))
    assert modtrace.diff(new, path).to_text() == modtrace.diff(new, base[1:]).to_text()


def test_a_comparison_with_a_baseline_has_no_step_to_show(tmp_path: Path) -> None:
    save_baseline(recording(0), tmp_path / "baseline.json")
    comparison = modtrace.diff(tmp_path / "baseline.json", recording(1))

    with pytest.raises(modtrace.WriteError, match=r"a\.html: a baseline has no step to show; write \.md"):
        comparison.save(tmp_path / "a.html")
    comparison.save(tmp_path / "a.md")
    assert (tmp_path / "a.md").read_text() == comparison.to_markdown()


def written(tmp_path: Path, **changed: object) -> Path:
    """A baseline of one recording, with changed values."""
    path = tmp_path / "baseline.json"
    save_baseline(recording(0), path)
    values = json.loads(path.read_text())
    values["recordings"][0].update(changed)
    path.write_text(json.dumps(values))
    return path


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"steps": -1}, "steps: not a number from 1 to 9.22337e+18"),
        ({"steps": 0}, "steps: not a number from 1"),
        ({"steps": True}, "steps: not a number"),
        ({"step": [0, 0.1]}, "step: not a number from 1"),
        ({"step": [10**400, 0.1]}, "step: not a number from 1"),
        ({"step": [5, float("nan")]}, "step: not a number from 0 to 1e+06"),
        ({"step": [5, 1e12]}, "step: not a number from 0 to 1e+06"),
        ({"step": [5]}, "missing 1 required positional argument"),
        ({"warm_up": -1}, "warm_up: not a number from 0"),
        ({"modules": [["Net", "Net", {"sideways": [1, 1, 1, 1, 1, 1]}]]}, "there is no phase 'sideways'"),
        ({"modules": [["Net", "Net", {"forward": [1, 1, 1, 0, 0, 0]}]]}, "Net forward: not a number from 1"),
        ({"modules": [["Net", "Net", {"forward": [1, 1, 1]}]]}, "not enough values"),
        ({"modules": [["Net", "Net"]]}, "not enough values"),
        ({"environment": []}, "a damaged baseline"),
        ({"peak_bytes": {"Net": -1}}, "peak_bytes: not a number from 0"),
    ],
)
def test_a_baseline_with_wrong_values_is_refused(tmp_path: Path, changed: dict[str, object], message: str) -> None:
    path = written(tmp_path, **changed)

    with pytest.raises(modtrace.ModtraceError, match=r"baseline\.json: a damaged baseline") as raised:
        modtrace.diff(path, recording(1))
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"format": "modtrace baseline"', "a damaged baseline"),
        ('{"format": "modtrace baseline"}', "a damaged baseline ('version')"),
        ('{"format": "modtrace baseline", "version": 1, "recordings": ' + "[" * 100_000, "a damaged baseline"),
        ('{"format": "modtrace baseline", "version": 2, "recordings": []}', "of version 2; this modtrace reads 1"),
        ('{"format": "modtrace baseline", "version": 1, "recordings": []}', "the baseline has no recording"),
    ],
)
def test_the_error_of_a_broken_baseline_has_the_reason(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)

    with pytest.raises(modtrace.ModtraceError) as raised:
        modtrace.diff(path, recording(0))
    assert message in str(raised.value)


def test_the_largest_values_are_compared_in_finite_numbers(tmp_path: Path) -> None:
    path = written(tmp_path, step=[9e18, 1e6])
    values = json.loads(path.read_text())
    for _, _, by_phase in values["recordings"][0]["modules"]:
        for numbers_of in by_phase.values():
            numbers_of[:2] = [9e18, 1e6]
    path.write_text(json.dumps(values))

    comparison = modtrace.diff(path, recording(1))

    outside: list[str] = []
    json.loads(comparison.to_json(), parse_constant=outside.append)
    assert outside == []
    assert comparison.above(0.05) == []


def test_the_command_saves_a_baseline_and_compares_with_it(tmp_path: Path) -> None:
    base, new, baseline = tmp_path / "base", tmp_path / "new", tmp_path / "baseline.json"
    for folder, factor in ((base, 1.0), (new, 1.3)):
        folder.mkdir()
        for seed in range(5):
            recording(seed + int(10 * factor), {("Net.h.3", FORWARD): factor}).save(folder / f"{seed}.pftrace")

    saved = invoke("--save-baseline", baseline, base)

    assert (saved.exit_code, saved.stdout.splitlines()) == (
        0,
        [
            f"{baseline}: 9 modules, 150 steps of 5 recordings",
            f"Next: modtrace diff {baseline} NEW.pftrace --fail-above 5%",
        ],
    )
    assert invoke(baseline, base, "--fail-above", "5%").exit_code == 0
    failed = invoke(baseline, str(new / "*.pftrace"), "--fail-above", "5%")
    assert failed.exit_code == 1
    assert "Net.h.3 forward is slower by 3" in failed.stderr
    assert invoke(baseline, new, "--fail-above", "50%").exit_code == 0
    assert invoke(baseline, new, "--fail-above", "5%", "--fail-floor", "2%").exit_code == 0
    assert invoke(baseline, new, "-o", tmp_path / "page.html").exit_code == 1
    assert "| `Net.h.3` | forward |" in invoke(baseline, new, "--format", "markdown").stdout
    several = invoke("--save-baseline", baseline, base / "0.pftrace", base / "1.pftrace")
    assert several.stdout.startswith(f"{baseline}: 9 modules, 60 steps of 2 recordings")


@pytest.mark.parametrize("sides", [1, 3])
def test_two_sides_are_needed(tmp_path: Path, sides: int) -> None:
    done = invoke(*[tmp_path] * sides)
    assert (done.exit_code, "Give two sides, BASE and NEW" in done.stderr) == (2, True)


def test_a_folder_or_pattern_without_recordings_is_an_error(tmp_path: Path) -> None:
    empty = invoke("--save-baseline", tmp_path / "baseline.json", tmp_path)
    assert (empty.exit_code, "no recording in this folder" in empty.stderr) == (1, True)
    nothing = invoke("--save-baseline", tmp_path / "baseline.json", tmp_path / "*.pftrace")
    assert (nothing.exit_code, "no file matches" in nothing.stderr) == (1, True)


def test_differences_of_the_environment_are_reported(tmp_path: Path) -> None:
    def with_torch(seed: int, version: str) -> modtrace.Timeline:
        return replace(recording(seed), metadata={"torch": version, "pid": 7})

    save_baseline(with_torch(0, "2.12.0"), tmp_path / "baseline.json")
    comparison = modtrace.diff(tmp_path / "baseline.json", with_torch(1, "2.13.0"))

    assert comparison.environment == {"torch": ("2.12.0", "2.13.0")}
    assert "torch: 2.12.0 before, 2.13.0 after" in comparison.to_text()
