"""Trains four models at once: their parameters are stacked, and `functional_call` runs one of them under `vmap`."""

import torch
import truth
from small_training import Net
from torch import Tensor
from torch.func import functional_call, stack_module_state, vmap

torch.manual_seed(0)
torch.set_num_threads(1)
models = [Net() for _ in range(4)]
parameters, _buffers = stack_module_state(list(models))
base = Net()
truth.watch(base, backward=False)
optimizer = torch.optim.SGD(parameters.values(), lr=0.1)


def call_one(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
    result: Tensor = functional_call(base, parameters, (x,))
    return result


for _ in range(3):
    loss = vmap(call_one, in_dims=(0, None))(parameters, torch.randn(3, 4)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    truth.step()
    truth.loss(loss)
truth.report()
