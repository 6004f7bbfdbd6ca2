"""The parts of steps of real programs, held against stopwatches that each program has around its own parts."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import modtrace
from modtrace.record_options import EngineName
from modtrace.timeline.summary import measure_steps
from modtrace.timeline.summary.slow_steps import StepParts, divide_steps
from tests.programs.recorded import RECORDED, told_by
from tests.support.forked_python import run_forked
from tests.support.pretended_clock import with_pretended_clock
from tests.support.python_process import python_environment, run_python

_FOLDER = Path(__file__).parent
_PROGRAMS = (
    *("loop", "workers", "scaler", "accumulation", "evaluation", "gpt", "gan", "ppo", "checkpoint", "compile"),
    *("ddp", "private", "own_optimizer", "quantized", "safetensors", "export", "garbage"),
)
_PREPARED = ("pair_loss", "classifier_loss", "setup", "tail", "suite", "validation")
"""Programs that do for long what belongs to no step, and stop each step from its begin on."""
_ENGINES = ["native", pytest.param("python", marks=pytest.mark.full)]
_WIDE = pytest.param(True, marks=pytest.mark.full)
"""Models as wide as those of users: only their times can be held against stopwatches."""
_NEAR, _NEAR_NS = 0.02, 50_000
"""Maximum difference of a part from the stopwatch: a share of its time, or ns for each start of the part."""
_MAX_OTHER, _USUAL_OTHER = 0.10, 0.03
_RANGES = {"data loading", "optimizer", "saving", "evaluation", "user"}
"""Categories of which each range is one part that a program begins."""

Stopped = dict[str, tuple[int, int]]
Recorded = tuple[modtrace.Timeline, list[Stopped]]
Run = Callable[[str, EngineName, bool], list[Recorded]]


@pytest.fixture(scope="module")
def run_recorded(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run and record a program once, and return the timeline and the stopwatches of each process.

    Its clock is pretended, so that no load makes a part long; but not of ranks, which wait for each other, and of wide
    models, whose times are compared within less than the pretended clock takes to be read.
    """
    pretended = with_pretended_clock(tmp_path_factory.mktemp("clock"))
    done: dict[tuple[str, EngineName, bool], list[Recorded]] = {}

    def output(program: Path, folder: Path, engine: EngineName, wide: bool) -> str:
        width = "640" if wide else "32"
        if program.stem == "timed_ddp":  # its ranks are processes
            arguments = ("-m", "modtrace", "run", "--engine", engine, "-o", folder / "trace.json", program)
            return run_python(*arguments, env=python_environment(STOPWATCH_WIDTH=width)).stdout
        environment = {**(python_environment() if wide else pretended), "STOPWATCH_WIDTH": width}
        return run_forked("-c", RECORDED, program, folder / "trace.json", engine, env=environment).stdout

    def run(name: str, engine: EngineName, wide: bool) -> list[Recorded]:
        if (name, engine, wide) not in done:
            folder = tmp_path_factory.mktemp(name)
            told = {
                process["pid"]: process["parts"]
                for process in told_by(output(_FOLDER / f"{name}.py", folder, engine, wide))
            }
            timelines = map(modtrace.load, sorted(folder.iterdir()))
            done[name, engine, wide] = [(timeline, told.get(timeline.metadata["pid"], [])) for timeline in timelines]
        return done[name, engine, wide]

    return run


def _other(timeline: modtrace.Timeline) -> float:
    """Return the median share of `other` in a step; the first is left out, as it begins where the recording does."""
    return statistics.median(
        step.parts.get("other", 0) / sum(step.parts.values()) for step in divide_steps(timeline)[1:]
    )


def _far_off(steps: Sequence[StepParts], stopped: list[Stopped], first: int = 1) -> dict[str, tuple[float, float]]:
    """Return by part, in µs, the median of what was stopped and of how far the recording is off, if that is far.

    A part counts in the steps that have it. The first step is left out, as it begins where the recording does, and the
    last, which no mark ends. Collections come into any part.
    """
    pairs = [(step.parts, stopped[step.step]) for step in steps[first:] if step.step < len(stopped)]
    assert len(pairs) == len(stopped) - first
    by_hand = dict.fromkeys(name for _, parts in pairs for name in parts if name != "other")
    told_apart = {name for names in by_hand for name in names.split("+")}
    far = {}
    for names in [*by_hand, *({name for parts, _ in pairs for name in parts} - told_apart - {"other", "gc"})]:
        present = []
        for parts, by in pairs:
            recorded, (ns, times) = sum(parts.get(name, 0) for name in names.split("+")), by.get(names, (0, 0))
            if recorded or ns:
                present.append((ns, abs(recorded - ns), max(times, 1)))
        usual, off, times = (statistics.median(values) for values in zip(*present, strict=True))
        if off > max(_NEAR * usual, _NEAR_NS * times):
            far[names] = usual / 1e3, off / 1e3
    return far


def _without_backward(stopped: Stopped) -> Stopped:
    """Return the parts with loss and backward as one."""
    both = {name: part for name, part in stopped.items() if name.startswith(("loss", "backward"))}
    if not both:
        return stopped
    names = dict.fromkeys(["loss", "backward", *(name for joined in both for name in joined.split("+"))])
    ns, times = (sum(part[column] for part in both.values()) for column in (0, 1))
    return {name: part for name, part in stopped.items() if name not in both} | {"+".join(names): (ns, times)}


