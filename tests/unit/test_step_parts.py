"""Steps in parts: whose each nanosecond is, worked out by hand, and that the parts of any step add up to it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given

from modtrace import Timeline
from modtrace.ring import Kind
from modtrace.ring.event_text import range_text
from modtrace.ring.slot_format import COLLECTED_BITS, GENERATION_BITS, NO_NAME, SEQUENCE_BITS
from modtrace.timeline.summary import find_step_bounds, measure_steps
from modtrace.timeline.summary.slow_steps import StepParts, divide_steps
from tests.support.event_script import WALL, EventScript
from tests.support.timelines import build_timeline, timelines
from tests.support.training_timeline import MS, training

FETCH = range_text("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "data loading")
STEP, CLIP = range_text("Optimizer.step#SGD.step", "optimizer"), range_text("clip_grad_norm_", "optimizer")
COMPILE, SAVE = range_text("torch.compile 0/0", "compile"), range_text("torch.save", "saving")
LOOP, NOTE, INNER = (range_text(name, "user") for name in ("loop", "note", "inner"))


class _Ranges:
    """Writes ranges, each with a number of its own."""

    def __init__(self, script: EventScript) -> None:
        self._script, self._count = script, 0

    def begin(self, time: int, text: str) -> tuple[str, int]:
        self._count += 1
        self._script.collective(time, Kind.RANGE_BEGIN, text, self._count)
        return text, self._count

    def end(self, time: int, opened: tuple[str, int]) -> None:
        self._script.collective(time, Kind.RANGE_END, *opened)

    def whole(self, start: int, end: int, text: str) -> None:
        self.end(end, self.begin(start, text))


def parts_of(timeline: Timeline) -> list[dict[str, int]]:
    return [dict(step.parts) for step in divide_steps(timeline)]


def test_each_nanosecond_of_a_step_is_of_one_part() -> None:
    script = EventScript()
    ranges, model, loss = (
        _Ranges(script),
        script.name("Net", module_class="Net"),
        script.name("MSELoss", module_class="MSELoss"),
    )
    loop = ranges.begin(0, LOOP)  # around modules: what no other part has
    ranges.whole(10, 30, FETCH)
    script.enter(40, model)
    ranges.whole(45, 50, COMPILE)
    ranges.whole(52, 54, NOTE)  # in a module: its time is forward
    script.exit(60, model)
    note = ranges.begin(64, NOTE)  # between the model and the pass: the user's own name is more than "loss"
    ranges.whole(66, 67, INNER)
    ranges.end(70, note)
    script.enter(72, loss)
    script.exit(75, loss)
    script.pass_begin(80)
    script.pass_end(100)
    ranges.whole(105, 110, CLIP)
    step = ranges.begin(111, STEP)
    script.step(120, 0)
    ranges.end(121, step)
    ranges.end(130, loop)

    assert parts_of(build_timeline(script.snapshot()))[:1] == [
        {
            "data loading": 20,
            "forward": 15,
            "compile": 5,
            "loss": 4 + 10,  # 60–64, and 70–80 with the loss module
            "note": 5,
            "inner": 1,
            "backward": 20,
            "optimizer": 5 + 9,
            "loop": 10 + 5 + 1,  # the step begins with its data
        }
    ]


def test_recompute_is_not_backward_and_what_is_left_is_other() -> None:
    assert divide_steps(training()) == [
        StepParts(
            0, {"forward": 30 * MS, "loss": 10 * MS, "backward": 30 * MS, "recompute": 10 * MS, "other": 10 * MS}
        ),
        StepParts(1, {"forward": 10 * MS, "other": 190 * MS}),
    ]


def test_all_that_is_in_an_evaluation_is_evaluation() -> None:
    script = EventScript()
    ranges, model = _Ranges(script), script.name("Net", module_class="Net")
    script.enter(0, model)
    script.exit(20, model)
    evaluation = ranges.begin(30, range_text("evaluation", "evaluation"))
    ranges.whole(32, 36, FETCH)
    script.enter(40, model)
    ranges.whole(42, 44, COMPILE)
    script.exit(50, model)
    ranges.whole(52, 58, SAVE)
    script.event(60, Kind.COLLECTION, NO_NAME, 1 << COLLECTED_BITS + GENERATION_BITS)
    ranges.end(60, evaluation)
    script.step(70, 0)
    timeline = build_timeline(script.snapshot())

    assert parts_of(timeline) == [{"forward": 20, "evaluation": 30, "other": 20}]
    assert [step.training_ns for step in measure_steps(timeline)] == [40]


@pytest.mark.parametrize(
    ("behind", "end", "loading"),
    [
        ([], 80, 0),
        ([("train", 85, 90)], 90, 0),
        ([("fetch", 82, 85), ("train", 86, 90)], 82, 3),  # of the evaluation, or of the training
        ([("save", 83, 84), ("train", 86, 90)], 83, 0),
    ],
)
def test_an_evaluation_lasts_from_eval_to_train(behind: list[tuple[str, int, int]], end: int, loading: int) -> None:
    script = EventScript()
    ranges, model = _Ranges(script), script.name("Net", module_class="Net")
    evaluates = range_text("Module.eval#Net", "torch")
    ranges.whole(1, 2, evaluates)  # the training goes on behind it
    script.enter(3, model, sequence=0)
    script.exit(10, model, sequence=1)
    script.pass_begin(20)
    script.node(20, 28, 0)
    script.pass_end(30)
    ranges.whole(35, 38, evaluates)
    ranges.whole(50, 55, evaluates)
    ranges.whole(56, 58, FETCH)
    for start, call in ((60, 1), (70, 2)):
        script.event(start, Kind.EVAL_ENTER, model, call << SEQUENCE_BITS | 1)
        script.exit(start + 10, model, call, sequence=1)
    texts = {"fetch": FETCH, "save": SAVE, "train": range_text("Module.train#Net", "torch")}
    for name, begin, until in behind:
        ranges.whole(begin, until, texts[name])
    script.step(100, 0)
    timeline = build_timeline(script.snapshot())

    (evaluation,) = (one for one in timeline.ranges if one.category == "evaluation")
    assert (evaluation.start_ns - WALL, evaluation.end_ns - WALL) == (50, end)
    (parts,) = parts_of(timeline)
    assert (parts["evaluation"], parts.get("data loading", 0)) == (end - 50, loading)
    assert (parts["forward"], parts["loss"], parts["backward"]) == (7, 10, 10)


def test_the_loss_is_behind_each_call_with_a_backward_and_before_each_pass() -> None:
    script = EventScript()
    ranges, model, teacher = _Ranges(script), script.name("Net"), script.name("Teacher")
    script.enter(0, model, sequence=0)
    script.exit(10, model, sequence=1)
    script.enter(14, teacher, sequence=1)  # without a backward: what follows it is loss if a pass comes next
    script.exit(20, teacher, sequence=1)
    script.enter(23, model, 1, sequence=1)
    script.exit(30, model, 1, sequence=2)
    script.pass_begin(35, 1)
    script.node(36, 40, 1)
    script.pass_end(42, 1)
    script.pass_begin(47, 2)  # a second loss of the same calls
    script.node(48, 50, 0)
    script.pass_end(52, 2)
    ranges.whole(54, 58, CLIP)
    script.pass_begin(60, 3)  # behind an optimizer
    script.pass_end(64, 3)
    script.step(70, 0)

    assert parts_of(build_timeline(script.snapshot())) == [
        {
            "forward": 10 + 6 + 7,
            "loss": 4 + 5 + 5,
            "backward": 7 + 5 + 4,
            "optimizer": 4,
            "other": 3 + 2 + 2 + 6,
        }
    ]


def test_the_loss_of_a_closure_is_not_the_optimizers() -> None:
    script = EventScript()
    ranges, model = _Ranges(script), script.name("Net")
    opened = ranges.begin(0, STEP)
    script.enter(10, model, sequence=0)
    script.exit(20, model, sequence=1)
    ranges.whole(22, 25, CLIP)
    script.pass_begin(30)
    script.node(31, 34, 0)
    script.pass_end(40)
    script.step(48, 0)
    ranges.end(50, opened)

    assert parts_of(build_timeline(script.snapshot()))[0] == {
        "forward": 10, "loss": 2 + 5, "backward": 10, "optimizer": 10 + 3 + 8
    }  # fmt: skip


def test_a_step_of_another_class_around_the_model_is_no_optimizer() -> None:
    script = EventScript()
    ranges, model = _Ranges(script), script.name("Net")
    opened = ranges.begin(0, range_text("Trainer.step", "optimizer"))
    script.enter(10, model, sequence=0)
    script.exit(20, model, sequence=1)
    ranges.whole(30, 37, range_text("Own.step", "optimizer"))
    script.step(48, 0)
    ranges.end(50, opened)

    assert parts_of(build_timeline(script.snapshot()))[0] == {"forward": 10, "optimizer": 7, "other": 31}


def test_a_loss_around_the_model_is_the_model() -> None:
    script = EventScript()
    both = script.name("Net", module_class="NetWithLoss")
    script.enter(0, both)
    script.exit(10, both)
    script.step(20, 0)
    alone = parts_of(build_timeline(script.snapshot()))
    script = EventScript()
    model, criterion = script.name("Net"), script.name("C", module_class="SetCriterion")
    script.enter(0, model)
    script.exit(10, model)
    script.enter(12, criterion)
    script.exit(15, criterion)
    script.step(20, 0)

    assert alone == [{"forward": 10, "other": 10}]
    assert parts_of(build_timeline(script.snapshot())) == [{"forward": 10, "loss": 3, "other": 7}]


def test_a_step_begins_with_what_leads_to_its_training() -> None:
    script = EventScript()
    ranges, net, other = _Ranges(script), script.name("Net"), script.name("Other")
    ranges.whole(0, 40, SAVE)  # loads weights
    script.enter(50, net, sequence=0)  # of a sample
    script.exit(60, net, sequence=1)
    at, sequence = 1000, 1
    for number, model in enumerate((net, net, other, other)):
        at += 500 if number == 2 else 0  # prepares the next training
        ranges.whole(at, at + 4, FETCH)
        script.enter(at + 6, model, number, sequence)
        script.exit(at + 16, model, number, sequence + 1)
        script.pass_begin(at + 20, number)
        script.node(at + 21, at + 29, sequence)
        script.pass_end(at + 30, number)
        script.step(at + 40, number)
        at, sequence = at + 40, sequence + 1
    ranges.whole(at + 10, at + 90, SAVE)
    timeline = build_timeline(script.snapshot())
    bounds = find_step_bounds(timeline)
    summary = timeline.summary()

    assert list(zip((bounds.start_ns - WALL).tolist(), (bounds.end_ns - WALL).tolist(), strict=True)) == [
        (1000, 1040),
        (1040, 1080),
        (1580, 1620),
        (1620, 1660),
    ]
    assert parts_of(timeline) == [
        {"data loading": 4, "forward": 10, "loss": 4, "backward": 10, "other": 12} for _ in range(4)
    ]
    assert summary.around == (
        {"other": 950, "saving": 40, "forward": 10},
        {"other": 500},
        {"saving": 80, "other": 10},
    )
    assert [(one.part, one.total_ns, one.share) for one in summary.parts][:2] == [
        ("data loading", 16, 0.1),
        ("forward", 40, 0.25),
    ]
    shares = {row.fqn: (row.calls, row.in_steps_ns) for row in summary.rows}
    assert shares == {"Net": (3, 36), "Other": (2, 36)}
    document = json.loads(summary.to_json())
    assert [document[place] for place in ("before", "outside", "after")] == [*map(dict, summary.around)]
    places = (
        "before the first step 0.001 ms, of it saving",
        "between trainings 0.001 ms",
        "after the last step 0.000 ms",
    )
    for text in (summary.to_text(), summary.to_markdown(), summary.to_html(), summary.to_tree()):
        assert all(place in text for place in places)
    assert [divide_steps(timeline.steps(low))[0].parts for low in range(4)] == [*map(dict, parts_of(timeline))]


def test_time_before_the_steps_is_that_of_the_busiest_thread_until_each_mark() -> None:
    script = EventScript()
    ranges, net = _Ranges(script), script.name("Net")
    script.on_thread(script.add_thread("loads", tid=2))
    ranges.whole(0, 90, NOTE)
    script.on_thread(0)
    script.step(100, 0)
    ranges.whole(110, 190, SAVE)
    for number, at in ((1, 500), (2, 540)):
        script.enter(at, net, number, number)
        script.exit(at + 10, net, number, number + 1)
        script.pass_begin(at + 20, number)
        script.node(at + 21, at + 29, number)
        script.pass_end(at + 30, number)
        script.step(at + 40, number)

    assert build_timeline(script.snapshot()).summary().around.before == {"other": 330, "note": 90, "saving": 80}


@pytest.mark.parametrize("trains_before", [False, True])
def test_an_earlier_training_before_a_long_pause_is_in_no_step(trains_before: bool) -> None:
    script = EventScript()
    net = script.name("Net")
    if trains_before:  # and takes no step
        script.enter(0, net, sequence=0)
        script.exit(10, net, sequence=1)
        script.pass_begin(12, 1)
        script.node(13, 18, 0)
        script.pass_end(20, 1)
    for call, at in enumerate((200, 240), 1):  # two batches to a step
        script.enter(at, net, call, call)
        script.exit(at + 10, net, call, call + 1)
        script.pass_begin(at + 12, call + 1)
        script.node(at + 13, at + 18, call)
        script.pass_end(at + 20, call + 1)
    script.step(270, 0)
    timeline = build_timeline(script.snapshot())

    assert parts_of(timeline) == [{"forward": 20, "loss": 4, "backward": 16, "other": 30}]
    assert sum(timeline.summary().around.before.values()) == (200 if trains_before else 0)


@pytest.mark.parametrize("encodes", [False, True])
def test_the_model_in_a_loss_is_forward_whatever_else_is_called(encodes: bool) -> None:
    script = EventScript()
    loss, model, layer, cosine, entropy, other = (
        script.name(name, module_class=name.split(".")[-1])
        for name in ("PairLoss", "PairLoss.Net", "PairLoss.Net.Linear", "PairLoss.Cosine", "PairLoss.BCELoss", "Other")
    )
    at, sequence = 0, 0
    for number in range(2):
        if encodes:
            script.enter(at, other, number, sequence)
            script.exit(at + 5, other, number, sequence)
        script.enter(at + 10, loss, number, sequence)
        script.enter(at + 12, model, number, sequence)
        script.enter(at + 13, layer, number, sequence)
        script.exit(at + 18, layer, number, sequence + 1)
        script.exit(at + 20, model, number, sequence + 1)
        for name in (cosine, entropy):
            script.enter(at + 24, name, number, sequence + 1)
            script.exit(at + 26, name, number, sequence + 2)
            at += 4
        script.exit(at + 30, loss, number, sequence + 2)
        script.pass_begin(at + 34, number)
        script.node(at + 35, at + 39, sequence)
        script.pass_end(at + 40, number)
        script.step(at + 50, number)
        at, sequence = at + 100, sequence + 2
    steps = parts_of(build_timeline(script.snapshot()))

    forward = 8 + (5 if encodes else 0)
    assert [(step["forward"], step["loss"], step["backward"]) for step in steps] == [(forward, 20 + 4, 6)] * 2


def test_layers_of_a_model_whose_method_the_loss_calls_are_forward() -> None:
    script = EventScript()
    loss, tok, inner, proj, head = (
        script.name(name, module_class="PairLoss" if name == "PairLoss" else "Layer")
        for name in ("PairLoss", "PairLoss.m.tok", "PairLoss.m.tok.0", "PairLoss.m.proj", "PairLoss.head")
    )
    script.enter(10, loss, sequence=0)
    script.enter(12, tok, sequence=0)
    script.enter(13, inner, sequence=0)
    script.exit(15, inner, sequence=1)
    script.exit(16, tok, sequence=1)
    for name, begin, sequence in ((proj, 18, 1), (head, 24, 2)):  # the head is the loss's own
        script.enter(begin, name, sequence=sequence)
        script.exit(begin + 4, name, sequence=sequence + 1)
    script.exit(30, loss, sequence=3)
    script.pass_begin(30)
    script.node(31, 39, 2)
    script.pass_end(40)
    script.step(50, 0)

    (parts,) = parts_of(build_timeline(script.snapshot()))

    assert (parts["forward"], parts["loss"], parts["backward"]) == (4 + 4, 20 - 8, 10)


def test_a_layer_in_a_loss_is_the_model_if_no_other_module_trains() -> None:
    def forward_and_loss(*, has_model: bool) -> tuple[int, int]:
        script = EventScript()
        model, loss, layer = (
            script.name(name, module_class=name.split(".")[-1]) for name in ("Net", "HeadLoss", "HeadLoss.Linear")
        )
        if has_model:
            script.enter(0, model, sequence=0)
            script.exit(10, model, sequence=1)
        script.enter(10, loss, sequence=1)
        script.enter(12, layer, sequence=1)
        script.exit(18, layer, sequence=2)
        script.exit(20, loss, sequence=2)
        script.pass_begin(20)
        script.node(22, 25, 1)
        script.node(26, 29, 0)
        script.pass_end(30)
        script.step(40, 0)
        (parts,) = parts_of(build_timeline(script.snapshot()))
        return parts["forward"], parts["loss"]

    assert forward_and_loss(has_model=True) == (10, 10)
    assert forward_and_loss(has_model=False) == (6, 4)


def test_totals_and_percentiles_of_parts() -> None:
    parts = training().summary().parts

    assert [(one.part, one.total_ns // MS, one.p50_ns // MS, one.p95_ns // MS) for one in parts] == [
        ("forward", 40, 20, 30),
        ("loss", 10, 5, 10),
        ("backward", 30, 15, 30),
        ("recompute", 10, 5, 10),
        ("other", 200, 100, 190),
    ]
    assert [one.share for one in parts] == [40 / 290, 10 / 290, 30 / 290, 10 / 290, 200 / 290]


def slow_steps(slow: dict[int, tuple[str, str]]) -> Timeline:
    """Twenty steps of 100 ms, but those in which a range of 4 ms takes 204."""
    script, now = EventScript(capacity=256), 0
    ranges, model = _Ranges(script), script.name("Net", module_class="Net")
    for number in range(20):
        long = slow.get(number)
        for text in (FETCH, STEP, SAVE):
            length = 204 if long is not None and long[0] == text else 4
            ranges.whole(now * MS, (now + length) * MS, text)
            now += length
        script.enter(now * MS, model)
        now += 88
        script.exit(now * MS, model)
        script.step(now * MS, number)
    return build_timeline(script.snapshot())


def test_a_slow_step_says_which_part_made_it_so() -> None:
    steps = divide_steps(slow_steps({12: (FETCH, ""), 14: (STEP, ""), 17: (SAVE, "")}))

    assert {step.step: step.cause for step in steps if step.cause is not None} == {
        12: "step 12: 300 ms, of which 204 ms data loading; usually 4 ms",
        14: "step 14: 300 ms, of which 204 ms optimizer (Optimizer.step#SGD.step); usually 4 ms",
        17: "step 17: 300 ms, of which 204 ms saving (torch.save); usually 4 ms",
    }


def test_no_step_of_a_quiet_run_is_slow() -> None:
    assert [step.cause for step in divide_steps(slow_steps({}))] == [None] * 20


def test_json_has_the_parts_of_all_steps_and_of_each() -> None:
    document = json.loads(training().summary().to_json())

    assert document["parts"][0] == {
        "part": "forward",
        "total_ns": 40 * MS,
        "p50_ns": 20 * MS,
        "p95_ns": 30 * MS,
        "share": 40 / 290,
    }
    assert document["steps"][1]["parts"] == {"forward": 10 * MS, "other": 190 * MS}
    assert document["steps"][1]["cause"] is None


def test_the_table_of_parts_has_a_bar_and_the_sentences() -> None:
    text = slow_steps({12: (FETCH, "")}).summary().tables["parts"].to("text").splitlines()

    assert text[0].split() == ["part", "of", "a", "step", "median", "ms", "p95", "%"]
    assert text[1].split() == ["data", "loading", "4.000", "4.000", "12.7", "███"]
    assert text[-1] == "step 12: 300 ms, of which 204 ms data loading; usually 4 ms"


@given(timelines())
def test_the_parts_of_any_step_add_up_to_it(timeline: Timeline) -> None:
    durations = {step.step: step.duration_ns for step in measure_steps(timeline)}

    assert {step.step: sum(step.parts.values()) for step in divide_steps(timeline)} == durations
