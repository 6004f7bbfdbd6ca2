"""An attribute holds a module of one class first and of another later, as torchopt's functions do."""

import torch
import truth
from torch import Tensor, nn


class Noisy(nn.Module):
    base: nn.Module

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x + 0.1 * torch.randn_like(x))
        return result


torch.manual_seed(0)
torch.set_num_threads(1)
linear = nn.Linear(4, 2)
deep = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
model = Noisy(linear)
truth.watch(model)
optimizer = torch.optim.SGD([*linear.parameters(), *deep.parameters()], lr=0.1)
for number in range(4):
    if number == 2:
        model.base = deep
        truth.watch(deep, name="Noisy.base")
    loss = model(torch.randn(3, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    truth.step()
    truth.loss(loss)
truth.report()
