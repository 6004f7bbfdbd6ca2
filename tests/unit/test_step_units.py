"""Steps that are calls or ranges: which there are, and how long they took, worked out by hand."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import assume, given

import modtrace
from modtrace import ModtraceError, Timeline
from modtrace.cli.group import group
from modtrace.ring import Kind
from modtrace.ring.event_text import RangeCategory, range_text
from modtrace.timeline import Mark, Name, Process, Slices, Track
from modtrace.timeline.join import add_gpu_tracks
from modtrace.timeline.summary import find_step_bounds, measure_steps
from modtrace.timeline.summary.slow_steps import divide_steps
from modtrace.timeline.summary.units import RangeTimes, UnitTimes
from modtrace.write.written_parts import part_counters, part_table
from tests.support.event_script import WALL, EventScript
from tests.support.timelines import build_timeline, timelines
from tests.support.trace_processor import TraceProcessor
from tests.support.training_timeline import MAIN, MS, training


class _Script(EventScript):
    """Writes whole calls and ranges."""

    def __init__(self) -> None:
        super().__init__(capacity=512)
        self._ranges = 0

    def call(self, start: int, end: int, name: int) -> None:
        self.enter(start, name)
        self.exit(end, name)

    def begin(self, time: int, name: str, category: RangeCategory = "user") -> tuple[str, int]:
        self._ranges += 1
        text = range_text(name, category)
        self.collective(time, Kind.RANGE_BEGIN, text, self._ranges)
        return text, self._ranges

    def end(self, time: int, opened: tuple[str, int]) -> None:
        self.collective(time, Kind.RANGE_END, *opened)


def decoding(name: str, category: RangeCategory) -> Timeline:
    """Two ranges of three and two calls of a model in which a block is called, and a call of it in no range.

    range  0────────────────100     120─────────────160
    model    10──40 50─60 80─90       130─142 150─158     200─250
    block     20─30                                        210─240
    fetch                       105─115
    """
    script = _Script()
    model, block = script.name("Net", module_class="Net"), script.name("Net.b", module_class="Block")
    opened = script.begin(0, name, category)
    script.enter(10, model)
    script.call(20, 30, block)
    script.exit(40, model)
    script.call(50, 60, model)
    script.call(80, 90, model)
    script.end(100, opened)
    script.end(115, script.begin(105, "enumerate(DataLoader)#Own.__next__", "data loading"))
    opened = script.begin(120, name, category)
    script.call(130, 142, model)
    script.call(150, 158, model)
    script.end(160, opened)
    script.enter(200, model)
    script.call(210, 240, block)
    script.exit(250, model)
    return build_timeline(script.snapshot())


def steps_of(timeline: Timeline, step_by: str | None = None) -> list[tuple[str, int, int]]:
    """Return name, start and end of each step."""
    bounds = find_step_bounds(timeline, step_by)
    return list(zip(bounds.name, (bounds.start_ns - WALL).tolist(), (bounds.end_ns - WALL).tolist(), strict=True))


GENERATED = decoding("generate", "generate")
REQUESTS = decoding("request", "user")


def test_a_generate_is_one_step_and_a_call_outside_is_another() -> None:
    assert steps_of(GENERATED) == [("generate", 0, 100), ("generate", 120, 160), ("Net", 200, 250)]
    assert GENERATED.summary().units == [
        UnitTimes("generate", "", "", 2, 5, 70, 100, 100, 2e9 / 160),
        UnitTimes("generate", "prefill", "", 2, 2, 21, 30, 30, 2e9 / 132),
        UnitTimes("generate", "decode", "", 3, 3, 10, 10, 10, 3e9 / 108),
        UnitTimes("Net", "", "", 1, 1, 50, 50, 50, 1e9 / 50),
    ]


def test_the_header_says_whose_generate_is_counted() -> None:
    assert str(GENERATED.summary()).splitlines()[1] == (
        "a step is an outermost call (--step-by chooses others): 2 × generate of transformers (5 calls inside), 1 × Net"
    )


def test_the_parts_of_a_generate_are_forward_and_what_is_between_the_calls() -> None:
    steps = divide_steps(GENERATED, None)

    assert [(step.name, step.parts) for step in steps] == [
        ("generate", {"forward": 50, "generate": 50}),
        ("generate", {"forward": 20, "generate": 20}),
        ("Net", {"forward": 50}),
    ]
    # Medians are of the steps that took most in all: 140 ns of generate, 50 of calls.
    assert [(part.part, part.total_ns, part.p50_ns) for part in GENERATED.summary().parts] == [
        ("forward", 120, 35),
        ("generate", 70, 35),
        ("other", 0, 0),
    ]
    assert GENERATED.summary().outside == {"other": 10 + 40, "data loading": 10}


def test_a_range_of_the_users_groups_calls_if_it_is_chosen() -> None:
    assert [name for name, _, _ in steps_of(REQUESTS)] == ["Net"] * 6
    assert steps_of(REQUESTS, "range request") == [("request", 0, 100), ("request", 120, 160)]
    assert [(unit.stage, unit.measured, unit.p50_ns) for unit in REQUESTS.summary(step_by="range request").units] == [
        ("", 2, 70),
        ("first call", 2, 21),
        ("later calls", 3, 10),
    ]


def test_the_typical_step_is_a_range_if_that_is_chosen() -> None:
    # The first one, of 100 ns, is slower than what follows.
    spans = REQUESTS.typical_step(step_by="range request").spans

    assert [(span.start_ns - WALL, span.end_ns - WALL) for span in spans] == [(130, 142), (150, 158)]


def test_a_class_of_modules_is_a_step() -> None:
    summary = REQUESTS.summary(step_by="Block")

    assert steps_of(REQUESTS, "Block") == [("Block", 20, 30), ("Block", 210, 240)]
    assert [(row.fqn, row.step_p50_ns, row.step_p95_ns) for row in summary.rows] == [("Net", 0, 0), ("Net.b", 20, 30)]


def test_a_step_is_measured_on_its_thread() -> None:
    first, second, third = measure_steps(GENERATED, None)

    assert (first.forward_ns, first.before_ns, first.between_ns, first.after_ns) == (50, 10, 30, 10)
    assert (second.forward_ns, second.before_ns, second.between_ns, second.after_ns) == (20, 10, 8, 2)
    assert (third.duration_ns, third.forward_ns) == (50, 50)


def two_threads() -> Timeline:
    """Calls of a model: 100 of 1 to 100 ns with 10 ns between them, beside three of 400 ns on another thread."""
    lengths = np.arange(1, 101)
    start = np.append(np.cumsum(lengths) - lengths + 10 * (lengths - 1), [0, 500, 900])
    end = start + np.append(lengths, [400] * 3)
    track = np.repeat([0, 1], [100, 3])
    order = np.lexsort((-end, start))
    neutral = {"name": 0, "phase": 0, "depth": 0, "parent": -1, "call": 0, "step": 0, "link": -1, "complete": True}
    columns = {"start": start, "end": end, "track": track} | {field: np.full(103, of) for field, of in neutral.items()}
    calls = Slices.of(**{field: column[order] for field, column in columns.items()})
    threads = [Track("forward", name, tid, MAIN) for tid, name in enumerate(("MainThread", "worker"))]
    return Timeline(calls, [Name("Net", "Net", "Net")], threads)


def test_calls_have_percentiles_and_a_rate_per_thread_and_over_all() -> None:
    summary = two_threads().summary()

    assert summary.units == [
        UnitTimes("Net", "", "", 103, 103, 52, 98, 400, 103e9 / 6040),
        UnitTimes("Net", "", "MainThread", 100, 100, 50, 95, 99, 100e9 / 6040),
        UnitTimes("Net", "", "worker", 3, 3, 400, 400, 400, 3e9 / 1300),
    ]
    assert str(summary).splitlines()[1] == "a step is an outermost call (--step-by chooses others): 103 × Net"
    assert [line.split()[:5] for line in summary.tables["units"].to("text").splitlines()[3:6]] == [
        ["Net", "all", "103", "103", "0.000"],
        ["Net", "MainThread", "100", "100", "0.000"],
        ["Net", "worker", "3", "3", "0.000"],
    ]
    assert summary.outside == {"other": 99 * 10 + 100}
    assert summary.tables["units"].to("text").splitlines()[:2] == [
        "14.9% of the threads' time is between steps (other 0.001 ms); the tables are of the steps",
        "",
    ]


def test_steps_at_once_on_two_threads_each_add_up() -> None:
    timeline = two_threads()

    assert [sum(step.parts.values()) for step in divide_steps(timeline, "call")] == [
        step.duration_ns for step in measure_steps(timeline, "call")
    ]
    assert sum(step.forward_ns for step in measure_steps(timeline, "call")) == 5050 + 3 * 400


@given(timelines())
def test_the_parts_of_any_calls_add_up_to_them(timeline: Timeline) -> None:
    assume(any(span.phase == "forward" and span.depth == 0 for span in timeline.spans))
    try:
        durations = [step.duration_ns for step in measure_steps(timeline, "call")]
    except ModtraceError:  # the calls are of another process
        return

    assert [sum(step.parts.values()) for step in divide_steps(timeline, "call")] == durations


def test_marks_and_backward_passes_make_training_steps() -> None:
    unmarked = training(marks=())
    marked = replace(GENERATED, marks=[Mark(WALL + 110, "step", "step 0")])

    assert training().summary().units == unmarked.summary().units == marked.summary().units == []
    assert "no whole step is marked" in str(unmarked.summary())
    assert [step.duration_ns for step in marked.summary().steps] == [100, 140]
    # Calls in backward are no outermost ones.
    assert [(unit.unit, unit.measured) for unit in training().summary(step_by="call").units] == [("Net", 2)]
    by_call = training().summary(step_by="call")
    assert by_call.rows[0].step_p95_ns == 30 * MS
    assert by_call.tables["steps"].to("text").splitlines()[-1] == (
        "63.6% of the threads' time is between steps (backward 30.000 ms, other 20.000 ms, loss 10.000 ms)"
    )
    assert len(GENERATED.summary(step_by="optimizer").steps) == 1


def test_a_call_without_its_end_counts_to_no_percentile() -> None:
    script = _Script()
    model = script.name("Net", module_class="Net")
    script.call(0, 10, model)
    script.enter(20, model)
    script.mark(50, "died")
    timeline = build_timeline(script.snapshot())

    assert [step.whole for step in timeline.summary().steps] == [True, False]
    assert [(unit.measured, unit.p99_ns) for unit in timeline.summary().units] == [(1, 10)]
    assert str(timeline.summary()).splitlines()[1].endswith("1 × Net; 1 step not recorded whole")


@pytest.mark.parametrize(
    ("step_by", "message"),
    [
        ("range reqest", "no range is called 'reqest'; there are request, enumerate(DataLoader)#Own.__next__"),
        (
            "Blok",
            "no class of modules is called 'Blok'; there are Net, Block; a range is 'range NAME', --ranges has them",
        ),
        ("request", "no class of modules is called 'request'; there are Net, Block; the range is 'range request'"),
    ],
)
def test_an_unknown_name_is_an_error_that_lists_the_known_ones(step_by: str, message: str) -> None:
    with pytest.raises(ModtraceError) as raised:
        REQUESTS.summary(step_by=step_by)

    assert str(raised.value) == message


def test_steps_takes_calls_where_nothing_is_trained() -> None:
    assert steps_of(GENERATED.steps(1, 2)) == [("generate", 120, 160)]
    assert [row.name for row in GENERATED.steps(0, 2).ranges] == [
        "generate",
        "enumerate(DataLoader)#Own.__next__",
        "generate",
    ]
    assert steps_of(GENERATED.steps(-1)) == [("Net", 200, 250)]
    assert [span.fqn for span in GENERATED.steps(2, 3).spans] == ["Net", "Net.b"]
    assert len(GENERATED.steps(3).slices) == len(GENERATED.steps(1, 1).slices) == 0
    assert steps_of(REQUESTS.steps(1, 2)) == [("Net", 50, 60)]
    assert steps_of(REQUESTS.steps(1, 2, "range request"), "range request") == [("request", 120, 160)]
    # All but the first take the median, 50 ns, behind a warm-up of one.
    assert steps_of(GENERATED.typical_step()) == [("generate", 120, 160)]


def on_a_stream(timeline: Timeline) -> Timeline:
    """Each call of a model on a stream too, 25 ns later."""
    number = np.arange(len(timeline.slices))
    timeline = replace(timeline, slices=replace(timeline.slices, call=number, link=number))
    columns, names = timeline.columns, timeline.names
    rows = np.flatnonzero([names[name].fqn == "Net" for name in columns.name.tolist()])
    calls, late, zeros = columns.take(rows), 25, np.zeros(len(rows), np.int64)
    start, end = calls.start + late, calls.end + late
    spans = Slices.of(start=start, end=end, name=calls.name, track=zeros, call=calls.call)
    return Timeline.of(add_gpu_tracks(timeline, [(0, 7)], spans))


def on_threads(count: int) -> Timeline:
    """Thread n calls a model at n, 100 + n and 200 + n for 10, 11 and 12 + n ns. All are at work at once."""
    thread, call = np.arange(count)[:, None], np.arange(3)
    start = WALL + thread + 100 * call
    track, call = (np.broadcast_to(each, start.shape) for each in (thread, call))
    order = np.argsort(start, axis=None, kind="stable")
    columns = {"start": start, "end": start + 10 + call + thread * (call == 2), "track": track, "call": call}
    slices = Slices.of(name=np.zeros(3 * count), **{name: column.flatten()[order] for name, column in columns.items()})
    tracks = [Track("forward", f"worker {number}", 100 + number, Process(1)) for number in range(count)]
    return Timeline(slices, [Name("Net", "Net", "Net")], tracks)


def test_each_of_thousands_of_threads_has_the_steps_that_it_would_have_alone() -> None:
    count, began = 3000, time.process_time()
    summary = on_threads(count).summary()
    took = time.process_time() - began

    assert [(unit.thread, unit.measured, unit.p50_ns, unit.p99_ns) for unit in summary.units[1:]] == [
        (f"worker {number}", 3, 11, 12 + number) for number in range(count)
    ]
    total_ns = 33 * count + count * (count - 1) // 2
    assert {part.part: part.total_ns for part in summary.parts} == {"forward": total_ns, "other": 0}
    assert summary.outside == {"other": 179 * count}
    assert np.unique(summary.steps.columns.forward_ns - summary.steps.columns.duration_ns).tolist() == [0]
    assert took < 3, "it takes 0.4 s, and took 7 s when each thread looked at the slices of all"


def test_work_of_a_gpu_belongs_to_the_step_that_launched_it() -> None:
    timeline = on_a_stream(REQUESTS)
    step = find_step_bounds(timeline, "range request").of_spans(timeline)
    chosen = timeline.steps(0, 1, "range request")

    assert [
        (span.start_ns - WALL, number)
        for span, number in zip(timeline.spans, step.tolist(), strict=True)
        if span.track.startswith("gpu")
    ] == [(35, 0), (75, 0), (105, 0), (155, 1), (175, 1), (225, -1)]
    assert [span.start_ns - WALL for span in chosen.spans if span.track.startswith("gpu")] == [35, 75, 105]


def serving(ms: dict[int, int], inside: dict[int, RangeCategory]) -> Timeline:
    """40 calls of a model that take 6 ms, but those of `ms`; some have a range of 50 ms more in them."""
    script, now = _Script(), 0
    model = script.name("Net", module_class="Net")
    for number in range(40):
        script.enter(now, model)
        now += ms.get(number, 6) * MS
        if number in inside:
            opened = script.begin(now, "torch.compile 0/1", inside[number])
            now += 50 * MS
            script.end(now, opened)
        script.exit(now, model)
        now += MS
    return build_timeline(script.snapshot())


def causes(timeline: Timeline) -> list[str]:
    return [step.cause for step in divide_steps(timeline, None) if step.cause is not None]


def test_a_call_with_a_long_prompt_is_not_slow() -> None:
    assert causes(serving({0: 300, 20: 300}, {})) == []
    # Between ranks a prompt is more to send; alone, waiting for them has no such reason.
    assert causes(serving({20: 300}, {20: "communication"})) == []
    assert causes(serving({0: 300, 20: 300}, {20: "compile", 30: "communication"})) == [
        "Net 20: 350 ms, of which 50 ms compile (torch.compile 0/1); usually 0 ms",
        "Net 30: 56 ms, of which 50 ms communication; usually 0 ms",
    ]


def test_json_has_units_and_the_name_of_each_step() -> None:
    document = json.loads(GENERATED.summary().to_json())

    assert document["units"][1] == {
        "unit": "generate",
        "stage": "prefill",
        "thread": "",
        "measured": 2,
        "calls": 2,
        "p50_ns": 21,
        "p95_ns": 30,
        "p99_ns": 30,
        "per_second": 2e9 / 132,
    }
    assert [step["name"] for step in document["steps"]] == ["generate", "generate", "Net"]
    assert [sum(step["parts"].values()) for step in document["steps"]] == [100, 40, 50]
    assert (document["overview"]["step_by"], document["outside"]) == ("call", {"other": 50, "data loading": 10})


def test_the_page_has_a_bar_per_call_and_a_trace_a_counter_per_part() -> None:
    table = part_table(GENERATED)

    assert table is not None
    assert table.names == ["generate 0", "generate 1", "Net 2"]
    assert (table.end_ns - table.start_ns).tolist() == [100, 40, 50]
    counters = {counter.name: counter for counter in part_counters(GENERATED)}
    assert [*counters] == ["step: forward", "step: generate"]
    assert (counters["step: forward"].time_ns - WALL).tolist() == [0, 100, 120, 160, 200, 250]
    assert counters["step: forward"].ns.tolist() == [50, 0, 20, 0, 50, 0]
    assert counters["step: generate"].ns.tolist() == [50, 0, 20, 0, 0, 0]


def test_calls_that_overlap_and_very_many_steps_have_no_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    assert part_counters(two_threads()) == []
    monkeypatch.setattr("modtrace.write.written_parts.MAX_STEPS", 2)
    assert part_counters(GENERATED) == []


@pytest.mark.parametrize("suffix", ["json", "pftrace"])
def test_perfetto_shows_each_generate_and_what_it_was_spent_on(
    trace_processor: type[TraceProcessor], tmp_path: Path, suffix: str
) -> None:
    GENERATED.save(tmp_path / f"t.{suffix}")
    opened = trace_processor.open(tmp_path / f"t.{suffix}")
    steps = opened.query("select ts, dur from slice where name = 'generate' order by ts")
    rows = opened.query(
        "select t.name, c.ts, c.value from counter c join counter_track t on c.track_id = t.id order by t.name, c.ts"
    )
    begin = steps[0]["ts"]

    assert opened.import_problems() == {}
    assert [(row["ts"] - begin, row["dur"]) for row in steps] == [(0, 100), (120, 40)]
    assert [(row["name"], row["ts"] - begin, row["value"]) for row in rows] == [
        (f"step: {part} ms", moment, ns / 1e6)
        for part, values in (("forward", (50, 0, 20, 0, 50, 0)), ("generate", (50, 0, 20, 0, 0, 0)))
        for moment, ns in zip((0, 100, 120, 160, 200, 250), values, strict=True)
    ]
    assert modtrace.load(tmp_path / f"t.{suffix}").counters == []


def test_steps_are_found_once_per_timeline() -> None:
    timeline = training()

    assert find_step_bounds(timeline) is find_step_bounds(timeline, None)
    assert divide_steps(timeline) is divide_steps(timeline, "optimizer")
    assert measure_steps(timeline) is not measure_steps(replace(timeline))


def test_ranges_are_listed_with_their_part_count_and_times() -> None:
    assert REQUESTS.summary().ranges == [
        RangeTimes("request", "request", 2, 140, 70, 100),
        RangeTimes("enumerate(DataLoader)#Own.__next__", "data loading", 1, 10, 10, 10),
    ]
    assert [(row.range, row.part) for row in GENERATED.summary().ranges][:1] == [("generate", "generate")]


def test_the_command_lists_ranges_alone(tmp_path: Path) -> None:
    REQUESTS.save(tmp_path / "requests.json")

    def shown(*options: str) -> Result:
        return CliRunner().invoke(group, ["summary", str(tmp_path / "requests.json"), "--ranges", *options])

    assert [line.split() for line in shown("--limit", "1").stdout.splitlines()] == [
        ["range", "part", "calls", "total", "ms", "p50", "p95"],
        ["request", "request", "2", "0.000", "0.000", "0.000"],
        ["1", "more", "range"],
    ]
    assert shown("--format", "csv").stdout.splitlines()[:2] == [
        "range,part,calls,total_ns,p50_ns,p95_ns",
        "request,request,2,140,70,100",
    ]
    assert json.loads(shown("--format", "json").stdout)["ranges"][0]["range"] == "request"
    assert shown("--by", "class").exit_code == shown("--only", "Net").exit_code == 2
    wrong = CliRunner().invoke(group, ["summary", str(tmp_path / "requests.json"), "--only", "request"])
    assert wrong.stderr.endswith(
        "no module is called request; there is Net, for one; --ranges lists saving, loading and the like\n"
    )


@pytest.mark.parametrize(
    ("step_by", "first", "numbers"), [("call", 1, [1, 2, 3, 4, 5]), ("call", -2, [4, 5]), ("range request", 1, [1])]
)
def test_chosen_calls_and_ranges_keep_their_numbers(
    step_by: str, first: int, numbers: list[int], tmp_path: Path
) -> None:
    chosen = REQUESTS.steps(first, None, step_by)
    chosen.save(tmp_path / "chosen.json")

    assert [step.step for step in chosen.summary(step_by=step_by).steps] == numbers
    assert [step.step for step in modtrace.load(tmp_path / "chosen.json").summary(step_by=step_by).steps] == numbers
    again = chosen.steps(numbers[-1], None, step_by)
    assert [step.step for step in again.summary(step_by=step_by).steps] == numbers[-1:]


def test_modules_of_chosen_calls_have_their_times() -> None:
    rows = {row.fqn: row for row in REQUESTS.steps(5, 6).summary().rows}  # the last call, 50 ns, 30 of them in Net.b

    assert {fqn: (row.in_steps_ns, row.step_p50_ns) for fqn, row in rows.items()} == {
        "Net": (50, 50),
        "Net.b": (30, 30),
    }


def test_a_row_of_steps_has_the_parts_that_add_up_to_it() -> None:
    for step_by in ("call", "range request"):
        for row in json.loads(REQUESTS.summary(step_by=step_by).tables["steps"].to("json")):
            parts = {name: ns for name, ns in row.items() if name.startswith("parts.")}
            assert sum(parts.values()) == row["duration_ns"]
    # Of a range's time all was "before": its parts are what ran in it.
    text = REQUESTS.summary(step_by="range request").tables["steps"].to("text").splitlines()
    assert text[0].split() == ["step", "duration", "ms", "forward", "request"]
