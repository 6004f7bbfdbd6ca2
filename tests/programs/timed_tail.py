"""Trains, and then saves, evaluates, plots, and frees a lot, for longer than it trained."""

import functools
import gc
import io

import stopwatch
import torch

model = stopwatch.Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
stopwatch.prepare()
stopwatch.begin()
for _ in range(12):
    with stopwatch.part("batch"), torch.profiler.record_function("batch"):
        inputs = torch.randn(128, stopwatch.WIDTH)
    stopwatch.learn(optimizer, functools.partial(model, inputs), stopwatch.spread)
stopwatch.report()
torch.save(model.state_dict(), io.BytesIO())
model.eval()
with torch.no_grad():
    model(torch.randn(512, stopwatch.WIDTH))
model(torch.randn(2, stopwatch.WIDTH)).sum().backward()
stopwatch.prepare()
junk = [[number] for number in range(100_000)]
for item in junk:
    item.append(item)  # type: ignore[arg-type]
del junk, item
gc.collect()
