"""Learns to learn: inner steps of SGD by hand through `functional_call`, and the outer step differentiates them."""

import torch
import truth
from small_training import Net
from torch.func import functional_call

torch.manual_seed(0)
torch.set_num_threads(1)
model = Net()
truth.watch(model)
optimizer = torch.optim.Adam(model.parameters())
for _ in range(2):
    optimizer.zero_grad()
    for _task in range(2):
        parameters = dict(model.named_parameters())
        for _inner in range(2):
            loss = functional_call(model, parameters, (torch.randn(3, 4),)).square().mean()
            gradients = torch.autograd.grad(loss, list(parameters.values()), create_graph=True)
            parameters = {
                name: parameter - 0.1 * gradient
                for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True)
            }
        outer = functional_call(model, parameters, (torch.randn(3, 4),)).square().mean()
        outer.backward()
        truth.loss(outer)
    optimizer.step()
    truth.step()
truth.report()
