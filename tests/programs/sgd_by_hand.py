"""Subtracts gradients from parameters by hand."""

import torch
import truth
from small_training import Net

torch.manual_seed(0)
torch.set_num_threads(1)
model = Net()
truth.watch(model)
for _ in range(3):
    loss = model(torch.randn(3, 4)).square().mean()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter -= 0.1 * parameter.grad
            parameter.grad = None
    truth.step()
    truth.loss(loss)
truth.report()
