"""Evaluation in a training script is not a training step: against counts by the script, with both engines."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor, nn

import modtrace
from modtrace import Timeline
from modtrace.record_options import EngineName


@pytest.fixture(autouse=True)
def even_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the wall clock run evenly: it may be set during a recording, which knows it from its start and stop."""
    ahead_ns = time.time_ns() - time.monotonic_ns()
    monkeypatch.setattr(time, "time_ns", lambda: time.monotonic_ns() + ahead_ns)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y


class Teacher(Net):
    pass


class Script:
    """Two epochs of three steps; after each, an evaluation of four batches, the second of which waits.

    Args:
        evaluates_in_eval_mode: whether the model is in eval mode for the evaluation.
        has_graph: whether the evaluation makes a graph.
        trains_in_eval_mode: whether the model is never in training mode.
    """

    def __init__(self, *, evaluates_in_eval_mode: bool, has_graph: bool, trains_in_eval_mode: bool = False) -> None:
        self.model, self.teacher = Net(), Teacher().eval()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.evaluates_in_eval_mode, self.has_graph = evaluates_in_eval_mode, has_graph
        self.trains_in_eval_mode = trains_in_eval_mode
        self.evaluations: list[tuple[int, int]] = []

    def run(self) -> None:
        for _ in range(2):
            self.model.train(not self.trains_in_eval_mode)
            for _ in range(3):
                with torch.no_grad():
                    target = self.teacher(torch.ones(2, 4))
                (self.model(torch.ones(2, 4)) - target).sum().backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
            begin = time.time_ns()
            self.model.train(not self.evaluates_in_eval_mode and not self.trains_in_eval_mode)
            with torch.set_grad_enabled(self.has_graph):
                for _ in range(4):
                    self.model(torch.ones(2, 4))
            self.model.train(not self.trains_in_eval_mode)
            self.evaluations.append((begin, time.time_ns()))


def recorded(script: Script, engine: EngineName) -> Timeline:
    with modtrace.record(engine=engine) as recording:
        script.run()
    return recording.timeline()


@pytest.mark.parametrize("engine", ["native", "python"])
@pytest.mark.parametrize(
    "script",
    [
        pytest.param(lambda: Script(evaluates_in_eval_mode=True, has_graph=False), id="eval and no_grad"),
        pytest.param(lambda: Script(evaluates_in_eval_mode=True, has_graph=True), id="eval"),
        pytest.param(lambda: Script(evaluates_in_eval_mode=False, has_graph=False), id="no_grad"),
        pytest.param(
            lambda: Script(evaluates_in_eval_mode=True, has_graph=False, trains_in_eval_mode=True), id="always eval"
        ),
    ],
)
def test_an_evaluation_is_one_range_and_no_part_of_a_training_step(script: object, engine: EngineName) -> None:
    program: Script = script()  # type: ignore[operator]
    timeline = recorded(program, engine)
    evaluations = [one for one in timeline.ranges if one.category == "evaluation"]
    assert [one.step for one in evaluations] == [3, 6]
    for one, (begin, end) in zip(evaluations, program.evaluations, strict=True):
        assert begin <= one.start_ns < one.end_ns <= end
        first = next(span.start_ns for span in timeline.spans if span.start_ns >= begin)
        evals = [each.start_ns for each in timeline.ranges if each.name == "Module.eval#Net" and each.start_ns < first]
        assert one.start_ns == (evals[-1] if evals and evals[-1] >= begin else first)
        assert bool(evals and evals[-1] >= begin) == (program.evaluates_in_eval_mode or program.trains_in_eval_mode)
        inside = [span.fqn for span in timeline.spans if one.start_ns <= span.start_ns < one.end_ns]
        assert inside == ["Net", "Net.inner"] * 4
    summary = timeline.summary()
    steps = {step.step: step for step in summary.steps}
    assert {number: step.evaluation_ns for number, step in steps.items() if step.evaluation_ns} == {
        one.step: one.end_ns - one.start_ns for one in evaluations
    }
    for step, parts in zip(summary.steps, summary.step_parts, strict=True):
        times = step.forward_ns + step.backward_ns + step.recompute_ns + step.evaluation_ns
        assert times + step.before_ns + step.between_ns + step.after_ns == step.duration_ns
        assert sum(parts.parts.values()) == step.duration_ns
        assert parts.parts.get("evaluation", 0) == step.evaluation_ns
    # All calls of a module count, but the percentiles of its time in a step are those of training.
    row = next(row for row in summary.rows if row.fqn == "Net")
    trained = sorted(
        sum(span.duration_ns for span in timeline.spans if span.fqn == "Net" and span.step == step)
        - sum(
            span.duration_ns
            for span in timeline.spans
            if span.fqn == "Net"
            and any(one.start_ns <= span.start_ns < one.end_ns for one in evaluations)
            and span.step == step
        )
        for step in range(6)
    )
    assert row.calls == 2 * (3 + 4)
    assert row.step_p95_ns == trained[-1]


@pytest.mark.parametrize("engine", ["native", "python"])
def test_calls_of_each_step_without_a_graph_belong_to_the_step(engine: EngineName) -> None:
    generator, critic = Net(), Net()
    optimizers = [torch.optim.SGD(one.parameters(), 0.1) for one in (generator, critic)]
    with modtrace.record(engine=engine) as recording:
        for _ in range(4):
            with torch.no_grad():
                made = generator(torch.ones(2, 4))
            critic(made).sum().backward()
            critic(generator(torch.ones(2, 4))).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            recording.step()
    assert [one for one in recording.timeline().ranges if one.category == "evaluation"] == []


@pytest.mark.parametrize("engine", ["native", "python"])
def test_inference_alone_is_no_evaluation(engine: EngineName) -> None:
    model = Net().eval()
    with modtrace.record(engine=engine) as recording:
        for _ in range(3):
            model(torch.ones(2, 4))
    assert recording.timeline().ranges == []
