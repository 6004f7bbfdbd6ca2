"""Modules whose weights are computed: weight_norm, spectral_norm, and a parametrization of its own."""

import torch
import truth
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm, weight_norm


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = weight_norm(nn.Linear(4, 4))
        self.middle = spectral_norm(nn.Linear(4, 4))
        self.last = nn.Linear(4, 4)
        parametrize.register_parametrization(self.last, "weight", Symmetric())

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.middle(self.first(x)).tanh())
        return result


torch.manual_seed(0)
torch.set_num_threads(1)
model = Net()
truth.watch(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    loss = model(torch.randn(3, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    truth.step()
    truth.loss(loss)
with torch.no_grad(), parametrize.cached():
    truth.loss(model(torch.ones(1, 4)).sum())
    truth.loss(model(torch.ones(2, 4)).sum())
# To see what comes of it, register_parametrization calls a list of them once, before it is a part of its module.
for name in ("_SpectralNorm", "Symmetric"):
    truth.add("ParametrizationList", {"": ("ParametrizationList", 1, 0), "0": (name, 1, 0)})
truth.report()
