"""Comparing recordings: planted changes are found, and nothing is found if nothing changed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import modtrace
from modtrace import Timeline
from modtrace.compare import Verdict, save_baseline
from modtrace.compare.compare import compare_runs
from modtrace.compare.run_times import RunTimes, Samples, measure_samples, plain_fqn, take_samples
from modtrace.timeline import BACKWARD, FORWARD, Process, Slices
from modtrace.timeline.join import add_gpu_tracks
from modtrace.timeline.select import keep_rows
from modtrace.timeline.slices import DTYPES
from modtrace.timeline.summary import warm_up_steps
from tests.support.compared_runs import COMPARISON, FQNS, STEPS, US, changed, invoke, recording


def serving(seed: int, slower: Mapping[str, float] | None = None) -> Timeline:
    """Forward calls of the eight layers, without training: 500 µs apart, on one thread."""
    trained = recording(seed, {(fqn, FORWARD): factor for fqn, factor in (slower or {}).items()})
    forward = keep_rows(trained, np.flatnonzero(trained.slices.phase == FORWARD))
    slices = replace(forward.slices, step=np.zeros(len(forward.slices), np.int64))
    return Timeline.of(replace(forward, slices=slices, marks=[]))


def test_calls_are_compared_if_nothing_is_trained() -> None:
    calls, new = serving(0), serving(1, {"Net.h.3": 1.5})
    comparison = modtrace.diff(calls, new)

    assert changed(comparison) == [("Net.h.3", "forward", "slower")]
    assert (comparison.base_steps + comparison.new_steps + comparison.warm_up) == 2 * STEPS
    assert [part.fqn for part in comparison.parts] == ["forward"]
    samples = take_samples(calls)
    assert (
        samples.duration_ns.tolist()
        == [span.duration_ns for span in calls.spans if span.fqn == "Net"][samples.warm_up :]
    )
    assert (
        samples.self_ns["Net.h.3", "forward"].tolist()
        == [span.duration_ns for span in calls.spans if span.fqn == "Net.h.3"][samples.warm_up :]
    )
    sides = comparison._sides
    assert sides is not None
    assert [(side.start_ns, side.duration_ns) for side in sides] == [
        (span.start_ns, span.duration_ns) for side in sides for span in side.step.spans[:1]
    ]


@pytest.mark.parametrize("factor", [1.1, 1.2, 1.5])
@pytest.mark.parametrize("phase", [FORWARD, BACKWARD])
def test_a_module_that_became_slower_is_the_only_change_found(factor: float, phase: int) -> None:
    for seed in range(5):
        comparison = modtrace.diff(recording(2 * seed), recording(2 * seed + 1, {("Net.h.3", phase): factor}))

        assert changed(comparison) == [("Net.h.3", ("forward", "backward")[phase], "slower")]
        change = comparison.changes[0]
        assert change.low_ns is not None
        assert change.high_ns is not None
        assert change.low_ns <= (factor - 1) * (100, 200)[phase] * US <= change.high_ns


def test_a_module_slower_one_way_is_faster_the_other_way() -> None:
    a, b = recording(0), recording(1, {("Net.h.3", FORWARD): 1.3})

    assert changed(modtrace.diff(b, a)) == [("Net.h.3", "forward", "faster")]


def test_two_recordings_of_the_same_program_hardly_ever_differ() -> None:
    wrong = [seed for seed in range(60) if changed(modtrace.diff(recording(2 * seed), recording(2 * seed + 1)))]

    assert len(wrong) <= 3


def test_a_machine_that_runs_slower_changes_no_module() -> None:
    sides = [[recording(side * 5 + number, speed=1 + 0.2 * side) for number in range(5)] for side in (0, 1)]
    comparison = modtrace.diff(*sides)

    assert changed(comparison) == []
    assert comparison.common_ratio == pytest.approx(1.2, abs=0.01)
    assert comparison.step.verdict == "slower"
    # With one recording per side, a slower machine cannot be told from slower code.
    single = modtrace.diff(sides[0][0], sides[1][0])
    assert (changed(single), single.step.verdict) == ([], "cannot tell")
    assert modtrace.diff(recording(0), recording(1, speed=2)).step.verdict == "slower"


@pytest.mark.parametrize("speed", [0.5, 1.0, 2.0, 3.0])
def test_a_change_is_as_large_however_fast_the_machine_is(speed: float) -> None:
    base = [recording(seed) for seed in range(5)]
    new = [recording(seed, {("Net.h.3", FORWARD): 1.2}, speed=speed) for seed in range(5, 10)]
    comparison = modtrace.diff(base, new)

    assert changed(comparison) == [("Net.h.3", "forward", "slower")]
    change = comparison.changes[0]
    assert change.ratio == pytest.approx(0.2, abs=0.015)
    assert change.low_ns is not None
    assert change.high_ns is not None
    assert 0.15 < change.low_ns / change.base_ns < change.ratio < change.high_ns / change.base_ns < 0.25
    assert change in comparison.above(0.15)
    assert change not in comparison.above(0.2)
    other_changes = [one for one in comparison.changes[1:] if one.fqn != "Net"]
    assert max(abs(one.ratio) for one in other_changes) < 0.02


@pytest.mark.parametrize("runs", [1, 3])
def test_a_module_that_takes_most_of_the_step_is_not_the_machine(runs: int) -> None:
    base = [recording(seed) for seed in range(runs)]
    wider = {("Net.h.3", FORWARD): 8.0, ("Net.h.3", BACKWARD): 8.0}
    comparison = modtrace.diff(base, [recording(seed, wider) for seed in range(runs, 2 * runs)])

    assert changed(comparison) == [("Net.h.3", "backward", "slower"), ("Net.h.3", "forward", "slower")]
    assert [change.ratio for change in comparison.changes[:2]] == pytest.approx([7, 7], rel=0.03)
    assert comparison.common_ratio == pytest.approx(1, abs=0.01)
    assert ("with one recording a side" in "\n".join(comparison.header)) == (runs == 1)


def test_an_unchanged_time_is_the_same_if_the_machine_changed() -> None:
    base = [recording(seed) for seed in range(5)]
    new = [recording(seed, {("Net.h.3", FORWARD): 0.5}, speed=2.0) for seed in range(5, 10)]

    assert ("Net.h.3", "forward") not in [name[:2] for name in changed(modtrace.diff(base, new))]


def test_single_recordings_on_a_machine_whose_speed_jumps_hardly_ever_differ() -> None:
    speeds = np.exp(np.random.default_rng(0).normal(0, 0.1, 120)).tolist()
    recordings = [recording(seed, speed=speed) for seed, speed in enumerate(speeds)]
    comparison = [modtrace.diff(*pair) for pair in zip(recordings[::2], recordings[1::2], strict=True)]

    assert sum(bool(changed(diff)) or diff.step.verdict in ("slower", "faster") for diff in comparison) <= 3


def test_new_or_removed_recompute_is_a_change() -> None:
    without, with_recompute = recording(0), recording(1, recompute=("Net.h.2",))

    assert changed(modtrace.diff(without, with_recompute)) == [("Net.h.2", "recompute", "added")]
    assert changed(modtrace.diff(with_recompute, without)) == [("Net.h.2", "recompute", "removed")]


def test_a_second_call_per_step_is_seen_in_the_calls() -> None:
    comparison = modtrace.diff(recording(0), recording(1, twice=("Net.h.5",)))

    assert {(c.fqn, c.base_calls, c.new_calls) for c in comparison.changes[:2]} == {("Net.h.5", 1, 2)}
    assert [verdict for _, _, verdict in changed(comparison)] == ["slower", "slower"]
    assert "1 → 2" in comparison.to_text()


def test_a_renamed_module_is_added_and_removed_unless_it_is_mapped() -> None:
    renamed = recording(1, rename={fqn: fqn.replace("Net.h", "Net.layers") for fqn in FQNS})

    assert {verdict for _, _, verdict in changed(modtrace.diff(recording(0), renamed))} == {"added", "removed"}
    assert changed(modtrace.diff(recording(0), renamed, map={"Net.h": "Net.layers"})) == []


def test_two_modules_that_swap_their_speed_are_both_found() -> None:
    base = recording(0, {("Net.h.1", FORWARD): 1.2})

    comparison = changed(modtrace.diff(base, recording(1, {("Net.h.2", FORWARD): 1.2})))

    assert sorted(comparison) == [("Net.h.1", "forward", "faster"), ("Net.h.2", "forward", "slower")]


def test_few_steps_have_the_verdict_cannot_tell() -> None:
    comparison = modtrace.diff(recording(0, steps=5), recording(1, {("Net.h.3", FORWARD): 2.0}, steps=5))

    assert {change.verdict for change in comparison.changes} == {"cannot tell"}


def test_five_recordings_per_side_are_the_samples() -> None:
    base = [recording(seed) for seed in range(5)]
    new = [recording(seed, {("Net.h.3", FORWARD): 1.5}) for seed in range(5, 10)]

    comparison = modtrace.diff(base, new)

    assert comparison.runs == (5, 5)
    assert changed(comparison) == [("Net.h.3", "forward", "slower")]


def test_a_recording_without_marked_steps_is_refused() -> None:
    with pytest.raises(modtrace.ModtraceError, match=r"call recording\.step"):
        modtrace.diff(recording(0), Timeline(Slices.empty()))


@pytest.mark.parametrize(
    ("fqn", "plain"),
    [
        ("Net.h.0", "Net.h.0"),
        ("OptimizedModule._orig_mod.h.0", "OptimizedModule.h.0"),
        ("DistributedDataParallel.module.h.0", "DistributedDataParallel.h.0"),
        ("Net._fsdp_wrapped_module.h.0._checkpoint_wrapped_module.fc", "Net.h.0.fc"),
        ("Net.module.fc", "Net.module.fc"),
        ("Net.old", "Net.new"),
        ("Net.old.fc", "Net.new.fc"),
        ("Net.older", "Net.older"),
    ],
)
def test_names_lose_wrappers_and_are_mapped_whole(fqn: str, plain: str) -> None:
    assert plain_fqn(fqn, {"Net.old": "Net.new"}) == plain


def test_warm_up_ends_at_the_first_usual_step() -> None:
    assert warm_up_steps(np.array([900, 300, 100, 101, 500, 99, 100, 101])) == 2
    assert warm_up_steps(np.array([100, 101, 99, 100])) == 0
    assert warm_up_steps(np.array([500, 400, 100, 100])) == 2
    assert warm_up_steps(np.array([7])) == 0


def test_samples_are_self_times_of_whole_steps() -> None:
    samples = take_samples(recording(0, recompute=("Net.h.2",)))

    assert samples.self_ns["Net", "forward"].tolist() == [50 * US] * STEPS
    assert samples.self_ns["Net.h.2", "recompute"].tolist() == [90 * US] * STEPS
    assert samples.calls["Net.h.2", "backward"].tolist() == [1] * STEPS
    assert samples.warm_up == 0


def test_forms_of_a_diff() -> None:
    assert str(COMPARISON).splitlines() == [
        "1. Net.h|0 · ran 2 times a step instead of 1: +0.200 ms a step, +2.0%",
        "   1.000 ms before, 1.200 ms after; next: modtrace diff BASE NEW --only 'Net.h|0*'",
        "2. Net.x · runs again in backward now (recompute): +0.090 ms a step, +0.9%",
        "   0.000 ms before, 0.090 ms after; next: modtrace diff BASE NEW --only 'Net.x*'",
        "nothing else changed beyond the noise",
        "",
        "Net.h|0 forward ran 2 times a step instead of 1: +0.200 ms (20%); no other module of 2 is slower or faster "
        "beyond the noise; 1 added; the step is 3.0% slower",
        "before: 30 steps of 1 recording; after: 28 of 1 recording; 2 of warm-up left out",
        "step: 10.000 ms before, 10.300 ms after (+0.300 ms, +0.100 … +0.500; +3.0%): slower",
        "modules in general became 1.0% slower, as on a slower machine: each module and part is compared with this, "
        "and shown without it; the step is not; with one recording a side, a change of all modules looks the same",
        "noise: a module differs by 1.5% between recordings",
        "torch: 2.12.0 before, 2.13.0 after",
        "Net.old may be called Net.new now: --map Net.old=Net.new compares them",
        "",
        "module (in Net)  phase      before self ms  after self ms  difference ms      interval ms      %  calls  "
        "verdict",
        "h|0              forward             1.000          1.200         +0.200  +0.150 … +0.250  +20.0  1 → 2  "
        "ran 2 times a step instead of 1",
        "x                recompute           0.000          0.090         +0.090                          0 → 1  "
        "added",
    ]
    assert (
        COMPARISON.to_markdown().splitlines()[-2].startswith("| Net&#46;h&#124;0 | forward | 1.000 | 1.200 | +0.200 |")
    )
    assert (
        COMPARISON.to_csv().splitlines()[1]
        == "Net.h|0,forward,1000000,1200000,200000,150000,250000,1,2,True,slower,1,1,1.0"
    )
    values = json.loads(COMPARISON.to_json())
    assert (values["sentence"], values["changes"][1]["verdict"]) == (COMPARISON.sentence, "added")
    assert '<td style="text-align: left">Net.h|0</td>' in COMPARISON._repr_html_()
    assert COMPARISON.only("*.x").changes == COMPARISON.changes[1:]


def of_two_classes(timeline: Timeline) -> Timeline:
    names = [
        name._replace(module_class="AB"[int(name.fqn[-1]) % 2] if "." in name.fqn else "Net") for name in timeline.names
    ]
    return replace(timeline, names=names)


def test_classes_are_compared_by_the_time_of_all_their_modules() -> None:
    base, new = of_two_classes(recording(0)), of_two_classes(recording(1, {("Net.h.3", FORWARD): 3.0}))
    comparison = modtrace.diff(base, new, by="class")

    assert {(change.fqn, change.phase) for change in comparison.changes} == {
        (name, phase) for name in ("Net", "A", "B") for phase in ("forward", "backward")
    }
    worst = comparison.changes[0]
    # One of four modules of 100 µs now lasts 300 µs.
    assert (worst.fqn, worst.phase, worst.base_calls, worst.verdict) == ("B", "forward", 4, "slower")
    assert worst.base_ns == pytest.approx(400_000, rel=0.03)
    assert worst.new_ns == pytest.approx(600_000, rel=0.03)
    assert comparison.sentence.startswith("1 of 3 classes is slower: B forward, +")
    assert comparison.to_text().splitlines()[-3].split()[:2] == ["class", "phase"]
    assert comparison.to_text().splitlines()[-1] == "2 classes: no difference beyond the noise"


def test_step_by_defines_the_steps(tmp_path: Path) -> None:
    base, new = tmp_path / "base.pftrace", tmp_path / "new.pftrace"
    recording(0).save(base)
    recording(1).save(new)
    save_baseline(base, tmp_path / "base.json", step_by="Block")
    for base_or_path in (base, tmp_path / "base.json"):
        comparison = modtrace.diff(base_or_path, new, step_by="Block")
        # Calls of the model: 50 µs of its own code and eight layers of 100 µs; no backward, no pause.
        assert comparison.step.base_ns == pytest.approx(850_000, rel=0.02)
        assert {change.phase for change in comparison.changes} == {"forward"}
    with pytest.raises(modtrace.ModtraceError, match="no class"):
        modtrace.diff(base, new, step_by="Other")


def test_modules_without_a_difference_are_one_line_unless_all_are_asked_for() -> None:
    verdicts: tuple[Verdict, ...] = ("same", "cannot tell")
    same = [COMPARISON.changes[1]._replace(fqn=f"Net.{at}", verdict=verdict) for at, verdict in enumerate(verdicts)]
    same = [
        row._replace(base_calls=1, new_calls=1, calls_changed=False) for row in (*same, same[0]._replace(fqn="Net.x"))
    ]
    comparison = replace(COMPARISON, changes=[*COMPARISON.changes, *same])
    # Net.x has a row for its recompute.
    assert comparison.to_text().splitlines()[-2:] == [
        str(COMPARISON).splitlines()[-1],
        "2 modules: no difference beyond the noise",
    ]
    assert comparison.to_markdown().splitlines()[-1] == "2 modules: no difference beyond the noise"
    assert comparison.to_text(1).splitlines()[-2:] == ["1 more row", "2 modules: no difference beyond the noise"]
    assert [line.split()[0] for line in comparison.to_text(verbose=True).splitlines()[-3:]] == [
        "0",
        "1",
        "x",
    ]
    quiet = replace(COMPARISON, changes=same)
    assert quiet.to_text().splitlines()[-2:] == ["", "3 modules: no difference beyond the noise"]


def test_above_needs_the_whole_interval() -> None:
    assert COMPARISON.above(0.10) == [COMPARISON.changes[0]]
    assert COMPARISON.above(0.15) == []
    assert COMPARISON.above(0.005) == [COMPARISON.step, COMPARISON.changes[0]]


def test_above_skips_small_shares_of_the_step() -> None:
    # 200 µs of 10 ms are 2 %.
    assert COMPARISON.above(0.10, floor=0.02) == [COMPARISON.changes[0]]
    assert COMPARISON.above(0.10, floor=0.021) == []
    assert COMPARISON.above(0.005, floor=1) == [COMPARISON.step]


def test_the_sentence_names_the_worst_and_the_unclear() -> None:
    twice, added = COMPARISON.changes
    slower = twice._replace(new_calls=1, calls_changed=False)
    faster = slower._replace(fqn="Net.y", verdict="faster", difference_ns=-100_000)
    unclear = COMPARISON.step._replace(verdict="cannot tell")
    comparison = replace(COMPARISON, changes=[slower, slower._replace(fqn="Net.z"), faster, added], step=unclear)
    assert comparison.sentence == (
        "2 of 4 modules are slower: most of all Net.h|0 forward, +0.200 ms (20%); 1 is faster: Net.y forward, "
        "-0.100 ms (10%); 1 added; whether the step changed is not clear"
    )
    comparison = replace(comparison, changes=[twice, twice._replace(phase="backward"), faster])
    assert comparison.sentence == (
        "Net.h|0 forward ran 2 times a step instead of 1: +0.200 ms (20%), and 1 more differs so; 1 of 2 modules is "
        "faster: Net.y forward, -0.100 ms (10%); whether the step changed is not clear"
    )
    same = replace(COMPARISON, changes=[slower._replace(verdict="same")], step=COMPARISON.step._replace(verdict="same"))
    assert same.sentence == "no module of 1 is slower or faster beyond the noise; the step is as long as before"


def test_a_sure_change_of_a_large_module_is_found_among_small_noisy_modules() -> None:
    random = np.random.default_rng(0)
    typical_ns = np.exp(random.uniform(np.log(1e4), np.log(3e4), 52))
    typical_ns[4:8] = (1.09e6, 2.1e6, 1.05e6, 2.2e6)
    keys = [(f"Net.{number // 2}", ("forward", "backward")[number % 2]) for number in range(52)]

    def run(slower_ns: float) -> RunTimes:
        own = typical_ns + slower_ns * (np.arange(52) == 4)
        # Noise of 1 % between recordings for large modules, 5 to 10 % for small modules, which also change together.
        noise = random.normal(0, 0.01 * np.sqrt(np.maximum(1e6 / own, 1))) + random.normal(0, 0.03) * (own < 5e4)
        times = np.exp(random.normal(0, 0.03, (30, 52)) + noise) * own
        columns = dict(zip(keys, times.astype(np.int64).T, strict=True))
        calls, durations = dict.fromkeys(keys, np.ones(30, np.int64)), times.sum(axis=1).astype(np.int64) + 10**7
        return measure_samples(Samples(columns, calls, durations, 0, dict.fromkeys((key[0] for key in keys), "M")), {})

    for _ in range(20):
        comparison = compare_runs([run(0) for _ in range(6)], [run(2e5) for _ in range(6)], {})
        assert [(c.fqn, c.phase) for c in comparison.changes if c.verdict in {"slower", "faster"}] == [
            ("Net.2", "forward")
        ]
        assert abs(comparison.common_ratio - 1) < 0.03


def test_models_with_hardly_a_common_module_are_reported_as_different(tmp_path: Path) -> None:
    base, other = tmp_path / "base.pftrace", tmp_path / "other.pftrace"
    recording(0).save(base)
    recording(1, rename={fqn: fqn.replace("Net", "Model") for fqn in FQNS}).save(other)

    comparison = modtrace.diff(base, other)
    assert comparison.sentence == "these are different models: 0 of 18 modules are on both sides"
    assert invoke(base, other).exit_code == 0
    failed = invoke(base, other, "--fail-above", "5%")
    assert (failed.exit_code, f"modtrace: {comparison.sentence}; the limit cannot be checked" in failed.stderr) == (
        1,
        True,
    )
    assert not modtrace.diff(recording(0), recording(1)).unrelated


def test_the_step_does_not_count_if_modules_are_selected() -> None:
    assert COMPARISON.only("*").above(0.005) == [COMPARISON.changes[0]]
    assert COMPARISON.only("Net.x").above(0.005) == []


def test_a_change_above_1000_percent_is_shown_as_a_factor() -> None:
    at_most, longer = (
        COMPARISON.changes[0]._replace(new_ns=1_000_000 + added_ns, difference_ns=added_ns, new_calls=1)
        for added_ns in (10_000_000, 242_000_000)
    )
    step = COMPARISON.step._replace(new_ns=2_430_000_000, difference_ns=2_420_000_000)
    comparison = replace(COMPARISON, changes=[longer, at_most], step=step, common_ratio=0.9512)
    lines, rows = comparison.header, comparison.to_markdown().splitlines()[-2:]

    assert lines[0] == (
        "1 of 1 module is slower: Net.h|0 forward, +242.000 ms (243 times as long); the step is 243 times as long"
    )
    assert lines[2].endswith("2430.000 ms after (+2420.000 ms, +0.100 … +0.500; 243 times as long): slower")
    assert lines[3].startswith("modules in general became 4.9% faster, as on a faster machine: ")
    assert [row.split(" | ")[6] for row in rows] == ["243 times as long", "+1000.0"]


def test_the_command_fails_above_a_budget(tmp_path: Path) -> None:
    base, new = tmp_path / "base.pftrace", tmp_path / "new.pftrace"
    recording(0).save(base)
    recording(1, {("Net.h.3", FORWARD): 1.3}).save(new)

    assert invoke(base, new).exit_code == 0
    failed = invoke(base, new, "--fail-above", "5%", "--only", "Net.h.*")
    assert failed.exit_code == 1
    assert "modtrace: Net.h.3 forward is slower by 29.6%, more than 5.0%" in failed.stderr
    assert invoke(base, new, "--fail-above", "0.5").exit_code == 0
    slow = tmp_path / "slow.pftrace"
    recording(2, speed=20.0).save(slow)
    result = invoke(base, slow, "--fail-above", "5%")
    assert (result.exit_code, "modtrace: the step is 16 times as long, more than 5.0%" in result.stderr) == (1, True)
    assert invoke(base, slow, "--fail-above", "5%", "--only", "Net.h.*").exit_code == 0
    assert invoke(base, new, "--format", "csv").stdout.splitlines()[1].startswith("Net.h.3,forward,")
    assert invoke(base, new, "--fail-above", "much").exit_code == 2
    forgotten = invoke(base, new, "--fail-above", "5")
    assert (forgotten.exit_code, "would be 500%; write 5% or 0.05" in forgotten.stderr) == (2, True)
    assert invoke(base, new, "--map", "Net.h").exit_code == 2


def with_gpu(timeline: Timeline, factor: float) -> Timeline:
    """The timeline with a stream: 50 µs of kernels for each layer's forward, `factor` times as long for one layer."""
    columns = timeline.columns
    forward = np.flatnonzero((columns.phase == FORWARD) & (columns.parent >= 0))
    kernel_ns = np.where(columns.name[forward] == FQNS.index("Net.h.3"), round(50 * US * factor), 50 * US)
    calls = columns.take(forward)
    spans = replace(calls, end=calls.start + kernel_ns, track=np.zeros(len(calls), np.int32))
    return Timeline.of(add_gpu_tracks(timeline, [(0, 7)], spans))


