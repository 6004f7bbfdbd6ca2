"""Findings from the notes of a few steps: loops over parameters, hooks, anomaly detection, float64."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from modtrace import Timeline
from modtrace.timeline.contents import OPTIMIZERS, STEP_NOTES, WHOLE_RUN
from modtrace.timeline.metadata import fit_metadata
from tests.unit.test_findings import BLOCKS, FETCH, MS, OptionalRange, found, training, with_teacher
from tests.unit.test_findings_of_calls import calls, with_loss

LOOP = [["mul_", 40, 3 * MS], ["add_", 40, 3 * MS], ["cross_entropy_loss", 2, MS]]
"""Operators of two steps: name, calls, ns."""
SAME = "is called again with the same inputs"
OTHER = "time outside of modules and ranges (other) takes a large share"


def noted(timeline: Timeline, *, tensors: int = 20, how: str | None = "one by one", **notes: Any) -> Timeline:
    """Return the timeline with the given notes of two steps."""
    optimizer = {"class": "SGD", "tensors": tensors, "hooks": 0, "how": how}
    known = {**timeline.metadata, OPTIMIZERS: [optimizer], STEP_NOTES: {"steps": 2} | notes}
    return replace(timeline, metadata=fit_metadata(known))


def with_loop(before: float, loop: object, tensors: int = 20) -> Timeline:
    """Steps of 9 ms with `before` ms more at their start, in which a loop runs."""
    return noted(training(before=before), tensors=tensors, operators={"outside": loop})


def test_a_loop_over_parameters_outside_the_optimizer() -> None:
    (finding,) = with_loop(2, LOOP).summary().findings

    assert finding[:4] == (OTHER, None, "other", 2 * MS)
    assert finding.share == pytest.approx(20 / 108)
    assert finding.evidence == (
        "2 ms of 11 ms (medians); 100% of it follows optimizer; a step runs 20 × mul_, 20 × add_ there, 3 ms: "
        "a loop over the 20 parameters"
    )


@pytest.mark.parametrize(
    ("loop", "tensors"),
    [
        (None, 20),
        ("mul_", 20),
        ([["mul_", 40]], 20),
        (LOOP, 21),  # fewer calls than parameters
        (LOOP, 0),  # the optimizer's own loop
        ([["mul_", 40, MS // 4]], 20),  # little of the time
        ([["item", 128, MS // 4]], 20),  # the same for `item`
        ([["mul_", 14, 6 * MS]], 7),  # few calls
    ],
)
def test_other_code_than_a_loop_over_parameters_counts_from_20_percent(loop: object, tensors: int) -> None:
    assert found(with_loop(2, loop, tensors)) == []
    assert found(with_loop(0, LOOP)) == []


@pytest.mark.parametrize(
    ("loops_ns", "is_named"),
    [(None, False), (33_000, False), (100_000, False), (16_500, True), (15_000, True), (0, True)],
)
def test_the_limit_of_brief_code_depends_on_the_speed_of_python(loops_ns: int | None, is_named: bool) -> None:
    # Every second step has another forward of 1 ms without a backward.
    timeline = training(alone=lambda step: step % 2, forward=lambda step, block: 0.25)
    notes: dict[str, Any] = {} if loops_ns is None else {"loops_ns": loops_ns}
    quick = noted(timeline, **notes)

    names = [finding.what for finding in quick.summary().findings]

    assert ("runs forward more often than backward" in names) == is_named


def test_clipping_by_torch_is_not_a_loop_over_the_parameters() -> None:
    assert found(with_loop(2, [["to", 40, MS]])) == []
    assert found(with_loop(2, [["clone", 40, MS]])) == found(with_loop(2, [["to", 40, 3 * MS]])) != []


@pytest.mark.parametrize(("calls", "is_named"), [(20, True), (19, False), (24, False)])
def test_a_loss_that_goes_over_the_parameters_counts_from_5_percent_on(calls: int, is_named: bool) -> None:
    loop = [["pow", 2 * calls, MS], ["sum", 2 * calls, MS]]

    findings = noted(with_loss(1, 1), operators={"outside": loop}, tensors=20).summary().findings

    assert [finding[:3] for finding in findings] == [("loss takes a large share", None, "loss")] * is_named
    assert [finding.evidence for finding in findings] == [
        "2 ms of 22 ms (medians), 1 ms of it in backward, outside of modules; a step runs 20 × pow, 20 × sum "
        "there, 1 ms: a loop over the 20 parameters"
    ] * is_named


@pytest.mark.parametrize(
    ("before", "ms_of_operators", "is_named"), [(1.5, 0.4, True), (1.5, 0.6, False), (0.9, 0.1, False)]
)
def test_python_outside_of_modules_counts_from_10_percent_on(
    before: float, ms_of_operators: float, is_named: bool
) -> None:
    findings = with_loop(before, [["randn", 2, round(2 * ms_of_operators * MS)]]).summary().findings

    assert [finding[:4] for finding in findings] == [(OTHER, None, "other", before * MS)] * is_named
    assert all("hardly any of it in operators of torch" in finding.evidence for finding in findings)


@pytest.mark.parametrize(
    ("calls", "tensors", "over"), [(65, 16, ""), (192, 12, ""), (192, 16, " over the 16 parameters")]
)
def test_a_multiple_of_few_parameters_or_with_little_time_is_another_loop(calls: int, tensors: int, over: str) -> None:
    loop = [["binary_cross_entropy", 2 * calls, 6 * MS], ["add", 2 * 192, 2 * MS]]

    (finding,) = with_loop(4, loop, tensors=tensors).summary().findings

    assert finding.evidence.endswith(f"192 × add there, 4 ms: a loop{over}")


@pytest.mark.parametrize(("again", "before", "ms"), [(2, 0, 2), (1, 0, 1), (1, 12, None), (0, 0, None)])
def test_repeated_calls_with_the_same_inputs_are_a_finding(again: int, before: float, ms: float | None) -> None:
    same = {"Net.blocks.1": again, "Net.blocks.1.act": again, "Other": 4}

    findings = noted(training(before=before), same_inputs=same).summary().findings

    rows = [finding[:4] for finding in findings if finding.what == SAME]
    assert rows == ([] if ms is None else [(SAME, "Net.blocks.1", "forward", ms * MS)])


def with_optimizers(stepped: int, first_tensors: int, optimizer_ms: float = 0, steps: int = 10) -> Timeline:
    """Steps of 9 ms and `optimizer_ms` of zero_grad in the optimizer's part, with two optimizers."""
    timeline = training(steps=steps, ranges=lambda step: [("Optimizer.zero_grad#SGD", "optimizer", optimizer_ms)])
    small = {"class": "SGD", "tensors": 1, "hooks": 0, "how": "one by one"}
    many = small | {"stepped": stepped, "first_tensors": first_tensors}
    return replace(timeline, metadata={**timeline.metadata, OPTIMIZERS: [small, many]})


