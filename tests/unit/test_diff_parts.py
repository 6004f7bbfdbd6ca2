"""Comparing the parts of a step: time outside modules gets a verdict, as modules do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import modtrace
from modtrace import Timeline
from modtrace.cli.group import group
from modtrace.compare.run_times import measure_run, take_samples
from tests.support.part_timeline import part_timeline

MS = 1_000_000
USUAL = {"data loading": 10 * MS, "forward": 20 * MS, "backward": 40 * MS, "optimizer": 5 * MS, "other": MS}
STEPS = 20


def recording(seed: int, factors: Mapping[str, float] | None = None, *, speed: float = 1.0) -> Timeline:
    """Twenty steps of 76 ms with 3 % of noise in each part, and a save of 8 ms in every fourth step."""
    random = np.random.default_rng(seed)
    steps = []
    for number in range(STEPS):
        parts = USUAL | ({"saving": 8 * MS} if number % 4 == 3 else {})
        steps.append(
            {
                part: round(ns * speed * (factors or {}).get(part, 1.0) * random.normal(1, 0.03))
                for part, ns in parts.items()
            }
        )
    return part_timeline(steps)


def side(first: int, factors: Mapping[str, float] | None = None, *, speed: float = 1.0) -> list[Timeline]:
    return [recording(first + seed, factors, speed=speed) for seed in range(5)]


def changed(comparison: modtrace.Diff) -> list[tuple[str, str, str]]:
    return [
        (part.fqn, part.phase, part.verdict) for part in comparison.parts if part.verdict not in {"same", "cannot tell"}
    ]


def test_samples_of_parts_equal_those_of_the_summary() -> None:
    timeline = part_timeline(
        [{"data loading": 3, "forward": 80, "evaluation": 7}, {"forward": 96}, {"forward": 88}] * 4
    )
    samples = take_samples(timeline)

    assert samples.warm_up == 0
    assert {part: ns.tolist() for part, ns in samples.parts.items()} == {
        "data loading": [3, 0, 0] * 4,
        "forward": [80, 96, 88] * 4,
        "evaluation": [7, 0, 0] * 4,
    }
    assert samples.duration_ns.tolist() == [83, 96, 88] * 4  # evaluation is not training time
    assert (measure_run(timeline).parts["data loading"].steps, measure_run(timeline).parts["forward"].steps) == (4, 12)


def test_a_part_that_became_slower_is_the_only_one_found() -> None:
    comparison = modtrace.diff(side(0), side(5, {"data loading": 1.4}))

    assert changed(comparison) == [("data loading", "part", "slower")]
    part = comparison.parts[0]
    assert part.low_ns is not None
    assert part.high_ns is not None
    assert 3.5 * MS < part.low_ns < part.difference_ns < part.high_ns < 4.5 * MS
    assert part.difference_ns == pytest.approx(4 * MS, abs=0.2 * MS)
    assert [change.verdict for change in comparison.changes if change.verdict in {"slower", "faster"}] == []
    assert part in comparison.above(0.3)
    assert part not in comparison.above(0.5)
    assert comparison.above(0.3, floor=0.1) == []  # 4 of 78 ms
    cost = f"{part.difference_ns / 1e6:+.3f} ms ({part.ratio:.0%})"
    assert comparison.sentence.endswith(f"; data loading is slower: {cost}")
    values = json.loads(comparison.to_json())
    assert (values["parts"][0]["fqn"], values["parts"][0]["low_ns"]) == ("data loading", part.low_ns)
    assert comparison.only("*.h.3").parts == ()
    assert comparison.only("*.h.3").sentence.count("data loading") == 0
    texts = (comparison.to_text(), comparison.to_markdown(), comparison._repr_html_(), comparison.to_csv())
    # In the findings, the sentence and the table; HTML has the first two in one line, CSV has the table only.
    assert [sum("data loading" in line for line in text.splitlines()) for text in texts] == [3, 3, 2, 1]


def test_a_part_in_few_steps_is_compared_over_these_steps() -> None:
    comparison = modtrace.diff(side(0), side(5, {"saving": 1.5}))

    assert changed(comparison) == [("saving", "part", "slower")]
    assert comparison.parts[0].base_ns == pytest.approx(8 * MS, rel=0.05)
    (finding,) = comparison.findings  # 4 ms more in every fourth step
    assert finding.ns_per_step == pytest.approx(MS, rel=0.2)
    assert finding.share == pytest.approx(1 / 78, rel=0.2)
    assert finding.evidence.startswith("in 25% of the steps; ")


def test_a_part_that_is_new_comes_first() -> None:
    new = [part_timeline([{**USUAL, "log": 2 * MS}] * STEPS) for _ in range(2)]
    comparison = modtrace.diff([part_timeline([USUAL] * STEPS)], new)

    assert [(part.fqn, part.verdict) for part in comparison.parts if part.calls_changed] == [("log", "added")]
    assert comparison.parts[0].fqn == "log"


def test_naming_a_part_of_other_time_makes_nothing_faster() -> None:
    """The new program has a range around 0.8 ms that were part of `other` before."""
    named = [part_timeline([{"forward": 20 * MS, "other": MS // 5, "augment": 4 * MS // 5}] * STEPS) for _ in range(5)]
    plain = [part_timeline([{"forward": 20 * MS, "other": MS}] * STEPS) for _ in range(5)]

    assert changed(modtrace.diff(plain, named)) == [("augment", "part", "added")]


@pytest.mark.parametrize(("augment_ms", "other"), [(0, True), (8, True), (9, False)])
def test_other_changes_if_no_part_with_a_name_explains_it(augment_ms: int, other: bool) -> None:
    """`other` shrinks from 10 ms to 1 ms; a named part of `augment_ms` may be new."""
    long = [part_timeline([{"forward": 20 * MS, "other": 10 * MS}] * STEPS) for _ in range(5)]
    named = {"augment": augment_ms * MS} if augment_ms else {}
    short = [part_timeline([{"forward": 20 * MS, "other": MS, **named}] * STEPS) for _ in range(5)]

    verdicts = {part: verdict for part, _, verdict in changed(modtrace.diff(long, short))}
    assert verdicts == ({"augment": "added"} if named else {}) | ({"other": "faster"} if other else {})
    verdicts = {part: verdict for part, _, verdict in changed(modtrace.diff(short, long))}
    assert verdicts == ({"augment": "removed"} if named else {}) | ({"other": "slower"} if other else {})


def test_a_machine_that_is_slower_changes_no_part() -> None:
    assert changed(modtrace.diff(side(0), side(5, speed=1.3))) == []


def test_parts_of_two_recordings_of_one_program_hardly_ever_differ() -> None:
    sides = [recording(seed) for seed in range(40)]
    wrong = [pair for pair in zip(sides[::2], sides[1::2], strict=True) if changed(modtrace.diff(*pair))]

    assert len(wrong) <= 1


def test_fail_above_names_the_part(tmp_path: Path) -> None:
    for name, timelines in (("base", side(0)), ("new", side(5, {"optimizer": 1.5}))):
        for number, timeline in enumerate(timelines):
            timeline.save(tmp_path / f"{name}-{number}.pftrace")
    sides = [str(tmp_path / "base-*.pftrace"), str(tmp_path / "new-*.pftrace")]

    result = CliRunner().invoke(group, ["diff", *sides, "--fail-above", "20%"])
    assert result.exit_code == 1
    assert "modtrace: optimizer is slower by 49.5%, more than 20.0%" in result.stderr
    baseline = str(tmp_path / "baseline.json")
    assert CliRunner().invoke(group, ["diff", "--save-baseline", baseline, sides[0]]).exit_code == 0
    assert CliRunner().invoke(group, ["diff", baseline, sides[1], "--fail-above", "20%"]).stderr == result.stderr


def test_a_baseline_of_an_earlier_version_has_no_verdict_of_parts(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    modtrace.save_baseline(side(0), path)
    values = json.loads(path.read_text())
    for run in values["recordings"]:
        del run["parts"]
    path.write_text(json.dumps(values))

    assert modtrace.diff(path, side(5)).parts == []
