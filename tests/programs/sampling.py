"""Draws samples of a model's weights by Langevin dynamics: a gradient, half a step, and noise."""

import torch
import truth
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
truth.watch(model)
x, y = torch.randn(8, 4), torch.randn(8, 1)
for _ in range(5):
    model.zero_grad()
    energy = (model(x) - y).square().sum()
    energy.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.add_(0.1 * torch.randn_like(parameter) - 0.005 * parameter.grad)
    truth.step()
    truth.loss(energy)
truth.report()