def test_an_optimizer_that_is_created_in_each_step() -> None:
    (finding,) = with_optimizers(8, 1).summary().findings

    assert finding[:5] == ("an optimizer is made anew in each step", "Optimizer.step#SGD.step", "optimizer", 0, 0)
    assert finding.evidence.startswith("7 times or more in 10 steps, for the same parameters")
    assert found(with_optimizers(8, 4)) == found(with_optimizers(8, 1, steps=18)) == []
    reused = with_optimizers(8, 1)
    whole_run = {"steps": 18, "spans": 0, "seconds": 1, "kept_steps": 10}
    assert found(replace(reused, metadata={**reused.metadata, WHOLE_RUN: whole_run})) == []


def test_gradients_that_are_filled_with_zeros_count_from_5_percent_on() -> None:
    def zeroing(ms: float, operator: str) -> Timeline:
        timeline = training(ranges=lambda step: [("Optimizer.zero_grad#SGD", "optimizer", ms)])
        return noted(timeline, operators={"in_optimizers": [[operator, 40, MS]]})

    (finding,) = zeroing(1, "zero_").summary().findings

    assert finding[:4] == ("takes a large share", "Optimizer.zero_grad#SGD", "optimizer", MS)
    assert finding.evidence == (
        "once a step, 1 ms each (median); it runs 20 × zero_: set_to_none=True, torch's default, fills none"
    )
    assert found(zeroing(1, "add_")) == found(zeroing(0.4, "zero_")) == []


@pytest.mark.parametrize(("groups", "tensors", "is_named"), [(32, 63, True), (32, 64, False), (31, 31, False)])
def test_a_group_for_each_tensor_counts_from_20_percent_on(groups: int, tensors: int, is_named: bool) -> None:
    timeline = training(ranges=lambda step: [("Optimizer.zero_grad#SGD", "optimizer", 1.3)])
    one = {"class": "SGD", "tensors": tensors, "hooks": 0, "how": "foreach", "groups": groups}

    findings = replace(timeline, metadata=fit_metadata({**timeline.metadata, OPTIMIZERS: [one]})).summary().findings

    assert [finding.what for finding in findings] == ["optimizer takes a large share"] * is_named
    assert all(
        "; SGD updates 63 tensors foreach in 32 groups; one can hold all tensors; " in finding.evidence
        for finding in findings
    )


def test_operators_that_could_not_be_noted_are_reported() -> None:
    missed = "; not at: which operators run: the Python engine counts none beside profilers, torch.compile, RPC"
    loop = {"outside": [["add", 2, MS]]}

    quiet, counted = noted(training()).summary(), noted(training(), operators=loop).summary()

    assert quiet.findings_text().endswith(f"1 kind of ranges{missed}")
    assert counted.findings_text().endswith("1 kind of ranges")
    assert noted(training(before=3)).summary().findings_text().endswith(f"\nnothing else stands out{missed}")


def test_many_optimizers_take_a_large_share_from_20_percent_on() -> None:
    # The optimizer's step itself is 1 ms.
    (finding,) = with_optimizers(8, 8, 1.3).summary().findings

    assert finding[:4] == ("optimizer takes a large share", "Optimizer.zero_grad#SGD", "optimizer", 2.3 * MS)
    assert "; 8 optimizers or more; SGD updates 1 tensor one by one; " in finding.evidence
    assert found(with_optimizers(8, 7, 1.3)) == found(with_optimizers(8, 8, 0.9)) == []


@pytest.mark.parametrize(
    ("unlike", "where"),
    [
        ([], ["Net.blocks.2.act"]),
        (["Net.blocks.*"], []),
        (["Net.blocks.*.act"], ["Net.blocks.2"]),
        (["Net.blocks.*.a", "Net.block"], ["Net.blocks.2.act"]),
    ],
)
def test_stages_of_other_sizes_are_not_siblings(unlike: list[str], where: list[str]) -> None:
    def longer(_: int, block: int) -> float:
        return 5 if block == 2 else 1

    timeline = noted(training(forward=longer, backward=longer), unlike=unlike)

    assert [row[1] for row in found(timeline)] == where


