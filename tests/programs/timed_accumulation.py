"""Gradients of four batches are one step; values are clipped, and gradients set to zero by the module."""

import stopwatch
import torch
from stopwatch import part, turn_to
from torch.utils.data import DataLoader

model = stopwatch.Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
batches = stopwatch.fetched(DataLoader(stopwatch.Rows(128 * 40), batch_size=128))
for _ in range(10):
    for _ in range(4):
        inputs, classes = next(batches)
        with part("forward"):
            output = model(inputs)
            turn_to("loss")
            loss = torch.nn.functional.cross_entropy(output, classes) / 4
            turn_to("backward")
            loss.backward()
    with part("optimizer"):
        torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
    with part("optimizer"):
        optimizer.step()
    del output, loss  # else the next forward ends with freeing this graph
    stopwatch.step()
    with part("optimizer"):
        model.zero_grad()
stopwatch.report()
