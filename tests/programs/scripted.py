"""Trains a scripted model, a traced one, and one that holds a scripted part."""

import warnings

import torch
import truth
from small_training import Net
from torch import Tensor, nn

warnings.simplefilter("ignore")  # torch.jit is deprecated


class Scorer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x).tanh()
        return result


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = torch.jit.script(Scorer())
        self.head = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.part(x))
        return result


torch.manual_seed(0)
torch.set_num_threads(1)
scripted = torch.jit.script(Scorer())
traced = torch.jit.trace(Net(), torch.ones(1, 4), check_trace=False)
models = (scripted, traced, Holder())
optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)
for _ in range(4):
    x = torch.randn(3, 4)
    loss = sum((model(x).square().mean() for model in models), torch.zeros(()))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    truth.step()
    truth.loss(loss)
# What torch.jit makes has a class of its own. Tracing called the module once, and all that is inside.
truth.add("RecursiveScriptModule", {"": ("RecursiveScriptModule", 4, 4)})
truth.add("TopLevelTracedModule", {"": ("TopLevelTracedModule", 4, 4)})
truth.add("Holder", {"": ("Holder", 4, 4), "part": ("RecursiveScriptModule", 4, 4), "head": ("Linear", 4, 4)})
inside = {"": "Net", "encoder": "Sequential", "encoder.0": "Linear", "encoder.1": "GELU", "head": "Linear"}
truth.add("Net", {path: (name, 1, 0) for path, name in inside.items()})
truth.report()
