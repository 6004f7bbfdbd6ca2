"""A WGAN's critic whose loss holds the norm of its own gradient: backward goes through a backward."""

import torch
import truth
from torch import Tensor, nn


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.activation = nn.Tanh()
        self.last = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.activation(self.first(x)))
        return result


torch.manual_seed(0)
torch.set_num_threads(1)
critic = Critic()
truth.watch(critic)
optimizer = torch.optim.Adam(critic.parameters())
for _ in range(3):
    real, fake = torch.randn(3, 4), torch.rand(3, 4)
    between = ((real + fake) / 2).requires_grad_()
    (gradient,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    penalty = (gradient.norm(dim=1) - 1).square().mean()
    loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    truth.step()
    truth.loss(loss)
truth.report()
