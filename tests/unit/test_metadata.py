"""Metadata in a file may hold anything: values of the wrong form are left out once, when the file is read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import modtrace
from modtrace.timeline.metadata import fit_metadata
from tests.support.event_script import EventScript
from tests.support.timelines import build_timeline, timeline_of

WORK = ["a: A", 1, 0, 0, 5, 0, -1]


@pytest.mark.parametrize(
    ("key", "value", "kept"),
    [
        ("anything", {"of": [None, True]}, {"of": [None, True]}),
        ("missing_bytes", True, ...),
        ("notes", ["a", 1], ...),
        ("first_called_step", {"call": 4, "Net": "4"}, {"call": 4}),
        (
            "whole_run",
            {"steps": 3, "spans": None, "seconds": "1", "more": "x"},
            {"steps": 3, "spans": None, "more": "x"},
        ),
        ("memory", {"by": {"Net": 1, "x": 1.5}, "grows": "much", "sentences": [1]}, {"by": {"Net": 1}}),
        ("optimizers", [{"class": "SGD", "tensors": "2"}, 3, {"hooks": 1}], [{"class": "SGD"}, {"hooks": 1}]),
        ("step_notes", {"operators": {"outside": [["mul", 1, 2], ["add", 1]]}}, {"operators": {}}),
        ("step_notes", {"resident": [(1, 2), [2, 3]]}, {"resident": [[1, 2], [2, 3]]}),
        ("step_notes", {"tables": ["a" * 10_000], "drop": ["a" * 10_001]}, {"tables": ["a" * 10_000]}),
        ("step_notes", {"hooks": {"a" * 10_001: 1, "b": 2}}, {"hooks": {"b": 2}}),
        ("compiled", {"Net": [{"work": [WORK]}, None], "x": 3}, {"Net": [{"work": [WORK]}]}),
        ("compiled", {"Net": [{"work": [["a" * 1001, *WORK[1:]]]}]}, {"Net": [{}]}),
        ("compiled", {"Net": [{"work": [WORK[:-1]], "graph": "0/0"}]}, {"Net": [{"graph": "0/0"}]}),
        ("compiled", {"Net": [{"fused_times": [["a", 3, []]]}]}, {"Net": [{}]}),
        (
            "compiled",
            {"Net": [{"kernels": [{"key": "k", "kernels": [["mm", [[-1, 0, 8]]]]}, 1]}]},
            {"Net": [{"kernels": [{"key": "k"}]}]},
        ),
    ],
)
def test_metadata_of_the_wrong_form_is_left_out(tmp_path: Path, key: str, value: object, kept: object) -> None:
    expected = {} if kept is ... else {key: kept}

    assert fit_metadata({key: value}) == expected
    replace(timeline_of((0, 1, "a")), metadata={key: value}).save(tmp_path / "trace.json")
    assert modtrace.load(tmp_path / "trace.json").metadata == expected


def test_a_ring_whose_notes_have_the_wrong_form_is_read_without_them() -> None:
    script = EventScript(metadata={"torch": "2.13.0", "memory": 3, "compiled": {"Net": 3}})
    net = script.name("Net")
    for note in _odd_notes(net):
        script.note(note)
    script.enter(10, net)
    script.exit(20, net)

    timeline = build_timeline(script.snapshot())

    known = {key: timeline.metadata.get(key) for key in ("torch", "memory", "compiled", "optimizers", "step_notes")}
    assert known == {
        "torch": "2.13.0",
        "memory": None,
        "compiled": {},
        "optimizers": [{"class": "SGD"}],
        "step_notes": {"drop": ["Net"], "steps": 2},
    }
    assert timeline.summary().rows[0].forward_ns == 10


def _odd_notes(name: int) -> list[dict[str, Any]]:
    return [
        {"kind": "compiled", "name": name, "modules": "Net.a: A", "graph": [3]},
        {"kind": "optimizer", "class": "SGD", "tensors": "2"},
        {"kind": "steps", "steps": 2, "notes": json.dumps({"hooks": [1], "drop": ["Net"]})},
    ]
