"""Comparing modules that some steps or some recordings lack, and recordings that are given twice."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import modtrace
from modtrace import Timeline
from modtrace.compare.run_times import ModuleRun, RunTimes, Typical
from modtrace.compare.verdicts import Change, compare_calls
from modtrace.timeline import FORWARD
from tests.support.compared_runs import FQNS, changed, invoke, recording


def keeping(timeline: Timeline, keep: Callable[[str, int], bool]) -> Timeline:
    """A timeline of the spans for whose module and step `keep` returns true."""
    columns = timeline.columns
    names = [timeline.names[name].fqn for name in columns.name]
    kept = [keep(fqn, int(step)) for fqn, step in zip(names, columns.step, strict=True)]
    flat = replace(columns, parent=np.full_like(columns.parent, -1), depth=np.zeros_like(columns.depth))
    return replace(timeline, slices=flat.take(np.flatnonzero(kept)))


def every(steps: int, timeline: Timeline) -> Timeline:
    """A timeline in which layer 3 is called only in every `steps`-th step."""
    return keeping(timeline, lambda fqn, step: fqn != "Net.h.3" or step % steps == 0)


def without(fqn: str, timeline: Timeline) -> Timeline:
    return keeping(timeline, lambda other, _: other != fqn)


def row(comparison: modtrace.Diff, fqn: str, phase: str = "forward") -> Change:
    return next(change for change in comparison.changes if (change.fqn, change.phase) == (fqn, phase))


@pytest.mark.parametrize("runs", [1, 3])
def test_a_module_called_in_every_step_instead_of_every_tenth_comes_first(runs: int) -> None:
    base = [every(10, recording(seed)) for seed in range(runs)]
    new = [every(1, recording(seed)) for seed in range(runs, 2 * runs)]
    comparison = modtrace.diff(base, new)

    first = comparison.changes[:2]
    assert {change[:2] for change in first} == {("Net.h.3", "forward"), ("Net.h.3", "backward")}
    assert {(c.base_calls, c.new_calls, c.calls_changed, c.verdict) for c in first} == {(0.1, 1, True, "slower")}
    assert "0.1 → 1" in comparison.to_text()
    # 10 µs per step before, 100 µs after.
    forward = row(comparison, "Net.h.3")
    assert forward.base_ns == pytest.approx(10_000, rel=0.1)
    assert forward.new_ns == pytest.approx(100_000, rel=0.1)
    assert comparison.above(0.05) == list(comparison.changes[:2])
    assert [change for change in comparison.changes[2:] if change.calls_changed] == []
    back = modtrace.diff(new, base)
    assert {(c.base_calls, c.new_calls, c.verdict) for c in back.changes[:2]} == {(1, 0.1, "faster")}


def run_of(called: int, steps: int) -> RunTimes:
    time = Typical(1e6, 1e-4)
    return RunTimes({("Net", "forward"): ModuleRun(time, called, 1, 1, 1)}, {}, time, steps, 0, {})


def test_a_share_of_steps_within_chance_did_not_change() -> None:
    key = ("Net", "forward")

    def compare(before: list[int], after: list[int]) -> bool:
        sides = [[run_of(called, 30) for called in side] for side in (before, after)]
        return compare_calls(sides[0], sides[1], key, 80).has_changed

    # By chance, 15 ± 2.7 of 30 steps have a call of probability 1/2; the sides' ranges must not overlap either.
    assert not compare([12], [18])
    assert not compare([15], [25])
    assert compare([3], [30])
    assert compare([5, 6, 7], [22, 24, 25])
    assert not compare([5, 6, 25], [22, 24, 25])
    random = np.random.default_rng(0)
    called = random.binomial(30, 0.5, (4000, 2, 2)).tolist()
    assert sum(compare(before, after) for before, after in called) == 0


def test_a_module_that_one_recording_lacks_is_compared_over_the_others() -> None:
    base = [recording(seed) for seed in range(8)]
    base[2] = without("Net.h.3", base[2])
    new = [recording(seed, {("Net.h.3", FORWARD): 1.6}) for seed in range(8, 16)]
    comparison = modtrace.diff(base, new)

    assert changed(comparison) == [("Net.h.3", "forward", "slower")]
    change = comparison.changes[0]
    assert (change.base_recordings, change.new_recordings, change.calls_changed) == (7, 8, False)
    assert change.ratio == pytest.approx(0.6, abs=0.03)
    assert [part.fqn for part in comparison.above(0.05)] == ["forward", "Net.h.3"]  # the part of a step, and its cause
    assert comparison.above(0.1) == [change]
    assert (
        "not in every recording: Net.h.3 forward (7 of 8 before), Net.h.3 backward (7 of 8 before)" in comparison.header
    )


def test_a_module_without_an_estimate_has_no_interval(tmp_path: Path) -> None:
    base = [recording(0), *(without("Net.h.3", recording(seed)) for seed in (1, 2))]
    comparison = modtrace.diff(base, [recording(seed, recompute=("Net.h.1",)) for seed in (3, 4, 5)])

    seldom, added = row(comparison, "Net.h.3"), row(comparison, "Net.h.1", "recompute")
    assert (seldom.low_ns, seldom.high_ns, seldom.verdict) == (None, None, "cannot tell")
    assert (added.low_ns, added.high_ns, added.verdict) == (None, None, "added")
    assert json.loads(comparison.to_json())["changes"][0]["low_ns"] is None
    comparison.save(tmp_path / "d.html")


def test_copies_of_a_recording_count_once() -> None:
    one, other = recording(0), recording(1)
    comparison = modtrace.diff([one] * 8, [other] * 8)

    single = modtrace.diff(one, other)
    assert (comparison.runs, comparison.copies, comparison.changes) == ((1, 1), (7, 7), single.changes)
    assert "14 recordings left out as copies of others" in comparison.header


def test_the_same_recordings_on_both_sides_are_reported() -> None:
    recordings = [recording(seed) for seed in range(8)]
    comparison = modtrace.diff(recordings, recordings)

    assert {change.difference_ns for change in comparison.changes} == {0}
    assert {change.verdict for change in comparison.changes} <= {"same", "cannot tell"}
    assert "both sides have the same recordings: they cannot show a change" in comparison.header
    partly = modtrace.diff(recordings[:5], recordings[4:])
    assert "1 recording on both sides: they cannot show a change" in partly.header


def test_times_below_the_clocks_resolution_have_no_verdict_and_no_percentage() -> None:
    def instant(timeline: Timeline) -> Timeline:
        columns = timeline.columns
        end = np.where(columns.name == FQNS.index("Net.h.3"), columns.start, columns.end)
        return replace(timeline, slices=replace(columns, end=end))

    base, new = ([recording(side * 5 + seed) for seed in range(5)] for side in (0, 1))
    both = row(modtrace.diff(list(map(instant, base)), list(map(instant, new))), "Net.h.3")
    assert (both.verdict, both.ratio, both.low_ns) == ("cannot tell", 0, None)
    comparison = modtrace.diff(list(map(instant, base)), new)
    grown = row(comparison, "Net.h.3", "backward")
    assert (grown.verdict, grown.ratio) == ("slower", math.inf)
    line = next(line for line in comparison.to_text().splitlines() if line.startswith("Net.h.3  backward"))
    low = f"{(grown.low_ns or 0) / 1e6:+.3f}"
    assert line.split()[4:6] == [f"{grown.difference_ns / 1e6:+.3f}", low]


def test_the_header_has_only_measured_facts() -> None:
    def few(seed: int, steps: int = 30) -> Timeline:
        return keeping(recording(seed, steps=steps), lambda fqn, _: fqn in {"Net.h.1", "Net.h.2"})

    header = "\n".join(modtrace.diff(few(0), few(1)).header)
    assert "too few modules to measure the machine's speed, which changes all differences" in header
    assert "modules in general" not in header
    header = "\n".join(modtrace.diff(few(0), without("Net.h.2", without("Net.h.1", recording(1)))).header)
    assert "no module is in enough recordings of both sides, so no times are compared" in header
    assert "differs by" not in header
    header = "\n".join(modtrace.diff(few(0, 5), few(1, 5)).header)
    assert "a side has fewer than 6 steps: there are no verdicts; record more" in header


@pytest.mark.parametrize("name_map", [{"Net.hh": "Net.h"}, {"Net.h": "Net.hh"}])
def test_a_map_that_matches_nothing_is_an_error_that_names_it(tmp_path: Path, name_map: dict[str, str]) -> None:
    ((old, new),) = name_map.items()
    message = f"{old}={new} maps nothing: no module {'before' if old == 'Net.hh' else 'after'} is Net.hh or inside it"
    with pytest.raises(modtrace.ModtraceError, match=message):
        modtrace.diff(recording(0), recording(1), map=name_map)

    files = tmp_path / "base.pftrace", tmp_path / "new.pftrace"
    for seed, file in enumerate(files):
        recording(seed).save(file)
    done = invoke(*files, "--map", f"{old}={new}")
    assert (done.exit_code, message in done.stderr) == (1, True)


def test_a_file_without_whole_steps_is_named(tmp_path: Path) -> None:
    for seed in range(2):
        recording(seed).save(tmp_path / f"{seed}.pftrace")
    replace(recording(2), marks=[]).save(tmp_path / "2.pftrace")

    with pytest.raises(modtrace.ModtraceError, match=r"/2\.pftrace: a recording without whole steps"):
        modtrace.diff(recording(3), [tmp_path / f"{seed}.pftrace" for seed in range(3)])
    done = invoke(tmp_path, tmp_path)
    assert (done.exit_code, "2.pftrace: a recording without whole steps" in done.stderr) == (1, True)
