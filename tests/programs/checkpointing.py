"""Activation checkpoints of both kinds: one block's forward runs again in backward by each."""

import torch
import truth
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.activation = nn.GELU()
        self.down = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(self.activation(self.up(x)))
        return result


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(4, 4)
        self.reentrant = Block()
        self.plain = Block()
        self.hooked = Block()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        x = checkpoint(self.reentrant, x, use_reentrant=True)
        x = self.plain(x)
        result: Tensor = checkpoint(self.hooked, x, use_reentrant=False)
        return result


torch.manual_seed(0)
torch.set_num_threads(1)
model = Net()
truth.watch(model, recompute=True)
optimizer = torch.optim.Adam(model.parameters())
for _ in range(3):
    loss = model(torch.randn(3, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    truth.step()
    truth.loss(loss)
truth.report()
