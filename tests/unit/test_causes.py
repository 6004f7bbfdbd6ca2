"""Causes of slow steps: in each of 100 noisy runs, the planted delay is named and nothing else is."""

from __future__ import annotations

import numpy as np
import pytest

from modtrace.timeline.summary.slow_steps import divide_steps
from tests.support.part_timeline import part_timeline

MS = 1_000_000
STEPS = 60
SHARES = {
    "data loading": 0.1,
    "forward": 0.25,
    "loss": 0.03,
    "backward": 0.4,
    "clip": 0.03,
    "optimizer": 0.12,
    "other": 0.05,
    "log": 0.02,
}
INJECTED = {
    **dict.fromkeys((9, 29, 49), ("data loading", 50, "data loading")),
    13: ("clip", 60, "optimizer (clip_grad_norm_)"),
    19: ("saving", 80, "saving (torch.save)"),
    25: ("compile", 900, "compile (torch.compile 0/1)"),
    **dict.fromkeys((31, 41, 51), ("gc", 200, "gc")),
}


def noisy_steps(random: np.random.Generator, step_ms: float) -> list[dict[str, int]]:
    """Steps of a program on a machine that runs other programs too.

    Batches differ in length by 8 % or by a third, each part has its own noise, and the machine's speed drifts. The
    system stops the thread in one of ten steps, for up to 4 ms. Every tenth step saves, every fifteenth has a long
    evaluation, and the first is slow. Half of the programs have short garbage collections in some steps.
    """
    steps, speed = [], 0.0
    spread, collects = random.choice([0.08, 0.33]), random.random() < 0.5
    for number in range(STEPS):
        speed = 0.9 * speed + random.normal(0, 0.02)
        length = step_ms * MS * np.exp(speed + spread * np.clip(random.normal(), -2.5, 2.5)) * (1 if number else 4)
        step = {part: length * share * np.exp(random.normal(0, 0.08)) for part, share in SHARES.items()}
        if random.random() < 0.1:
            step[random.choice(list(SHARES))] += min(random.exponential(MS), 4 * MS)
        if collects and random.random() < 0.3:
            step["gc"] = random.uniform(0.1, 0.5) * MS
        if number % 10 == 9:
            step["saving"] = 0.5 * step_ms * MS * np.exp(random.normal(0, 0.08))
        if number % 15 == 14:
            step["evaluation"] = 5 * step_ms * MS
        steps.append({part: round(ns) for part, ns in step.items()})
    return steps


def test_exactly_the_slow_steps_of_100_noisy_runs_are_explained() -> None:
    for seed in range(100):
        random = np.random.default_rng(seed)
        steps = noisy_steps(random, float(np.exp(random.uniform(0, np.log(100)))))
        for number, (part, ms, _) in INJECTED.items():
            steps[number][part] = steps[number].get(part, 0) + ms * MS
        causes = {step.step: step.cause for step in divide_steps(part_timeline(steps, layers=0)) if step.cause}

        assert causes.keys() == INJECTED.keys(), seed
        for number, (_, _, cause) in INJECTED.items():
            assert f" {cause}; usually" in causes[number]


def test_no_step_of_100_quiet_runs_is_explained() -> None:
    for seed in range(100):
        random = np.random.default_rng(seed)
        steps = noisy_steps(random, float(np.exp(random.uniform(0, np.log(300)))))

        assert [step.cause for step in divide_steps(part_timeline(steps, layers=0))] == [None] * STEPS, seed


def test_a_slow_step_that_evaluates_is_explained_without_its_evaluation() -> None:
    steps = [{"data loading": 4 * MS, "forward": 90 * MS}] * 8
    steps[4] = {"data loading": 204 * MS, "forward": 90 * MS, "evaluation": 500 * MS}
    steps[6] = {"data loading": 4 * MS, "forward": 90 * MS, "evaluation": 500 * MS}
    timeline = part_timeline(steps)
    divided = {step.step: step for step in divide_steps(timeline)}
    summary = timeline.summary()

    assert divided[4].cause == "step 4: 294 ms without evaluation, of which 204 ms data loading; usually 4 ms"
    assert divided[6].cause is None
    assert [step.training_ns for step in summary.steps] == [94 * MS] * 4 + [294 * MS] + [94 * MS] * 3
    # The header leaves out the parts that the table of parts has a share for.
    assert str(summary).splitlines()[1] == (
        "8 whole steps, median 94.000 ms, p95 294.000 ms, slowest 294.000 ms (step 4), "
        "without the 1,000.000 ms of evaluation in 2 steps"
    )
    shares = {part.part: part.share for part in summary.parts}
    assert shares["evaluation"] == 1000 / (8 * 94 + 200 + 1000)


@pytest.mark.parametrize(("compile_ms", "is_named"), [(300, True), (100, False)])
def test_compiling_explains_a_slow_first_step_if_it_is_the_largest_part(compile_ms: int, is_named: bool) -> None:
    steps = [{"forward": 20 * MS}] * 8
    steps[0] = {"forward": 220 * MS, "compile": compile_ms * MS}

    assert [step.step for step in divide_steps(part_timeline(steps)) if step.cause] == ([0] if is_named else [])


@pytest.mark.parametrize(("longer_ms", "is_named"), [(4, False), (6, True)])
def test_one_millisecond_more_does_not_explain_a_short_step(longer_ms: int, is_named: bool) -> None:
    steps = [{"forward": MS}] * 8
    steps[5] = {"forward": MS, "data loading": longer_ms * MS}

    assert [step.step for step in divide_steps(part_timeline(steps)) if step.cause] == ([5] if is_named else [])
