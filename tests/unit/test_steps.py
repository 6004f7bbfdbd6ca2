"""Steps without marks: the optimizer step that ends each."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import modtrace
from modtrace.track.optimizer_steps import OptimizerSteps, describe_optimizer


@pytest.fixture(autouse=True)
def _no_optimizers_of_tests_before() -> None:
    gc.collect()


def make_optimizer(**options: Any) -> torch.optim.SGD:
    return torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, **options)


def told(train: Callable[[], object]) -> list[tuple[int, bool]]:
    steps: list[tuple[int, bool]] = []
    counter = OptimizerSteps(lambda step, complete: steps.append((step, complete)))
    counter.start()
    try:
        train()
    finally:
        counter.stop()
    return steps


def test_each_step_of_a_single_optimizer_is_a_step() -> None:
    optimizer = make_optimizer()

    assert told(lambda: [optimizer.step() for _ in range(3)]) == [(0, True), (1, True), (2, True)]


def test_two_optimizers_that_take_turns_share_a_step() -> None:
    critic, generator = make_optimizer(), make_optimizer()

    steps = told(lambda: [optimizer.step() for _ in range(3) for optimizer in (critic, generator)])

    assert steps == [(0, False), (0, True), (1, False), (1, True), (2, False), (2, True)]


@pytest.mark.parametrize("count", [1, 8])
def test_all_objects_are_walked_through_once_per_process(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    told(lambda: None)
    walked: list[object] = []
    monkeypatch.setattr(gc, "get_referrers", lambda *kinds: walked.append(kinds))
    optimizers = [make_optimizer() for _ in range(count)]

    steps = told(lambda: [optimizer.step() for _ in range(5) for optimizer in optimizers])

    assert steps == [(step, number == count - 1) for step in range(5) for number in range(count)]
    assert walked == []


def test_an_optimizer_that_is_gone_is_not_waited_for() -> None:
    first, second, third = (make_optimizer() for _ in range(3))
    awaited = [second, third]
    del second, third

    def train() -> None:
        first.step()
        del awaited[:]
        first.step()

    assert told(train) == [(0, False), (1, True)]


def test_the_optimizer_that_steps_more_often_makes_the_steps() -> None:
    critic, generator = make_optimizer(), make_optimizer()

    steps = told(lambda: [optimizer.step() for optimizer in (critic, critic, critic, generator, critic, critic)])

    assert [step for step, _ in steps] == [0, 1, 2, 2, 3, 4]


def test_a_users_mode_sees_no_more_calls_than_without_a_recording() -> None:
    optimizers = [make_optimizer(), make_optimizer()]
    seen: list[str] = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    def train() -> None:
        for optimizer in optimizers:
            optimizer.param_groups[0]["params"][0].grad = torch.ones(1)
        with Mode():
            for _ in range(3):
                for optimizer in optimizers:
                    optimizer.step()

    train()
    plain = seen[:]
    seen.clear()

    assert len(told(train)) == 6
    assert seen == plain


@pytest.mark.parametrize(
    ("options", "how"),
    [({}, "one by one"), ({"foreach": False}, "one by one (foreach=False)"), ({"foreach": True}, "foreach")],
)
def test_an_optimizer_is_described_once_in_a_thread(options: dict[str, bool], how: str) -> None:
    said: list[dict[str, object]] = []
    counter = OptimizerSteps(lambda _step, _complete: None, said.append)
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True) for _ in range(3)], **options)
    optimizer.register_step_pre_hook(lambda *_: None)

    counter.start()
    optimizer.step()
    optimizer.step()
    counter.stop()

    assert said == [{"class": "SGD", "tensors": 3, "hooks": 1, "how": how}]


@pytest.mark.parametrize(("alike", "count"), [(True, 1), (False, 20)])
def test_many_optimizers_are_noted_with_the_number_of_their_first_tensors(alike: bool, count: int) -> None:
    said: list[dict[str, object]] = []
    counter = OptimizerSteps(lambda _step, _complete: None, said.append)
    tensors, kept = [torch.ones(1, requires_grad=True) for _ in range(20)], []

    counter.start()
    for number in range(20):
        optimizer = torch.optim.SGD([tensors[0 if alike else number]])
        optimizer.step()
        optimizer.step()
        kept.append(None if number % 2 else optimizer)
    counter.stop()

    one: dict[str, object] = {"class": "SGD", "tensors": 1, "hooks": 0, "how": "one by one"}
    assert [note for note in said if "stepped" not in note] == [one] * count
    assert [note for note in said if "stepped" in note] == [
        one | {"stepped": stepped, "first_tensors": 1 if alike else stepped} for stepped in (8, 16)
    ]


def test_the_attributes_of_a_foreign_optimizer_are_described() -> None:
    class Other:
        param_groups = ({"params": [torch.ones(1)]},)

    assert describe_optimizer(Other()) == {"class": "Other", "tensors": 1}  # type: ignore[arg-type]


def test_an_optimizer_inside_another_one_does_not_count() -> None:
    class Outer(torch.optim.SGD):
        def __init__(self) -> None:
            super().__init__([nn.Parameter(torch.ones(1))], lr=0.1)
            self.inner = make_optimizer()

        def step(self, closure: Any = None) -> Any:
            return self.inner.step(closure)

    outer = Outer()

    assert [step for step, _ in told(lambda: [outer.step() for _ in range(2)])] == [0, 1]


def compute(net: nn.Module) -> None:
    net(torch.ones(1, 2)).sum().backward()


def test_a_second_training_starts_steps_of_its_own() -> None:
    def train() -> None:
        nets = [nn.Linear(2, 2) for _ in range(3)]
        first, second, *third = (torch.optim.SGD(net.parameters(), lr=0.1) for net in nets)
        for net, optimizer in zip((0, 0, 1, 1), (first, first, second, second), strict=True):
            compute(nets[net])
            optimizer.step()
        del first, second, third, optimizer
        third = [torch.optim.SGD(nets[2].parameters(), lr=0.1)]
        compute(nets[2])
        third[0].step()

    assert [step for step, _ in told(train)] == [0, 1, 2, 3, 4]


def test_a_gan_whose_second_optimizer_comes_later_shares_each_later_step() -> None:
    critic, generator = nn.Linear(2, 2), nn.Linear(2, 2)

    def train() -> None:
        optimizers = [torch.optim.SGD(critic.parameters(), lr=0.1)]
        for iteration in range(103):
            if iteration == 100:
                optimizers.append(torch.optim.SGD(generator.parameters(), lr=0.1))
            for net, optimizer in zip((critic, generator), optimizers, strict=False):
                compute(net)
                optimizer.step()

    steps = told(train)

    assert steps[:100] == [(step, True) for step in range(100)]
    # The second optimizer might start another training here, so its first step is a step of its own.
    assert steps[100:] == [(100, True), (101, True), (102, False), (102, True), (103, False), (103, True)]


def test_a_later_optimizer_of_the_same_loss_shares_each_step_even_if_it_steps_first() -> None:
    net = nn.Linear(2, 2)

    def train() -> None:
        first = torch.optim.SGD([net.weight], lr=0.1)
        for _ in range(2):
            compute(net)
            first.step()
        second = torch.optim.SGD([net.bias], lr=0.1)
        for _ in range(2):
            compute(net)
            second.step()
            first.step()

    assert told(train) == [(0, True), (1, True), (2, True), (2, True), (3, False), (3, True)]


@pytest.mark.parametrize("keep", [True, False])
def test_a_replacement_optimizer_continues_the_count(keep: bool) -> None:
    net = nn.Linear(2, 2)
    kept: list[torch.optim.Optimizer] = []

    def train() -> None:
        for _ in range(2):
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            if keep:
                kept.append(optimizer)
            for _ in range(3):
                compute(net)
                optimizer.step()

    assert told(train) == [(step, True) for step in range(6)]


def test_two_models_trained_one_after_the_other_share_no_step() -> None:
    nets = [nn.Linear(2, 2), nn.Linear(2, 2)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]

    def train() -> None:
        for net, optimizer in zip(nets, optimizers, strict=True):
            for _ in range(3):
                compute(net)
                optimizer.step()

    assert [step for step, _ in told(train)] == list(range(6))


def test_a_model_frozen_after_training_shares_no_step_with_one_whose_optimizer_is_made_then() -> None:
    teacher, student = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizers: list[torch.optim.Optimizer] = []

    def train() -> None:
        for net in (teacher, student):
            optimizers.append(torch.optim.SGD(net.parameters(), lr=0.1))
            for _ in range(3):
                compute(net)
                optimizers[-1].step()
            net.requires_grad_(False)

    assert [step for step, _ in told(train)] == list(range(6))


class Gan:
    """A critic and its generator, each with an optimizer."""

    def __init__(self) -> None:
        self.critic, self.generator = nn.Linear(2, 1), nn.Linear(2, 2)
        self.critic_optimizer = torch.optim.SGD(self.critic.parameters(), lr=0.1)
        self.generator_optimizer = torch.optim.SGD(self.generator.parameters(), lr=0.1)

    def train(self, *, cycles: int, critic_steps: int, frozen: bool = False, zero_after: bool = False) -> None:
        """Train both, the critic `critic_steps` times in a cycle; it may be frozen while the generator is trained."""
        for _ in range(cycles):
            for _ in range(critic_steps):
                fake = self.generator(torch.ones(1, 2)).detach()
                self._step(self.critic_optimizer, self.critic(fake).sum(), zero_after)
            self.critic.requires_grad_(not frozen)
            self._step(self.generator_optimizer, -self.critic(self.generator(torch.ones(1, 2))).sum(), zero_after)
            self.critic.requires_grad_(True)

    def _step(self, optimizer: torch.optim.Optimizer, loss: torch.Tensor, zero_after: bool) -> None:
        if not zero_after:
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if zero_after:
            optimizer.zero_grad()


@pytest.mark.parametrize("zero_after", [False, True])
@pytest.mark.parametrize(
    ("critic_steps", "frozen", "steps"),
    [
        (1, False, [0, 0, 1, 1, 2, 2]),
        (1, True, [0, 0, 1, 1, 2, 2]),
        (3, False, [0, 1, 2, 2, 3, 4, 5, 5, 6, 7, 8, 8]),
        (3, True, [0, 1, 2, 2, 3, 4, 5, 5, 6, 7, 8, 8]),
    ],
)
def test_a_step_of_a_generator_belongs_to_the_critics_step_before_it(
    critic_steps: int, frozen: bool, steps: list[int], zero_after: bool
) -> None:
    gan = Gan()

    optimizer_steps = told(lambda: gan.train(cycles=3, critic_steps=critic_steps, frozen=frozen, zero_after=zero_after))

    assert [step for step, _ in optimizer_steps] == steps


@pytest.mark.parametrize("starts_with_both", [True, False])
def test_a_rare_optimizer_of_the_same_loss_that_steps_first_starts_its_steps(starts_with_both: bool) -> None:
    net = nn.Linear(2, 2)
    always, seldom = torch.optim.SGD([net.weight], lr=0.1), torch.optim.SGD([net.bias], lr=0.1)

    def train() -> None:
        for batch in range(7):
            compute(net)
            if batch % 3 == (0 if starts_with_both else 2):
                seldom.step()
            always.step()

    # If it is not among the first, its first step is counted as that of a generator.
    expected = [0, 0, 1, 2, 3, 3, 4, 5, 6, 6] if starts_with_both else [0, 1, 1, 2, 3, 4, 5, 5, 6]
    assert [step for step, _ in told(train)] == expected


def test_a_rare_optimizer_of_the_same_loss_that_steps_last_belongs_to_the_step_before() -> None:
    net = nn.Linear(2, 2)
    always, seldom = torch.optim.SGD([net.weight], lr=0.1), torch.optim.SGD([net.bias], lr=0.1)

    def train() -> None:
        for batch in range(6):
            compute(net)
            always.step()
            if batch % 3 == 2:
                seldom.step()

    assert [step for step, _ in told(train)] == [0, 1, 2, 2, 3, 4, 5, 5]


def test_accumulated_gradients_with_two_optimizers_are_one_step() -> None:
    net = nn.Linear(2, 2)
    optimizers = [torch.optim.SGD([net.weight], lr=0.1), torch.optim.SGD([net.bias], lr=0.1)]

    def train() -> None:
        for batch in range(8):
            compute(net)
            if batch % 4 == 3:
                for optimizer in optimizers:
                    optimizer.step()

    assert told(train) == [(0, False), (0, True), (1, False), (1, True)]


def test_a_gan_made_again_for_each_task_shares_each_step() -> None:
    def train() -> None:
        for _ in range(5):
            Gan().train(cycles=2, critic_steps=1)

    assert [step for step, _ in told(train)] == [step for step in range(10) for _ in range(2)]


def test_an_optimizer_for_each_parameter_that_steps_within_backward_shares_the_step() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in net.parameters()}
    handles = [
        parameter.register_post_accumulate_grad_hook(lambda parameter: optimizers[parameter].step())
        for parameter in net.parameters()
    ]

    def three() -> None:
        for _ in range(3):
            compute(net)

    steps = told(three)
    for handle in handles:
        handle.remove()

    assert steps == [(step, number == 3) for step in range(3) for number in range(4)]


def test_optimizers_made_for_one_step_of_each_parameter_share_it() -> None:
    net = nn.Linear(2, 2)

    def train() -> None:
        for _ in range(3):
            compute(net)
            for parameter in net.parameters():
                torch.optim.SGD([parameter], lr=0.1).step()

    assert [step for step, _ in told(train)] == [0, 0, 1, 1, 2, 2]


def test_a_closure_that_is_called_five_times_is_in_one_step() -> None:
    net, calls = nn.Linear(2, 1), []
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=5, max_eval=5)

    def closure() -> torch.Tensor:
        calls.append(0)
        optimizer.zero_grad()
        loss: torch.Tensor = (net(torch.ones(1, 2)) - 3).square().sum()
        loss.backward()
        return loss.detach()  # torch 2.8 converts it to a number, and warns if it has a gradient

    steps = told(lambda: [optimizer.step(closure) for _ in range(3)])

    assert steps == [(0, True), (1, True), (2, True)]
    assert len(calls) > 3


def in_threads(train: Callable[[int], None], count: int = 3) -> None:
    """Train in threads that take turns at each of their steps: all of one step, then all of the next."""
    threads = [threading.Thread(target=train, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("shared", ["nothing", "parameters", "optimizer"])
def test_three_training_threads_have_all_of_their_steps(shared: str) -> None:
    nets = [nn.Linear(2, 2)] * 3 if shared != "nothing" else [nn.Linear(2, 2) for _ in range(3)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    barrier = threading.Barrier(3, timeout=60)

    def train(number: int) -> None:
        for _ in range(20):
            compute(nets[number])
            barrier.wait()
            optimizers[0 if shared == "optimizer" else number].step()

    steps = told(lambda: in_threads(train))

    assert sorted(step for step, _ in steps) == list(range(60))


def test_threads_that_each_train_a_gan_share_no_step() -> None:
    gans = [Gan() for _ in range(3)]
    own: dict[int, list[int]] = {number: [] for number in range(3)}
    numbers: dict[int, int] = {}
    barrier = threading.Barrier(3, timeout=60)
    counter = OptimizerSteps(lambda step, _: own[numbers[threading.get_ident()]].append(step))

    def train(number: int) -> None:
        numbers[threading.get_ident()] = number
        for _ in range(4):
            barrier.wait()
            gans[number].train(cycles=1, critic_steps=1)

    counter.start()
    in_threads(train)
    counter.stop()

    # Each number twice in a row on its thread: the critic's step and the generator's.
    assert all(steps[::2] == steps[1::2] and len(steps) == 8 for steps in own.values())
    assert sorted(step for steps in own.values() for step in steps[::2]) == list(range(12))
    assert counter.ended == 12


def spans(recording: modtrace.Recording, fqn: str = "Linear") -> list[tuple[str, int]]:
    return [(span.phase, span.step) for span in recording.timeline().spans if span.fqn == fqn]


@pytest.mark.usefixtures("engine")
class TestRecording:
    def test_accumulated_gradients_are_one_step(self, engine: Any) -> None:
        net = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with modtrace.record(engine=engine) as recording:
            for batch in range(4):
                net(torch.ones(1, 2)).sum().backward()
                if batch % 2:
                    optimizer.step()
        assert recording.steps == 2
        assert spans(recording) == [(phase, step) for step in (0, 0, 1, 1) for phase in ("forward", "backward")]
        assert [mark.text for mark in recording.timeline().marks] == ["step 0", "step 1"]

    def test_a_generator_that_steps_after_three_of_its_critic_shares_the_last_ones_step(self, engine: Any) -> None:
        gan = Gan()
        with modtrace.record(engine=engine) as recording:
            gan.train(cycles=4, critic_steps=3)
        assert recording.steps == 12
        timeline = recording.timeline()
        assert [mark.text for mark in timeline.marks] == [f"step {step}" for step in range(12)]
        assert [(step.step, step.whole) for step in timeline.summary().steps] == [(step, True) for step in range(12)]
        forward = [span.step for span in timeline.spans if span.phase == "forward"]
        # Both modules run for the critic's loss, and both for the generator's.
        assert forward == [step for step in range(12) for _ in range(4 if step % 3 == 2 else 2)]

    @pytest.mark.parametrize("marked_first", [True, False])
    def test_marked_steps_are_the_only_steps(self, engine: Any, marked_first: bool) -> None:
        net = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with modtrace.record(engine=engine) as recording:
            for _ in range(3):
                net(torch.ones(1, 2)).sum().backward()
                if marked_first:
                    recording.step()
                optimizer.step()
                if not marked_first:
                    recording.step()
        assert recording.steps == 3
        assert spans(recording) == [(phase, step) for step in range(3) for phase in ("forward", "backward")]
        assert [mark.text for mark in recording.timeline().marks] == ["step 0", "step 1", "step 2"]

    def test_max_steps_counts_optimizer_steps(self, engine: Any) -> None:
        net = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with modtrace.record(engine=engine, max_steps=2) as recording:
            for _ in range(3):
                net(torch.ones(1, 2)).sum().backward()
                optimizer.step()
            assert not recording.running
        assert [step for _, step in spans(recording)] == [0, 0, 1, 1]
