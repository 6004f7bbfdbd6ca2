"""The memory part of a summary, from samples written by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

import modtrace
from modtrace import Timeline
from modtrace.cli.group import group
from modtrace.compare import PeakChange
from modtrace.timeline import FORWARD, CounterSeries, Name, Process
from modtrace.timeline.summary.memory_summary import Holder, MemoryModule, holders_table
from tests.support.cost_timelines import NAMES, NET, PROCESS, SPANS, A, recorded


def test_each_module_has_the_memory_its_median_call_keeps_and_the_most_inside_any() -> None:
    memory = recorded().summary().memory

    assert memory is not None
    assert memory.rows == (
        # 160 - 100 and 150 - 130, the lower one; 170 - 100 and 230 - 130 in forward, 250 - 160 in backward.
        MemoryModule("Net", "Net", 20, None, 100, 100, 90, None),
        # 120 - 100 and 210 - 230; 140 - 100 and nothing above 230.
        MemoryModule("Net.a", "Linear", -20, None, 40, 40, None, None),
        MemoryModule("Net.b", "Linear", 50, None, 90, 50, 90, None),
    )
    assert [(row.retained_bytes, row.peak_bytes) for row in recorded().summary().rows] == [
        (20, 100),
        (-20, 40),
        (50, 90),
    ]


def test_a_summary_by_class_has_the_calls_of_all_its_modules() -> None:
    memory = recorded().summary("class").memory

    assert memory is not None
    assert [row[1:5] for row in memory.rows] == [("Net", 20, None, 100), ("Linear", 20, None, 90)]


def test_holders_at_the_peak_sum_to_all_that_is_held() -> None:
    memory = recorded().summary().memory

    # 250 at 2010, in step 0: Net has kept 60 in forward, since b kept 50, and a 20 of which Net freed 10; then b's
    # backward 90. The remaining bytes were held before.
    assert memory is not None
    assert (memory.peak_bytes, memory.peak_ns, memory.process) == (250, 2010, "")
    assert (memory.peak_step, memory.peak_seconds) == (0, 1010e-9)
    assert memory.holders == (Holder("Net.b", 140), Holder("Net.a", 10), Holder("other", 100))


def test_modules_save_the_bytes_of_inner_modules_unless_several_processes_count() -> None:
    single_process = replace(recorded(), metadata={"memory": {"saved": {"Net.a": 30, "Net.b": 160}}})
    other = replace(single_process.counters[0], process=Process(8), value=single_process.counters[0].value - 1)
    several = replace(single_process, counters=[*single_process.counters, other])

    memory, of_several = single_process.summary().memory, several.summary().memory
    assert memory is not None
    assert of_several is not None
    assert [row.saved_bytes for row in memory.rows] == [190, 30, 160]
    # Upper limits at the peak: b holds 140, a 10.
    assert [holder.saved_bytes for holder in memory.holders] == [140, 10, None]
    assert [row.saved_bytes for row in of_several.rows] == [None, None, None]


def test_holders_in_a_later_step_are_its_own_calls() -> None:
    memory = recorded().steps(1, 2).summary().memory

    # 230 at 3005, at the start of Net: the 130 held before the step are in "other".
    assert memory is not None
    assert (memory.peak_bytes, memory.holders) == (230, (Holder("Net", 100), Holder("other", 130)))


@pytest.mark.parametrize(
    ("first_step", "time_ns", "holders"),
    [
        # b's row has the gradients that its backward keeps; how many of the 8 bytes are elsewhere is unknown.
        (0, 2010, (("Net.b", 140), ("optimizer state", 60), ("parameters", 30), ("Net.a", 10), ("other", 10))),
        (1, 3005, (("Net", 100), ("optimizer state", 60), ("parameters", 30), ("gradients", 8), ("other", 32))),
        (1, 2010, (("Net", 100), ("other", 130))),  # the peak was at another moment
    ],
)
def test_parameters_gradients_and_optimizer_state_are_named_if_known(
    first_step: int, time_ns: int, holders: tuple[tuple[str, int], ...]
) -> None:
    at_peak = {"time_ns": time_ns, "gradients": 8, "optimizer state": 60, "parameters": 30}
    memory = replace(recorded(), metadata={"memory": {"at_peak": at_peak}}).steps(first_step, 2).summary().memory

    assert memory is not None
    assert tuple(holder[:2] for holder in memory.holders) == holders
    assert memory.peak_bytes == sum(count for _, count in holders)


@pytest.mark.parametrize(
    ("first_step", "holders"),
    [
        # At the peak of 250 in step 0, one step before the known amounts: 75 - 25 and 30 - 10 then.
        (0, (("Net.b", 140), ("Net.a", 10 + 50), ("no module", 20), ("other", 30))),
        (1, (("Net", 100), ("Net.a", 75), ("no module", 30), ("other", 25))),
    ],
)
def test_growing_memory_is_held_by_the_modules_that_allocated_it_in_earlier_steps(
    first_step: int, holders: tuple[tuple[str, int], ...]
) -> None:
    known = {
        "by": {"Net.a": 75, "no module": 30, "Net.b": 9, "optimizer": 7},
        "grows_by": {"Net.a": 25, "no module": 10, "optimizer": 7},
    }
    memory = replace(recorded(), metadata={"memory": known}).steps(first_step, 2).summary().memory

    assert memory is not None
    assert {(holder.fqn, holder.bytes) for holder in memory.holders} == {*holders}


def test_kinds_have_no_more_bytes_than_modules_leave() -> None:
    at_peak = {"time_ns": 2010, "gradients": 8, "optimizer state": 80, "parameters": 30}
    memory = replace(recorded(), metadata={"memory": {"at_peak": at_peak}}).summary().memory

    assert memory is not None
    assert [holder[:2] for holder in memory.holders[1:]] == [
        ("optimizer state", 70),
        ("parameters", 30),
        ("Net.a", 10),
        ("other", 0),
    ]
    assert (
        holders_table(memory)
        .notes[0]
        .endswith(
            "; parameters: of modules called by then; gradients, optimizer state: allocated by backward passes and "
            "optimizers' steps; other: held before the step, or by no module"
        )
    )


def test_calls_before_the_first_sample_are_not_known() -> None:
    timeline = recorded([(A, FORWARD, 10, 20, -1, 0), *SPANS[5:6]])

    assert [(row.fqn, row.retained_bytes, row.peak_bytes) for row in timeline.summary().rows] == [
        ("Net.a", None, None),
        ("Net", 20, 100),
    ]


def command(*arguments: str | Path) -> Result:
    return CliRunner().invoke(group, [str(argument) for argument in arguments])


@pytest.mark.parametrize("suffix", ["json", "pftrace"])
def test_the_command_shows_memory_of_a_file(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"trace.{suffix}"
    recorded().save(path)

    assert command("summary", "--memory", path).stdout.splitlines() == [
        "module (in Net)  class   retained  peak inside  forward  backward",
        "Net              Net         20 B        100 B    100 B      90 B",
        "b                Linear      50 B         90 B     50 B      90 B",
        "a                Linear     -20 B         40 B     40 B",
        "retained: held at the end of a call minus at its start, median; saved: by its calls for a backward pass, "
        "mean; peak inside: maximum held inside minus at its start, then by phase",
        "",
        "held at the peak by (in Net)  bytes     %",
        "b                             140 B  56.0",
        "a                              10 B   4.0",
        "other                         100 B  40.0",
        "together 250 B, in step 0, 0.000 s from the start; other: held before the step (parameters, gradients, the "
        "optimizer's state), or by no module",
    ]
    values = json.loads(command("summary", "--format", "json", path).stdout)
    assert values["memory"]["peak_bytes"] == 250
    assert values["memory"]["holders"][0] == {"fqn": "Net.b", "bytes": 140, "saved_bytes": None}
    assert "| held at the peak by | bytes | % |" in command("summary", "--format", "markdown", path).stdout
    assert "<td" in recorded().summary().to_html().split("held at the peak by")[1]


def test_a_diff_shows_any_difference_in_bytes() -> None:
    more = recorded()
    more.counters[0].value[4] += 1  # at the end of Net's first forward

    # The lower median of a module's two forward calls: 20 stays, and 170 - 100 inside; the peak stays.
    assert modtrace.diff(recorded(), more).environment == {}
    more.counters[0].value[3:6] += 80  # b keeps 130
    comparison = modtrace.diff(recorded(), more)
    assert comparison.environment == {
        "bytes held at most": ("250", "330"),
        "bytes retained by Net.b": ("50", "130"),
    }
    assert "bytes held at most: 250 before, 330 after" in comparison.header


def test_a_peak_that_is_higher_than_in_the_baseline_fails(tmp_path: Path) -> None:
    base, path = tmp_path / "base.json", tmp_path / "new.json"
    modtrace.save_baseline([recorded(), recorded()], base)
    more = recorded()
    more.counters[0].value[3:6] += 80
    more.save(path)
    comparison = modtrace.diff(base, path)

    # In forward Net holds 250 - 100, and b 250 - 120.
    assert comparison.peak_bytes == [
        PeakChange("", 250, 330, 80),
        PeakChange("Net", 100, 150, 50),
        PeakChange("Net.a", 40, 40, 0),
        PeakChange("Net.b", 90, 130, 40),
    ]
    assert "peak_bytes of Net: 100 before, 150 after (+50)" in comparison.header
    assert [peak.fqn for peak in comparison.peaks_above(0.3)] == ["", "Net", "Net.b"]
    assert [peak.fqn for peak in comparison.peaks_above(0.3, floor=0.17)] == ["", "Net"]  # 42.5 bytes
    assert [peak.fqn for peak in comparison.only("Net.*").peaks_above(0.3)] == ["Net.b"]
    assert json.loads(comparison.to_json())["peak_bytes"][1]["difference_bytes"] == 50

    fails, passes = (command("diff", base, path, "--fail-above", limit) for limit in ("40%", "50%"))
    assert (fails.exit_code, fails.stderr.splitlines()) == (
        1,
        [
            "modtrace: Net: peak_bytes are 50 more (50.0%): 100 before, 150 after",
            "modtrace: Net.b: peak_bytes are 40 more (44.4%): 90 before, 130 after",
        ],
    )
    assert (passes.exit_code, passes.stderr) == (0, "")
    renamed = replace(more, names=[*NAMES[:2], Name("c: Linear", "Net.c", "Linear")])
    assert modtrace.diff(base, renamed, map={"Net.b": "Net.c"}).peak_bytes[-1] == PeakChange("Net.c", 90, 130, 40)


def test_chosen_modules_have_only_their_own_rows() -> None:
    memory = recorded().summary().only("*.b").memory

    assert memory is not None
    assert [row.fqn for row in memory.rows] == ["Net.b"]


def test_peaks_are_unknown_if_a_side_has_no_memory(tmp_path: Path) -> None:
    assert modtrace.diff(recorded(), replace(recorded(), counters=[])).peak_bytes == []


def test_a_file_without_memory_gives_an_instruction(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    Timeline(recorded().slices, NAMES, recorded().tracks).save(path)

    done = command("summary", "--memory", path)

    assert done.exit_code == 2
    assert done.stderr.endswith("has no memory; record with --memory, or record(memory=True).\n")
    assert json.loads(command("summary", "--format", "json", path).stdout)["rows"][0]["peak_bytes"] is None


def test_the_python_engine_refuses_to_count() -> None:
    with pytest.raises(modtrace.RecordingError, match="memory needs the native engine; give engine='native' or 'auto'"):
        modtrace.record(engine="python", memory=True)


def test_freed_results_are_held_by_no_call() -> None:
    spans = [(NET, FORWARD, start, start + 9, -1, 0) for start in (10, 30, 50)]
    samples = [(9, 10), (18, 110), (29, 10), (38, 110), (49, 15), (58, 165)]
    counters = [CounterSeries("allocated", "bytes", PROCESS, *np.array(samples, np.int64).T)]
    memory = replace(recorded(spans), marks=[], counters=counters).summary().memory

    assert memory is not None
    # The first result is freed before the next call, and 95 bytes of the second: 5 of another kind came.
    assert memory.holders == (Holder("Net", 155), Holder("other", 10))


def test_a_limit_shortens_the_holders_and_adds_one_row_for_the_others() -> None:
    summary = recorded().summary()

    assert [line.split()[:2] for line in summary.memory_text(1).split("\n\n")[-1].splitlines()[1:4]] == [
        ["Net.b", "140"],
        ["more", "rows"],
        ["other", "100"],
    ]
    assert [row["bytes"] for row in json.loads(summary.tables["holders"].to("json"))] == [140, 10, 100]
