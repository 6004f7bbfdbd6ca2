"""Subtracts gradients that `torch.autograd.grad` returns from parameters, as torchopt and higher do."""

import torch
import truth
from small_training import Net

torch.manual_seed(0)
torch.set_num_threads(1)
model = Net()
truth.watch(model)
parameters = list(model.parameters())
for _ in range(3):
    loss = model(torch.randn(3, 4)).square().mean()
    gradients = torch.autograd.grad(loss, parameters)
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter -= 0.1 * gradient
    truth.step()
    truth.loss(loss)
truth.report()
