"""A training that programs share where it is not what they are about; it imports torch."""

from __future__ import annotations

import torch
import truth
from torch import Tensor, nn

__all__ = ["Net", "train", "train_epoch"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 8), nn.GELU())
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.encoder(x))
        return result


def train(steps: int) -> None:
    """Make a `Net`, train it with Adam, count it."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Net()
    truth.watch(model)
    train_epoch(model, torch.optim.Adam(model.parameters()), steps)


def train_epoch(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(3, 4)).square().mean()
        loss.backward()
        optimizer.step()
        truth.step()
        truth.loss(loss)
