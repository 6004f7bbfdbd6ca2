"""FLOPs of modules against closed forms written by hand, and their sums against torch's counter."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import (
    FlopCounterMode,
    flop_registry,
    register_flop_formula,
    sdpa_backward_flop,
    sdpa_flop,
)

import modtrace
from modtrace._errors import EngineError, RecordingError
from modtrace.recording import capture
from modtrace.timeline.slices import UNKNOWN_FLOPS
from modtrace.timeline.summary.flop_summary import flops_lines
from tests.support.flop_cases import (
    BATCH,
    CASES,
    FIRST,
    HEAD,
    HEADS,
    HIDDEN,
    LENGTH,
    NARROW,
    STEPS,
    WIDE,
    Attention,
    Case,
    Checkpointed,
    N,
    compiled,
    convolutions,
    costs,
    lora,
    mlp,
    rows,
    trained,
    two_linears,
)
from tests.support.models import ARCHITECTURES

pytestmark = pytest.mark.usefixtures("native_engine")


def test_compiled_regions_are_named_as_not_fully_counted() -> None:
    step, _ = compiled()
    with modtrace.record(flops=True, engine="native") as recording:
        step()
    flops = recording.timeline().summary().flops

    assert flops is not None
    assert flops.unseen == ["Sequential"]
    assert flops_lines(flops)[-1] == "not counted: the work of generated kernels or a replayed graph in Sequential"


@pytest.mark.parametrize("case", CASES)
def test_modules_cost_what_their_closed_forms_say_in_each_phase(case: Callable[[], Case], tmp_path: Path) -> None:
    step, expected = case()
    with modtrace.record(tmp_path / "steps.json", flops=True, engine="native") as recording:
        for _ in range(STEPS):
            step()
            recording.step()
    timeline = recording.timeline()

    assert timeline.metadata["flops"]["steps"] == [0]
    cost_of = costs(timeline)
    assert {name: cost_of[name] for name in expected} == {
        name: tuple(STEPS * flops for flops in of_phase) for name, of_phase in expected.items()
    }
    others = [flops for name, flops in cost_of.items() if name not in expected]
    assert others == [(0, 0, 0)] * len(others)
    assert costs(modtrace.load(tmp_path / "steps.json")) == cost_of


X, W, Y = N * NARROW, NARROW * WIDE, N * WIDE
INTO, BACK = X + W + WIDE + Y, Y + W + NARROW + X
"""Numbers that two Linear layers, NARROW to WIDE and back, read and write in forward."""


def mlp_bytes() -> Case:
    forward, product = (INTO, BACK), X + W + Y
    return Case(
        trained(two_linears()),
        {
            "Sequential": (sum(forward), 3 * product, 0),
            "Sequential.0": (INTO, product, 0),  # only the gradient of the weight
            "Sequential.2": (BACK, 2 * product, 0),
        },
    )


def checkpointed_bytes() -> Case:
    product = X + W + Y
    return Case(
        trained(Checkpointed(reentrant=False)),
        {
            "Checkpointed": (2 * INTO + BACK, 5 * product, INTO + BACK),
            "Checkpointed.block.0": (INTO, product, INTO),
            "Checkpointed.head": (INTO, 2 * product, 0),
        },
    )


def attention_bytes() -> Case:
    x, heads, sums = BATCH * LENGTH * HIDDEN, BATCH * HEADS * LENGTH * HEAD, BATCH * HEADS * LENGTH
    qkv, out = x + 3 * HIDDEN * HIDDEN + 3 * HIDDEN + 3 * x, x + HIDDEN * HIDDEN + HIDDEN + x
    into_weight, product = 4 * x + 3 * HIDDEN * HIDDEN, 2 * x + HIDDEN * HIDDEN
    return Case(
        trained(Attention(), lambda: torch.randn(BATCH, LENGTH, HIDDEN)),
        {
            # Query, key, value, output and log-sum-exps; in backward these, and the gradients of the first four.
            "Attention": (qkv + out + 4 * heads + sums, into_weight + 2 * product + 8 * heads + sums, 0),
            "Attention.qkv": (qkv, into_weight, 0),
            "Attention.out": (out, 2 * product, 0),
        },
    )


def convolution_bytes() -> Case:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1))
    x, weight, y = 4 * 3 * 16 * 16, 8 * 3 * 9, 4 * 8 * 16 * 16
    return Case(
        trained(model, lambda: torch.randn(4, 3, 16, 16)),
        # backward: reads all three, and writes the gradients of the weight and of the bias
        {"Sequential.0": (x + weight + 8 + y, y + x + weight + weight + 8, 0)},
    )


class Views(nn.Module):
    def forward(self, batch: Tensor, weight: Tensor) -> None:
        torch.bmm(batch, weight.expand(3, 5, 6))  # in memory once
        torch.bmm(batch, weight.expand(3, 5, 6).contiguous())
        total = torch.mm(batch[0], weight)
        torch.mm(batch[0], weight, out=total)


def views_bytes() -> Case:
    x, weight, y = 3 * 4 * 5, 5 * 6, 3 * 4 * 6
    single = (x + y) // 3 + weight
    return Case(
        lambda: Views()(torch.randn(3, 4, 5), torch.randn(5, 6)),
        {"Views": (x + weight + y + x + 3 * weight + y + 2 * single, 0, 0)},
    )


@pytest.mark.parametrize("case", [mlp_bytes, checkpointed_bytes, attention_bytes, convolution_bytes, views_bytes])
def test_bytes_are_those_of_inputs_and_outputs_each_once(case: Callable[[], Case], tmp_path: Path) -> None:
    step, expected = case()
    with modtrace.record(tmp_path / "steps.json", flops=True, engine="native") as recording:
        for _ in range(STEPS):
            step()
            recording.step()
    for timeline in recording.timeline(), modtrace.load(tmp_path / "steps.json"):
        flops = timeline.summary().flops
        assert flops is not None
        bytes_of = {row.fqn: (row.bytes_forward, row.bytes_backward, row.bytes_recompute) for row in flops.rows}
        assert {name: bytes_of[name] for name in expected} == {
            name: tuple(4 * STEPS * numbers for numbers in of_phase) for name, of_phase in expected.items()
        }


def test_numbers_of_16_bits_are_half_as_many_bytes() -> None:
    model = nn.Linear(NARROW, WIDE, dtype=torch.bfloat16)
    with modtrace.record(flops=True, engine="native") as recording, torch.no_grad():
        model(rows().bfloat16())
    flops = recording.timeline().summary().flops

    assert flops is not None
    assert flops.rows[0].bytes_forward == 2 * INTO
    assert flops.rates[0].intensity == FIRST / (2 * INTO)


@contextmanager
def attention_on_cpu_registered() -> Iterator[None]:
    """torch's counter with a formula for the CPU's attention, which it lacks."""
    name = "_scaled_dot_product_flash_attention_for_cpu"
    added = {
        operator: formula
        for operator, formula in (
            (getattr(torch.ops.aten, name), sdpa_flop),
            (getattr(torch.ops.aten, f"{name}_backward"), sdpa_backward_flop),
        )
        if operator not in flop_registry
    }
    flop_registry.update(added)
    try:
        yield
    finally:
        for operator in added:
            del flop_registry[operator]


AT_FIRST = ("Llama, checkpointed (reentrant)", "U-Net", "two towers")


def losses_and_gradients(name: str, around: AbstractContextManager[object]) -> list[Tensor]:
    torch.manual_seed(0)
    model, loss = ARCHITECTURES[name]()
    with around:
        result: Tensor = loss()
        result.backward()
    return [result, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in AT_FIRST else pytest.mark.full) for name in ARCHITECTURES]
)
@pytest.mark.filterwarnings("ignore:.*enable_nested_tensor:UserWarning")
def test_sum_over_modules_equals_torchs_counter_and_training_is_the_same_to_the_bit(name: str) -> None:
    plain = losses_and_gradients(name, nullcontext())
    with attention_on_cpu_registered():
        counter = FlopCounterMode(display=False)
        losses_and_gradients(name, counter)  # it changes gradients in the last bits
    recording = modtrace.record(flops=True, engine="native")
    recorded = losses_and_gradients(name, recording)
    timeline = recording.timeline()
    flops = timeline.summary().flops

    assert flops is not None
    rows = [row for row in costs(timeline).items() if "." not in row[0]]
    assert sum(sum(of_phase) for _, of_phase in rows) + flops.outside == counter.get_total_flops()
    assert flops.unknown == 0
    assert all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))


def test_inputs_of_new_shapes_are_counted_and_those_of_known_shapes_are_not_again() -> None:
    model, batches = two_linears(), (N, N, 2 * N, N, 2 * N)
    with modtrace.record(flops=True, engine="native") as recording:
        for batch in batches:
            model(torch.randn(batch, NARROW)).sum().backward()
            recording.step()
    flops = recording.timeline().summary().flops

    assert flops is not None
    assert flops.counted_in == [0, 2]
    assert [step.flops for step in flops.by_step] == [5 * FIRST * batch // N for batch in batches]


Step = Callable[[int], int]
"""Runs the step of a number, and returns how many products of `FIRST` it computes."""


def graph_again(model: nn.Sequential) -> Step:
    def step(number: int) -> int:
        passes, loss = (1, 3, 1, 2)[number], model(rows()).sum()
        for _ in range(passes):
            loss.backward(retain_graph=True)
        return 2 + 3 * passes

    return step


def graph_of_the_step_before(model: nn.Sequential) -> Step:
    kept: list[Tensor] = []

    def step(_number: int) -> int:
        kept.append(model(rows()).sum())
        for loss in kept[-2:]:
            loss.backward(retain_graph=True)
        return 2 + 3 * len(kept[-2:])

    return step


def some_gradients(model: nn.Sequential) -> Step:
    def step(number: int) -> int:
        loss = model(rows()).sum()
        if number == 1:
            loss.backward()
            return 2 + 3
        torch.autograd.grad(loss, model[2].get_parameter("weight"), retain_graph=True)
        if number == 2:
            torch.autograd.grad(loss, model[0].get_parameter("weight"))
        return 2 + 1 + 2 * (number == 2)

    return step


def one_of_two_outputs(model: nn.Sequential) -> Step:
    other = nn.Linear(WIDE, NARROW)
    both = Both(model, other)

    def step(number: int) -> int:
        first, second = both(rows())
        if number == 0:
            first.sum().backward()
        elif number == 1:
            (first + second).sum().backward()
        else:
            first.sum().backward(retain_graph=True)
            second.sum().backward()
        return 3 + (3, 5, 6, 6)[number]

    return step


class Both(nn.Module):
    def __init__(self, model: nn.Sequential, other: nn.Linear) -> None:
        super().__init__()
        self.model, self.other = model, other

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.model[1](self.model[0](x))
        return self.model[2](hidden), self.other(hidden)


def no_backward(model: nn.Sequential) -> Step:
    def step(number: int) -> int:
        loss = model(rows()).sum()
        if number % 2:
            loss.backward()
        return 2 + 3 * (number % 2)

    return step


def losses_added_up(model: nn.Sequential) -> Step:
    def step(number: int) -> int:
        batches = 1 + number % 3
        torch.stack([model(rows()).sum() for _ in range(batches)]).sum().backward()
        return (2 + 3) * batches

    return step


def frozen_in_some_steps(model: nn.Sequential) -> Step:
    def step(number: int) -> int:
        model[0].requires_grad_(number % 2 == 0)
        model(rows()).sum().backward()
        return 2 + 3 - 2 * (number % 2)  # the gradient of its output is not needed either

    return step


def batched_gradients(model: nn.Sequential) -> Step:
    def step(number: int) -> int:
        gradients = torch.randn(3, N, NARROW)
        if number % 2:
            torch.autograd.grad(model(rows()), model[2].get_parameter("weight"), gradients, is_grads_batched=True)
        else:
            torch.autograd.grad(model(rows()), model[2].get_parameter("weight"), gradients[0])
        return 2 + (3 if number % 2 else 1)

    return step


def checkpointed_in_some_steps(model: nn.Sequential, *, use_reentrant: bool = False) -> Step:
    both = nn.Sequential(model, nn.GELU())  # needs the last product again

    def step(number: int) -> int:
        x, again = rows().requires_grad_(), number in (1, 2)
        (checkpoint(both, x, use_reentrant=use_reentrant) if again else both(x)).sum().backward()
        return 2 + 4 + 2 * again

    return step


def penalty_in_some_steps(_model: nn.Sequential) -> Step:
    model = nn.Linear(NARROW, WIDE)

    def step(number: int) -> int:
        x = rows().requires_grad_()
        loss = model(x).square().sum()
        if number % 2 == 0:
            loss.backward()
            return 1 + 2
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        gradient.square().sum().backward()
        return 1 + 5  # as in `double_backward`

    return step


@pytest.mark.parametrize(
    "steps",
    [
        *(graph_again, graph_of_the_step_before, some_gradients, one_of_two_outputs, no_backward, losses_added_up),
        *(frozen_in_some_steps, batched_gradients, checkpointed_in_some_steps, penalty_in_some_steps),
        partial(checkpointed_in_some_steps, use_reentrant=True),
    ],
)
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_backward_costs_what_each_pass_computes(steps: Callable[[nn.Sequential], Step]) -> None:
    step = steps(two_linears())
    with modtrace.record(flops=True, engine="native") as recording:
        expected = []
        for number in range(4):
            expected.append(FIRST * step(number))
            recording.step()
    flops = recording.timeline().summary().flops

    assert flops is not None
    assert [of_step.flops for of_step in flops.by_step] == expected
    assert flops.unknown == 0


class Generator(nn.Linear):
    pass


class Critic(nn.Linear):
    pass


def test_a_call_with_more_than_a_thousand_values_has_unknown_flops() -> None:
    class Sums(nn.Linear):
        def forward(self, x: Tensor, weights: list[float]) -> Tensor:  # type: ignore[override]
            return super().forward(x) * sum(weights)

    model = Sums(NARROW, WIDE)
    with modtrace.record(flops=True, engine="native") as recording, torch.no_grad():
        for values in (1000, 1000, 1024):  # operators are counted in the first
            model(rows(), [0.5] * values)
    args = recording.timeline().span_args

    assert [args[call]["flops"] for call in range(3)] == [FIRST, FIRST, UNKNOWN_FLOPS]


def test_networks_that_take_turns_are_counted_in_both_updates() -> None:
    generator, critic = Generator(NARROW, WIDE), Critic(WIDE, NARROW)
    optimizers = torch.optim.SGD(generator.parameters()), torch.optim.SGD(critic.parameters())
    with modtrace.record(flops=True, engine="native") as recording:
        for _ in range(STEPS):
            (critic(torch.randn(N, WIDE)) - critic(generator(rows()).detach())).mean().backward()
            optimizers[1].step()
            critic(generator(rows())).mean().backward()
            optimizers[0].step()
    cost_of = costs(recording.timeline())

    assert recording.timeline().metadata["flops"]["steps"] == [0]
    # The critic's input needs a gradient only in the generator's update.
    assert cost_of == {
        "Generator": (2 * STEPS * FIRST, STEPS * FIRST, 0),
        "Critic": (3 * STEPS * FIRST, 4 * STEPS * FIRST, 0),
    }


def test_operators_are_counted_again_before_the_ring_forgets_them() -> None:
    model = two_linears()
    with modtrace.record(flops=True, engine="native", capacity=512) as recording:
        for _ in range(200):
            model(rows()).sum().backward()
            recording.step()
    timeline = recording.timeline()
    flops = timeline.summary().flops

    assert timeline.stats.overwritten > 1000
    assert flops is not None
    assert len(flops.counted_in) > 0
    assert {step.flops for step, took in zip(flops.by_step, timeline.summary().steps, strict=True) if took.whole} == {
        5 * FIRST
    }


def test_operators_of_the_user_count_by_their_formula_and_operators_inside_do_not() -> None:
    @torch.library.custom_op("modtrace_test::twice", mutates_args=())
    def twice(x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight @ weight

    @register_flop_formula(torch.ops.modtrace_test.twice)
    def twice_flops(x: Any, weight: Any, *, out_shape: Any = None) -> int:
        return int(7 * x[0] + out_shape[1])

    @torch.library.custom_op("modtrace_test::wrong", mutates_args=())
    def wrong(x: Tensor) -> Tensor:
        return x @ x.T

    @register_flop_formula(torch.ops.modtrace_test.wrong)
    def wrong_flops(*args: Any, **kwargs: Any) -> int:
        raise ValueError("no such shapes")

    @torch.library.custom_op("modtrace_test::large", mutates_args=())
    def large(x: Tensor) -> Tensor:
        return x @ x.T

    @register_flop_formula(torch.ops.modtrace_test.large)
    def large_flops(*args: Any, **kwargs: Any) -> int:
        return 2**64

    class Uses(nn.Module):
        def forward(self, x: Tensor) -> None:
            wrong(x)
            large(x)
            twice(x, torch.ones(NARROW, NARROW))

    model = Uses()
    try:
        with modtrace.record(flops=True, engine="native") as recording:
            model(rows())
    finally:
        for name in ("twice", "wrong", "large"):
            del flop_registry[getattr(torch.ops.modtrace_test, name)]
    summary = recording.timeline().summary()

    assert costs(recording.timeline()) == {"Uses": (7 * N + NARROW, 0, 0)}
    assert summary.flops is not None
    assert summary.flops.without_formula == ["modtrace_test::large", "modtrace_test::wrong"]
    assert "not counted, as torch has no formula: modtrace_test::large, modtrace_test::wrong" in summary.tables[
        "flops"
    ].to("text")


def test_operators_of_the_user_count_in_backward_too_and_are_called_as_before_afterwards() -> None:
    @torch.library.custom_op("modtrace_test::product", mutates_args=())
    def product(x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight

    @torch.library.custom_op("modtrace_test::gradient", mutates_args=())
    def gradient(of_output: Tensor, weight: Tensor) -> Tensor:
        return of_output @ weight.T

    product.register_autograd(
        lambda ctx, of_output: (gradient(of_output, *ctx.saved_tensors), None),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]),
    )

    class Product(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return product(x, torch.ones(NARROW, WIDE))

    model, operators = Product(), [torch.ops.modtrace_test.product, torch.ops.modtrace_test.gradient]
    before = [vars(operator.default).get("_pyobj_dispatcher") is None for operator in operators]
    for number, operator in enumerate(operators):
        register_flop_formula(operator)(lambda *_args, number=number, **_keywords: 5 + number)
    try:
        with modtrace.record(flops=True, engine="native") as recording:
            for _ in range(STEPS):
                model(rows().requires_grad_()).sum().backward()
    finally:
        for operator in operators:
            del flop_registry[operator]

    assert costs(recording.timeline()) == {"Product": (STEPS * 5, STEPS * 6, 0)}
    assert [vars(operator.default).get("_pyobj_dispatcher") is None for operator in operators] == before


@pytest.mark.parametrize("case", [mlp, lora, convolutions])
def test_tensors_without_data_cost_the_same_as_others(case: Callable[[], Case]) -> None:
    with torch.device("meta"):
        step, expected = case()
        with modtrace.record(flops=True, engine="native") as recording:
            for _ in range(STEPS):
                step()

    counted = {
        name: tuple(cost // STEPS for cost in of_phases) for name, of_phases in costs(recording.timeline()).items()
    }
    assert {name: cost for name, cost in counted.items() if any(cost)} == {
        name: cost for name, cost in expected.items() if any(cost)
    }


def test_a_formula_runs_in_no_call_of_the_users_and_neither_exits_nor_changes_random_numbers() -> None:
    @torch.library.custom_op("modtrace_test::exits", mutates_args=())
    def exits(x: Tensor) -> Tensor:
        return x @ x.T

    in_call: list[bool] = []

    @register_flop_formula(torch.ops.modtrace_test.exits)
    def exits_flops(*args: Any, **kwargs: Any) -> int:
        in_call.append(model.runs)
        torch.rand(3)
        raise SystemExit

    class Uses(nn.Module):
        runs = False

        def forward(self, x: Tensor) -> None:
            self.runs = True
            exits(x)
            self.runs = False

    model = Uses()
    torch.manual_seed(0)
    try:
        with modtrace.record(flops=True, engine="native") as recording:
            for length in (2, 3, *[3] * 4, 4):  # asked once with a call, for the other lengths at the end
                model(torch.ones(length, 5))
    finally:
        del flop_registry[torch.ops.modtrace_test.exits]
    drawn = torch.rand(3)
    flops = recording.timeline().summary().flops

    assert in_call == [False] * 3
    assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(0)))
    assert flops is not None
    assert flops.without_formula == ["modtrace_test::exits"]


def test_operators_on_a_thread_without_modules_are_left_alone() -> None:
    x = torch.ones(4, 4)
    thread = threading.Thread(target=torch.mm, args=(x, x))
    with modtrace.record(flops=True, engine="native") as recording:
        two_linears()(rows())
        torch.mm(x, x)  # on a thread that has a number
        thread.start()
        thread.join()
    flops = recording.timeline().summary().flops

    # To get a number, the thread would need the interpreter's lock, whose holder may wait for this operator.
    assert flops is not None
    assert flops.outside == 2 * 4**3


def test_the_cost_of_operators_is_known_while_the_recording_runs() -> None:
    model = two_linears()
    with modtrace.record(flops=True, engine="native") as recording:
        model(rows()).sum().backward()
        model(rows())
        cost_of = costs(recording.snapshot())

    assert cost_of["Sequential"] == (4 * FIRST, 3 * FIRST, 0)


def test_transforms_of_torch_func_count_the_computed_operators() -> None:
    model = two_linears()
    values = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(values: dict[str, Tensor], x: Tensor) -> Tensor:
        out: Tensor = torch.func.functional_call(model, values, x)
        return out.square().mean()

    with modtrace.record(flops=True, engine="native") as recording:
        torch.func.grad(loss)(values, rows())
        recording.step()
        torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(values, torch.randn(3, N, NARROW))
        recording.step()
    flops = recording.timeline().summary().flops

    assert flops is not None
    assert [step.flops for step in flops.by_step] == [5 * FIRST, 3 * 5 * FIRST]


def test_without_the_native_engine_flops_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RecordingError, match="flops needs the native engine; give engine='native' or 'auto'"):
        modtrace.record(flops=True, engine="python")
    monkeypatch.setattr(capture, "why_unavailable", lambda: "it is not built")
    with pytest.raises(EngineError, match="only the native engine counts FLOPs; run `modtrace build`"):
        modtrace.record(flops=True).start()
