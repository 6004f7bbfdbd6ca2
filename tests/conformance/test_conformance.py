"""Every case with our engines and trackers; torch's trackers are in the table that scripts/conformance prints."""

from __future__ import annotations

import pytest
from _pytest.mark import ParameterSet

from .case import Case
from .families import all_cases
from .notation import Node, parse, project, render, variants
from .subjects import OURS, answer, count_unattributed


def _case_and_subject() -> list[ParameterSet]:
    parameters = []
    for case in all_cases():
        for subject in OURS:
            marks = [pytest.mark.xfail(reason=case.wrong[subject])] if subject in case.wrong else []
            if case.not_live is None or "engine" in subject:
                parameters.append(pytest.param(case, subject, marks=marks, id=f"{case.name}-{subject}"))
    return parameters


@pytest.mark.usefixtures("native_engine")
@pytest.mark.parametrize(("case", "subject"), _case_and_subject())
def test_case(case: Case, subject: str) -> None:
    given = answer(case, subject)
    assert given.verdict == "right", f"{case.about}\nexpected\n{render(case.expected)}\ntold\n{given.trees}"


@pytest.mark.usefixtures("native_engine")
def test_both_engines_count_the_same_nodes_outside_modules() -> None:
    different = {
        case.name: counts
        for case in all_cases()
        if len(set(counts := [count_unattributed(case, engine) for engine in ("native", "python")])) > 1
    }

    # In a backward on another thread, the Python engine does not know which thread's sequence numbers it sees.
    assert different == {"backward on another thread": [1, 0]}


def test_there_are_enough_cases() -> None:
    cases = all_cases()
    assert len(cases) >= 40
    assert len({case.about for case in cases}) == len(cases)
    # Minimum for each engine, so that a case marked as wrong is an exception and not a way out.
    assert [case.name for case in cases if "native engine" in case.wrong] == []
    assert sum("Python engine" not in case.wrong for case in cases) >= 0.9 * len(cases)


TEXT = """
    forward:
      Net
        Net.a
        Net.a #1
    backward @worker:
      Net ~
        recompute Net.a #12
"""


def test_trees_are_parsed_and_rendered() -> None:
    trees = parse(TEXT)
    assert trees == {
        "forward": (Node("Net", children=(Node("Net.a"), Node("Net.a", 1))),),
        "backward @worker": (Node("Net", cut=True, children=(Node("Net.a", 12, recompute=True),)),),
    }
    assert parse(render(trees)) == trees


def test_optional_lines_have_variants() -> None:
    trees = parse("backward:\n  Net ?\n    Net.a ~?\n")
    a, cut = Node("Net.a"), Node("Net.a", cut=True)
    assert variants(trees) == [
        {"backward": (Node("Net", children=(a,)),)},
        {"backward": (Node("Net", children=(cut,)),)},
        {"backward": (a,)},
        {"backward": (cut,)},
    ]


def test_projected_trees_are_those_of_sets_of_names() -> None:
    trees = parse(
        """
        backward:
          Net
            Net.a
          Net #1
            Net.a #1
              recompute Net.a
                recompute Net.a.b
            Net.c
        """
    )
    b = Node("Net.a.b")
    assert project(trees) == {
        "backward": (Node("Net", children=(Node("Net.a", children=(b,)), Node("Net.c"))),),
    }
