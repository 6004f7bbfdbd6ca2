"""A training that exports its model now and then."""

import stopwatch
import torch
from stopwatch import part
from torch.export import export

model = stopwatch.Net()
optimizer = torch.optim.AdamW(model.parameters())
batch = torch.randn(128, stopwatch.WIDTH)
for number in range(12):
    if number % 4 == 3:
        with part("compile"):
            export(model, (batch,))
    stopwatch.learn(optimizer, lambda: model(batch))
stopwatch.report()
