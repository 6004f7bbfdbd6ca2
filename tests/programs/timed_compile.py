"""A compiled model, which another length of the batch has compiled again."""

import functools

import stopwatch
import torch
from stopwatch import part

model = stopwatch.Net()
compiled = torch.compile(model, backend="aot_eager", dynamic=False)
optimizer = torch.optim.AdamW(model.parameters())
for number in range(16):
    with part("batch"), torch.profiler.record_function("batch"):
        batch = torch.randn(160 if number == 11 else 192, stopwatch.WIDTH)
    stopwatch.learn(optimizer, functools.partial(compiled, batch), forward="forward+compile")
stopwatch.report()
