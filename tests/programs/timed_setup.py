"""Loads a model as `from_pretrained` does, tries it with a sample, prepares data, and only then trains."""

import functools
import io

import stopwatch
import torch
from torch.utils.data import DataLoader

weights = io.BytesIO()
torch.save(stopwatch.Net().state_dict(), weights)
weights.seek(0)
model = stopwatch.Net()
model.load_state_dict(torch.load(weights))
model.eval()
with torch.no_grad():
    model(torch.randn(2, stopwatch.WIDTH))
model(torch.randn(2, stopwatch.WIDTH)).sum().backward()  # whether gradients flow
model.zero_grad()
model.train()
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
loader = DataLoader(stopwatch.Rows(128 * 12), batch_size=128)
inputs, _ = next(iter(loader))  # what shape they have
stopwatch.prepare()
stopwatch.begin()
for inputs, _ in stopwatch.fetched(loader):
    stopwatch.learn(optimizer, functools.partial(model, inputs), stopwatch.spread)
    with stopwatch.part("optimizer"):
        scheduler.step()
stopwatch.report()
