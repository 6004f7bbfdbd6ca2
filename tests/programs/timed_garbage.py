"""A program whose batches leave cycles of objects, which are collected."""

import functools
import gc

import stopwatch
import torch
from stopwatch import part


def make_batch() -> torch.Tensor:
    for _ in range(5_000):
        row: list[object] = []
        row.append(row)
    return torch.randn(128, stopwatch.WIDTH)


model = stopwatch.Net()
optimizer = torch.optim.AdamW(model.parameters())
gc.collect()
for number in range(16):
    with part("batch"), torch.profiler.record_function("batch"):
        batch = make_batch()
    with part("gc"):
        gc.collect(2 if number % 4 == 3 else 0)
    stopwatch.learn(optimizer, functools.partial(model, batch))
stopwatch.report()