@pytest.mark.usefixtures("native_engine")
@pytest.mark.parametrize("wide", [False, _WIDE])
@pytest.mark.parametrize("engine", _ENGINES)
@pytest.mark.parametrize("name", _PROGRAMS)
def test_parts_add_up_to_each_step(name: str, engine: EngineName, wide: bool, run_recorded: Run) -> None:
    for timeline, _ in run_recorded(f"timed_{name}", engine, wide):
        durations = {step.step: step.duration_ns for step in measure_steps(timeline)}
        assert {step.step: sum(step.parts.values()) for step in divide_steps(timeline)} == durations


@pytest.mark.usefixtures("native_engine")
@pytest.mark.parametrize("engine", _ENGINES)
@pytest.mark.parametrize("name", _PROGRAMS)
def test_each_part_that_the_program_begins_is_a_range(name: str, engine: EngineName, run_recorded: Run) -> None:
    for timeline, stopped in run_recorded(f"timed_{name}", engine, False):
        ranges: list[Counter[str]] = [Counter() for _ in range(len(stopped) + 1)]
        for one in timeline.ranges:
            # Torch 2.8 names what its compiler does.
            if one.category in _RANGES and one.depth == 0 and "(dynamo_timed)" not in one.name:
                ranges[one.step][one.name if one.category == "user" else one.category] += 1
        names = _RANGES | {name for counts in ranges for name in counts}
        begun = [{name: times for name, (_, times) in parts.items() if times and name in names} for parts in stopped]

        # The first step begins where the recording does.
        assert [dict(counts) for counts in ranges[1:-1]] == begun[1:]


@pytest.mark.usefixtures("native_engine")
@pytest.mark.full  # the 50 µs are those of a machine that does nothing else
@pytest.mark.parametrize("engine", ["native", "python"])
@pytest.mark.parametrize("name", _PROGRAMS)
def test_parts_are_what_the_stopwatches_of_the_program_say(name: str, engine: EngineName, run_recorded: Run) -> None:
    for timeline, stopped in run_recorded(f"timed_{name}", engine, True):
        if engine == "python":  # what backward() does before the engine of torch runs is loss
            stopped = [_without_backward(parts) for parts in stopped]
        assert _far_off(divide_steps(timeline), stopped) == {}


@pytest.mark.usefixtures("native_engine")
@pytest.mark.full  # the shares are those of a machine that does nothing else
@pytest.mark.parametrize("engine", ["native", "python"])
def test_little_of_each_program_is_other(engine: EngineName, run_recorded: Run) -> None:
    shares = {name: _other(run_recorded(f"timed_{name}", engine, True)[0][0]) for name in _PROGRAMS}

    print(*(f"{name:14}{100 * share:6.1f} %" for name, share in shares.items()), sep="\n")
    assert statistics.median(shares.values()) <= _USUAL_OTHER
    assert max(shares.values()) <= _MAX_OTHER


_CAUSES = {
    **dict.fromkeys((9, 29), r"of which \d+ ms data loading; usually \S+ ms"),
    13: r"of which \d+ ms optimizer \(clip_grad_norm_\); usually \S+ ms",
    19: r"of which \d+ ms saving \(torch\.save\); usually \S+ ms",
    25: r"of which [\d,]+ ms compile \(torch\.compile 0/1: .* expected 4, actual 6.*\); usually 0 ms",
    31: r"of which [\d,]+ ms gc; usually 0 ms",
}


@pytest.mark.usefixtures("native_engine")
@pytest.mark.parametrize("engine", ["native", "python"])
def test_slow_steps_say_what_made_them_slow(engine: EngineName, run_recorded: Run) -> None:
    ((timeline, _),) = run_recorded("slow_steps", engine, False)

    causes = {step.step: step.cause or "" for step in divide_steps(timeline)}
    assert {step: causes[step] for step, cause in _CAUSES.items() if not re.search(cause, causes[step])} == {}


@pytest.mark.usefixtures("native_engine")
@pytest.mark.parametrize("engine", ["native", "python"])
@pytest.mark.parametrize("name", _PREPARED)
def test_figures_are_of_the_whole_steps_alone(name: str, engine: EngineName, run_recorded: Run) -> None:
    ((timeline, stopped),) = run_recorded(f"timed_{name}", engine, False)
    summary = timeline.summary()
    whole = [step for step in summary.steps if step.whole]

    assert [step.step for step in whole] == [*range(len(stopped))]
    assert sum(part.total_ns for part in summary.parts) == sum(step.duration_ns for step in whole) == summary.steps_ns
    around_ns = sum(sum(parts.values()) for parts in summary.around)
    in_all_ns = max(timeline.slices.end.max(), timeline.marks[-1].time_ns) - timeline.slices.start.min()
    assert summary.steps_ns + around_ns == in_all_ns


@pytest.mark.usefixtures("native_engine")
@pytest.mark.full  # the 50 µs are those of a machine that does nothing else
@pytest.mark.parametrize("engine", ["native", "python"])
@pytest.mark.parametrize("name", _PREPARED)
def test_the_first_step_too_is_what_the_stopwatch_says(name: str, engine: EngineName, run_recorded: Run) -> None:
    ((timeline, stopped),) = run_recorded(f"timed_{name}", engine, True)
    summary = timeline.summary()
    if engine == "python":  # what backward() does before the engine of torch runs is loss
        stopped = [_without_backward(parts) for parts in stopped]

    assert {part.part: part.share for part in summary.parts}["other"] <= _MAX_OTHER
    assert _far_off(summary.step_parts, stopped, first=0) == {}