def test_other_time_is_in_operators_or_in_python() -> None:
    evidence = "3 ms of 12 ms (medians); 100% of it follows optimizer"
    texts = [
        with_loop(3, loop, tensors=tensors).summary().findings[0].evidence.removeprefix(evidence)
        for loop, tensors in (
            (None, 0),
            (LOOP, 0),
            ([["randint", 2, MS]], 0),
            ([["clone", 2, 6 * MS]], 0),
            ([["detach", 40, MS]], 20),
            ([["to", 40, MS]], 20),
            ([["clone", 40, MS]], 20),
            ([["copy_", 160, 6 * MS]], 20),
            ([["mul_", 200, 6 * MS]], 20),  # five times per parameter
            ([["copy_", 162, 6 * MS]], 20),  # another loop
            ([["mean", 128, 6 * MS]], 53),  # another loop
            ([["copy_", 114, 6 * MS]], 53),  # also over four buffers
        )
    ]

    assert texts == [
        "",
        "; a step runs 20 × mul_, 20 × add_ there, 3 ms",
        "; hardly any of it in operators of torch: Python, or waiting",
        "; a step runs 1 × clone there, 3 ms",
        "; hardly any of it in operators of torch: Python, or waiting; a step runs 20 × detach there, 0.5 ms: for "
        "each of the 20 parameters",
        "; hardly any of it in operators of torch: Python, or waiting; a step runs 20 × to there, 0.5 ms: for "
        "each of the 20 parameters",
        "; hardly any of it in operators of torch: Python, or waiting; a step runs 20 × clone there, 0.5 ms: "
        "copies of the 20 parameters",
        "; a step runs 80 × copy_ there, 3 ms: copies of the 20 parameters",
        "; a step runs 100 × mul_ there, 3 ms: a loop over the 20 parameters",
        "; a step runs 81 × copy_ there, 3 ms: a loop",
        "; a step runs 64 × mean there, 3 ms: a loop",
        "; a step runs 57 × copy_ there, 3 ms: copies of the 53 parameters",
    ]


def gap(ns: list[object], part: str = "other", after: str = "train.py:31", begun: str = "forward") -> list[object]:
    return [after, "optimizer", "train.py:24", begun, part, ns]


AT_LINES = "of it between train.py:31 (optimizer) and train.py:24 (forward)"


