"""A loss module holds the model, a layer on top of it and a loss of torch; each step begins with another model."""

import stopwatch
import torch
from stopwatch import part, turn_to
from torch import Tensor, nn


class ClassifierLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.classifier, self.entropy = model, nn.Linear(10, 64), nn.CrossEntropyLoss()

    def forward(self, inputs: Tensor, classes: Tensor) -> Tensor:
        with part("forward"):
            output = self.model(inputs)
            turn_to("loss")
            loss: Tensor = self.entropy(self.classifier(output), classes) + stopwatch.spread(output)
            return loss


teacher, criterion = stopwatch.Net().eval(), ClassifierLoss(stopwatch.Net())
optimizer = torch.optim.AdamW(criterion.parameters())
stopwatch.prepare()
stopwatch.begin()
for _ in range(12):
    with part("forward"), torch.no_grad():
        classes = teacher(torch.ones(128, stopwatch.WIDTH)).argmax(1)
    with part("batch"), torch.profiler.record_function("batch"):
        inputs = torch.randn(128, stopwatch.WIDTH)
    with part("loss"):
        loss = criterion(inputs, classes)
        turn_to("backward")
        loss.backward()
    with part("optimizer"):
        optimizer.step()
    del loss  # else the next forward ends with freeing this graph
    stopwatch.step()
    with part("optimizer"):
        optimizer.zero_grad()
stopwatch.report()
