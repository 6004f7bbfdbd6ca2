"""Findings of calls written by hand: models that are not trained, and modules that others call in a loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from modtrace import Timeline
from modtrace.timeline.contents import STEP_NOTES
from modtrace.timeline.metadata import fit_metadata
from modtrace.timeline.summary.findings.occasions import period_of
from tests.support.event_script import EventScript
from tests.support.timelines import build_timeline
from tests.unit.test_findings import MS, found, training

GROWS, LOOP = "takes longer from step to step", "is called in a loop, for a short time each"
BETWEEN = "time between calls, outside of modules and ranges, takes a large share"
WITHOUT_CACHE = ": inputs grow, as in generation without a KV cache"


def calls(times: Sequence[tuple[float, float]], gap: Callable[[int], float] = lambda call: 0) -> Timeline:
    """Calls of `Net`: ms of its own code, ms of each of its `a` and `b`, and ms of `gap` before the call."""
    script, now = EventScript(capacity=1 << 14), 1
    net, *inner = script.name("Net"), script.name("Net.a"), script.name("Net.b")
    for call, (own_ms, inner_ms) in enumerate(times):
        now += round(gap(call) * MS)
        script.enter(now, net, call)
        now += round(own_ms * MS)
        for name in inner:
            script.enter(now, name, call)
            now += round(inner_ms * MS)
            script.exit(now, name, call)
        script.exit(now, net, call)
    return build_timeline(script.snapshot())


@pytest.mark.parametrize("runs", [1, 3])
def test_calls_that_take_longer_and_longer_until_a_new_request(runs: int) -> None:
    request = [(0, 1 + number / 8) for number in range(24)]
    (finding,) = calls(request * runs).summary().findings

    assert finding[:3] == (GROWS, "Net", "forward")
    # The first quarter of 23 steps has 6, of 2.25 to 3.5 ms; the last has 5, of 6.75 to 7.75 ms.
    several = "3 runs of 24 steps" if runs > 1 else "24 steps"
    assert finding.evidence == f"from 2.9 ms to 7.2 ms in {several}, in Net, in all modules inside{WITHOUT_CACHE}"
    # The times above 2.875 ms: 3, 3.25 … 7.75 ms.
    assert finding.ns_per_step == round(sum(2 + at / 4 - 2.875 for at in range(4, 24)) / 24 * MS)


def test_growing_time_is_a_modules_or_its_own() -> None:
    (finding,) = calls([(1 + at, 1) for at in range(24)]).summary().findings

    assert finding[:3] == (GROWS, "Net", "forward")
    assert finding.evidence.endswith(" in 24 steps, in Net, in its own time")


def test_growing_time_may_be_a_ranges() -> None:
    timeline = training(steps=24, ranges=lambda step: [("metrics", "user", 1 + 2 * step)])

    assert [row[:3] for row in found(timeline) if row[0] == GROWS] == [(GROWS, "metrics", "metrics")]


@pytest.mark.parametrize(("waited_ms", "is_named"), [(9.9, True), (10, False)])
def test_steps_that_grow_with_the_machines_load_are_not_a_finding(waited_ms: float, is_named: bool) -> None:
    # The range lasts 3, 5, 7, 9, 11, 13 ms in the first quarter of 23 steps. Its time above the mean of 8 ms is
    # 1 + 3 + … + 39 ms, 400 ms in all; the thread waits for half of that in 20 steps.
    delays = [(step, round(waited_ms * MS)) for step in range(20)]
    timeline = training(steps=24, ranges=lambda step: [("metrics", "user", 1 + 2 * step)])
    metadata = {**timeline.metadata, STEP_NOTES: {"steps": 2, "delays": delays}}

    findings = found(replace(timeline, metadata=fit_metadata(metadata)))

    assert [finding[0] for finding in findings if finding[0] == GROWS] == [GROWS] * is_named


@pytest.mark.parametrize(
    "times",
    [
        [1.0] * 24 + [3.0] * 24,  # one change of the length
        [1 + at / 40 for at in range(24)],  # a machine that gets busier
        [1.0, 5.0, 2.0, 1.0, 9.0, 2.0] * 8,
        [ms for at in range(4) for ms in [1 + at, 9.0, 9.0] * 5],  # only every third step grows
        [1 + at / 2 for at in range(11)],
        # A machine that gets busier twice.
        [
            *(30.5, 23.4, 23.6, 21.7, 25.1, 22.8, 16.9, 22.0, 28.3, 21.0, 23.5, 30.6, 26.6, 31.4, 29.3, 25.5, 36.4),
            *(21.5, 15.6, 15.1, 17.4, 15.0, 14.7, 20.8, 21.6, 17.7, 19.0, 34.8, 21.2, 15.3, 17.6, 20.6, 24.1, 22.3),
            *(24.9, 34.6, 27.0, 26.8, 30.5, 27.0),
        ],
    ],
)
def test_calls_that_do_not_grow_steadily(times: list[float]) -> None:
    assert [row for row in found(calls([(0, ms) for ms in times])) if row[0] == GROWS] == []


@pytest.mark.parametrize(
    ("gap", "ms"),
    [
        (lambda call: 0.6, 0.6),
        (lambda call: (0.3, 0.8)[call % 2], None),  # 0.3 ms is too short
        (lambda call: 0.4, None),
        (lambda call: (0.4, 4.0)[call % 2], None),  # requests at random times
        (lambda call: (0.74, 3.26)[call % 2], None),
        (lambda call: (0.78, 3.22)[call % 2], 2.0),
    ],
)
def test_time_between_calls(gap: Callable[[int], float], ms: float | None) -> None:
    timeline = calls([(0, 1)] * 40, gap)

    assert [(what, taken) for what, _, _, taken, _ in found(timeline)] == ([(BETWEEN, ms)] if ms else [])


@pytest.mark.parametrize(
    ("own", "line"),
    [
        (
            lambda call: 9 if call % 8 == 7 else 0,
            "5 of 40 calls, every 8th, took 11 ms each (usually 2 ms), 44% of the ",
        ),
        (lambda call: 9 if call in (3, 4, 20) else 0, "3 of 40 calls took 11 ms each (usually 2 ms), 31% of the "),
        (lambda call: 9 if call == 20 else 0, ""),  # 12 %
        (lambda call: 5.9 if call % 4 == 3 else 0, ""),  # less than four times as long
    ],
)
def test_long_calls_with_a_large_share_are_a_line_and_not_a_finding(own: Callable[[int], float], line: str) -> None:
    summary = calls([(own(call), 1) for call in range(40)]).summary()

    assert summary.lines == ([f"{line}time of all"] if line else [])
    assert summary.findings == []


def cells(count: int, ms: float, cells: int = 1) -> Timeline:
    """Calls of `Net`, with 4 ms of its own code and `count` calls of each of its `cells`."""
    script, now = EventScript(capacity=1 << 16), 1
    net, inner = script.name("Net"), [script.name(f"Net.cells.{number}") for number in range(cells)]
    for call in range(6):
        script.enter(now, net, call)
        now += 4 * MS
        for _ in range(count):
            for name in inner:
                script.enter(now, name, call)
                now += round(ms * MS)
                script.exit(now, name, call)
        script.exit(now, net, call)
    return build_timeline(script.snapshot())


@pytest.mark.parametrize(("count", "number", "several"), [(32, 1, ""), (16, 2, " (2 modules Net.cells.*)")])
def test_modules_that_are_called_in_a_loop(count: int, number: int, several: str) -> None:
    (finding,) = [finding for finding in cells(count, 0.1, number).summary().findings if finding.what == LOOP]

    assert finding[1:4] == ("Net.cells.0", "forward", round(3.2 * MS))
    text = f"a call of Net calls it 32 times, 0.1 ms each in forward{several}"
    assert finding.evidence == f"{text}: a loop in Python; fewer and larger calls would be faster"


@pytest.mark.parametrize(("count", "ms"), [(31, 0.1), (32, 0.03), (32, 1.1)])
def test_few_calls_short_calls_and_long_calls_are_not_a_loop(count: int, ms: float) -> None:
    assert [row for row in found(cells(count, ms)) if row[0] == LOOP] == []


@pytest.mark.parametrize(("count", "layers", "is_named"), [(1, 40, False), (2, 20, True)])
def test_a_list_of_many_layers_is_not_a_loop(count: int, layers: int, is_named: bool) -> None:
    assert [row[0] for row in found(cells(count, 0.1, layers)) if row[0] == LOOP] == [LOOP] * is_named


@pytest.mark.parametrize(
    ("ms", "trains", "is_named"),
    [(1, False, True), (0.4, False, False), (1, True, False), (3.9, True, True), (3, True, False)],
)
def test_weights_that_are_computed_from_others_in_each_call(ms: float, trains: bool, is_named: bool) -> None:
    script, now = EventScript(capacity=1 << 12), 1
    names = "Net", "Net.a.parametrizations.weight", "Net.a.parametrizations.weight.0", "Net.b.parametrizations.bias"
    net, weight, inner, bias = map(script.name, names)
    for call in range(6):
        script.enter(now, net, call, call)
        for name in (weight, inner):
            script.enter(now, name, call, call)
        for name in (inner, weight):
            script.exit(now := now + round(ms * MS / 2), name, call, call)
        script.enter(now, bias, call, call)
        script.exit(now := now + round(0.5 * MS), bias, call, call)
        script.exit(now := now + 9 * MS, net, call, call + trains)
        if trains:
            script.node(now, now := now + MS, call)
            script.step(now, call)
    what = "computes its parametrized weights in each call"
    findings = [finding for finding in build_timeline(script.snapshot()).summary().findings if finding.what == what]

    # With a backward of 1 ms, which belongs to `Net`, steps of 14.4 ms: 30 % are 4.3 ms.
    part = None if trains else "forward"
    assert [finding[:4] for finding in findings] == [(what, "Net.a", part, round((ms + 0.5) * MS))] * is_named
    text = (
        "4.4 ms a step, the longest by M, forward and backward: a cheaper parametrization, or parametrize.cached() "
        "around several calls of a step, takes less"
        if trains
        else "1.5 ms a step, though nothing is trained: parametrize.remove_parametrizations(), or "
        "parametrize.cached() around calls, computes them once"
    )
    assert [finding.evidence for finding in findings] == [f"2 weights, {text}"] * is_named


def test_layers_of_a_deep_model_are_not_a_loop() -> None:
    script, now = EventScript(capacity=1 << 16), 1
    net, layers = script.name("Net"), [script.name(f"Net.layers.{number}") for number in range(16)]
    inner = [script.name(f"Net.layers.{number}.{name}") for number in range(16) for name in "ab"]
    for call in range(6):
        script.enter(now, net, call)
        for number, layer in enumerate(layers):
            script.enter(now, layer, call)
            for name in inner[2 * number : 2 * number + 2] * 16:
                script.enter(now, name, call)
                script.exit(now := now + MS // 10, name, call)
            script.exit(now, layer, call)
        script.exit(now, net, call)

    assert found(build_timeline(script.snapshot())) == []


def with_loss(loss: float, alone: float, name: str = "Net", passes: int = 1) -> Timeline:
    """Steps of a module with 10 ms each of forward and backward, `loss` ms, and `alone` ms of a pass in no module."""
    script, now = EventScript(capacity=1 << 10), 0
    net = script.name(name, name, name)
    for step in range(6):
        script.enter(now, net, step, step)
        script.exit(now := now + 10 * MS, net, step, step + 1)
        now += round(loss * MS)
        for number in range(passes * step, passes * step + passes):
            script.pass_begin(now, number)
            script.node(now, now := now + 10 * MS, step, graph_task=number)
            script.pass_end(now := now + round(alone * MS), number)
        script.step(now, step)
    return build_timeline(script.snapshot())


@pytest.mark.parametrize(("loss", "alone", "ms"), [(3, 0.1, 3.1), (3, 1, None), (3, 2.6, 5.6), (2, 0.1, None)])
def test_a_loss_without_a_backward_of_its_size_has_other_work(loss: float, alone: float, ms: float | None) -> None:
    expected = [("loss takes a large share", None, "loss", ms)] if ms else []

    assert [row[:4] for row in found(with_loss(loss, alone))] == expected


def test_differentiating_gradients_is_not_a_loss() -> None:
    # The loss is 3 of 38 ms, and 5 ms of the two passes are in no module.
    names = [row[0] for row in found(with_loss(3, 2.5, passes=2))]

    assert names == ["runs backward more often than forward"]


@pytest.mark.parametrize(
    ("forward", "backward", "act", "is_found"),
    [(1, 0.01, "Sines", True), (1, 0.1, "Sines", False), (0.6, 0.01, "Sines", False), (3, 0.01, "Dropout", False)],
)
def test_a_module_without_inner_modules_that_has_hardly_any_backward(
    forward: float, backward: float, act: str, is_found: bool
) -> None:
    timeline = training(
        forward=lambda step, block: forward, backward=lambda step, block: backward, act=lambda block: act, wait=60
    )

    what = "spends host time in its own forward, outside of inner modules and operators"
    expected = [(what, "Net.blocks.0.act", "forward", 4)] if is_found else []
    assert [row[:4] for row in found(timeline)] == expected


@pytest.mark.parametrize(
    ("more_ms", "waited_ms", "is_named"),
    [(30, 14, True), (30, 15, False), (49, 99, False), (50, 199, True), (50, 200, False)],
)
def test_a_call_is_slow_by_the_machine_if_calls_waited_for_a_processor(
    more_ms: int, waited_ms: int, is_named: bool
) -> None:
    script, now = EventScript(capacity=1 << 14), 1
    net, *layers = (script.name(name) for name in ("Net", *(f"Net.layers.{layer}" for layer in range(3))))
    for call in range(20):
        script.enter(now, net, call)
        for layer, name in enumerate(layers):
            script.enter(now, name, call)
            now += MS + more_ms * MS * ((call, layer) == (12, 1))
            script.exit(now, name, call)
        script.exit(now, net, call)
    timeline = build_timeline(script.snapshot())
    notes = {STEP_NOTES: {"waited_ns": waited_ms * MS}}

    findings = replace(timeline, metadata=fit_metadata({**timeline.metadata, **notes})).summary().findings
    assert [finding.where for finding in findings] == ["Net.layers.1"] * is_named


@pytest.mark.parametrize(
    ("steps", "period"),
    [
        ([9, 19, 29], 10),
        ([10, 20], 0),  # two occurrences are not a period
        ([9, 11, 13], 0),  # a period would have steps before and after these
        ([5, 15, 25], 10),
        ([11, 20, 29], 0),  # a period would have a step before these
        ([1, 8, 15], 0),
        ([3, 13, 22], 0),
        ([4, 5, 6], 0),
    ],
)
def test_a_period_holds_from_start_to_end(steps: list[int], period: int) -> None:
    assert period_of(np.array(steps), np.arange(30)) == period


def checkpointed(inner: Sequence[str], again: Sequence[str]) -> Timeline:
    """10 steps of `Net`: 10 ms of each inner module; backward runs those in `again` once more, for 4, 5, 6 … ms."""
    script, now = EventScript(capacity=1 << 14), 1
    net, names = script.name("Net", module_class="Net"), {name: script.name(f"Net.{name}") for name in inner}
    for step in range(10):
        script.enter(now, net, step)
        for name in names.values():
            script.enter(now, name, step)
            now += 10 * MS
            script.exit(now, name, step, step + 1)
        script.exit(now, net, step, step + 1)
        script.pass_begin(now, step)
        for number, inner_name in enumerate(again):
            script.enter(now, names[inner_name], step, step + 1, recompute=True)
            now += (4 + number) * MS
            script.exit(now, names[inner_name], step, step + 1, recompute=True)
        script.node(now, now + MS, step)
        now += MS
        script.pass_end(now, step)
        script.step(now, step)
    return build_timeline(script.snapshot())


@pytest.mark.parametrize(
    ("inner", "again", "where", "text", "ms"),
    [
        # Two modules of a list are checkpointed.
        (["h.0", "h.1", "h.2"], ["h.1", "h.2"], "Net.h.1", "2 of 3 Net.h.* again: 9 ms", 9),
        (["h.0", "h.1", "h.2"], ["h.0", "h.1", "h.2"], "Net.h.0", "Net.h.* again: 15 ms", 15),
        # The time is that of all: those left out are counted, and `where` is the longest.
        (["a", "b", "c", "d"], ["a", "b", "c", "d"], "Net.d", "Net.a, Net.b, Net.c and 1 more again: 22 ms", 22),
        (["a", "b", "c"], ["b"], "Net.b", "Net.b again: 4 ms", 4),
    ],
)
def test_modules_that_checkpoints_run_again_are_named_in_full(
    inner: Sequence[str], again: Sequence[str], where: str, text: str, ms: int
) -> None:
    what = "runs again in backward (recompute)"
    (finding,) = [each for each in checkpointed(inner, again).summary().findings if each.what == what]

    assert finding[1:4] == (where, "recompute", ms * MS)
    assert finding.evidence == f"checkpointing runs {text} a step"
