"""LBFGS calls a closure several times per step, which runs forward and backward."""

import torch
import truth
from small_training import Net
from torch import Tensor

torch.manual_seed(0)
torch.set_num_threads(1)
model = Net()
truth.watch(model)
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
x = torch.randn(3, 4)


def closure() -> Tensor:
    optimizer.zero_grad()
    loss: Tensor = model(x).square().mean()
    loss.backward()
    truth.loss(loss)
    return loss


for _ in range(3):
    optimizer.step(closure)
    truth.step()
truth.report()
