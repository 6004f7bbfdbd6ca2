"""Models and calls whose FLOPs follow from their shapes by a closed form."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import modtrace

STEPS = 3


N, WIDE, NARROW = 32, 48, 20


FIRST = 2 * N * NARROW * WIDE
"""FLOPs of a Linear from NARROW to WIDE, or back: 2 · rows · in · out."""


Expected = dict[str, tuple[int, int, int]]
"""FLOPs of forward, backward and recompute in a step, by name."""


class Case(NamedTuple):
    """A step, and what its modules cost."""

    step: Callable[[], object]
    expected: Expected


def rows() -> Tensor:
    return torch.randn(N, NARROW)


def trained(model: Callable[[Tensor], Tensor], inputs: Callable[[], Tensor] = rows) -> Callable[[], object]:
    return lambda: model(inputs()).square().mean().backward()


def two_linears() -> nn.Sequential:
    return nn.Sequential(nn.Linear(NARROW, WIDE), nn.GELU(), nn.Linear(WIDE, NARROW))


def mlp() -> Case:
    return Case(
        trained(two_linears()),
        {
            "Sequential": (2 * FIRST, 3 * FIRST, 0),
            "Sequential.0": (FIRST, FIRST, 0),  # of the weight alone
            "Sequential.1": (0, 0, 0),
            "Sequential.2": (FIRST, 2 * FIRST, 0),
        },
    )


def input_with_gradient() -> Case:
    return Case(
        trained(two_linears(), lambda: rows().requires_grad_()),
        {
            "Sequential": (2 * FIRST, 4 * FIRST, 0),
            "Sequential.0": (FIRST, 2 * FIRST, 0),
            "Sequential.2": (FIRST, 2 * FIRST, 0),
        },
    )


def frozen_first() -> Case:
    model = two_linears()
    model[0].requires_grad_(False)
    return Case(
        trained(model),
        {
            "Sequential": (2 * FIRST, FIRST, 0),
            "Sequential.0": (FIRST, 0, 0),
            "Sequential.2": (FIRST, FIRST, 0),
        },
    )


def frozen_last() -> Case:
    model = two_linears()
    model[2].requires_grad_(False)
    return Case(
        trained(model),
        {
            "Sequential": (2 * FIRST, 2 * FIRST, 0),
            "Sequential.0": (FIRST, FIRST, 0),
            "Sequential.2": (FIRST, FIRST, 0),  # of the input alone
        },
    )


RANK = 4


class Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(NARROW, NARROW).requires_grad_(False)
        self.down = nn.Linear(NARROW, RANK, bias=False)
        self.up = nn.Linear(RANK, NARROW, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.up(self.down(x))
        return out


def lora() -> Case:
    base, small = 2 * N * NARROW * NARROW, 2 * N * NARROW * RANK
    return Case(
        trained(nn.Sequential(Lora(), Lora())),
        {
            "Sequential": (2 * (base + 2 * small), 3 * small + base + 4 * small, 0),
            "Sequential.0": (base + 2 * small, 3 * small, 0),
            "Sequential.0.base": (base, 0, 0),
            "Sequential.0.down": (small, small, 0),
            "Sequential.0.up": (small, 2 * small, 0),
            "Sequential.1": (base + 2 * small, base + 4 * small, 0),
            "Sequential.1.base": (base, base, 0),
            "Sequential.1.down": (small, 2 * small, 0),
            "Sequential.1.up": (small, 2 * small, 0),
        },
    )


def convolutions() -> Case:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, stride=2, padding=1))
    # Per point of the output: 2 · channels in · channels out · points of the kernel.
    first, second = 4 * 16 * 16 * 2 * 3 * 8 * 9, 4 * 8 * 8 * 2 * 8 * 4 * 9
    return Case(
        trained(model, lambda: torch.randn(4, 3, 16, 16)),
        {
            "Sequential": (first + second, first + 2 * second, 0),
            "Sequential.0": (first, first, 0),
            "Sequential.2": (second, 2 * second, 0),
        },
    )


def transposed_convolution() -> Case:
    model = nn.Sequential(nn.ConvTranspose1d(6, 5, 4, stride=2))
    # Per point of the input.
    each = 3 * 10 * 2 * 6 * 5 * 4
    return Case(
        trained(model, lambda: torch.randn(3, 6, 10)), {"Sequential": (each, each, 0), "Sequential.0": (each, each, 0)}
    )


BATCH, HEADS, LENGTH, HEAD = 2, 4, 16, 8


HIDDEN = HEADS * HEAD


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            one.unflatten(-1, (HEADS, HEAD)).transpose(1, 2).contiguous() for one in self.qkv(x).chunk(3, dim=-1)
        )
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            mixed = functional.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


def attention() -> Case:
    qkv, out = 2 * BATCH * LENGTH * HIDDEN * 3 * HIDDEN, 2 * BATCH * LENGTH * HIDDEN * HIDDEN
    product = 2 * BATCH * HEADS * LENGTH * LENGTH * HEAD
    return Case(
        trained(Attention(), lambda: torch.randn(BATCH, LENGTH, HIDDEN)),
        {
            # Two products in forward; backward computes the scores again, and two gradients of each product.
            "Attention": (qkv + out + 2 * product, qkv + 2 * out + 5 * product, 0),
            "Attention.qkv": (qkv, qkv, 0),
            "Attention.out": (out, 2 * out, 0),
        },
    )


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(NARROW, WIDE), nn.ReLU(), nn.Linear(WIDE, NARROW), nn.ReLU())
        self.head = nn.Linear(NARROW, WIDE)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(checkpoint(self.block, x, use_reentrant=self.reentrant))
        return out


def checkpointed() -> Case:
    return Case(
        trained(Checkpointed(reentrant=False)),
        {
            "Checkpointed": (3 * FIRST, 5 * FIRST, 2 * FIRST),
            "Checkpointed.block": (2 * FIRST, 3 * FIRST, 2 * FIRST),
            "Checkpointed.block.0": (FIRST, FIRST, FIRST),
            "Checkpointed.block.2": (FIRST, 2 * FIRST, FIRST),
            "Checkpointed.head": (FIRST, 2 * FIRST, 0),
        },
    )


def checkpointed_reentrant() -> Case:
    return Case(
        trained(Checkpointed(reentrant=True), lambda: rows().requires_grad_()),
        {
            "Checkpointed": (3 * FIRST, 6 * FIRST, 2 * FIRST),
            "Checkpointed.block": (2 * FIRST, 4 * FIRST, 2 * FIRST),
            "Checkpointed.block.0": (FIRST, 2 * FIRST, FIRST),
            "Checkpointed.block.2": (FIRST, 2 * FIRST, FIRST),
            "Checkpointed.head": (FIRST, 2 * FIRST, 0),
        },
    )


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Linear(NARROW, NARROW)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.twice(torch.relu(self.twice(x)))
        return out @ out.T  # of the module itself


class CheckpointedFunction(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.into, self.back = nn.Parameter(torch.randn(NARROW, WIDE)), nn.Parameter(torch.randn(WIDE, NARROW))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(lambda x: torch.relu(x @ self.into) @ self.back, x, use_reentrant=self.reentrant)
        return out


def checkpointed_functions(again: int, *, reentrant: bool) -> Case:
    model = nn.Sequential(
        *(
            nn.Linear(NARROW, NARROW),
            CheckpointedFunction(reentrant=reentrant),
            CheckpointedFunction(reentrant=reentrant),
        )
    )
    linear = 2 * N * NARROW * NARROW
    return Case(
        trained(model),
        {
            "Sequential": (linear + 4 * FIRST, linear + 8 * FIRST, 2 * again),
            "Sequential.0": (linear, linear, 0),
            "Sequential.1": (2 * FIRST, 4 * FIRST, again),
            "Sequential.2": (2 * FIRST, 4 * FIRST, again),
        },
    )


def checkpointed_function() -> Case:
    return checkpointed_functions(FIRST, reentrant=False)  # it stops where the last product saves its inputs


def checkpointed_function_reentrant() -> Case:
    return checkpointed_functions(2 * FIRST, reentrant=True)


class Inside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.back = nn.Linear(NARROW, WIDE), nn.Parameter(torch.randn(WIDE, NARROW))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.into(x) @ self.back)


class CheckpointedForward(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.block = Inside()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(type(self.block).forward, self.block, x, use_reentrant=self.reentrant)
        return out


def checkpointed_forward(*, reentrant: bool = False) -> Case:
    model = nn.Sequential(CheckpointedForward(reentrant=reentrant))
    return Case(
        trained(model, lambda: rows().requires_grad_()),
        {
            "Sequential": (2 * FIRST, 4 * FIRST, 2 * FIRST),
            "Sequential.0": (2 * FIRST, 4 * FIRST, 2 * FIRST),
            "Sequential.0.block.into": (FIRST, 2 * FIRST, FIRST),
        },
    )


def checkpointed_forward_reentrant() -> Case:
    return checkpointed_forward(reentrant=True)


def double_backward() -> Case:
    model = nn.Linear(NARROW, WIDE)

    def step() -> None:
        x = rows().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        gradient.square().sum().backward()

    # One product, then two gradients of it and two of the forward's.
    return Case(step, {"Linear": (FIRST, 5 * FIRST, 0)})


def shared() -> Case:
    linear, product = 2 * N * NARROW * NARROW, 2 * N * N * NARROW
    return Case(
        trained(Shared()),
        {
            "Shared": (2 * linear + product, 3 * linear + 2 * product, 0),
            "Shared.twice": (2 * linear, 3 * linear, 0),
        },
    )


def inference() -> Case:
    model = two_linears().eval()

    def step() -> None:
        with torch.inference_mode():
            model(rows())

    return Case(step, {"Sequential": (2 * FIRST, 0, 0), "Sequential.0": (FIRST, 0, 0), "Sequential.2": (FIRST, 0, 0)})


def functional_call() -> Case:
    model = two_linears()
    values = {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}
    return Case(
        trained(lambda x: torch.func.functional_call(model, values, x)),
        {
            "Sequential": (2 * FIRST, 3 * FIRST, 0),
            "Sequential.0": (FIRST, FIRST, 0),
            "Sequential.2": (FIRST, 2 * FIRST, 0),
        },
    )


def compiled() -> Case:
    torch.compiler.reset()
    model: nn.Module = torch.compile(two_linears(), backend="aot_eager")  # type: ignore[assignment]
    return Case(trained(model), {"Sequential": (2 * FIRST, 3 * FIRST, 0)})


class Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5, 6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.baddbmm(torch.ones(()), x, self.weight) @ torch.ones(6, 2)


def batched_products() -> Case:
    each, last = 2 * 3 * 4 * 5 * 6, 2 * 3 * 4 * 6 * 2
    return Case(trained(Products(), lambda: torch.randn(3, 4, 5)), {"Products": (each + last, each + last, 0)})


CASES = (
    *(mlp, input_with_gradient, frozen_first, frozen_last, lora, convolutions, transposed_convolution, attention),
    *(checkpointed, checkpointed_reentrant, checkpointed_function, checkpointed_function_reentrant),
    *(checkpointed_forward, checkpointed_forward_reentrant, double_backward),
    *(shared, inference, functional_call, compiled, batched_products),
)


def costs(timeline: modtrace.Timeline) -> Expected:
    return {
        row.fqn: (row.flops_forward, row.flops_backward, row.flops_recompute)  # type: ignore[misc]
        for row in timeline.summary().rows
    }
