"""Activation checkpoints: two of three blocks run again in backward."""

import stopwatch
import torch
from stopwatch import part
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(stopwatch.WIDTH, 1024), nn.GELU(), nn.Linear(1024, stopwatch.WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.layers(x)
        return result


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = checkpoint(run_block, block, x, use_reentrant=False)
        return x


def run_block(block: nn.Module, x: Tensor) -> Tensor:
    again = torch._C._current_graph_task_id() != -1
    with part("recompute" if again else "forward"):
        result: Tensor = block(x)
        return result


model = Net()
optimizer = torch.optim.AdamW(model.parameters())
batch = torch.randn(128, stopwatch.WIDTH)
for _ in range(12):
    stopwatch.learn(optimizer, lambda: model(batch))
stopwatch.report()
