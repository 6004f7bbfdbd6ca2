"""Automatic mixed precision: autocast, and a GradScaler that unscales for the clipping."""

import stopwatch
import torch
from stopwatch import part
from torch import nn

model, criterion = stopwatch.Net(), nn.MSELoss()
optimizer = torch.optim.Adam(model.parameters())
scaler = torch.amp.GradScaler("cpu")
batch, target = torch.randn(128, stopwatch.WIDTH), torch.randn(128, 10)
for _ in range(16):
    with torch.autocast("cpu", torch.bfloat16):
        with part("forward"):
            output = model(batch)
        with part("loss+backward"):
            loss = criterion(output, target)
    with part("loss+backward"):
        scaler.scale(loss).backward()
    with part("optimizer"):
        scaler.unscale_(optimizer)
    with part("optimizer"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with part("optimizer"):
        scaler.step(optimizer)
    stopwatch.step()
    with part("optimizer"):
        scaler.update()
    with part("optimizer"):
        optimizer.zero_grad()
stopwatch.report()
