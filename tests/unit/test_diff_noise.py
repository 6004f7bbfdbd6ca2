"""Statistics of comparisons: typical times, the machine's speed, and the noise of modules."""

from __future__ import annotations

import numpy as np
import pytest

from modtrace.compare.noise import (
    SIZE_FREEDOM,
    Estimate,
    estimate,
    machine_speeds,
    noise_of,
    student_quantile,
    trimmed_mean,
)
from modtrace.compare.run_times import typical


def test_typical_is_the_mean_of_the_faster_half() -> None:
    # The fastest and the 10 slowest of 20 times are left out.
    times = np.array([*range(101, 111), *range(1000, 1010)])

    assert typical(times).time_ns == sum(range(102, 111)) / 9
    assert typical(np.array([7])).time_ns == 7
    assert typical(np.array([8, 4])).time_ns == 4


def test_typical_does_not_change_with_delays_of_single_steps() -> None:
    random = np.random.default_rng(0)
    quiet = random.normal(100_000, 3_000, 200).astype(np.int64)
    disturbed = np.where(random.random(200) < 0.2, 5 * quiet, quiet)

    assert typical(disturbed).time_ns == pytest.approx(typical(quiet).time_ns, rel=0.01)


@pytest.mark.parametrize("count", [30, 200])
def test_variance_of_typical_is_the_variance_of_many_repetitions(count: int) -> None:
    random = np.random.default_rng(1)
    repetitions = [typical(random.lognormal(12, 0.1, count).astype(np.int64)) for _ in range(2_000)]

    means = np.array([one.time_ns for one in repetitions])
    assert np.mean([one.variance for one in repetitions]) == pytest.approx(means.var() / means.mean() ** 2, rel=0.15)


@pytest.mark.parametrize(
    ("outside", "freedom", "t"),
    # Quantiles from tables of Student's distribution.
    [(0.05, 2, 4.303), (0.01, 5, 4.032), (0.05, 10, 2.228), (0.001, 8, 5.041), (0.0001, 6, 9.082), (0.05, 1e9, 1.960)],
)
def test_student_quantile_equals_the_tables(outside: float, freedom: float, t: float) -> None:
    assert student_quantile(outside, freedom) == pytest.approx(1.02 * t, rel=0.02)


def test_a_recording_with_other_load_is_left_out() -> None:
    logs = np.array([0.1, 0.2, 0.3, np.nan, 0.2, 0.3, 0.2, 0.3, 5.0])

    mean, squares, kept = trimmed_mean(logs)

    assert mean == pytest.approx(0.25)
    # 0.1 and 5 are replaced by 0.2 and 0.3.
    assert squares == pytest.approx(8 * 0.05**2)
    assert kept == 6
    assert trimmed_mean(logs[:8])[2] == 7


def test_the_machines_factor_is_that_of_most_of_the_time() -> None:
    # Ten modules of 10 µs became 5 % faster; two of 1 ms, with 95 % of the time, did not change.
    usual = np.log([1e6, 1e6, *[1e4] * 10])
    logs = np.stack([usual, usual + np.array([0, 0, *[-0.05] * 10])], axis=1)

    assert machine_speeds(logs).tolist() == [0, 0]
    assert machine_speeds(logs[:5]).tolist() == [0, 0], "too few modules"
    slower = np.stack([usual, usual + 0.2], axis=1)
    assert machine_speeds(slower) == pytest.approx([-0.1, 0.1])
    strange = np.column_stack([logs, np.full(len(logs), np.nan)])
    assert machine_speeds(strange).tolist() == [0, 0, 0], "a recording with no module of the others"


def test_a_change_of_one_module_is_not_the_machine() -> None:
    usual = np.log([1e6, *[1e4] * 10])
    logs = np.stack([usual, usual + np.array([0.4, *[0] * 10])], axis=1)

    assert machine_speeds(logs) == pytest.approx([0, 0])


def test_a_change_of_a_parent_with_its_children_is_not_the_machine() -> None:
    # Three modules with 99.7 % of the time became eight times as slow, and the machine by 0.2.
    usual = np.log([*[1e6] * 3, *[1e3] * 9])
    logs = np.stack([usual, usual + np.array([np.log(8)] * 3 + [0] * 9) + 0.2], axis=1)

    assert machine_speeds(logs) == pytest.approx([-0.1, 0.1])


def test_the_machines_factor_is_common_to_most_time_and_most_modules() -> None:
    def speeds(large: float, small: float) -> list[float]:
        usual = np.log([*[1e6] * 2, *[1e4] * 10])
        logs = np.stack([usual, usual + np.array([large] * 2 + [small] * 10)], axis=1)
        ratios: list[float] = machine_speeds(logs).tolist()
        return ratios

    # Two modules have 95 % of the time. Half of a change is on each side of the mean.
    assert speeds(0.02, 0.06) == pytest.approx([-0.01, 0.01])
    assert speeds(0.06, 0.02) == pytest.approx([-0.01, 0.01])
    assert speeds(-0.06, 0.02) == [0, 0]


