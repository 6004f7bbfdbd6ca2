"""Trains by `torch.func.grad` with Adam of its own, and takes the gradient of each sample by `vmap`."""

import torch
import truth
from small_training import Net
from torch import Tensor
from torch.func import functional_call, grad, grad_and_value, vmap

torch.manual_seed(0)
torch.set_num_threads(1)
model = Net()
truth.watch(model, backward=False)
parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}


def compute_loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
    result: Tensor = functional_call(model, parameters, (x,)).square().mean()
    return result


for _ in range(3):
    x = torch.randn(3, 4)
    gradients, loss = grad_and_value(compute_loss)(parameters, x)
    parameters = {name: parameter - 0.1 * gradients[name] for name, parameter in parameters.items()}
    truth.step()
    truth.loss(loss)

per_sample = vmap(grad(compute_loss), in_dims=(None, 0))(parameters, torch.randn(5, 4))
truth.loss(per_sample["head.weight"].square().sum())
truth.report()
