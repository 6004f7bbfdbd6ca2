"""A loss module holds the model and calls it for both sides of a pair; between some steps the model alone encodes."""

import stopwatch
import torch
from stopwatch import part, turn_to
from torch import Tensor, nn


class PairLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.cosine = model, nn.CosineSimilarity()

    def forward(self, left: Tensor, right: Tensor, alike: Tensor) -> Tensor:
        with part("forward"):
            left = self.model(left)
            turn_to("loss")
            left = left * 1.0
            turn_to("forward")
            right = self.model(right)
            turn_to("loss")
            loss: Tensor = nn.functional.mse_loss(self.cosine(left, right), alike) + 0 * stopwatch.spread(left)
            return loss


criterion = PairLoss(stopwatch.Net())
with torch.no_grad():
    criterion.model(torch.randn(2, stopwatch.WIDTH))
optimizer = torch.optim.SGD(criterion.parameters(), lr=0.01)
stopwatch.prepare()
stopwatch.begin()
for number in range(12):
    with part("batch"), torch.profiler.record_function("batch"):
        left, right, alike = torch.randn(128, stopwatch.WIDTH), torch.randn(128, stopwatch.WIDTH), torch.rand(128)
    with part("loss"):
        loss = criterion(left, right, alike)
        turn_to("backward")
        loss.backward()
    with part("optimizer"):
        optimizer.step()
    del loss  # else the next forward ends with freeing this graph
    stopwatch.step()
    with part("optimizer"):
        optimizer.zero_grad()
    if number % 3 == 2:
        with part("evaluation"), torch.no_grad():
            criterion.model.eval()
            criterion.model(torch.randn(32, stopwatch.WIDTH))
            criterion.model.train()
stopwatch.report()