def test_times_on_a_gpu_are_compared_separately() -> None:
    comparison = modtrace.diff(with_gpu(recording(0), 1.0), with_gpu(recording(1), 1.5))

    assert changed(comparison) == [("Net.h.3", "GPU forward", "slower")]
    assert (comparison.changes[0].base_ns, comparison.changes[0].new_ns) == (50 * US, 75 * US)


def test_work_on_a_gpu_changes_nothing_on_the_cpu() -> None:
    on_cpu, with_kernels = recording(0), with_gpu(recording(0), 1.0)

    assert take_samples(on_cpu).self_ns["Net.h.3", "forward"].tolist() == (
        take_samples(with_kernels).self_ns["Net.h.3", "forward"].tolist()
    )


def test_one_step_with_other_calls_does_not_hide_a_change_of_the_others() -> None:
    times, once = np.full(30, 100 * US), np.ones(30, np.int64)
    twice = np.append(1, np.full(29, 2))
    before, after = (
        measure_samples(Samples({("Net", "forward"): times}, {("Net", "forward"): calls}, times, 0, {"Net": "Net"}), {})
        for calls in (once, twice)
    )

    (change,) = compare_runs([before], [after], {}).changes

    assert (change.base_calls, change.new_calls, change.calls_changed) == (1, 2, True)


