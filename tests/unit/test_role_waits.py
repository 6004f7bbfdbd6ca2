"""Waits of roles for other roles, in jobs with known culprits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import modtrace
from modtrace.ranks import JobTime, find_rank_recordings
from modtrace.ranks.dataset_tables import query
from modtrace.ranks.pack import pack
from modtrace.ranks.slow.late_steps import IN_RANGE
from modtrace.ranks.slow.role_waits import RoleTimes, find_role_waits
from tests.support.ppo_job import PpoCulprit, write_ppo_job

ROLLOUT = [("decode", 6), ("LM.body", 6), ("LM.head", 3), ("sample", 4)]
TRAINER = [("Net.up", 3), ("Net.down", 4), ("Net.up backward", 3), ("advantages", 3)]
CULPRITS = [
    *(PpoCulprit("rollout", rank, place, ms) for rank in (0, 1) for place, ms in ROLLOUT),
    *(PpoCulprit("trainer", rank, place, ms) for rank in (0, 1) for place, ms in TRAINER),
    *(PpoCulprit("driver", 0, place, ms) for place in ("prompts", "reward") for ms in (4, 12)),
]
BY_MESSAGES = pytest.mark.parametrize("by_messages", [True, False])


def names(run: modtrace.ranks.slow.SlowRun) -> set[tuple[str, str, str]]:
    """The processes that others wait for, and where those take longer."""
    return {(one.waits_for, one.fqn, one.phase) for one in run.waits if not one.waits_for.endswith("s")}


@BY_MESSAGES
def test_a_sentence_says_who_waits_how_long_for_whom_and_why(by_messages: bool, tmp_path: Path) -> None:
    """A step is 59.7 ms: 0.5 of prompts, 38.2 of decoding, 0.5 of rewards, 20 of training, five times 0.1 to hand on.

    That counts to who gets it. What waits for training in the last of 23 steps is not there any more.
    """
    write_ppo_job(tmp_path, PpoCulprit("rollout", 0, "sample", 10), by_messages=by_messages, noise=0)

    run = modtrace.find_slow_ranks(tmp_path)

    rollout = "rollout 3" if by_messages else "rollout 0"
    assert run.sentences[1:3] == [
        f"driver waits 64 % of a step for {rollout}: sample is 4.3 times as long there",
        f"trainers wait 64 % of a step for {rollout}: sample is 4.3 times as long there",
    ]
    trainers, rollouts = run.to_dict()["waits"][1], run.to_dict()["waits"][3]
    assert trainers["ns_per_step"] == pytest.approx(38_300_000, abs=10)
    assert trainers["ratio"] == pytest.approx((3 + 10) / 3)
    assert (rollouts["role"], rollouts["waits_for"], rollouts["ratio"]) == ("rollouts", "trainers", None)
    # What is only seen by its ranges and modules was last seen before its all-reduce.
    assert rollouts["ns_per_step"] == pytest.approx((20_200_000 - (not by_messages) * 100_000) * 22 / 23, abs=10)
    assert f"trainers  {rollout}" in run.to_text()


@BY_MESSAGES
def test_no_rank_is_called_even_where_roles_wait(by_messages: bool, tmp_path: Path) -> None:
    """The rollouts end no steps, so that only the trainers are compared with each other."""
    write_ppo_job(tmp_path, PpoCulprit("rollout", 0, "sample", 10), by_messages=by_messages, noise=0)

    run = modtrace.find_slow_ranks(tmp_path)

    even = "apart from waits between roles, no rank is slower than the others again and again"
    assert run.sentences[5:] == (
        [even]
        if by_messages
        else ["trainer: 2 ranks, 24 steps; ranks that wait for each other read one clock", f"trainer: {even}"]
    )
    roles = run.to_dict()["roles"]
    assert {role: roles[role]["sentences"][1:] for role in roles} == (
        {} if by_messages else {"driver": [], "rollout": [], "trainer": [even]}
    )


@BY_MESSAGES
def test_a_wait_for_earlier_work_is_not_in_the_first_counted_step(by_messages: bool, tmp_path: Path) -> None:
    waits = []
    for warm_up_ms in (1, 5_000):
        folder = tmp_path / str(warm_up_ms)
        folder.mkdir()
        write_ppo_job(folder, by_messages=by_messages, noise=0, warm_up_ms=warm_up_ms)
        waits.append(modtrace.find_slow_ranks(folder).waits)

    assert waits[0] == waits[1]
    assert sum(one.share for one in waits[0] if one.role == "rollouts") < 1


def test_work_outside_modules_and_ranges_is_reported_as_such(tmp_path: Path) -> None:
    """10 ms, twice 0.5 in ranges, and what it is handed and hands on."""
    write_ppo_job(tmp_path, PpoCulprit("driver", 0, "", 10), by_messages=True, noise=0)

    run = modtrace.find_slow_ranks(tmp_path)

    assert "trainers wait 19 % of a step for driver 0, mostly outside modules and ranges" in run.sentences
    [wait] = [one for one in run.waits if (one.role, one.waits_for) == ("trainers", "driver 0")]
    assert (wait.ns_per_step, wait.fqn, wait.phase) == (11_200_000, "", "")


@BY_MESSAGES
def test_a_process_is_named_for_what_it_does_in_no_module_and_no_range(by_messages: bool, tmp_path: Path) -> None:
    """10 ms more in each step, where the other trainer is for none."""
    write_ppo_job(tmp_path, PpoCulprit("trainer", 1, "", 10), by_messages=by_messages)

    assert names(modtrace.find_slow_ranks(tmp_path)) == {("trainer 2" if by_messages else "trainer 1", "", "")}


def test_the_only_process_of_a_role_is_not_named_for_what_any_takes(tmp_path: Path) -> None:
    """3.2 ms of 50 in no module and no range, twice 0.5 in ranges: 8 % of a step."""
    write_ppo_job(tmp_path, PpoCulprit("driver", 0, "", 3), by_messages=True, noise=0)

    assert {one.waits_for for one in modtrace.find_slow_ranks(tmp_path).waits} == {"rollouts", "trainers"}


@BY_MESSAGES
def test_twenty_culprits_are_named_and_nobody_else_is(by_messages: bool, tmp_path: Path) -> None:
    assert len(CULPRITS) == 20
    for number, culprit in enumerate(CULPRITS):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_ppo_job(folder, culprit, by_messages=by_messages, seed=number)

        rank = culprit.rank + {"driver": 0, "trainer": 1, "rollout": 3}[culprit.role] * by_messages
        place, _, phase = culprit.place.partition(" ")
        phase = phase or ("forward" if "." in place else "range")
        assert names(modtrace.find_slow_ranks(folder)) == {(f"{culprit.role} {rank}", place, phase)}, culprit


@BY_MESSAGES
def test_nobody_is_named_in_quiet_jobs(by_messages: bool, tmp_path: Path) -> None:
    for seed in range(5):
        (tmp_path / str(seed)).mkdir()
        write_ppo_job(tmp_path / str(seed), by_messages=by_messages, seed=seed)

        run = modtrace.find_slow_ranks(tmp_path / str(seed))

        assert {one.waits_for for one in run.waits} == {"rollouts", "trainers"}


def test_a_dataset_says_the_same_and_has_the_ranges_around_modules(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    write_ppo_job(folder, PpoCulprit("rollout", 1, "LM.head", 5), by_messages=True)
    files = find_rank_recordings(folder)

    pack(files, tmp_path / "dataset", steps_per_bucket=100, processes=1)

    assert len(JobTime(files).ranks) == 5
    told = modtrace.find_slow_ranks(folder)
    assert modtrace.find_slow_ranks(tmp_path / "dataset").sentences == told.sentences
    assert names(told) == {("rollout 4", "LM.head", "forward")}
    sql = "SELECT range, category, apart, count(*) AS times FROM ranges WHERE rank = 3 GROUP BY ALL ORDER BY range"
    assert query(tmp_path / "dataset", sql).to_pylist() == [
        {"range": "range decode", "category": "user", "apart": False, "times": 24},
        {"range": "range sample", "category": "user", "apart": True, "times": 144},
    ]


def test_a_process_with_work_that_no_other_does_is_named_even_if_it_varies() -> None:
    state = np.array([20, 90, 25, 250, 140, 125, 115, 85, 30, 130, 75, 120, 25, 30, 80, 240], float) * 1e6
    made = np.append(4e9, np.zeros(15))
    processes = {0: ("driver", 0), 1: ("trainer", 0), 2: ("trainer", 1)}
    state_place, made_place = ("Trainer.state", IN_RANGE), ("Trainer.__init__", IN_RANGE)
    took = {(1, state_place): state, (1, made_place): made, (2, made_place): 0.5 * made}
    times = RoleTimes(processes, (state + made + 5e6).astype(np.int64), {(0, 1): state + made}, took)

    waits = find_role_waits(times)

    assert [(wait.role, wait.waits_for, wait.fqn, wait.ratio) for wait in waits] == [
        ("driver", "trainer 0", "Trainer.state", None)
    ]


@pytest.mark.parametrize("count", [60, 15, 9])
def test_a_process_that_saves_in_each_third_step_is_named_beside_a_slightly_late_one(count: int) -> None:
    """480 ms for 20 of 60 steps, and 2 ms for 12 others, in steps of 100 ms else; or for 5 and 3, or for 3 and 2."""
    steps = np.arange(count)
    save, late = (steps % 3 == 0) * 480e6, (steps % 5 == 1) * 2e6
    processes = {0: ("driver", 0), 1: ("trainer", 0), 2: ("trainer", 1)}
    net, saving = ("Net", "forward"), ("saving", IN_RANGE)
    took = {(1, net): np.full(count, 5e6), (1, saving): save, (2, net): 5e6 + late}
    waited = {(0, 1): 5e6 + save, (0, 2): 5e6 + late}

    [wait] = find_role_waits(RoleTimes(processes, (100e6 + save).astype(np.int64), waited, took))

    assert (wait.waits_for, wait.fqn, wait.ratio) == ("trainer 0", "saving", None)


def test_two_savings_name_no_process_but_the_work_of_all_trainers_is_named() -> None:
    """480 ms for 2 of 30 steps: that may be at the end of an epoch, or by chance."""
    save = np.zeros(30)
    save[[9, 19]] = 480e6
    processes = {0: ("driver", 0), 1: ("trainer", 0), 2: ("trainer", 1)}
    net, saving = ("Net", "forward"), ("saving", IN_RANGE)
    took = {(1, net): np.full(30, 45e6), (1, saving): save, (2, net): np.full(30, 45e6)}
    waited = {(0, 1): 45e6 + save}

    [wait] = find_role_waits(RoleTimes(processes, (100e6 + save).astype(np.int64), waited, took))

    assert (wait.waits_for, wait.fqn, wait.ratio) == ("trainers", "Net", None)


@pytest.mark.parametrize("others_ms", [0, 1, 60])
def test_a_process_that_is_slow_in_each_fourth_step_is_named_if_all_are_a_little_slow(others_ms: float) -> None:
    """150 ms more for 6 of 24 steps, where both take 2 ms; unless the other takes 60 more for three."""
    steps = np.arange(24)
    long, other = (steps % 4 == 1) * 150e6, (steps % 8 == 2) * others_ms * 1e6
    processes = {0: ("driver", 0), 1: ("rollout", 0), 2: ("rollout", 1)}
    generate, detokenize = ("generate", IN_RANGE), ("detokenize", IN_RANGE)
    took = {(rank, generate): np.full(24, 50e6) for rank in (1, 2)}
    took |= {(1, detokenize): 2e6 + long, (2, detokenize): 2e6 + other}
    waited = {(0, 1): 52e6 + long, (0, 2): other}

    [wait] = find_role_waits(RoleTimes(processes, (100e6 + long + other).astype(np.int64), waited, took))

    named = ("rollouts", "generate") if others_ms == 60 else ("rollout 0", "detokenize")
    assert (wait.waits_for, wait.fqn) == named


@pytest.mark.parametrize(("more_ms", "named"), [(3, "trainers"), (9, "trainer 0")])
def test_a_process_that_is_always_a_little_slower_is_not_the_awaited_one(more_ms: float, named: str) -> None:
    """3 ms of steps of 103 while all wait 30 for the trainers: the first of them hands on the weights."""
    more, none = np.full(24, more_ms * 1e6), np.zeros(24)
    processes = {0: ("driver", 0), 1: ("trainer", 0), 2: ("trainer", 1)}
    net, hand_on = ("Net", "forward"), ("hand on", IN_RANGE)
    took = {(1, net): none + 30e6, (2, net): none + 30e6, (1, hand_on): none + 1e6 + more, (2, hand_on): none + 1e6}

    [wait] = find_role_waits(RoleTimes(processes, (100e6 + more).astype(np.int64), {(0, 1): 30e6 + more}, took))

    assert wait.waits_for == named
