"""Trains a scripted model and a traced one, and a model that holds a scripted part."""

import warnings

import torch
import truth
from small_training import Net
from torch import Tensor, nn

warnings.simplefilter("ignore")  # torch.jit is deprecated


class Holder(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part
        self.head = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.part(x))
        return result


torch.manual_seed(0)
torch.set_num_threads(1)
scripted = torch.jit.script(Net())
holder = Holder(torch.jit.script(Net()))
net = Net()
truth.watch(net, backward=False)  # it is called once, to be traced
traced = torch.jit.trace(net, torch.ones(1, 4), check_trace=False)
models = (scripted, traced, holder)
optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)
for _ in range(4):
    x = torch.randn(3, 4)
    loss = sum((model(x).square().mean() for model in models), torch.zeros(()))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    truth.step()
    truth.loss(loss)
truth.add("Net", {"": ("Net", 4, 4)})
truth.add("Net", {"": ("Net", 4, 4)})
truth.add("Holder", {"": ("Holder", 4, 4), "part": ("Net", 4, 4), "head": ("Linear", 4, 4)})
truth.report()
