"""Trains on nested tensors, rows of several lengths, in the jagged layout."""

import torch
import truth
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.up = nn.Linear(4, 8)
        self.activation = nn.GELU()
        self.down = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(self.activation(self.up(self.norm(x))))
        return result


torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(Block(), Block())
truth.watch(model)
optimizer = torch.optim.Adam(model.parameters())
for _ in range(3):
    rows = [torch.randn(length, 4) for length in (2, 5, 3)]
    batch = torch.nested.nested_tensor(rows, layout=torch.jagged)
    loss = model(batch).values().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    truth.step()
    truth.loss(loss)
truth.report()
