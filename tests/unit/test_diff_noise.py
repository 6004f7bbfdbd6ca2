"""What a comparison holds differences against: typical times, and how much recordings of one program differ."""

from __future__ import annotations

import math

import numpy as np
import pytest

from modtrace.compare.spread import SINGLE_FREEDOM, measure_spread, student_quantile, trimmed_mean
from modtrace.compare.typical import likeness, typical


def test_typical_is_the_mean_of_the_faster_half() -> None:
    # Of 20 times the fastest is left out, and the 10 slowest.
    times = np.array([*range(101, 111), *range(1000, 1010)])

    assert typical(times).time_ns == sum(range(102, 111)) / 9
    assert typical(np.array([7])).time_ns == 7
    assert typical(np.array([8, 4])).time_ns == 4


def test_typical_does_not_change_with_what_disturbs_single_steps() -> None:
    random = np.random.default_rng(0)
    quiet = random.normal(100_000, 3_000, 200).astype(np.int64)
    disturbed = np.where(random.random(200) < 0.2, 5 * quiet, quiet)

    assert typical(disturbed).time_ns == pytest.approx(typical(quiet).time_ns, rel=0.01)


@pytest.mark.parametrize("count", [30, 200])
def test_variance_of_typical_is_that_of_many_repetitions(count: int) -> None:
    random = np.random.default_rng(1)
    found = [typical(random.lognormal(12, 0.1, count).astype(np.int64)) for _ in range(2_000)]

    means = np.array([one.time_ns for one in found])
    assert np.mean([one.variance for one in found]) == pytest.approx(means.var() / means.mean() ** 2, rel=0.15)


def test_steps_that_resemble_their_neighbours_count_for_less() -> None:
    random = np.random.default_rng(0)
    steady = 1000 + random.normal(0, 10, 200).astype(np.int64)
    drifting = steady + np.arange(200)

    assert likeness([steady]) < 0.1
    assert likeness([drifting]) > 0.8
    assert likeness([np.full(9, 5)]) == 0
    assert typical(steady, 0.5).variance == pytest.approx(3 * typical(steady).variance, rel=0.1)


@pytest.mark.parametrize(
    ("outside", "freedom", "t"),
    # Tables of Student's distribution.
    [(0.05, 1, 12.706), (0.05, 2, 4.303), (0.01, 5, 4.032), (0.05, 10, 2.228), (0.001, 8, 5.041), (0.05, 1e9, 1.960)],
)
def test_student_quantile_is_that_of_tables(outside: float, freedom: float, t: float) -> None:
    assert student_quantile(outside, freedom) == pytest.approx(t, abs=0.002)


def draw(random: np.random.Generator, modules: int, runs: int, freedom: float, within: float = 0.01) -> np.ndarray:
    """Logarithms of times whose variances are 4 times those within, and differ between modules."""
    variance = 4 * within**2 * freedom / random.chisquare(freedom, modules)
    return random.normal(0, 1, (modules, runs)) * np.sqrt(variance)[:, None]


def test_spread_finds_how_much_recordings_differ_and_how_unequally() -> None:
    random = np.random.default_rng(2)
    logs, within = draw(random, 2_000, 8, 6.0), np.full(2_000, 0.01**2)

    found = measure_spread(logs, within, 100, 4)

    # The median of freedom / χ² is 6 / 5.348.
    assert found.factor == pytest.approx(2 * math.sqrt(6 / 5.348), rel=0.05)
    assert found.freedom == pytest.approx(6 + 6, abs=1.5)


@pytest.mark.parametrize("runs", [2, 3, 5, 12])
def test_equal_programs_are_told_apart_as_seldom_as_is_said(runs: int) -> None:
    random = np.random.default_rng(3)
    wrong = 0
    for _ in range(300):
        logs = draw(random, 60, 2 * runs, 8.0)
        found = measure_spread(logs, np.full(60, 0.01**2), 100, runs)
        wrong += bool((abs(found.difference) > student_quantile(0.05 / 60, found.freedom) * found.error).any())

    assert wrong <= 300 * 0.07


def test_a_recording_in_which_something_else_ran_is_left_out() -> None:
    logs = np.array([[0.1, 0.2, 0.3, 0.2, 0.3, 0.2, 0.3, 5.0]])

    found = trimmed_mean(logs)

    assert found.mean[0] == pytest.approx(0.25)
    # 0.1 and 5 are moved to 0.2 and 0.3.
    assert found.squares[0] == pytest.approx(8 * 0.05**2)
    assert found.kept == 6
    assert trimmed_mean(logs[:, :7]).kept == 7


def test_one_recording_a_side_is_held_against_what_all_modules_do() -> None:
    random = np.random.default_rng(4)
    logs = random.normal(0, 0.02, (101, 2))

    found = measure_spread(logs, np.full(101, 0.01**2), 26, 1)

    assert found.factor == pytest.approx(2, abs=0.5)
    assert 3 < found.freedom < SINGLE_FREEDOM


def test_one_recording_a_side_in_which_everything_changed_is_not_all_noise() -> None:
    logs = np.array([[0.0, 0.4 * (module % 2)] for module in range(20)])

    found = measure_spread(logs, np.full(20, 0.002**2), 26, 1)

    assert found.spread.max() <= 0.05
