"""Trainings that each hold memory for one known reason."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

TOO_MANY = 1 << 40
"""Rows that no machine has the memory for: they are a view of one."""


class Net(nn.Module):
    """Three blocks of 16 KiB each on 32 rows, and a head of 125 KiB."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3))
        self.head = nn.Linear(64, 1000)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


class Training:
    """Steps of a training, and what they keep."""

    def __init__(self) -> None:
        self.model = Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.x = torch.randn(32, 64)
        self.kept: list[object] = []

    def step(self) -> Tensor:
        out: Tensor = self.model(self.x)
        out.square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return out


def keep_nothing(training: Training) -> None:
    training.step()


def keep_outputs(training: Training) -> None:
    training.kept.append(training.step())


def keep_history(training: Training) -> None:
    training.step()
    training.kept.append(torch.ones(5000))


def evaluate_with_gradients(training: Training) -> None:
    training.kept.append(training.model(training.x).sum())


def keep_activations_by_a_hook(training: Training) -> None:
    if not training.kept:
        training.model.blocks[1].register_forward_hook(lambda _module, _inputs, out: training.kept.append(out))
        training.kept.append(None)
    training.step()


def keep_gradients(training: Training) -> None:
    for parameter in training.model.parameters():
        parameter.grad = None
    training.model(training.x).sum().backward()
    training.kept += [parameter.grad for parameter in training.model.parameters()]


def make_an_optimizer_in_each_step(training: Training) -> None:
    training.optimizer = torch.optim.AdamW(training.model.parameters())
    training.kept.append(training.optimizer)
    training.step()


def widen_the_batch(training: Training) -> None:
    training.x = torch.randn(1, 64).expand(TOO_MANY, 64)
    training.step()


def widen_the_head(training: Training) -> None:
    training.model.head.weight = nn.Parameter(torch.ones(1, 64).expand(TOO_MANY, 64), requires_grad=False)
    training.model.head.bias = None  # type: ignore[assignment]
    training.step()


class Greedy(torch.autograd.Function):
    """Asks for too much in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].new_empty(TOO_MANY, 64)


class GreedyLayer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Greedy.apply(x)
        return out


def ask_in_backward(training: Training) -> None:
    training.model.blocks.append(GreedyLayer())
    training.step()


class Mask(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch.ones(len(x), len(x)).tril()
        return x


def mask_each_pair_of_many_tokens(training: Training) -> None:
    training.model.blocks.insert(0, Mask())
    training.x = torch.randn(1, 64).expand(1 << 22, 64)
    training.step()


def ask_outside(training: Training) -> None:
    training.step()
    torch.empty(TOO_MANY, 64)
