"""Late ranks of jobs with known culprits; and each stage of the search, worked out by hand."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import modtrace
from modtrace import Timeline
from modtrace._arrays import median_of_others
from modtrace._tables import counted
from modtrace.cli.group import group as commands
from modtrace.live.triggers import parse_conditions
from modtrace.live.watch import Watcher
from modtrace.live.windows import KEPT, KeepLimits, KeptFolder, WindowKeeper
from modtrace.ranks.rank_tables import StepTable, step_end_table
from modtrace.ranks.slow import SlowRun, find_late_in_rings, find_slow_ranks, worst_ranks
from modtrace.ranks.slow.findings import step_durations
from modtrace.ranks.slow.late_steps import NO_RANK, ModuleExcess, StepFinding, often_late, probability_of_at_least
from modtrace.ranks.slow.slow_run import LateModule, LateRank, PartOfRun, join_parts, png
from modtrace.ranks.sync_points import inferred_waits
from modtrace.ring import Kind
from modtrace.ring.slot_format import COLLECTED_BITS, GENERATION_BITS, NO_NAME
from modtrace.timeline import Mark, Slices
from tests.support.event_script import WALL, EventScript
from tests.support.made_job import Culprit, MadeJob, Template
from tests.support.slow_ranks import (
    ALL_REDUCE,
    LATE_IN,
    MS,
    make_template,
    template_with_ranges,
    write_steps,
)
from tests.support.timelines import build_timeline

STEPS = 12
MAX_KEPT = 3


UNSEEN = {
    "python": (
        "the Python engine does not see the collectives of DDP's reducer, or functional ones, in which ranks wait; "
        "record with the native engine (modtrace build)"
    ),
    "device": (
        "a device runs the collectives, and only the times at which threads called them are known; merge a profile "
        "of each rank, or record its device times"
    ),
}


@pytest.mark.parametrize("unseen", [*UNSEEN, ""])
def test_where_waits_are_not_seen_it_cannot_tell_who_is_slower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unseen: str
) -> None:
    if unseen == "device":
        monkeypatch.setitem(write_steps.__globals__, "ALL_REDUCE", '["all_reduce", "0", -1, "cuda"]')
    for rank in range(2):
        engine = "python" if rank and unseen == "python" else "native"
        script = EventScript(1024, tmp_path / f"{rank}.modtrace", {"rank": rank, "pid": 1, "engine": engine})
        script.note({"kind": "clock", "clock": "host"})
        write_steps(script, sharded=False)
        script.close()
    run = find_slow_ranks(tmp_path)

    told = "no rank is slower than the others again and again"
    told = f"cannot tell whether a rank is slower: {UNSEEN[unseen]}" if unseen else told
    assert run.sentences == ["2 ranks, 6 steps; ranks that wait for each other read one clock", told]
    assert run.to_dict()["unseen"] == UNSEEN.get(unseen, "")
    late = LateRank(1, 6, 6 * MS, 6 * MS, is_slow=True, modules=())
    others = [line for line in replace(run, late=[late]).sentences if line.startswith("cannot tell whether other")]
    assert others == ([f"cannot tell whether other ranks are slower too: {UNSEEN[unseen]}"] if unseen else [])
    packed = CliRunner().invoke(commands, ["ranks", "pack", str(tmp_path), "-o", str(tmp_path / "dataset")])
    assert packed.exit_code == 0, packed.output
    assert find_slow_ranks(tmp_path / "dataset").sentences == run.sentences


PLANTED = [
    (2 + number % 3, number % (2 + number % 3), *LATE_IN[number % 6], (1, 9, 1000)[number // 6 % 3], bool(number & 1))
    for number in range(20)
]
"""Number of ranks; the late rank, its module and phase; its period in 40 steps (1000: once); whether it is sharded."""


@pytest.mark.parametrize(
    ("ranks", "rank", "fqn", "phase", "every", "sharded"),
    [pytest.param(*one, marks=[pytest.mark.full] * (number % 3 > 0)) for number, one in enumerate(PLANTED)],
)
def test_a_late_rank_is_named_with_what_made_it_late(
    tmp_path: Path, ranks: int, rank: int, fqn: str, phase: str, every: int, sharded: bool
) -> None:
    culprit = Culprit(rank, fqn, phase, 60 * MS, every, first=20 if every > 40 else 0)
    job = MadeJob(template_with_ranges(tmp_path, sharded=sharded), ranks, 40, [culprit], noise=0.02, seed=rank)

    run = find(tmp_path / "run", job)

    place = fqn if phase == "range" else f"{fqn} {phase}"
    assert named_by(run.sentences) == [(rank, place)]
    kept = kept_by_watch(tmp_path / "run", "step > 3x; step > 30ms")
    assert len(kept) == (1 if every > 40 else MAX_KEPT)
    for folder, sentences in kept.items():
        assert folder.startswith(f"rank{rank}-step")
        assert re.fullmatch(
            rf"rank {rank} came late in step \d+ by [56]\d(\.\d)? ms, in {re.escape(place)}", sentences[0]
        )


@pytest.mark.parametrize("seed", range(5))
def test_balanced_ranks_are_not_named(tmp_path: Path, seed: int) -> None:
    job = MadeJob(template_with_ranges(tmp_path, sharded=seed % 2 == 1), 2 + seed % 3, 40, seed=seed)

    assert named_by(find(tmp_path / "run", job).sentences) == []
    kept = kept_by_watch(tmp_path / "run", "step > 1ms")
    assert kept
    assert [folder for folder in kept if folder.startswith("rank")] == []


def find_of_three(folder: Path, work: Callable[[EventScript, int, int, bool], int]) -> set[tuple[ModuleExcess, ...]]:
    """Return the modules that make rank 1 of three late by 7 ms in each of 6 steps; no other rank is late.

    `work` writes what a rank does, from a moment on, and returns when it is done: the number of the step, and whether
    it is the late rank, say what.
    """
    for rank in range(3):
        script = EventScript(256, folder / f"{rank}.modtrace", {"rank": rank, "pid": 1})
        script.note({"kind": "clock", "clock": "a"})
        script.note_group("0", "0-2", "default_pg")
        for step in range(6):
            begin = 10**16 + 20 * MS * step
            done = work(script, begin, step, rank == 1)
            script.collective(done, Kind.COLLECTIVE_ENTER, ALL_REDUCE, step)
            script.collective(begin + 10 * MS, Kind.COLLECTIVE_DONE, ALL_REDUCE, step)
            script.collective(begin + 10 * MS, Kind.COLLECTIVE_EXIT, ALL_REDUCE, 8)
            script.step(begin + 11 * MS, step)
        script.close()
    run = find_slow_ranks(folder)
    assert [(step.rank, step.cost_ns) for step in run.steps[1:]] == [(1, 7 * MS)] * 5
    return {step.modules for step in run.steps[1:]}


def test_the_lines_of_a_late_ranks_time_outside_modules_are_named(tmp_path: Path) -> None:
    gaps = [["train.py:31", "optimizer", "train.py:24", "forward", "other", [7 * MS, 8 * MS]]]
    gaps.append(["train.py:24", "forward", "train.py:29", "backward", "loss", [MS, MS]])

    def work(script: EventScript, now: int, step: int, late: bool) -> int:
        if late and step == 5:
            script.note({"kind": "steps", "steps": 2, "notes": json.dumps({"gaps": gaps})})
        return now + MS + 7 * MS * late

    # From the collective of the step before on, 10 ms.
    assert find_of_three(tmp_path, work) == {(("", "", 7 * MS, 18 * MS),)}
    run = find_slow_ranks(tmp_path)
    said = ", mostly in (outside modules), longest between train.py:31 (optimizer) and train.py:24 (forward);"
    assert said in run._rank_sentence(run.late[0])


def test_a_collection_is_not_counted_to_the_module_or_the_range_around_it(tmp_path: Path) -> None:
    # The late rank collects for 5 of the 7 ms of its module, and for 2 of the 3 ms of its loader; others take 2 and 1.
    def work(script: EventScript, now: int, step: int, late: bool) -> int:
        script.collective(now, Kind.RANGE_BEGIN, '["data loading", "next"]', step)
        if late:
            script.event(now + 2 * MS, Kind.COLLECTION, NO_NAME, 2 * MS << GENERATION_BITS + COLLECTED_BITS)
        now += MS + 2 * MS * late
        script.collective(now, Kind.RANGE_END, '["data loading", "next"]', step)
        script.enter(now, script.name("Net"), step)
        if late:
            script.event(now + 6 * MS, Kind.COLLECTION, NO_NAME, 5 * MS << GENERATION_BITS + COLLECTED_BITS)
        now += 2 * MS + 5 * MS * late
        script.exit(now, script.name("Net"), step)
        return now

    assert find_of_three(tmp_path, work) == {(("garbage collection", "range", 7 * MS, 7 * MS),)}


def test_a_compilation_in_a_module_counts_as_compilation(tmp_path: Path) -> None:
    # A save begins together with it, and takes 2 of its 7 ms: of the two, compiling counts.
    def work(script: EventScript, now: int, step: int, late: bool) -> int:
        script.enter(now, script.name("Net"), step)
        if late:
            for index, (text, after) in enumerate((('["compile", "f"]', 7), ('["saving", "s"]', 2))):
                script.collective(now, Kind.RANGE_BEGIN, text, 2 * step + index)
                script.collective(now + after * MS, Kind.RANGE_END, text, 2 * step + index)
        script.exit(now + MS + 7 * MS * late, script.name("Net"), step)
        return now + MS + 7 * MS * late

    assert find_of_three(tmp_path, work) == {(("compilation", "range", 7 * MS, 7 * MS),)}


def test_a_save_on_a_thread_of_its_own_makes_no_rank_late(tmp_path: Path) -> None:
    def work(script: EventScript, now: int, step: int, late: bool) -> int:
        script.on_thread(other := script.add_thread("saves", tid=2))
        script.collective(now, Kind.RANGE_BEGIN, '["saving", "s"]', step)
        script.on_thread(0)
        script.enter(now, script.name("Net"), step)
        script.exit(now + MS + 7 * MS * late, script.name("Net"), step)
        script.on_thread(other)
        script.collective(now + MS + 7 * MS * late, Kind.RANGE_END, '["saving", "s"]', step)
        script.on_thread(0)
        return now + MS + 7 * MS * late

    assert find_of_three(tmp_path, work) == {(("Net", "forward", 7 * MS, 8 * MS),)}


def test_a_module_that_is_slow_on_all_ranks_is_not_named_for_the_last_one(tmp_path: Path) -> None:
    took = (300, 330, 300)
    culprits = [Culprit(rank, "saving", "range", ms * MS, 1000, first=20) for rank, ms in enumerate(took)]

    run = find(tmp_path / "run", MadeJob(template_with_ranges(tmp_path), 3, 40, culprits, noise=0.02))

    assert named_by(run.sentences) == [(1, "saving")]
    assert run.late[0].cost_ns == pytest.approx(30 * MS, rel=0.1)
    ((folder, sentences),) = kept_by_watch(tmp_path / "run", "step > 3x").items()
    assert folder == "step20-step"
    assert "300 ms saving (torch.save)" in sentences[-1]


def kept_by_watch(folder: Path, conditions: str) -> dict[str, list[str]]:
    """Return, by folder, the reasons of the windows that `modtrace watch` keeps of an ended job; each file has them."""
    keeper = WindowKeeper(
        KeptFolder(folder / "kept"), KeepLimits(pause_ns=0, max_kept=MAX_KEPT), lambda line: None, find_late_in_rings
    )
    Watcher([str(folder)], parse_conditions(conditions), keeper, lambda line: None).run(0.0)
    kept: dict[str, list[str]] = {}
    for window in (folder / "kept").iterdir():
        first, *others = (modtrace.load(file).metadata[KEPT] for file in window.iterdir())
        assert others == [first] * len(others)
        assert isinstance(first, list)
        kept[window.name] = first
    return kept


def named_by(sentences: Iterable[str]) -> list[tuple[int, str]]:
    """The ranks that sentences call late, and in what."""
    named = (re.match(r"rank (\d+) was late in .* mostly in (.*); without", line) for line in sentences)
    return [(int(match[1]), match[2]) for match in named if match]


def test_a_rank_that_is_late_in_its_data_loader_is_named_with_that(tmp_path: Path) -> None:
    job = MadeJob(template_with_ranges(tmp_path), 4, STEPS, [Culprit(3, "data loading", "range", 5 * MS)], noise=0.02)

    run = find(tmp_path / "run", job)

    assert [(one.rank, one.is_slow) for one in run.late] == [(3, True)]
    for step in run.steps[1:]:
        assert [(module.fqn, module.phase) for module in step.modules[:1]] == [("data loading", "range")]
        assert abs(step.modules[0].excess_ns - 5 * MS) <= MS
    (sentence,) = (line for line in run.sentences if line.startswith("rank 3 "))
    assert ", mostly in data loading; without this delay" in sentence
    assert run.to_csv().splitlines()[1].split(",")[3] == "data loading"
    text = run.to_text(1).splitlines()
    assert text[: len(run.sentences)] == run.sentences
    assert [line.split()[0] for line in text if line.startswith(("rank ", "module", "step"))][-3:] == [
        "rank",
        "module",
        "step",
    ]
    with pytest.raises(modtrace.WriteError, match=r"the report is an HTML page; give it a name that ends in \.html$"):
        run.save(tmp_path / "late.txt")


@pytest.fixture(params=["ddp", "fsdp"])
def template(request: pytest.FixtureRequest, tmp_path: Path) -> Template:
    return make_template(tmp_path / "one.modtrace", sharded=request.param == "fsdp")


def find(folder: Path, job: MadeJob) -> SlowRun:
    folder.mkdir()
    job.write(folder)
    return find_slow_ranks(folder)


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize(("ranks", "group_size"), [(2, 0), (4, 0), (24, 4)])
def test_the_rank_and_the_module_that_were_made_slow_are_named_with_what_it_cost(
    tmp_path: Path, template: Template, phase: str, ranks: int, group_size: int
) -> None:
    culprit = Culprit(ranks - 1, "Net.second", phase, 2 * MS)

    run = find(tmp_path / "run", MadeJob(template, ranks, STEPS, [culprit], group_size=group_size, noise=0.02))

    # What came before the first collective of a recording is not known.
    for step in run.steps[1:]:
        assert (step.verdict, step.rank) == ("late", culprit.rank)
        assert (step.modules[0].fqn, step.modules[0].phase) == ("Net.second", phase)
        assert abs(step.cost_ns - culprit.extra_ns) <= 0.2 * culprit.extra_ns
        assert abs(step.modules[0].excess_ns - culprit.extra_ns) <= 0.2 * culprit.extra_ns
    assert [(one.rank, one.is_slow) for one in run.late] == [(culprit.rank, True)]
    assert worst_ranks(run, 1) == [culprit.rank]


def test_a_rank_of_two_that_is_late_by_varying_times_is_named(tmp_path: Path, template: Template) -> None:
    culprits = [Culprit(1, "Net.second", "backward", (2 + 3 * every) * MS, every) for every in (1, 2, 3, 5)]

    run = find(tmp_path / "run", MadeJob(template, 2, 24, culprits))

    assert {(step.verdict, step.rank) for step in run.steps[1:]} == {("late", 1)}
    assert {step.modules[0].fqn for step in run.steps[1:]} == {"Net.second"}


def test_now_and_then_is_not_slow_and_balanced_ranks_are_not_accused(tmp_path: Path, template: Template) -> None:
    balanced = find(tmp_path / "balanced", MadeJob(template, 4, 40))
    once = find(tmp_path / "once", MadeJob(template, 4, 40, [Culprit(2, "Net.first", "forward", 5 * MS, every=20)]))

    assert [one for one in balanced.late if one.is_slow] == []
    assert sum(step.verdict == "late" for step in balanced.steps) <= 2
    assert (once.steps[20].verdict, once.steps[20].rank, once.steps[20].modules[0].fqn) == ("late", 2, "Net.first")
    assert [one for one in once.late if one.is_slow] == []


@pytest.mark.parametrize(("ranks", "seed"), [(2, 1), (3, 2), (4, 0)])
def test_a_rank_that_is_late_in_nearly_every_step_is_named_though_all_vary_much(
    tmp_path: Path, ranks: int, seed: int
) -> None:
    template = template_with_ranges(tmp_path)
    culprit = Culprit(1, "data loading", "range", 9 * MS)

    run = find(tmp_path / "run", MadeJob(template, ranks, 24, [culprit], noise=1.0, seed=seed))

    assert named_by(run.sentences) == [(1, "data loading")]
    late = [step for step in run.steps if step.verdict == "late"]
    assert [step.rank for step in late] == [1] * len(late)
    # Their limit is 3 deviations: few steps alone would be late.
    assert sum(step.cost_ns > 2 * step.noise_ns for step in late) < len(late) / 2
    balanced = find(tmp_path / "balanced", MadeJob(template, ranks, 24, noise=1.0, seed=seed))
    assert {step.verdict for step in balanced.steps} == {"even"}


@pytest.mark.parametrize(("seed", "late"), [(seed, late) for seed in range(3) for late in (True, False)])
def test_a_rank_that_takes_a_tenth_more_in_most_steps_is_named_whatever_the_noise_is(
    tmp_path: Path, seed: int, late: bool
) -> None:
    culprits = [Culprit(1, "data loading", "range", 9 * MS)] * late
    template = template_with_ranges(tmp_path)

    runs = [
        find(tmp_path / f"{steps}", MadeJob(template, 2, steps, culprits, noise=2.5, seed=seed)) for steps in (16, 40)
    ]

    # What came before the first collective of a recording is not known, so 15 steps are.
    assert [named_by(run.sentences) for run in runs] == [[], [(1, "data loading")] * late]


def test_a_rank_that_always_takes_little_more_is_not_called_slow_for_that(tmp_path: Path) -> None:
    culprit = Culprit(1, "data loading", "range", MS // 5)

    run = find(tmp_path / "run", MadeJob(template_with_ranges(tmp_path), 2, 24, [culprit], noise=0.02, seed=1))

    assert named_by(run.sentences) == []


def test_lateness_below_the_bounds_cannot_be_told(tmp_path: Path, template: Template) -> None:
    culprit = Culprit(9, "Net.second", "forward", MS // 2)

    run = find(tmp_path / "run", MadeJob(template, 16, STEPS, [culprit], noise=0.01, bound_ns=2 * MS))

    # Where the error of the clocks and the lateness add up to more than the bound, it can be told after all.
    assert {step.rank for step in run.steps if step.verdict == "late"} <= {9}
    assert sum(step.verdict == "cannot tell" for step in run.steps) > 0
    assert all(step.bound_ns >= MS for step in run.steps)
    assert all(step.lateness_ns <= step.bound_ns for step in run.steps if step.verdict == "cannot tell")


def test_two_ranks_late_in_turns_are_both_named(tmp_path: Path, template: Template) -> None:
    culprits = [
        Culprit(1, "Net.first", "backward", 3 * MS, every=2),
        Culprit(2, "Net.second", "forward", 8 * MS, every=3),
    ]

    run = find(tmp_path / "run", MadeJob(template, 4, 30, culprits))

    named = {step.step: step.rank for step in run.steps if step.verdict == "late"}
    assert {step for step, rank in named.items() if rank == 2} - {0} == set(range(3, 30, 3))
    assert {step for step, rank in named.items() if rank == 1} >= set(range(2, 30, 2)) - set(range(0, 30, 3))
    assert {one.rank for one in run.late if one.is_slow} == {1, 2}


def test_lateness_is_exact_to_the_nanosecond(tmp_path: Path) -> None:
    # Rank 2 calls 1,012 ns behind one and 1,002 behind the other, in each of 3 steps.
    for rank, late in enumerate((0, 10, 1_012)):
        script = EventScript(64, tmp_path / f"{rank}.modtrace", {"rank": rank, "pid": 1})
        script.note({"kind": "clock", "clock": "a"})
        script.note_group("0", "0-2", "default_pg")
        for step in range(3):
            begin = 10**16 + 12_345_677 + step * MS + late
            script.collective(begin, Kind.COLLECTIVE_ENTER, ALL_REDUCE, step)
            script.collective(begin + 10, Kind.COLLECTIVE_EXIT, ALL_REDUCE, 8)
            script.step(begin + 20, step)
        script.close()

    run = find_slow_ranks(tmp_path)

    assert [step.lateness_ns for step in run.steps] == [1_007] * 3
    assert run.lateness[0].tolist() == [[-511] * 3, [-496] * 3, [1_007] * 3]


@pytest.mark.parametrize(("ended", "late_ns", "steps"), [(5, 0, 5), (5, 9 * MS, 6), (0, 0, 1)])
def test_calls_after_the_last_step_count_if_a_rank_was_late_there(
    tmp_path: Path, ended: int, late_ns: int, steps: int
) -> None:
    for rank in range(3):
        script = EventScript(64, tmp_path / f"{rank}.modtrace", {"rank": rank, "pid": 1})
        script.note({"kind": "clock", "clock": "a"})
        script.note_group("0", "0-2", "default_pg")
        for step in range(6):
            begin = 10**16 + step * MS + (late_ns if step == 5 and rank == 2 else 0)
            script.collective(begin, Kind.COLLECTIVE_ENTER, ALL_REDUCE, step)
            script.collective(begin + 10, Kind.COLLECTIVE_EXIT, ALL_REDUCE, 8)
            if step < ended:
                script.step(begin + 20, step)
        script.close()

    run = find_slow_ranks(tmp_path)

    assert [step.step for step in run.steps] == [*range(steps)]
    assert run.lateness[2] == [*range(steps)]
    assert [(one.rank, one.steps, one.cost_ns) for one in run.late] == [(2, 1, 9 * MS)] * (late_ns > 0)
    assert run.sentences[0].startswith(f"3 ranks, {counted(steps, 'step')}; ")


def test_the_duration_of_a_step_is_the_median_of_all_ranks() -> None:
    # Step 1 lasts 10 on rank 0, 30 on rank 1, 20 on rank 2; step 2 lasts 5 and 8; before step 4 one is missing.
    rows = [(1, 1, 130), (0, 0, 100), (0, 1, 110), (0, 2, 115), (1, 0, 100), (2, 0, 100), (2, 1, 120), (2, 2, 128)]
    rank, step, end = np.array([*rows, (0, 4, 200)]).T

    assert step_durations(StepTable(rank, step, end)) == {1: 20, 2: 6}
    assert step_durations(StepTable(*np.empty((3, 0), np.int64))) == {}


def test_a_mark_that_names_no_step_is_of_none() -> None:
    texts = ("step 7", "step 999999999", "step 99999999999", "epoch 3")
    timeline = Timeline(Slices.empty(), marks=[Mark(time, "step", text) for time, text in enumerate(texts)])

    assert step_end_table(timeline, 5).step.tolist() == [7, 999_999_999, -1, -1]


@pytest.mark.parametrize(
    ("values", "expected"),
    [([1, 5], [5, 1]), ([1, 2, 9], [5.5, 5, 1.5]), ([0, 10, 20, 40], [20, 20, 10, 10])],
)
def test_median_of_the_others(values: list[int], expected: list[float]) -> None:
    medians = median_of_others(np.array(values), np.array([0]))

    assert medians.tolist() == expected


def test_the_wait_of_the_reducer_is_inferred_from_the_pass_around_it() -> None:
    script = EventScript(1024)
    write_steps(script, sharded=False)
    timeline = build_timeline(script.snapshot())

    waits = inferred_waits(timeline)

    # In each step both all_reduces are complete 50 µs behind their return; the second returns 20 µs behind the layer's
    # last node, whose run ends when backward is over, 10 µs behind the return. So 40 µs were waiting.
    assert (waits.end_ns - waits.start_ns).tolist() == [40_000] * 6
    assert waits.step.tolist() == [*range(6)]
    assert int(waits.end_ns[0]) - WALL == int(timeline.collectives.done[1]) - WALL


def test_waits_that_were_seen_are_not_inferred_again() -> None:
    script = EventScript(1024)
    write_steps(script, sharded=True)

    assert len(inferred_waits(build_timeline(script.snapshot())).start_ns) == 0


def test_chance_of_being_late_so_often() -> None:
    assert probability_of_at_least(0, 10, 0.5) == 1
    assert probability_of_at_least(10, 10, 0.5) == pytest.approx(1 / 1024)
    assert probability_of_at_least(9, 10, 0.5) == pytest.approx(11 / 1024)


def test_a_rank_is_slow_that_is_late_more_often_than_chance_has_it() -> None:
    # Ten in a row where neither of two was late otherwise: 2 × 2**-10 by chance; eleven: 2 × 2**-11 < 0.001.
    assert often_late([NO_RANK] * 9 + [1] * 10, 2) == set()
    assert often_late([NO_RANK] * 9 + [1] * 11, 2) == {1}
    # Of four ranks 4 × 4**-5 by chance.
    assert often_late([2] * 5 + [NO_RANK], 4) == set()
    assert often_late([2] * 6, 4) == {2}
    # For a thousand ranks: 1,000 × (a half of 10 × 9) × 0.001² for two of ten steps.
    assert often_late([NO_RANK] * 8 + [7] * 2, 1000) == set()
    assert often_late([NO_RANK] * 6 + [7] * 4, 1000) == {7}
    assert often_late([], 0) == set()


def test_steps_in_a_row_are_not_as_many_chances() -> None:
    # 24 of 28 is often: 2 × 24,158 / 2**28 by chance. Where the other one is late for two steps at a time, these are 12
    # of 14, and 2 × 106 / 2**14 by chance.
    alone = [0, 0, NO_RANK] * 12 + [1, NO_RANK] * 4
    in_a_row = [0, 0, NO_RANK] * 12 + [1, 1, NO_RANK] * 2

    assert often_late(alone, 2) == {0}
    assert often_late(in_a_row, 2) == set()


def test_png_holds_the_pixels() -> None:
    pixels = np.array([[[255, 0, 0], [0, 255, 0]], [[0, 0, 255], [9, 8, 7]]], np.uint8)

    data = png(pixels)

    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    begin = data.index(b"IDAT") + 4
    length = int.from_bytes(data[begin - 8 : begin - 4], "big")
    assert zlib.decompress(data[begin : begin + length]) == b"\0\xff\0\0\0\xff\0\0\0\0\xff\x09\x08\x07"


@pytest.fixture
def run_command(tmp_path: Path, template: Template) -> Callable[..., str]:
    (tmp_path / "run").mkdir()
    MadeJob(template, 4, STEPS, [Culprit(3, "Net.second", "backward", 2 * MS)]).write(tmp_path / "run")

    def run(*arguments: str) -> str:
        done = CliRunner().invoke(commands, ["ranks", arguments[0], str(tmp_path / "run"), *arguments[1:]])
        assert done.exit_code == 0, done.output
        return done.output

    return run


def test_the_command_says_who_is_late_in_each_form(tmp_path: Path, run_command: Callable[..., str]) -> None:
    page = tmp_path / "late.html"

    text = run_command("slow", "-o", str(page))

    assert "4 ranks, 12 steps; ranks that wait for each other read one clock" in text
    assert "rank 3 was late in 1" in text
    assert "mostly in Net.second backward" in text
    told = text[text.rindex("\n\n") :].split("\n")[2:-1]
    assert [line.partition(":")[0] for line in told] == ["cost", "saved", "late by", "±"]
    assert set(told) <= set(run_command("slow", "--format", "markdown").splitlines())
    as_json = json.loads(run_command("slow", "--format", "json"))
    assert [one["rank"] for one in as_json["late_ranks"]] == [3]
    assert {step["modules"][0]["fqn"] for step in as_json["steps"][1:]} == {"Net.second"}
    assert run_command("slow", "--format", "csv").splitlines()[0].startswith("step,verdict,rank,module,phase")
    assert "| `Net.second` | backward |" in run_command("slow", "--format", "markdown")
    html = page.read_text()
    assert "<script" not in html
    assert all(f"<p>{line}</p>" in html for line in told)
    assert "default-src 'none'" in html
    assert "data:image/png;base64," in html


def test_worst_ranks_can_be_chosen_for_the_timeline(tmp_path: Path, run_command: Callable[..., str]) -> None:
    out = tmp_path / "all.json"

    assert "2 ranks, " in run_command("timeline", "-o", str(out), "--ranks", "0,worst:1")
    assert {track.process.rank for track in modtrace.load(out).tracks} == {0, 3}


@pytest.mark.parametrize("unknown", [[], [0], [2], [0, 2]])
def test_the_share_of_a_run_is_of_the_steps_whose_time_is_known(unknown: list[int]) -> None:
    steps = [StepFinding(step, "late", 1, 90, 75, 90, 0, 1, (), 0 if step in unknown else 100) for step in range(3)]
    late = LateRank(1, 3, 270, 225, True, ())

    sentences = SlowRun(steps, 2, [late], sum(step.duration_ns for step in steps), ()).sentences

    assert sentences[1].endswith("without this delay the run would be 0.000 ms shorter (75.0 %)")


def test_a_share_of_nothing_is_not_said() -> None:
    steps = [StepFinding(0, "late", 1, 90, -20, 90, 0, 1, (), 100)]

    [_, sentence] = SlowRun(steps, 2, [LateRank(1, 1, 90, 75, True, ())], 100, ()).sentences

    assert sentence.endswith("without this delay the run would be 0.000 ms shorter")


@pytest.mark.parametrize(
    ("costs", "where"), [([10, 11], "in all places alike (23% in the worst one)"), ([12, 11], "mostly in a forward")]
)
def test_a_rank_that_is_slower_in_all_places_is_late_in_none(costs: list[int], where: str) -> None:
    places = tuple(LateModule(fqn, "forward", 1, cost * MS) for fqn, cost in zip("ab", costs, strict=True))
    late = LateRank(1, 2, 92 * MS, 75, True, places)
    steps = [StepFinding(step, "late", 1, 46 * MS, 0, 0, 0, 1) for step in range(2)]

    sentences = SlowRun(steps, 2, [late], 100, ()).sentences

    assert [where in sentence for sentence in sentences if sentence.startswith("rank 1")] == [True]


def test_ranks_without_collectives_are_not_held_against_those_that_are_late() -> None:
    """Two of five are late in turn: of two, neither is more often than the other."""
    steps = [StepFinding(step, "late", step % 2, 90, 75, 90, 0, 1, (), 100) for step in range(24)]
    lateness = np.full((5, 24), np.nan, np.float32)
    lateness[:2] = 90

    run = join_parts([PartOfRun(steps, np.arange(5), lateness, {}, 0, True)])

    assert [(one.rank, one.is_slow) for one in run.late] == [(0, False), (1, False)]


def test_a_rank_of_which_no_lateness_is_known_is_the_last_of_the_worst() -> None:
    lateness = np.array([[np.nan, np.nan], [-2.0, np.nan], [3.0, 1.0]], np.float32)
    steps = [StepFinding(step, "even", 0, 0, 0, 0, 0, 0) for step in range(2)]

    run = join_parts([PartOfRun(steps, np.array([4, 5, 6]), lateness, {}, 0, True)])

    assert worst_ranks(run, 3) == [6, 5, 4]