def test_noise_belongs_to_modules_of_one_size() -> None:
    random = np.random.default_rng(2)
    sizes, deviation = np.repeat([np.log(1e4), np.log(1e6)], 40), np.repeat([0.1, 0.01], 40)
    estimates = [estimate(*random.normal(0, one, (2, 6))) for one in deviation]

    variance, freedom = noise_of(sizes, np.full(80, 1e-6), estimates)

    assert set(freedom) == {10 + SIZE_FREEDOM}
    assert np.sqrt(variance[:40].mean()) == pytest.approx(0.1, rel=0.1)
    assert np.sqrt(variance[40:].mean()) == pytest.approx(0.01, rel=0.1)


def test_a_module_of_a_unique_size_has_only_its_own_noise() -> None:
    alone = Estimate(0.0, 0.0, 8 * 0.01**2, 8, 0.4)
    others = [Estimate(0.0, 0.0, 8 * 0.1**2, 8, 0.4)] * 9

    variance, freedom = noise_of(np.log([1e6, *[1e4] * 9]), np.full(10, 1e-6), [alone, *others])

    assert (variance[0], freedom[0]) == (pytest.approx(0.01**2), 8)
    assert freedom[1] == 8 + SIZE_FREEDOM


def test_noise_is_at_least_the_noise_of_the_steps() -> None:
    still = [Estimate(0.0, 0.0, 0.0, 8, 0.4)] * 9

    assert noise_of(np.zeros(9), np.full(9, 0.0004), still)[0].tolist() == [0.0004] * 9


@pytest.mark.parametrize("runs", [2, 3, 5, 12])
def test_equal_programs_differ_as_seldom_as_promised(runs: int) -> None:
    random = np.random.default_rng(3)
    wrong = 0
    for _ in range(200):
        # The modules' variances are distributed as with 8 degrees of freedom.
        deviation = 0.02 * np.sqrt(8 / random.chisquare(8, 60))
        estimates = [estimate(*(random.normal(0, one, (2, runs)))) for one in deviation]
        variance, freedom = noise_of(random.uniform(9, 14, 60), np.full(60, 1e-6), estimates)
        error = np.sqrt(variance * [one.recordings for one in estimates])
        reach = [student_quantile(0.05 / 60, one) for one in freedom]
        wrong += bool((np.abs([one.difference for one in estimates]) > reach * error).any())

    assert wrong <= 200 * 0.08


def test_one_recording_per_side_has_the_noise_of_modules_of_its_size() -> None:
    random = np.random.default_rng(4)
    estimates = [estimate(*random.normal(0, 0.02, (2, 1))) for _ in range(101)]

    variance, freedom = noise_of(np.linspace(9, 14, 101), np.full(101, 0.001**2), estimates)

    assert np.sqrt(np.median(variance)) == pytest.approx(0.02, rel=0.25)
    assert set(freedom) == {SIZE_FREEDOM}


def test_one_recording_per_side_has_the_noise_of_its_size_if_there_are_enough_modules() -> None:
    # Nine modules of 10 µs differ by 0.2 between the sides, nine of 1 ms by 0.02; the variance is half the square.
    estimates = [estimate(np.zeros(1), np.full(1, 0.2))] * 9 + [estimate(np.zeros(1), np.full(1, 0.02))] * 9
    sizes = np.repeat(np.log([1e4, 1e6]), 9)

    variance, _ = noise_of(sizes, np.full(18, 1e-6), estimates)

    assert variance[:9] == pytest.approx(0.2**2 / 2 / 0.455)
    assert variance[9:] == pytest.approx(0.02**2 / 2 / 0.455)


def test_noise_follows_the_variance_of_the_steps() -> None:
    # The variance between recordings is four times the variance of the steps; for the last module it is unknown.
    within = np.array([*[1e-4] * 8, 9e-4])
    estimates = [Estimate(0.0, 0.0, 4 * 8e-4, 8, 0.4)] * 8 + [estimate(np.zeros(1), np.zeros(1))]

    # Half of the expected variance follows the module's own steps: (9 + 1) / 2.
    median = 4e-4 / (1 - 2 / 72) ** 3
    assert noise_of(np.zeros(9), within, estimates)[0][8] == pytest.approx(5 * median)


def test_one_recording_per_side_does_not_show_whether_most_modules_changed() -> None:
    estimates = [estimate(np.zeros(1), np.full(1, 0.4 * (module % 3 > 0))) for module in range(21)]

    assert np.sqrt(noise_of(np.zeros(21), np.full(21, 0.002**2), estimates)[0].min()) > 0.2


def test_a_single_module_with_one_recording_per_side_has_the_default_noise() -> None:
    variance, freedom = noise_of(np.zeros(1), np.full(1, 1e-6), [estimate(np.zeros(1), np.ones(1))])

    assert (variance.tolist(), freedom.tolist()) == ([0.05**2], [SIZE_FREEDOM])