@pytest.mark.parametrize(
    ("gaps", "text"),
    [
        ([gap([3 * MS, 12 * MS // 5]), gap([MS // 4, MS // 4], after="train.py:3")], f"; 80% {AT_LINES}"),
        ([gap([5 * MS, 6 * MS])], f"; 100% {AT_LINES}"),
        ([gap([3 * MS])], None),  # only in one of two steps
        ([gap([9 * MS, 9 * MS], "loss", "a.py:1"), gap([2 * MS, 3 * MS // 2])], f"; 50% {AT_LINES}"),
        ([gap([3 * MS, 3 * MS], after="train.py:24")], "; 100% of it between optimizer and forward at train.py:24"),
        ([gap([3 * MS, 3 * MS], begun="user")], f"; 100% {AT_LINES.replace('forward', 'range')}"),
        ([gap([MS, MS // 2])], None),  # a gap with little of the time
        ([gap([3 * MS, 3 * MS], after="")], None),
        ([gap([3 * MS, 3 * MS])[:5], 1, [1] * 6, gap(["1", None]), [*gap([])[:5], "1"]], None),
        ("gaps", None),
    ],
)
def test_other_time_is_between_lines(gaps: object, text: str | None) -> None:
    (finding,) = noted(training(before=3), gaps=gaps).summary().findings

    assert finding.evidence == "3 ms of 12 ms (medians)" + (text or "; 100% of it follows optimizer")


@pytest.mark.parametrize(
    ("ms", "texts"), [(9.1, [f"; 9.1 ms of such a step {AT_LINES.removeprefix('of it ')}"]), (8.9, [])]
)
def test_a_wait_in_some_steps_is_between_lines(ms: float, texts: list[str]) -> None:
    # Steps of 9 ms; seven of ten wait, and one of the two noted steps.
    timeline = training(pause=lambda step: ms if step > 2 else 0)

    findings = noted(timeline, gaps=[gap([round(ms * MS)])]).summary().findings

    assert [finding.evidence for finding in findings] == [
        f"{ms} ms of 18 ms (medians); 100% of it follows optimizer{text}" for text in texts
    ]


def test_growing_other_time_is_between_lines_and_in_operators() -> None:
    # Steps of 9 ms and 0 to 23 ms more; 16 of them are between two lines in a noted step.
    growing = training(steps=24, pause=lambda step: step)
    cat = {"outside": [["cat", 2, 16 * MS]]}
    grows = [
        finding
        for finding in noted(growing, gaps=[gap([2 * MS, 16 * MS])], operators=cat).summary().findings
        if finding.what == "takes longer from step to step"
    ]

    assert [finding.part for finding in grows] == ["other"]
    assert grows[0].evidence == (
        "from 12 ms to 30 ms in 24 steps, outside of modules and ranges; 16 ms of such a step "
        f"{AT_LINES.removeprefix('of it ')}; a step runs 1 × cat there, 8 ms"
    )


@pytest.mark.parametrize(
    ("before", "ns", "lines"),
    [
        (0.5, MS // 2, ["other: 100% of it between train.py:31 (optimizer) and train.py:24 (forward)"]),
        (0.5, MS // 5, ["other: 40% of it between train.py:31 (optimizer) and train.py:24 (forward)"]),
        (0.5, MS // 8, []),  # below 30 % of the part
        (0.4, 2 * MS // 5, []),  # below 5 % of a step
        (3, 3 * MS, []),  # reported by a finding
    ],
)
def test_parts_without_a_finding_have_their_lines_too(before: float, ns: int, lines: list[str]) -> None:
    summary = noted(training(before=before), gaps=[gap([ns, ns])]).summary()

    assert summary.lines == lines
    assert json.loads(summary.to_json()).get("lines", []) == lines
    assert [line for line in summary.first_screen().splitlines() if line.startswith("other: ")] == lines


def test_the_line_of_a_part_has_its_operators() -> None:
    known: dict[str, Any] = {"gaps": [gap([MS // 2, MS // 2])], "operators": {"outside": [["randint", 2, MS // 10]]}}

    (line,) = noted(training(before=0.5), **known).summary().lines

    assert line.endswith("train.py:24 (forward); hardly any of it in operators of torch: Python, or waiting")


@pytest.mark.parametrize(
    ("name", "finding_text"),
    [("torch.load", "loading what was saved takes a large share"), ("torch.save", "saving takes a large share")],
)
def test_loading_in_each_step_is_not_called_saving(name: str, finding_text: str) -> None:
    (finding,) = training(ranges=lambda step: [(name, "saving", 4)]).summary().findings

    assert finding[:3] == (finding_text, name, "saving")


def test_hooks_of_gradients_that_take_a_large_share() -> None:
    def with_hooks(more: float, hooks: int = 12) -> Timeline:
        # torch itself needs 20 µs for each node, and the sums of gradients.
        with_hooks = ["nodes and hooks", 80, round((8 + 2 * more + 1.6 + 1) * MS)]
        passes = [with_hooks, ["nodes", 80, 8 * MS], ["to", 24, MS], ["sum", 8, MS]]
        return noted(training(wait=1), gradient_hooks=hooks, operators={"in_passes": passes})

    (finding,) = with_hooks(0.8).summary().findings

    assert finding[:4] == ("hooks of gradients take a large share", None, "backward", 800_000)
    assert finding.share == pytest.approx(0.08)
    assert finding.evidence == "12 hooks of parameters' gradients: 0.8 ms a step, which run 12 × to"
    assert found(with_hooks(0.4)) == []
    assert found(with_hooks(0.8, hooks=0)) == []


@pytest.mark.parametrize(
    ("setting", "part", "text"),
    [("anomaly detection", "backward", "torch.autograd.set_detect_anomaly"), ("torch.profiler", None, "a schedule")],
)
def test_settings_that_are_on_in_each_step(setting: str, part: str | None, text: str) -> None:
    def on_in(count: int, steps: int = 3) -> Timeline:
        return noted(training(), steps=steps, settings={setting: count})

    (finding,) = on_in(3).summary().findings

    assert finding[:4] == (f"{setting} is on in each step", None, part, 0)
    assert text in finding.evidence
    assert found(on_in(2)) == []
    assert found(on_in(2, steps=2)) == []


def test_restarted_workers_explain_why_steps_wait_for_data() -> None:
    fetch, begin = FETCH.replace("SingleProcess", "MultiProcessing"), "enumerate(DataLoader)#DataLoader.__iter__"

    def ranges(step: int) -> list[OptionalRange]:
        begins: list[OptionalRange] = [(begin, "data loading", 40)]
        return [(fetch, "data loading", 0.1), *(begins if step % 4 == 3 else [])]

    (finding,) = training(steps=13, ranges=ranges).summary().findings

    assert finding.what == "data loading makes some steps slow"
    assert finding.evidence.startswith("in 3 of 13 steps, every 4th step; ")
    assert finding.evidence.endswith("; workers start 3 times, 40 ms each: persistent_workers=True would keep them")


def test_forward_hooks_that_take_long() -> None:
    def with_hooks(own: float, hooked: int = BLOCKS) -> Timeline:
        timeline = training(own=lambda block: own)
        return noted(timeline, hooks={f"Net.blocks.{block}": 1 for block in range(hooked)})

    # 0.1 ms of each block's time are calls of the block and of its modules.
    (finding,) = with_hooks(0.24).summary().findings

    assert finding[:4] == ("has a forward hook that takes long", "Net.blocks.0", "forward", 560_000)
    assert finding.share == pytest.approx(0.56 / 9.96)
    assert finding.evidence == (
        "4 modules with forward hooks take 0.56 ms a step more than their backward suggests, most of it in Net.blocks.0"
    )
    assert found(with_hooks(0.22)) == []
    assert found(with_hooks(0.24, hooked=0)) == []
    # A module that is much slower than its siblings gets that finding, with its hooks in the evidence.
    (finding,) = noted(training(own=lambda block: 5 if block == 1 else 0), hooks={"Net.blocks.1": 2}).summary().findings
    assert finding.what == "is slower than its siblings"
    assert "has 2 forward hooks" in finding.evidence


def test_gradients_that_no_optimizer_uses() -> None:
    def untrained(acts: int, ms: float = 1) -> Timeline:
        names = [f"Net.blocks.{block}.act" for block in range(acts)]
        return noted(training(backward=lambda step, block: ms), untrained=[*names, "Net.gone"])

    (finding,) = untrained(4).summary().findings

    assert finding[:4] == ("gets gradients that no optimizer uses", "Net.blocks.0.act", "backward", 2 * MS)
    assert finding.evidence == (
        "own backward of 4 modules with parameters that no optimizer has: 4 ms a step; requires_grad_(False) would "
        "save at least half of it"
    )
    assert found(untrained(0)) == found(untrained(1, 0.8)) == []
    assert len(found(untrained(2, 0.8))) == 1


def test_a_slower_module_with_more_parameters_has_that_in_its_evidence() -> None:
    slower = training(forward=lambda step, block: 5 if block == 2 else 1)

    (finding,) = noted(slower, size_percent={"Net.blocks.2.act": 880}).summary().findings

    assert finding.evidence == (
        "6 ms a step, its siblings 2 ms (medians), mostly forward, has 8.8 times their parameters"
    )


def test_modules_of_float64_among_others() -> None:
    (finding,) = noted(training(), doubles=["Net.blocks.1.act"]).summary().findings

    assert finding[:4] == ("computes in float64, most others do not", "Net.blocks.1.act", None, 2 * MS)
    assert finding.share == pytest.approx(2 / 9)
    assert finding.evidence == "parameters of float64 in 1 module, which take 2 ms a step"
    assert found(noted(training(), doubles=[f"Net.blocks.{block}.act" for block in range(3)])) == []
    assert found(noted(training(), doubles=["Net.gone"])) == []


def test_a_model_that_computes_in_float64_as_a_whole() -> None:
    def with_parameters(count: int, doubles: int) -> Timeline:
        return noted(training(), parameters=count, float64_parameters=doubles)

    (finding,) = with_parameters(8, 8).summary().findings

    # The modules last 8 of the 9 ms of a step.
    assert finding[:5] == ("computes in float64", "Net", None, 4 * MS, 4 / 9)
    assert finding.evidence == (
        "all parameters are float64; modules that compute in it take 8 ms a step: "
        "float32 takes half or less, if its 7 digits are enough"
    )
    assert found(with_parameters(8, 7)) == found(with_parameters(0, 0)) == []


@pytest.mark.parametrize("name", ["to", "to (float64)"])
def test_modules_with_tables_of_float64_if_gradients_are_cast(name: str) -> None:
    def with_tables(casts: int, **more: Any) -> Timeline:
        operators = {"in_passes": [[name, casts, MS], ["sum", 2, MS]]}
        return noted(training(), tables=["Net.blocks.1.act"], operators=operators, **more)

    (finding,) = with_tables(2).summary().findings

    assert finding[:4] == ("computes in float64, most others do not", "Net.blocks.1.act", None, 2 * MS)
    assert finding.evidence == "tables of float64 in 1 module, which take 2 ms a step, and gradients are cast"
    assert found(with_tables(1)) == []
    # Operators known to be of float64 have a finding of their own.
    inside = {f"Net.blocks.{block}.act": [["", 2, 2 * MS], ["mul", 2, 2 * MS]] for block in range(BLOCKS)}
    inside["Net.blocks.1.act"] = [["", 2, 2 * MS], ["mul (float64)", 2, 2 * MS]]
    assert len(found(with_tables(2, inside=inside))) == 1


def test_nodes_made_without_gradients_are_not_a_graph() -> None:
    assert len(found(noted(with_teacher(3, range(4)), casts=["Net"]))) == 1
    assert found(noted(with_teacher(3, range(4)), casts=["Teacher"])) == []


def test_an_optimizer_configured_to_update_one_by_one() -> None:
    (finding,) = noted(training(), how="one by one (foreach=False)").summary().findings

    assert finding[:4] == ("optimizer takes a large share", "Optimizer.step#SGD.step", "optimizer", MS)
    assert "SGD updates 20 tensors one by one (foreach=False)" in finding.evidence
    assert found(noted(training())) == []
    longer = training(forward=lambda step, block: 2)
    assert found(noted(longer, how="one by one (foreach=False)")) == []


GROWING = [[1, 0], [2, 50 << 20], [4, 54 << 20], [8, 62 << 20], [16, 78 << 20]]
"""Step and resident bytes, which grow by 2 MiB a step after step 2."""


def test_memory_that_grows_steadily() -> None:
    (finding,) = noted(training(), resident=GROWING).summary().findings

    assert finding[:5] == ("memory grows from step to step", None, None, 0, 0.0)
    assert finding.evidence == "the process holds about 2.00 MiB more after each step"
    assert finding.next == "modtrace run --memory SCRIPT"


@pytest.mark.parametrize(
    "resident",
    [
        GROWING[:4],  # too few steps
        [*GROWING[:4], [16, 62 << 20]],  # no growth at the end
        [*GROWING[:4], [16, 67 << 20]],  # slower growth
        [*GROWING[:2], [4, 56 << 20], [8, 68 << 20], [16, 85 << 20]],  # growth by 3, 3 and 2.1 MiB per step
        [[step, size // 4] for step, size in GROWING],  # little growth
        [*GROWING[:3], [8, "62"], [16, 78 << 20]],
        [[1, 0]] * 5,
    ],
)
def test_memory_that_does_not_grow_steadily(resident: object) -> None:
    assert found(noted(training(), resident=resident)) == []


@pytest.mark.parametrize(("delays", "is_named"), [([[7, 20]], False), ([[7, 19]], True), ([[6, 40]], True), (7, True)])
def test_a_step_in_which_the_thread_waited_for_a_processor_is_slow_by_the_machine(delays: Any, is_named: bool) -> None:
    slow = training(forward=lambda step, block: 41 if step == 7 and block == 2 else 1)
    noted_ns = [[step, ms * MS] for step, ms in delays] if isinstance(delays, list) else delays

    findings = noted(slow, delays=noted_ns).summary().findings

    assert [finding.what for finding in findings] == ["makes step 7 slow (forward)"] * is_named


@pytest.mark.parametrize(
    ("engine", "step", "look_ms", "notes_ms", "is_named"),
    [
        ("python", 8, 49, 0, False),
        ("python", 8, 50, 0, True),
        ("python", 8, 55, 5, True),
        ("python", 8, 55, 6, False),
        ("python", 7, 49, 6, True),
        ("native", 8, 49, 6, True),
    ],
)
def test_the_python_engines_notes_of_a_step_do_not_make_it_slow(
    engine: str, step: int, look_ms: int, notes_ms: int, is_named: bool
) -> None:
    slow = training(forward=lambda number, block: look_ms - 3 if number == step and block == 2 else 1)
    known = replace(slow, metadata=fit_metadata({**slow.metadata, "engine": engine}))

    findings = noted(known, sampling_ns=[[4, 9 * MS], [8, notes_ms * MS]]).summary().findings

    assert [finding.part for finding in findings] == ["forward"] * is_named


@pytest.mark.parametrize(
    ("is_slow", "is_named"),
    [
        (lambda step: step % 6 == 5, True),
        (lambda step: step % 6 == 5 or step in (4, 8), True),  # the engine makes steps 1, 2, 4, 8, 16 slow
        (lambda step: step in (4, 8, 11), False),
    ],
)
def test_steps_that_are_slow_with_a_period_beside_those_with_notes(
    is_slow: Callable[[int], bool], is_named: bool
) -> None:
    # A slow step takes 14 ms more, less than other single ones that are reported.
    slow = training(steps=24, forward=lambda step, block: 15 if is_slow(step) and block == 2 else 1)
    known = replace(slow, metadata=fit_metadata({**slow.metadata, "engine": "python"}))

    findings = noted(known, delays=[[11, 14 * MS]]).summary().findings
    slow_steps = [finding.evidence for finding in findings if finding.what.startswith("makes ")]

    assert [evidence.partition(";")[0] for evidence in slow_steps] == ["in 4 of 24 steps, every 6th step"] * is_named


@pytest.mark.parametrize(
    ("growth", "first", "last", "ms"),
    [
        # The last 6 of 8 calls take 4 ms more; calls before the first trained one are in no step, so 9 of 10 steps.
        (1, "int64[2, 8]", "int64[2, 15]", 21.6),
        (1, "int64[2, 8], bool[2, 8]", "int64[2, 12], bool[2, 12]", 21.6),
        (1, "int64[2, 8]", "int64[2, 11]", None),  # less than half of the calls
        (1, "int64[2, 8]", "int64[3, 15]", None),
        (1, "int64[2, 8]", "int32[2, 15]", None),
        (1, "int64[8]", "int64[2, 8]", None),
        (1, "int64[2, 15]", "int64[2, 8]", None),
        (0, "int64[2, 8]", "int64[2, 15]", None),
    ],
)
def test_inputs_that_grow_from_call_to_call_of_a_step(growth: int, first: str, last: str, ms: float | None) -> None:
    counts = [0] * 12

    def forward(step: int, block: int) -> float:
        counts[step] += 1
        # Each call runs four blocks; the last call of a step is trained.
        return 1 + growth * (8 < counts[step] <= 32)

    timeline = noted(training(forward=forward, alone=lambda step: 8), changing_inputs={"Net": [[8, first, last]] * 2})
    what = "gets a longer input in each call of a step"

    findings = [finding for finding in timeline.summary().findings if finding.what == what]

    assert [(finding.where, finding.part, finding.ns_per_step) for finding in findings] == (
        [("Net", "forward", round(ms * MS))] if ms else []
    )
    assert all(
        finding.evidence
        == f"the inputs of 8 calls in a step grow from {first} to {last}, and calls take longer: as in generation "
        "without a KV cache, which computes all earlier positions again"
        for finding in findings
    )


def test_steps_that_are_slow_with_a_period_are_not_slow_by_the_machine() -> None:
    slow = training(forward=lambda step, block: 41 if step % 3 == 2 and block == 2 else 1)

    findings = noted(slow, delays=[[step, 40 * MS] for step in (2, 5, 8)]).summary().findings

    assert [finding.what for finding in findings] == ["makes some steps slow (forward)"]


def test_a_step_is_slow_by_the_machine_if_waiting_is_half_of_its_excess() -> None:
    def whats(waited_ms: int) -> list[str]:
        def times(step: int, block: int) -> int:
            return 31 if step == 7 and block == 2 else 1

        slow = training(forward=times, backward=lambda step, block: times(step, block))
        return [finding.what for finding in noted(slow, delays=[[7, waited_ms * MS]]).summary().findings]

    # The step is longer by 30 ms in forward and 30 ms in backward.
    assert whats(29) == ["makes step 7 slow (forward)"]
    assert whats(30) == []


def test_a_stalled_forward_does_not_make_a_modules_backward_look_small() -> None:
    stalled = training(forward=lambda step, block: 61 if step == 7 and block == 2 else 1)

    assert noted(stalled, delays=[[7, 60 * MS]]).summary().findings == []


@pytest.mark.parametrize(
    ("more_ms", "delays", "is_named"), [(18, [[2, MS]], True), (17, [[2, MS]], False), (18, [], False), (27, [], True)]
)
def test_one_module_of_a_list_makes_a_step_slow_by_less_if_it_waited_for_no_processor(
    more_ms: int, delays: Any, is_named: bool
) -> None:
    slow = training(forward=lambda step, block: 1 + more_ms * (step == 7 and block == 2))

    findings = noted(slow, delays=delays).summary().findings

    assert [finding.where for finding in findings] == ["Net.blocks.2.act"] * is_named


def test_a_step_with_larger_inputs_has_a_longer_forward_and_backward() -> None:
    def times(step: int, block: int) -> int:
        return 12 if step == 7 else 1

    (finding,) = training(forward=times, backward=lambda step, block: 3 * times(step, block)).summary().findings
    assert finding.what == "makes step 7 slow (backward)"
    assert finding.evidence == (
        "step 7: 193 ms, of which 144 ms backward; usually 12 ms; Net 192 ms, usually 16 ms; forward too: 48 ms, "
        "usually 4 ms, as of larger inputs"
    )
    (finding,) = training(backward=lambda step, block: 3 * times(step, block)).summary().findings
    assert "inputs" not in finding.evidence


@pytest.mark.parametrize("kind", ["gaps", "slow_gaps"])
def test_slow_steps_have_their_lines_if_one_was_noted(kind: str) -> None:
    slow = training(before=0.1, pause=lambda step: 40 * (step % 3 == 1))

    def evidence(ms: int) -> str:
        gap = ["t.py:9", "optimizer", "t.py:3", "forward", "other", [ms * MS, 0]]
        notes: dict[str, Any] = {kind: [gap]}
        (finding,) = noted(slow, **notes).summary().findings
        return finding.evidence

    text = "; 20 ms of such a step between t.py:9 (optimizer) and t.py:3 (forward)"
    assert evidence(20).endswith(text)
    assert "looked" not in evidence(19)


@pytest.mark.parametrize(("stop", "is_named"), [(5, True), (17, False)])
def test_stops_of_the_machine_in_each_step_hide_no_loop_of_half_the_share(stop: int, is_named: bool) -> None:
    # A loop of 0.6 ms is 6.2 % of a step of the shortest tenth, 4.4 % of 13.6 ms, and 2.3 % of 25.6 ms.
    busy = training(
        steps=32,
        before=0.6,
        forward=lambda step, block: stop if step % 8 == block else 1,
        backward=lambda step, block: stop if step % 8 == 4 + block else 1,
    )

    findings = noted(busy, operators={"outside": [["mul_", 40, MS]]}).summary().findings
    assert [finding.what for finding in findings] == [OTHER] * is_named


def test_a_known_loop_counts_from_half_a_millisecond_on() -> None:
    def whats(before: float) -> list[str]:
        loop = {"outside": [["mul_", 40, MS]]}
        return [row[0] for row in found(noted(training(steps=32, before=before), operators=loop))]

    assert whats(0.5) == [OTHER]
    assert whats(0.49) == []


def test_a_users_optimizer_that_loops_over_its_parameters() -> None:
    def evidence(operators: object, **more: Any) -> str:
        slow = training(ranges=lambda step: [("Optimizer.step#Own.step", "optimizer", 4)])
        return noted(slow, operators={"in_optimizers": operators}, **more).summary().findings[0].evidence

    text = "; a step runs 64 × sqrt there: a loop over 20 parameters, for which torch._foreach needs few"
    loop = [["sqrt", 128, MS], ["add_", 126, MS]]
    assert evidence(loop, how=None).endswith(text)
    assert text not in evidence(loop, how="foreach") + evidence(loop[1:], how=None)


def test_an_optimizer_that_mostly_updates_a_table_names_it() -> None:
    slow = training(ranges=lambda step: [("Optimizer.step#SGD.step", "optimizer", 12)])

    (finding,) = noted(slow, largest={"Net.table": 96}).summary().findings
    assert finding.what == "optimizer takes a large share"
    assert "(medians); 96% of the parameters' values are those of Net.table; " in finding.evidence


@pytest.mark.parametrize(("delays", "parts"), [([], ["other", "forward"]), ([(3, MS)], ["other"]), (None, ["other"])])
def test_a_longer_stall_hides_another_slow_step_only_if_the_machine_is_busy(
    delays: list[tuple[int, int]] | None, parts: list[str]
) -> None:
    # Steps of 9 ms; in step 8 each of 4 forwards is 9 ms longer, and before step 12 the program waits.
    timeline = training(
        steps=20, forward=lambda step, block: 10 if step == 8 else 1, pause=lambda step: 300 if step == 12 else 0
    )

    known: dict[str, Any] = {} if delays is None else {"delays": delays}
    findings = noted(timeline, **known).summary().findings

    assert [finding.part for finding in findings if "slow" in finding.what] == parts


SLOWLY = [[step, size // 2] for step, size in GROWING]
"""The same with a growth of 1 MiB a step."""


@pytest.mark.parametrize(
    ("lengths", "evidence", "where"),
    [
        ({"Net.seen": [[2, 2], [3, 3], [5, 5], [9, 9], [17, 17]]}, "; Net.seen gets 1 values more", "Net"),
        ({"__main__.losses": [[3, 6], [5, 10], [9, 18], [17, 34]]}, "; __main__.losses gets 2 values more", None),
        ({"Net.seen": [[3, 3], [5, 5], [9, 9]]}, None, None),  # too few lengths
        ({"Net.seen": [[3, 3], [5, 5], [9, 9], [17, 11]]}, None, None),  # slower growth
        ({"Net.seen": [[3, 3], [3, 5], [9, 9], [17, 17]]}, None, None),  # one step twice, which no recording has
        ({"Net.seen": [3, 5, 9, 17]}, None, None),
    ],
)
def test_a_growing_list_explains_growing_memory(
    lengths: dict[str, object], evidence: str | None, where: str | None
) -> None:
    findings = noted(training(), resident=SLOWLY, lengthen=lengths).summary().findings

    expected = [f"the process holds about 1.00 MiB more after each step{evidence}"] if evidence else []
    assert [(finding.evidence, finding.where) for finding in findings] == [(text, where) for text in expected]
    assert found(noted(training(), lengthen=lengths)) == []


def test_a_growing_list_of_a_slow_module_is_a_finding_of_its_own() -> None:
    slow = training(forward=lambda step, block: 6 if block == 1 else 1)
    lengths = {"Net.blocks.1.act.seen": [[2, 2], [3, 3], [5, 5], [9, 9], [17, 17]]}

    findings = noted(slow, resident=SLOWLY, lengthen=lengths).summary().findings

    assert [(finding.where, finding.what) for finding in findings] == [
        ("Net.blocks.1.act", "is slower than its siblings"),
        ("Net.blocks.1.act", "memory grows from step to step"),
    ]


@pytest.mark.parametrize("holder", ["Net", "Other"])
def test_the_tensor_with_which_calls_get_longer_is_named(holder: str) -> None:
    timeline = calls([(1 + at, 1) for at in range(24)])
    lengths = {f"{holder}.a": [[2, 9], [3, 10], [5, 13]], f"{holder}.b": [[2, 8], [3, 1008], [5, 3008], [9, 7008]]}

    (finding,) = noted(timeline, tensors_lengthen=lengths).summary().findings

    grown = "; Net.b gets 1,000 values more in each" if holder == "Net" else ""
    assert finding.evidence == f"from 6.5 ms to 24 ms in 24 steps, in Net, in its own time{grown}"


@pytest.mark.parametrize(
    ("operators", "parameters", "loss", "is_found"),
    [
        ([["log_softmax (float64)", 2, 2 * MS], ["mean", 2, MS]], 0, 2, True),
        ([["log_softmax (float64)", 2, 2 * MS], ["mean", 2, MS]], 0, 1.5, False),  # 7 % of 21.6 ms
        ([["log_softmax (float64)", 2, MS], ["mean", 2, MS]], 0, 2, False),
        ([["log_softmax (float64)", 2, 2 * MS]], 9, 2, False),  # all parameters are float64
    ],
)
def test_a_loss_in_float64(operators: object, parameters: int, loss: float, is_found: bool) -> None:
    # A module takes 20 ms of a step, and a pass 0.1 ms outside of it.
    timeline = noted(
        with_loss(loss, 0.1),
        operators={"outside": operators, "in_passes": []},
        parameters=parameters,
        float64_parameters=parameters,
    )

    findings = [finding for finding in timeline.summary().findings if finding.part == "loss"]

    assert [finding.evidence for finding in findings] == [
        "2.1 ms of 22 ms (medians), 0.1 ms of it in backward, outside of modules; a step runs "
        "1 × log_softmax (float64) there, 1 ms; it computes in float64, the model does not"
    ] * is_found


def test_copies_of_the_parameters() -> None:
    (finding,) = with_loop(2, [["clone", 40, 6 * MS]]).summary().findings

    assert finding.evidence.endswith("; a step runs 20 × clone there, 3 ms: copies of the 20 parameters")


def test_malformed_notes_are_not_findings() -> None:
    timeline = training()
    odd: list[object] = [None, 1, [], {}, {"steps": "2"}, {"steps": 0, "operators": {"outside": LOOP}}]
    odd += [{"steps": 2, "operators": [], "hooks": [], "settings": [], "doubles": {"a": 1}, "gradient_hooks": "3"}]
    for notes in odd:
        assert found(replace(timeline, metadata=fit_metadata({**timeline.metadata, STEP_NOTES: notes}))) == []


@pytest.mark.parametrize(
    ("looks", "more_ms", "is_named"),
    [
        ("aaabb", 2, True),
        ("aaabb", 1, False),  # 1.1 times as long
        ("aaaba", 2, False),  # smaller again, as after the last batch of an epoch
        ("aaabc", 2, False),
        ("aaaaa", 2, False),
        ("", 2, False),
        ("ab", 2, False),  # two noted steps do not show the time before
    ],
)
def test_steps_that_stay_longer_because_of_larger_inputs(looks: str, more_ms: int, is_named: bool) -> None:
    steps = [1, 2, 6, 12, 16] if len(looks) > 2 else [1, 12][: len(looks)]
    # Steps last 9 ms until step 9, then one or two ms longer in forward.
    timeline = training(steps=20, forward=lambda step, block: 1 + more_ms / BLOCKS * (step > 9))
    sizes = {"a": "float32[8, 4]", "b": "float32[16, 4]", "c": "float32[17, 4]"}

    named = noted(timeline, inputs={"Net": [[step, sizes[look]] for step, look in zip(steps, looks, strict=True)]})
    larger = [finding for finding in named.summary().findings if finding.what == "gets larger inputs after some steps"]

    assert [(finding.where, finding.ns_per_step, finding.evidence) for finding in larger] == [
        (
            "Net",
            round(2 * MS * 8 / 20),
            "it gets float32[16, 4] from step 12 on, float32[8, 4] until step 6: a step takes 11 ms, 9 ms before",
        )
    ] * is_named


@pytest.mark.parametrize(("outside", "is_said"), [({"outside": []}, True), ({}, False)])
def test_operators_that_were_not_counted_are_not_said_to_be_few(outside: dict[str, Any], is_said: bool) -> None:
    operators = {**outside, "in_passes": [["nodes", 8, MS]]}

    (finding,) = noted(training(before=9), operators=operators).summary().findings

    assert finding.part == "other"
    assert ("hardly any of it in operators of torch" in finding.evidence) == is_said
