"""Findings of a comparison: the largest changes of any kind come first, and chance makes none.

Every recording is made of known times, so each expected figure is a sum.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import modtrace
from modtrace.cli.group import group
from modtrace.compare.compare import compare_runs
from modtrace.compare.regions import RegionChange
from modtrace.compare.run_times import ModuleRun, RunTimes, Typical, read_baseline, renamed_run, write_baseline
from modtrace.timeline.contents import COMPILED_CLASS
from modtrace.timeline.summary import Finding

MS = 1_000_000
STEPS = 30
PLACES = ("GPT", *(f"GPT.h.{layer}{name}" for layer in range(4) for name in ("", ".attn", ".act")))
CLASSES = {"": "GPT", "attn": "Attention", "act": "GELU"}
NEXT = "modtrace diff BASE NEW --verbose"


def next_of(where: str) -> str:
    return f"modtrace diff BASE NEW --only '{where}*'"


def times(ns: float, calls: int = 1, steps: int = STEPS) -> ModuleRun:
    return ModuleRun(Typical(ns, 1e-8), steps, calls, calls, calls)


def model(
    times_ns: Mapping[tuple[str, str], float] | None = None,
    *,
    calls: Mapping[str, int] | None = None,
    classes: Mapping[str, str] | None = None,
    parts: Mapping[str, ModuleRun] | None = None,
    exact: Mapping[str, str] | None = None,
    factor: float = 1.0,
    compiled: tuple[str, ...] = (),
) -> RunTimes:
    """Four layers whose modules last 1 ms forward and 2 ms backward, in steps of 50 ms, and the given differences."""
    own = {(fqn, phase): ms * MS * factor for fqn in PLACES for phase, ms in (("forward", 1.0), ("backward", 2.0))}
    own = {key: ns for key, ns in (own | dict(times_ns or {})).items() if ns}
    if compiled:
        own = {key: ns for key, ns in own.items() if not any(key[0].startswith(f"{region}.") for region in compiled)}
    modules = {(fqn, phase): times(ns, (calls or {}).get(fqn, 1)) for (fqn, phase), ns in own.items()}
    usual = {fqn: CLASSES.get(fqn.rpartition(".")[2], "Block") for fqn, _ in own} | {"GPT": "GPT"}
    parts = {"forward": times(13 * MS * factor), "optimizer": times(5 * MS)} | dict(parts or {})
    step = Typical(50 * MS * factor, 1e-8)
    return RunTimes(modules, usual | dict(classes or {}), step, STEPS, 0, exact or {}, parts, compiled=compiled)


def findings(new: RunTimes, base: RunTimes | None = None) -> list[Finding]:
    """Compare five recordings per side, equal except for the number of warm-up steps, which makes each distinct."""
    base = base or model()
    before, after = ([run._replace(warm_up=n) for n in range(5)] for run in (base, new))
    return compare_runs(before, after, {}).findings


def test_new_recompute_comes_before_a_small_change_of_the_optimizer() -> None:
    again = {("GPT.h.0.attn", "recompute"): 12 * MS, ("GPT.h.1.attn", "recompute"): 8 * MS}
    parts = {"recompute": times(20.5 * MS), "optimizer": times(5.54 * MS)}
    new, base = model(again, parts=parts), model()

    assert findings(new, base) == [
        Finding(
            "runs again in backward now (recompute)", "GPT.h.0.attn", "recompute", 20_500_000, 0.41,
            "GPT.h.0.attn, GPT.h.1.attn; 0.000 ms before, 20.500 ms after", next_of("GPT.h.0.attn"),
        ),
        Finding(
            "optimizer is slower", None, "optimizer", 540_000, 0.0108, "5.000 ms before, 5.540 ms after", NEXT,
        ),
    ]  # fmt: skip
    gone = findings(base, new)
    assert [(found.what, found.ns_per_step) for found in gone] == [
        ("recomputes no more", -20_500_000),
        ("optimizer is faster", -540_000),
    ]


def test_another_class_in_one_place_is_reported_with_its_cost() -> None:
    slower = model({("GPT.h.2.act", "forward"): 3 * MS}, classes={"GPT.h.2.act": "A"})
    same = model(classes={"GPT.h.2.act": "A", "GPT.h.3.act": "A"})

    assert findings(slower) == [
        Finding(
            "is A, was GELU", "GPT.h.2.act", "forward", 2 * MS, 0.04,
            "1.000 ms before, 3.000 ms after", next_of("GPT.h.2.act"),
        )
    ]  # fmt: skip
    assert findings(same) == [
        Finding("is A, was GELU", "GPT.h.2.act", None, 0, 0.0, "GPT.h.2.act, GPT.h.3.act", next_of("GPT.h.2.act"))
    ]


def test_another_number_of_calls_is_one_finding_with_all_inner_modules() -> None:
    inside = [fqn for fqn in PLACES if fqn.startswith("GPT.h.1")]
    longer = {(fqn, phase): 2 * ms * MS for fqn in inside for phase, ms in (("forward", 1), ("backward", 2))}

    # Three modules last 3 ms longer each.
    assert findings(model(longer, calls=dict.fromkeys(inside, 2))) == [
        Finding(
            "ran 2 times a step instead of 1", "GPT.h.1", None, 9 * MS, 0.18,
            "9.000 ms before, 18.000 ms after", next_of("GPT.h.1"),
        )
    ]  # fmt: skip


def test_other_flops_of_one_module_are_reported_in_figures() -> None:
    name = "FLOPs of a call of GPT.h.1.attn"
    base = {name: "1,000", "FLOPs of a call of GPT.h.0.attn": "1,000", "FLOPs of a call of GPT.h.2.attn": "1,000"}
    new = base | {name: "4,000"}
    slower = {("GPT.h.1.attn", "forward"): 4 * MS}

    assert findings(model(slower, exact=new), model(exact=base)) == [
        Finding(
            "has other FLOPs", "GPT.h.1.attn", "forward", 3 * MS, 0.06,
            f"{name}: 1,000 before, 4,000 after; 1.000 ms before, 4.000 ms after", next_of("GPT.h.1.attn"),
        )
    ]  # fmt: skip


@pytest.mark.parametrize("region", ["GPT", "GPT.h.1"])
def test_a_compiled_model_is_the_same_model(region: str, tmp_path: Path) -> None:
    new = model({(region, "forward"): 4 * MS}, compiled=(region,))
    comparison = compare_runs([model()] * 5, [new], {})
    inside = 12 if region == "GPT" else 2
    words = f"compiled: the {inside} modules inside of {region} have no spans of their own"

    assert not comparison.unrelated
    assert f"; {words}; " in comparison.sentence
    assert "removed" not in comparison.sentence
    # The step is as long as before.
    assert comparison.findings == [
        Finding(words, region, None, 0, 0.0, f"{3 * (inside + 1)}.000 ms before, 6.000 ms after", next_of(region))
    ]
    back = compare_runs([new], [model()], {})
    assert back.findings[0].what == f"not compiled: the {inside} modules inside of {region} have spans of their own"
    # The modules are compared as one with the region, so none of them is removed.
    assert {row.verdict for row in comparison.changes if row.fqn.startswith(f"{region}.")} == set()
    assert len(comparison.inside) == inside
    assert comparison.regions == [
        RegionChange(region, "forward", 0, (inside + 1) * MS, 4 * MS, (3 - inside) * MS),
        RegionChange(region, "backward", 0, 2 * (inside + 1) * MS, 2 * MS, -2 * inside * MS),
    ]
    table = comparison.tables["regions"].to("csv").splitlines()
    assert table[1] == f"{region},forward,0,{(inside + 1) * MS},{4 * MS},{(3 - inside) * MS}"
    write_baseline([new], tmp_path / "baseline.json")
    assert read_baseline(tmp_path / "baseline.json") == [new]


@pytest.mark.parametrize("is_merged", [True, False])
def test_modules_inside_a_compiled_function_are_compared_with_eager(is_merged: bool, tmp_path: Path) -> None:
    function: dict[str, Any] = {"compiled": ("loss",), "in_functions": {"GPT": "loss.m"}}
    new = renamed_run(model(), {"GPT": "loss.m"})._replace(**function)
    if not is_merged:
        taken = new.modules["loss.m", "forward"]
        new = new._replace(modules={("loss", "forward"): taken}, classes={"loss": COMPILED_CLASS})
    write_baseline([new], tmp_path / "baseline.json")

    (read,) = read_baseline(tmp_path / "baseline.json")
    for before, after, sign in ((model(), new, 1), (read, model(), -1)):
        comparison = compare_runs([before], [after], {})
        assert not comparison.unrelated
        if is_merged:
            assert {row.verdict for row in comparison.changes} == {"same"}
            assert comparison.inside == []
            assert [(row.modules, row.difference_ns) for row in comparison.regions] == [(13, 0), (13, 0)]
        else:
            assert comparison.inside == sorted(f"loss.m{fqn[3:]}" for fqn in PLACES)
            # The forward of 13 modules was 13 ms and is 1 ms; their backward was 26 ms and is 0.
            assert [(row.fqn, row.phase, row.modules, row.difference_ns) for row in comparison.regions] == [
                ("loss", "forward", 0, -12 * MS * sign),
                ("loss", "backward", 0, -26 * MS * sign),
            ]
            assert comparison.findings[0].where == "loss"


def test_recomputation_in_a_region_without_recompute_is_backward() -> None:
    again = {(f"GPT.h.1{name}", "recompute"): 1.0 * MS for name in ("", ".attn", ".act")}
    new = model({("GPT.h.1", "backward"): 8 * MS}, compiled=("GPT.h.1",))
    comparison = compare_runs([model(again)], [new], {})

    assert comparison.regions == [
        RegionChange("GPT.h.1", "forward", 0, 3 * MS, MS, -2 * MS),
        RegionChange("GPT.h.1", "backward", 0, 9 * MS, 8 * MS, -MS),
    ]


def test_modules_of_a_region_known_from_a_merge_are_compared_one_by_one() -> None:
    inner = {("GPT.h.1.attn", "forward"): 4 * MS, ("GPT.h.1.act", "forward"): 0.5 * MS}
    new = model(inner)._replace(compiled=("GPT.h.1",))
    comparison = compare_runs([model()] * 2, [new], {})

    rows = {row.fqn: row for row in comparison.changes if row.phase == "forward"}
    assert [(rows[fqn].verdict, rows[fqn].new_ns) for fqn, _ in inner] == [("slower", 4 * MS), ("faster", 0.5 * MS)]
    assert comparison.inside == []
    assert [finding.what for finding in comparison.findings] == ["compiled: GPT.h.1, by module"]
    assert comparison.regions == [
        RegionChange("GPT.h.1", "forward", 2, 3 * MS, 5_500_000, 2_500_000),
        RegionChange("GPT.h.1", "backward", 2, 6 * MS, 6 * MS, 0),
    ]


@pytest.mark.parametrize("region", ["GPT", "GPT.h.1"])
def test_a_model_compiled_before_the_recording_is_the_same_model(region: str) -> None:
    new = model({(region, "forward"): 4 * MS}, compiled=(region,))._replace(compiled=())
    comparison, back = compare_runs([model()] * 5, [new], {}), compare_runs([new], [model()], {})
    inside = 12 if region == "GPT" else 2

    assert not comparison.unrelated
    assert "removed" not in comparison.sentence
    assert comparison.findings == [
        Finding(
            f"the {inside} modules inside of {region} have no spans now: compiled, or not called any more",
            region, None, 0, 0.0, f"{3 * (inside + 1)}.000 ms before, 6.000 ms after", next_of(region),
        )
    ]  # fmt: skip
    assert [finding.what for finding in back.findings] == [
        f"the {inside} modules inside of {region} have spans now: not compiled any more, or not called before"
    ]


def test_a_common_slowdown_is_reported_even_if_the_work_is_unknown() -> None:
    slower, much_slower = (model(factor=factor)._replace(step=Typical(75 * MS, 0.05)) for factor in (1.4, 1.6))

    assert [finding.what for finding in compare_runs([model()], [slower], {}).findings] == []
    assert compare_runs([model()], [much_slower], {}).findings == [
        Finding(
            "modules in general take 1.60 times as long", None, None, 25 * MS, 0.5,
            "whether the machine or the work changed is not known, nor by how much: FLOPs or shapes say it; "
            "50.000 ms before, 75.000 ms after",
            NEXT,
        )
    ]  # fmt: skip


def test_on_the_command_line_the_next_command_names_both_files(tmp_path: Path) -> None:
    old, new = tmp_path / "it's old.json", tmp_path / "new.json"
    write_baseline([model()], old)
    write_baseline([model({("GPT.h.1.attn", "forward"): 4 * MS}, classes={"GPT.h.2.act": "A"})], new)

    printed = CliRunner().invoke(group, ["diff", str(old), str(new), "--map", "GPT.h.3=GPT.h.3", "--format", "json"])

    for found in json.loads(printed.stdout)["findings"]:
        words = shlex.split(found["next"])
        assert words == [
            "modtrace", "diff", str(old), str(new), "--map", "GPT.h.3=GPT.h.3", "--only", f"{found['where']}*",
        ]  # fmt: skip
        again = CliRunner().invoke(group, words[1:])
        assert (again.exit_code, again.stdout.count(found["where"]) > 1) == (0, True), again.output


def test_modules_missing_in_a_model_that_is_not_compiled_are_gone() -> None:
    gone = dict.fromkeys(((fqn, phase) for fqn in PLACES[4:7] for phase in ("forward", "backward")), 0.0)

    assert [(finding.what, finding.where, finding.ns_per_step) for finding in findings(model(gone))] == [
        ("is gone", "GPT.h.1", -9 * MS)
    ]


def test_a_larger_batch_is_one_finding() -> None:
    base, new = ({f"shapes of a call of {fqn}": f"float32[{batch}, 32]" for fqn in PLACES} for batch in (8, 16))

    assert findings(model(exact=new, factor=2.0), model(exact=base)) == [
        Finding(
            "the work changed", None, None, 50 * MS, 1.0,
            "shapes of a call of GPT: float32[8, 32] before, float32[16, 32] after; 50.000 ms before, 100.000 ms after",
            NEXT,
        )
    ]  # fmt: skip


def test_nothing_is_found_within_the_noise() -> None:
    barely = {("GPT.h.1.attn", "forward"): 1.019 * MS}
    assert [findings(new) for new in (model(), model(barely))] == [[], []]
    # A garbage collection in two steps of one recording.
    assert compare_runs([model()], [model(parts={"gc": times(40 * MS, steps=2)})], {}).findings == []
    comparison = compare_runs([model()], [model(barely)], {})
    # With one recording per side, steps may differ by exp(4.07 · 0.1 · √2).
    closing = (
        "nothing changed beyond the noise; the step: +0.0%, from -43.7% to +77.7%: to tell more, record more per side, "
        "in turns (now 1 and 1); looked at: times, calls and classes of 13 modules, 2 parts of the step, "
        "FLOPs and shapes where both sides have them"
    )
    assert str(comparison).splitlines()[:2] == [closing, ""]
    assert comparison.to_markdown().splitlines()[:2] == [closing, ""]
    assert json.loads(comparison.to_json())["findings"] == []
    few = [run._replace(steps=5) for run in (model(), model(barely))]
    comparison = compare_runs(few[:1], few[1:], {})
    assert comparison.findings_lines == []
    assert comparison.sentence == (
        "record 6 or more steps a side to see whether any module of 13 is slower or faster; whether the step changed "
        "is not clear"
    )


def test_unclear_changes_are_reported_first_and_fail_no_budget_silently(tmp_path: Path) -> None:
    base = [model({("GPT.h.2", "forward"): 3 * MS})._replace(warm_up=n) for n in range(3)]
    slow = {1.1: 3.3 * MS, 1.7: 7 * MS, 2.6: 9 * MS}
    new = [
        model({("GPT.h.2", "forward"): ns})._replace(step=Typical(50 * MS * step, 1e-8)) for step, ns in slow.items()
    ]
    comparison = compare_runs(base, new, {})
    row = next(change for change in comparison.changes if (change.fqn, change.phase) == ("GPT.h.2", "forward"))

    assert [comparison.step.verdict, row.verdict, comparison.findings] == ["cannot tell", "cannot tell", []]
    # The geometric means: 50 ms · (1.1 · 1.7 · 2.6)^⅓, and (3.3 · 7 · 9)^⅓ ms.
    assert comparison.to_text().startswith(
        "cannot tell whether the step (+69.4%), GPT.h.2 forward (+97.5%) changed: record more per side, in turns (now "
        "3 and 3); looked at: times, calls and classes of 13 modules, "
    )
    paths = [tmp_path / name for name in ("base.json", "new.json")]
    for runs, path in zip((base, new), paths, strict=True):
        write_baseline(runs, path)
    command = ["diff", *map(str, paths), "--fail-above"]
    likely, hardly = (CliRunner().invoke(group, [*command, limit]) for limit in ("5%", "40%"))
    message = "modtrace: the step is likely slower by more than 5.0% (+69.4%, but maybe -46.9%): record more per side\n"
    assert (likely.exit_code, likely.stderr, hardly.exit_code, hardly.stderr) == (3, message, 0, "")
    alone = CliRunner().invoke(group, [*command, "5%", "--only", "GPT.h.0"])
    assert (alone.exit_code, alone.stdout.split(";")[0]) == (0, "nothing changed beyond the noise")


@given(
    st.lists(st.floats(-3, 3), min_size=2, max_size=8),
    st.floats(-2, 2),
    st.sampled_from([{}, {"optimizer": 5}, {"optimizer": 9}, {"optimizer": 5, "saving": 2}]),
    st.sampled_from([{}, dict.fromkeys(PLACES, 2)]),
)
def test_an_interval_contains_its_estimate(
    noise: list[float], machine: float, parts: dict[str, int], calls: dict[str, int]
) -> None:
    runs = [
        model({("GPT.h.2", "forward"): 3 * MS * 2**factor}, factor=2.0 ** (factor / 9))._replace(warm_up=n)
        for n, factor in enumerate(noise)
    ]
    new = model(factor=2.0**machine, parts={name: times(ms * MS) for name, ms in parts.items()}, calls=calls)
    comparison = compare_runs(runs[1:], [new, *runs[:1]], {})

    for row in (comparison.step, *comparison.parts, *comparison.changes):
        if row.low_ns is not None and row.high_ns is not None:
            assert row.low_ns <= row.difference_ns <= row.high_ns, row


def test_an_end_of_an_interval_beyond_all_times_is_unknown() -> None:
    """One recording per side, modules last from 1/16 to 16 times as long: no change is outside that noise."""
    new = {
        (fqn, phase): ms * MS * 2.0 ** (number % 9 - 4)
        for number, fqn in enumerate(PLACES)
        for phase, ms in (("forward", 1), ("backward", 2))
    }
    comparison = compare_runs([model()], [model(new)], {})

    change = next(change for change in comparison.changes if change.label == "GPT.h.1 backward")
    assert (change.low_ns, change.high_ns, change.verdict) == (-2 * MS, None, "cannot tell")
    rows = [line for line in comparison.to_text(verbose=True).splitlines() if "backward" in line and "h.1 " in line]
    assert [" ".join(row.split()) for row in rows] == [
        "h.1 backward 2.000 2.000 +0.000 -2.000 … not known +0.0 1 cannot tell",
    ]


def test_possible_further_changes_follow_the_findings() -> None:
    slower = {("GPT.h.1.attn", "forward"): 4 * MS}
    new = [
        model(slower | {("GPT.h.2", "forward"): ns * MS})._replace(warm_up=n) for n, ns in enumerate((0.9, 1.5, 2.5))
    ]
    comparison = compare_runs([model()._replace(warm_up=n) for n in range(3)], new, {})

    assert [finding.where for finding in comparison.findings] == ["GPT.h.1.attn"]
    assert comparison.findings_lines[-1] == (
        "cannot tell whether GPT.h.2 forward (+50.0%) changed too: record more per side, in turns (now 3 and 3)"
    )


def test_a_part_in_too_many_steps_for_chance_is_new() -> None:
    comparison = compare_runs([model()], [model(parts={"saving": times(10 * MS, steps=15)})], {})

    # 10 ms in every second step.
    assert [(finding.what, finding.part, finding.ns_per_step) for finding in comparison.findings] == [
        ("saving is new", "saving", 5 * MS)
    ]
    assert [(part.fqn, part.new_calls) for part in comparison.parts if part.verdict == "added"] == [("saving", 0.5)]


@pytest.mark.parametrize(("period", "steps", "is_gone"), [(10, 30, True), (11, 30, False), (0, 30, False)])
def test_a_periodic_part_is_gone_if_three_periods_lack_it(period: int, steps: int, is_gone: bool) -> None:
    evaluation = times(16 * MS, steps=3)._replace(period=period)
    base = model(parts={"evaluation": evaluation})
    comparison = compare_runs([base], [model()._replace(steps=steps)], {})

    # 16 ms in every tenth step.
    assert [(finding.what, finding.ns_per_step) for finding in comparison.findings] == (
        [("evaluation is gone", -1_600_000)] if is_gone else []
    )


@pytest.mark.parametrize(("periods", "is_more"), [((10, 5), True), ((0, 5), False), ((10, 0), False)])
def test_a_part_with_another_period_is_reported_once(periods: tuple[int, int], is_more: bool) -> None:
    base, new = (
        model(parts={"evaluation": times(16 * MS, steps=3 * often)._replace(period=period)})
        for often, period in zip((1, 2), periods, strict=True)
    )
    comparison = compare_runs([base], [new], {})

    # 16 ms in 3 of 30 steps, then in 6.
    assert [(finding.what, finding.ns_per_step) for finding in comparison.findings] == (
        [("evaluation is in more steps", 1_600_000)] if is_more else []
    )
    assert "evaluation (" not in comparison.findings_lines[-1]


@pytest.mark.parametrize(
    ("new", "where"),
    [
        (((10, "a.py:3"), (8, "a.py:9")), "8 ms of it between a.py:9; "),  # a.py:3 is unchanged
        (((10, "a.py:4"), (8, "a.py:9")), "8 ms of it between a.py:9; "),  # a.py:3 moved by one line
        (((10, "a.py:3"), (3, "a.py:9"), (3, "a.py:12")), ""),  # no line has half of the difference
        (((2, "a.py:9"),), ""),
    ],
)
def test_lines_with_most_of_the_increase_of_other_are_named(new: Any, where: str) -> None:
    before, after = (
        model(parts={"other": times(ns * MS)})._replace(
            lines=(("loss", "between b.py:1", 8 * MS), *(("other", f"between {line}", ms * MS) for ms, line in lines)),
        )
        for ns, lines in ((10, ((10, "a.py:3"),)), (16.8, new))
    )

    assert [(finding.what, finding.evidence) for finding in findings(after, before)] == [
        ("other is slower", f"{where}10.000 ms before, 16.800 ms after")
    ]
    (finding,) = findings(before, after)
    assert finding.evidence == f"{where}16.800 ms before, 10.000 ms after"


def test_siblings_that_changed_alike_are_one_finding() -> None:
    slower = {(f"GPT.h.{layer}.attn", "forward"): 3 * MS for layer in (3, 1, 2)}

    assert findings(model(slower)) == [
        Finding(
            "is slower in forward", "GPT.h.1.attn", "forward", 6 * MS, 0.12,
            "GPT.h.1.attn, GPT.h.2.attn, GPT.h.3.attn; 3.000 ms before, 9.000 ms after", next_of("GPT.h.1.attn"),
        )
    ]  # fmt: skip


def test_changed_facts_of_a_program_are_reported_with_the_changed_part() -> None:
    facts = {"optimizer": "AdamW (foreach)", "parameters": "100 values", "hooks of gradients": "0"}
    base = model(exact=facts)
    new = model(
        exact={"optimizer": "SGD (foreach)", "parameters": "200 values", "hooks of gradients": "7"},
        parts={"optimizer": times(2 * MS)},
    )

    rows = [(finding.what, finding.part, finding.ns_per_step, finding.evidence) for finding in findings(new, base)]
    assert rows == [
        ("optimizer: SGD (foreach), was AdamW (foreach)", "optimizer", -3 * MS, "5.000 ms before, 2.000 ms after"),
        ("hooks of gradients: 7, was 0", None, 0, ""),
        ("parameters: 200 values, was 100 values", None, 0, ""),
    ]
    # A slower step is explained by the parameters, but new modules have parameters of their own.
    slower = new._replace(step=Typical(60 * MS, 1e-8))
    assert [(finding.what, finding.ns_per_step) for finding in findings(slower, base)][:1] == [
        ("parameters: 200 values, was 100 values", 10 * MS)
    ]
    block = {("GPT.h.4", "forward"): times(MS)}
    larger = new._replace(modules={**new.modules, **block}, classes={**new.classes, "GPT.h.4": "Block"})
    assert not [finding for finding in findings(larger, base) if finding.what.startswith("parameters")]
    # Only one finding has the step's difference, however many facts differ.
    both = slower._replace(environment={**slower.environment, "anomaly detection": "on"})
    off = base._replace(environment={**base.environment, "anomaly detection": "off"})
    assert [finding.ns_per_step for finding in findings(both, off) if finding.ns_per_step > 0] == [10 * MS]
    # A fact that a side, or one of its recordings, does not have is not compared.
    bases = [base, base._replace(environment={}, warm_up=1)]
    assert compare_runs(bases, [base._replace(warm_up=2)], {}).environment == {}
    assert [finding.what for finding in findings(new, model())] == ["optimizer is faster"]


@pytest.mark.parametrize(("optimizer", "cause"), [("SGD (one by one)", "unknown"), ("AdamW (one by one)", "either")])
def test_another_optimizer_does_not_show_the_machines_speed(optimizer: str, cause: str) -> None:
    """All modules last 1.5 times as long, the optimizer half as long."""
    base = model(exact={"optimizer": "AdamW (one by one)"})
    new = model(exact={"optimizer": optimizer}, factor=1.5, parts={"optimizer": times(2.5 * MS)})

    assert compare_runs([base], [new], {}).common_cause == cause


def test_different_inputs_show_that_the_work_changed() -> None:
    base = model(exact={"inputs of GPT": "int64[8, 32]"})
    new = model(exact={"inputs of GPT": "int64[16, 32]"}, factor=2.0)

    (finding,) = findings(new, base)
    assert (finding.what, finding.evidence) == (
        "the work changed",
        "inputs of GPT: int64[8, 32] before, int64[16, 32] after; 50.000 ms before, 100.000 ms after",
    )
    # Equal inputs do not explain a change; different inputs are reported even if no module's time changed.
    assert findings(model(exact=dict(base.environment), factor=2.0), base)[0].what != "the work changed"
    assert [(finding.what, finding.where) for finding in findings(new._replace(modules=base.modules), base)][:1] == [
        ("the work changed", None)
    ]


def test_selected_modules_have_their_findings() -> None:
    new = model({("GPT.h.1.attn", "forward"): 4 * MS}, classes={"GPT.h.2.act": "A"}, parts={"optimizer": times(9 * MS)})
    comparison: modtrace.Diff = compare_runs([model()] * 2, [new], {})

    assert [finding.where for finding in comparison.findings] == [None, "GPT.h.1.attn", "GPT.h.2.act"]
    assert [finding.where for finding in comparison.only("*.attn").findings] == ["GPT.h.1.attn"]
    text = comparison.to_text()
    assert text.startswith("1. optimizer is slower: +4.000 ms a step, +8.0%\n")
    assert comparison.to_markdown().startswith("1. optimizer is slower: +4.000 ms a step, +8.0%\n")
    assert [finding["where"] for finding in json.loads(comparison.to_json())["findings"]] == [
        None, "GPT.h.1.attn", "GPT.h.2.act",
    ]  # fmt: skip
