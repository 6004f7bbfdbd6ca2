"""Renames that the structure of both sides suggests."""

from __future__ import annotations

import cProfile

import pytest

from modtrace.compare.compare import compare_runs, suggest_renames
from modtrace.compare.run_times import ModuleRun, RunTimes, Typical

TIME = Typical(1_000.0, 0.0001)


def run(classes: dict[str, str], calls: dict[str, int] | None = None) -> RunTimes:
    """A recording of modules in the order of their calls; `calls` is the number of calls per step, if not one."""
    modules = {
        (fqn, phase): ModuleRun(TIME, 20, count, count, count)
        for fqn in classes
        for phase in ("forward", "backward")
        for count in ((calls or {}).get(fqn, 1),)
    }
    return RunTimes(modules, classes, TIME, 20, 0, {})


BASE = {
    "Net": "Net",
    "Net.h.0": "Block",
    "Net.h.0.fc": "Linear",
    "Net.h.1": "Block",
    "Net.h.1.fc": "Linear",
    "Net.head": "Linear",
}


def test_a_renamed_list_of_modules_is_suggested_once() -> None:
    renamed = {fqn.replace("Net.h.", "Net.layers."): of for fqn, of in BASE.items()}

    assert suggest_renames(run(BASE), run(renamed)) == {"Net.h": "Net.layers"}


def test_a_renamed_module_with_its_inner_modules_is_suggested() -> None:
    renamed = {fqn.replace("Net.head", "Net.out"): of for fqn, of in BASE.items()}

    assert suggest_renames(run(BASE), run(renamed)) == {"Net.head": "Net.out"}


def test_a_renamed_model_with_the_same_modules_is_suggested() -> None:
    renamed = {fqn.replace("Net", "Model", 1): of.replace("Net", "Model") for fqn, of in BASE.items()}

    assert suggest_renames(run(BASE), run(renamed)) == {"Net": "Model"}


def test_a_module_moved_into_an_uncalled_container_is_suggested() -> None:
    moved = {fqn.replace("Net.head", "Net.heads.head"): of for fqn, of in BASE.items()}

    assert suggest_renames(run(BASE), run(moved)) == {"Net.head": "Net.heads.head"}
    # The model itself is not called: only its name shows that it is the same.
    flat, inside = ({fqn: of for fqn, of in classes.items() if fqn != "Net"} for classes in (BASE, moved))
    assert suggest_renames(run(flat), run(inside)) == {"Net.head": "Net.heads.head"}


def test_nothing_is_suggested_for_another_class_place_or_number_of_calls() -> None:
    out = {fqn.replace("Net.head", "Net.out"): of for fqn, of in BASE.items()}

    assert suggest_renames(run(BASE), run({**out, "Net.out": "Conv2d"})) == {}
    assert suggest_renames(run(BASE), run(out, {"Net.out": 2})) == {}
    moved = {fqn.replace("Net.head", "Net.h.1.head"): of for fqn, of in BASE.items()}
    assert suggest_renames(run(BASE), run(moved)) == {}


def test_two_removed_modules_and_one_new_are_ambiguous() -> None:
    one_less = {"Net": "Net", "Net.layers.0": "Block", "Net.layers.0.fc": "Linear", "Net.head": "Linear"}

    assert suggest_renames(run(BASE), run(one_less)) == {}


def test_equal_structure_needs_no_rename() -> None:
    assert suggest_renames(run(BASE), run(BASE)) == {}


def test_modules_inside_a_module_that_is_no_longer_called_are_kept() -> None:
    """Renaming `Net.h.0` would also rename `Net.h.0.fc`, which both sides have."""
    stayed = {fqn: of for fqn, of in BASE.items() if fqn != "Net.h.0"} | {"Net.first": "Block"}

    assert suggest_renames(run(BASE), run(stayed)) == {}


@pytest.mark.parametrize("new", ["Net.layers.{}.mlp", "Net.h.{}.ffn", "Other.h.{}.mlp", "Net.{}"])
def test_many_renamed_modules_need_no_more_calls_than_equal_names(new: str) -> None:
    def functions_called(names: str, renamed: dict[str, str]) -> int:
        """Number of function calls, which does not depend on the machine's load as times do."""
        sides = [run({form.format(number): "Block" for number in range(500)}) for form in ("Net.h.{}.mlp", names)]
        profile = cProfile.Profile()
        profile.runcall(compare_runs, [sides[0]], [sides[1]], renamed)
        return sum(entry.callcount for entry in profile.getstats())

    same = functions_called("Net.h.{}.mlp", {})
    each = {f"Net.h.{number}.mlp": new.format(number) for number in range(500)}
    assert functions_called(new, {}) < 1.1 * same
    assert functions_called(new, each) < 1.1 * same


def test_the_innermost_module_that_was_renamed_decides() -> None:
    renamed = {"Net.h": "Net.layers", "Net.h.1": "Net.last"}
    classes = {"Net.layers.0": "Block", "Net.layers.0.fc": "Linear", "Net.last": "Block", "Net.last.fc": "Linear"}
    comparison = compare_runs([run(BASE)], [run({"Net": "Net", **classes, "Net.head": "Linear"})], renamed)

    assert {change.fqn for change in comparison.changes} == {"Net", *classes, "Net.head"}
    assert not any(change.calls_changed for change in comparison.changes)