def of_ranks(*ranks: Timeline) -> Timeline:
    """One file of several ranks, with the marks of the first rank."""
    tracks = [track._replace(process=Process(rank, rank)) for rank, one in enumerate(ranks) for track in one.tracks]
    firsts = np.cumsum([0, *(len(one.columns) for one in ranks)]).tolist()
    parts = [
        replace(
            one.columns,
            track=one.columns.track + rank * len(one.tracks),
            parent=np.where(one.columns.parent < 0, -1, one.columns.parent + firsts[rank]).astype(np.int32),
        )
        for rank, one in enumerate(ranks)
    ]
    columns = Slices.of(None, **{f: np.concatenate([getattr(part, f) for part in parts]) for f in DTYPES})
    return replace(ranks[0], slices=columns, tracks=tracks)


def test_a_sample_of_several_ranks_is_the_mean_of_the_ranks() -> None:
    fast, slow = recording(0), recording(0, speed=2)
    alone = take_samples(fast)

    for count in (2, 4):
        several = take_samples(of_ranks(*[fast] * count))
        assert {key: times.tolist() for key, times in several.self_ns.items()} == {
            key: times.tolist() for key, times in alone.self_ns.items()
        }
        assert {int(calls.max()) for calls in several.calls.values()} == {1}
    mixed = take_samples(of_ranks(fast, slow)).self_ns["Net.h.3", "forward"]
    assert np.max(np.abs(mixed - 1.5 * alone.self_ns["Net.h.3", "forward"])) <= 1
