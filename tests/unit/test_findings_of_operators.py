"""Findings of modules' own code: loops, float64, copies, masks, Python; from operators, or from nodes only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from modtrace import Timeline
from modtrace.ring import Kind
from modtrace.ring.event_text import range_text
from modtrace.timeline.summary.findings import Finding
from modtrace.timeline.summary.findings.noted import NotedSteps, Operator
from tests.support.event_script import EventScript
from tests.support.timelines import build_timeline
from tests.unit.test_findings import BLOCKS, MS, STEP_MS, STEPS, found, training
from tests.unit.test_findings_of_calls import with_loss
from tests.unit.test_findings_of_notes import noted

LOOKS = 2
Operators = Sequence[tuple[str, float, float]]
ATTENTION = "computes attention by hand, with all weights in memory"
LOOP, FLOAT64_TITLE = "runs many short operators: a loop in Python", "computes in float64, most others do not"
MOVES = "copies tensors, or makes them anew, in each call"
SORTS = "sorts or factorizes in each call"
HEADS = "computes its attention head by head: a loop"
PRODUCT = "multiplies and sums (mul, sum) where a product of matrices would do"
RESIZES = "spends much time interpolating or padding tensors in each call"
PYTHON = "spends host time in its own forward, outside of inner modules and operators"


def inside(operators: Operators) -> dict[str, Any]:
    """Return notes of two steps in which each block itself runs `operators`: name, calls and ms per step."""
    rows = [(name, round(LOOKS * count), round(LOOKS * ms * MS)) for name, count, ms in operators]
    total = [("", sum(count for _, count, _ in rows), sum(ns for _, _, ns in rows))]
    acts = {
        f"Net.blocks.{block}.act": [["", LOOKS, LOOKS * MS], ["gelu", LOOKS, LOOKS * MS]] for block in range(BLOCKS)
    }
    return {"inside": {f"Net.blocks.{block}": [*total, *rows] for block in range(BLOCKS) if rows} | acts}


def with_own(ms: float, operators: Operators, **more: Any) -> Timeline:
    """Steps in which each block has `ms` of its own code in forward and runs `operators` there."""
    return noted(training(own=lambda block: ms), **{**inside(operators), **more})


def only(timeline: Timeline) -> Finding:
    (finding,) = timeline.summary().findings
    return finding


# 4 blocks of 1 ms in a step of 13 ms. Calling an operator costs 20 µs; a call and an inner call cost 50 µs each.
@pytest.mark.parametrize(
    ("operators", "what", "ms"),
    [
        ([("matmul", 40, 0.2), ("add", 24, 0.3)], LOOP, 4),
        ([("linear (float64)", 1, 0.5), ("to", 2, 0.1), ("add", 1, 0.3)], FLOAT64_TITLE, 4 * 5 / 9),
        ([("clone", 1, 0.5), ("linear", 1, 0.4)], MOVES, 4 * 5 / 9),
        ([("masked_fill", 1, 0.2), ("ones", 1, 0.2), ("linear", 1, 0.5)], MOVES, 4 * 4 / 9),
        ([("matmul", 2, 0.3), ("softmax", 1, 0.2), ("masked_fill", 1, 0.3), ("linear", 1, 0.1)], ATTENTION, 4 * 5 / 9),
        ([("bmm", 1, 0.3), ("baddbmm", 1, 0.3), ("_softmax", 1, 0.3)], ATTENTION, 4 / 3),
        ([("sort", 1, 0.5), ("gelu", 1, 0.4)], SORTS, 4 * 5 / 9),
        ([("linalg_svd (float64)", 1, 0.4), ("quantile", 1, 0.2), ("gelu", 1, 0.3)], SORTS, 4 * 6 / 9),
        ([("matmul", 6, 0.3), ("softmax", 3, 0.2), ("add", 3, 0.2), ("linear", 1, 0.2)], HEADS, 4 * 7 / 9),
        ([("scaled_dot_product_attention", 4, 0.6), ("cat", 1, 0.3)], HEADS, 4),
        ([("mul", 1, 0.3), ("sum", 1, 0.1), ("index", 2, 0.5)], PRODUCT, 4 * 4 / 9),
        ([("upsample_bicubic2d", 1, 0.5), ("conv2d", 1, 0.4)], RESIZES, 4 * 5 / 9),
        ([("_upsample_bicubic2d_aa", 1, 0.5), ("conv2d", 1, 0.4)], RESIZES, 4 * 5 / 9),
        ([("pad", 1, 0.3), ("reflection_pad1d", 1, 0.3), ("add", 1, 0.3)], RESIZES, 4 * 6 / 9),
        ([("linear", 1, 0.1)], PYTHON, 4 * (1 - 0.1 - 0.02 - 0.1)),
        ([], PYTHON, 4 * (1 - 0.1)),
    ],
)
def test_findings_of_the_own_operators_of_modules_of_one_place(operators: Operators, what: str, ms: float) -> None:
    finding = only(with_own(1, operators))

    assert finding[:3] == (what, "Net.blocks.0", "forward")
    assert finding.ns_per_step == pytest.approx(ms * MS, abs=4)
    assert finding.share == pytest.approx(ms / (STEP_MS + 4), rel=1e-5)
    assert finding.evidence.startswith(
        "own forward 4 ms a step in 4 modules Net.blocks.* (Block), own backward 0 ms; a call runs "
    )


@pytest.mark.parametrize(
    ("own", "operators"),
    [
        (1, [("matmul", 39, 0.2), ("add", 24, 0.4)]),  # one call too few
        (0.1, [("matmul", 64, 0.09)]),  # 0.4 ms of 9.4
        (1, [("linear (float64)", 1, 0.4), ("linear", 1, 0.5)]),  # less than half of the time
        (1, [("clone", 1, 0.1), ("ones", 1, 0.1), ("linear", 1, 0.7)]),
        (1, [("sort", 1, 0.4), ("linear", 1, 0.5)]),
        (1, [("linalg_vector_norm", 1, 0.9)]),
        (0.1, [("sort", 1, 0.1)]),  # 0.4 ms of 9.4
        (1, [("linear", 1, 0.5)]),  # 38 % of the block's time
        (1, [("matmul", 1, 0.3), ("softmax", 1, 0.5)]),  # only one product
        (1, [("bmm", 4, 0.3), ("softmax", 1, 0.5)]),  # two of the products are of positions
        (1, [("matmul", 2, 0.3), ("softmax", 1, 0.2), ("add", 1, 0.4)]),  # perhaps a learned bias
        (1, [("scaled_dot_product_attention", 2, 0.7), ("linear", 1, 0.2)]),  # self-attention and cross-attention
        (1, [("mul", 1, 0.2), ("sum", 2, 0.4), ("linear", 1, 0.3)]),
        (1, [("mul", 1, 0.1), ("sum", 1, 0.1), ("linear", 1, 0.7)]),
        (1, [("mul", 1, 0.3), ("sum", 1, 0.3), ("rsqrt", 1, 0.3)]),  # a norm
        (1, [("upsample_nearest2d", 1, 0.4), ("conv2d", 1, 0.5)]),
        (0.2, [("upsample_nearest2d", 1, 0.15)]),  # 0.8 ms of 9.8
        (1, [("_pack_padded_sequence", 1, 0.5), ("gru", 1, 0.4)]),
        (0.2, []),  # 0.4 ms of 9.8
    ],
)
def test_operators_close_to_these_are_not_a_finding(own: float, operators: Operators) -> None:
    assert found(with_own(own, operators)) == []


@pytest.mark.parametrize(
    ("operators", "trains", "count"),
    [
        ([("cat", 2, 0.5), ("scaled_dot_product_attention", 1, 0.4)], False, 1),
        ([("cat", 2, 0.4), ("scaled_dot_product_attention", 1, 0.5)], False, 0),
        ([("cat", 2, 0.5), ("linear", 1, 0.4)], False, 0),
        ([("cat", 2, 0.5), ("scaled_dot_product_attention", 1, 0.4)], True, 0),
    ],
)
def test_attention_that_concatenates_its_cache_in_each_call(operators: Operators, trains: bool, count: int) -> None:
    script, now = EventScript(capacity=1 << 10), 1
    net, attention = script.name("Net"), script.name("Net.attention")
    for call in range(STEPS):
        for name in (net, attention):
            script.enter(now, name, call, call)
        now += 2 * MS
        for name in (attention, net):
            script.exit(now, name, call, call + trains)
        if trains:
            script.node(now, now + MS, call)
            now += MS
            script.step(now, call)
    rows = [(name, round(LOOKS * times), round(2 * LOOKS * ms * MS)) for name, times, ms in operators]
    total = "", sum(times for _, times, _ in rows), sum(ns for _, _, ns in rows)
    timeline = noted(build_timeline(script.snapshot()), inside={"Net.attention": [total, *rows]})

    findings = [finding for finding in timeline.summary().findings if finding.what.startswith("concatenates")]
    assert [(one.where, one.ns_per_step) for one in findings] == [("Net.attention", round(10 / 9 * MS))] * count


def test_operators_of_a_loop_are_counted_per_call() -> None:
    assert only(with_own(1, [("matmul", 40, 0.2), ("add", 24, 0.3)])).evidence == (
        "own forward 4 ms a step in 4 modules Net.blocks.* (Block), own backward 0 ms; a call runs 24 × add, "
        "40 × matmul, in all 64 operators of 0.5 ms: fewer and larger ones take less"
    )


@pytest.mark.parametrize(("long", "is_named"), [(32, True), (40, False)])
def test_a_small_share_of_most_steps_is_not_a_finding(long: float, is_named: bool) -> None:
    timeline = training(own=lambda block: 1, forward=lambda step, block: 1.0 if step < 2 else long)

    # 3.12 ms of 13 ms in the first of ten steps, and of a mean step of 112 or 138 ms.
    assert [row[0] for row in found(noted(timeline, **inside([("linear", 1, 0.1)])))] == [PYTHON] * is_named


def test_compiling_in_the_first_step_is_not_python_in_the_others() -> None:
    # Each `act` lasts 1 ms in forward, all in an operator, and 3 ms in backward.
    compiled = training(forward=lambda step, block: 300 if step == 0 else 1, backward=lambda step, block: 3)

    assert found(noted(compiled, **inside([]))) == []


def test_time_of_modules_in_evaluations_is_not_work_of_steps() -> None:
    # Each `act` lasts 1 ms in forward and 1 ms in backward; evaluations call it 8 more times per step.
    acts = {f"Net.blocks.{block}.act": [[name, 2, 2 * MS] for name in ("", "clone")] for block in range(BLOCKS)}

    findings = noted(training(evaluations=8), inside=acts).summary().findings

    assert [finding.what for finding in findings] == ["evaluation takes a large share", MOVES]
    assert findings[1].evidence.startswith(
        "own forward 4 ms a step in 4 modules Net.blocks.*.act (GELU), own backward 4 ms; a call runs "
    )


def test_long_operators_are_not_a_loop() -> None:
    assert found(with_own(12.9, [("matmul", 64, 12.9)])) == []
    assert [row[0] for row in found(with_own(12.8, [("matmul", 64, 12.8)]))] == [LOOP]


def test_float64_is_not_a_finding_in_modules_that_hold_it_or_if_most_time_is_in_it() -> None:
    operators = [("linear (float64)", 1, 0.9)]
    assert [row[0] for row in found(with_own(1, operators))] == [FLOAT64_TITLE]
    # More than half of modules' time is in float64: 3.6 ms, and 3.5 ms in the acts.
    acts = {f"Net.blocks.{block}.act": [["", 2, round(1.75 * MS)]] for block in range(BLOCKS)}
    assert found(with_own(1, operators, inside=inside(operators)["inside"] | acts)) == []


def test_modules_that_were_not_noted_are_not_judged() -> None:
    acts = inside([])["inside"]
    other_notes = {f"Other.{number}": [["", 1, 1]] for number in range(64 - len(acts))}
    assert found(with_own(1, [], inside=acts | other_notes)) == []
    other_notes.popitem()
    assert [row[0] for row in found(with_own(1, [], inside=acts | other_notes))] == [PYTHON]


def test_an_outlier_has_its_operators_in_its_evidence() -> None:
    slow = training(own=lambda block: 4 if block == 2 else 0.2)
    operators = {"Net.blocks.2": [["", 260, 8 * MS], [" (float64)", 4, MS], ["bmm", 256, MS], ["add", 4, MS]]}

    finding = noted(slow, inside=operators).summary().findings[0]

    assert finding[:2] == ("is slower than its siblings", "Net.blocks.2")
    assert finding.evidence == (
        "6 ms a step, its siblings 2.2 ms (medians), mostly its own forward, outside of inner modules, it runs 128 × "
        "bmm, 2 × add itself in a call, in all 130 operators"
    )


@pytest.mark.parametrize(
    ("operators_ms", "others", "says"),
    [
        (1.1, 0, True),
        (1.3, 0, False),  # 30 % of 4 ms
        (None, 1, True),
        (None, 0, False),  # no operators were counted
        (None, 64, False),  # not the operators of all modules
    ],
)
def test_the_evidence_of_an_outlier_has_its_python_time(operators_ms: float | None, others: int, says: bool) -> None:
    slow = training(own=lambda block: 4 if block == 2 else 0.2)
    noted_of = {f"Net.other.{number}": [["", 2, MS]] for number in range(others)}
    if operators_ms is not None:
        noted_of["Net.blocks.2"] = [["", 2, round(operators_ms * LOOKS * MS)]]

    finding = noted(slow, inside=noted_of).summary().findings[0]

    assert finding[:2] == ("is slower than its siblings", "Net.blocks.2")
    text = ", outside of inner modules, hardly any of it in operators of torch: Python, or waiting"
    assert finding.evidence.endswith(text) == says


def test_only_the_affected_modules_of_a_place_count() -> None:
    # 1 ms of each of 4 blocks; two compute attention by hand, with 0.5 of 0.9 ms outside the products.
    by_hand = inside([("matmul", 2, 0.3), ("softmax", 1, 0.2), ("masked_fill", 1, 0.3), ("linear", 1, 0.1)])["inside"]
    fused_notes = inside([("scaled_dot_product_attention", 1, 0.9)])["inside"]
    notes = {**fused_notes, **{fqn: by_hand[fqn] for fqn in ("Net.blocks.1", "Net.blocks.3")}}

    finding = only(noted(training(own=lambda block: 1), inside=notes))

    assert finding[:2] == (ATTENTION, "Net.blocks.1")
    assert finding.ns_per_step == pytest.approx(2 * 5 / 9 * MS, abs=4)
    assert finding.evidence.startswith("own forward 2 ms a step in 2 modules Net.blocks.* (Block) of 4, ")


@pytest.mark.parametrize("name", ["PairLoss", "Pairs"])
def test_a_loop_in_a_loss_is_reported_once(name: str) -> None:
    timeline = noted(with_loss(5, 1, name), inside={name: [["", 200 * LOOKS, 9 * LOOKS * MS]]})

    findings = timeline.summary().findings

    expected = ["loss takes a large share"] * (name == "Pairs")
    assert [finding.what for finding in findings] == [LOOP, *expected]


@pytest.mark.parametrize(
    ("act", "forward_ms", "backward_ms", "is_named"),
    [("Embedding", 0.1, 1, True), ("Embedding", 0.11, 1, False), ("Linear", 0.1, 1, False)],
)
def test_a_table_whose_backward_is_ten_times_as_long_as_its_forward(
    act: str, forward_ms: float, backward_ms: float, is_named: bool
) -> None:
    timeline = training(
        act=lambda block: act, forward=lambda step, block: forward_ms, backward=lambda step, block: backward_ms
    )

    findings = noted(timeline).summary().findings

    assert [finding[:4] for finding in findings] == [
        ("has a gradient of its whole table", "Net.blocks.0.act", "backward", 4 * backward_ms * MS)
    ] * is_named
    assert all(
        row.evidence.endswith("are in no input: with sparse=True only the used rows get gradients") for row in findings
    )


def test_operators_of_float64_are_counted_together_if_noted_so() -> None:
    notes = inside([("mul", 1, 0.3), ("add (float64)", 1, 0.1)])
    for fqn, (total, *rows) in notes["inside"].items():
        if not fqn.endswith(".act"):
            # 0.2 ms of two more operators, not named because they are short. All except `mul` are of float64.
            total_row = ("", total[1] + 2 * LOOKS, total[2] + round(0.2 * LOOKS * MS))
            notes["inside"][fqn] = [total_row, (" (float64)", 3 * LOOKS, round(0.31 * LOOKS * MS)), *rows]

    finding = only(noted(training(own=lambda block: 1), **notes))

    assert finding[:4] == (FLOAT64_TITLE, "Net.blocks.0", "forward", round(4 * 0.31 / 0.6 * MS))
    assert "a call runs 1 × mul, 1 × add (float64), in all 4 operators of 0.6 ms" in finding.evidence


@pytest.mark.parametrize(("own", "is_named"), [(1.2, True), (1.0, False)])
def test_each_call_of_a_generate_is_short_if_a_step_would_be(own: float, is_named: bool) -> None:
    script, now = EventScript(capacity=1 << 12), 1
    net, inner, text = script.name("Net"), script.name("Net.a"), range_text("generate", "generate")
    for step in range(10):
        script.collective(now, Kind.RANGE_BEGIN, text, step)
        for call in range(4 * step, 4 * step + 4):
            script.enter(now, net, call)
            script.enter(now, inner, call)
            script.exit(now + MS, inner, call)
            now += round((1 + own) * MS)
            script.exit(now, net, call)
        script.collective(now, Kind.RANGE_END, text, step)
    timeline = noted(build_timeline(script.snapshot()), inside={"Net.a": [["", 2, MS], ["linear", 2, MS]]})

    # Minus 50 µs for the call and 50 µs for the inner call: 1.1 or 0.9 ms.
    assert [row[:2] for row in found(timeline)] == [(PYTHON, "Net")] * is_named


def test_a_step_of_several_calls_has_the_operators_of_all() -> None:
    notes = {"steps": 2, "inside": {"Net": [["", 4, 2_000], ["addmm", 4, 2_000]]}}

    assert NotedSteps(notes, samples_per_step=3.0).module_operators == {
        "Net": [Operator("", 6.0, 3_000.0), Operator("addmm", 6.0, 3_000.0)]
    }


def test_modules_without_the_sum_of_their_operators_are_left_out() -> None:
    assert NotedSteps({"steps": 1, "inside": {"Net": [("linear", 5, 22)]}}).module_operators == {}
    assert found(noted(training(), inside={"Net.blocks.0": [["linear", 5, MS]]})) == []


@pytest.mark.parametrize(("at_once", "is_found"), [(1, True), (2, True), (3, False), (4, False)])
def test_calls_at_once_are_no_host_time_of_a_step(at_once: int, is_found: bool) -> None:
    """10 steps of 10 ms in forward and in backward, while threads call `Waits` for all of the forward."""
    script, now = EventScript(capacity=1 << 14), 1
    net, waits = script.name("Net", module_class="Net"), script.name("Waits", module_class="Waits")
    main, *threads = (script.add_thread(f"thread {number}", tid=number + 1) for number in range(at_once + 1))
    for step in range(10):
        script.on_thread(main)
        script.enter(now, net, step, step)
        for number, thread in enumerate(threads):
            script.on_thread(thread)
            script.enter(now, waits, step * at_once + number, 0)
        now += 10 * MS
        for number, thread in enumerate(threads):
            script.on_thread(thread)
            script.exit(now, waits, step * at_once + number, 1)
        script.on_thread(main)
        script.exit(now, net, step, step + 1)
        script.pass_begin(now, step)
        script.node(now, now + 10 * MS, step)
        now += 10 * MS
        script.pass_end(now, step)
        script.step(now, step)
    inside_of = {name: [["", LOOKS, LOOKS * MS]] for name in ("Net", "Waits")}

    findings = noted(build_timeline(script.snapshot()), inside=inside_of).summary().findings

    # Four calls of 10 ms at once are no 40 ms of a step of 20 ms.
    assert ("Waits" in [finding.where for finding in findings if finding.what == PYTHON]) == is_found
