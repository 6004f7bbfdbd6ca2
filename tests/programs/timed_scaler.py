"""Automatic mixed precision: autocast, and a GradScaler that unscales for the clipping."""

import stopwatch
import torch
from stopwatch import part, turn_to
from torch import nn

model, criterion = stopwatch.Net(), nn.MSELoss()
optimizer = torch.optim.Adam(model.parameters())
scaler = torch.amp.GradScaler("cpu")
batch, target = torch.randn(128, stopwatch.WIDTH), torch.randn(128, 10)
for _ in range(16):
    with torch.autocast("cpu", torch.bfloat16), part("forward"):
        output = model(batch)
        turn_to("loss")
        loss = criterion(output, target)
    with part("loss"):
        scaled = scaler.scale(loss)
        turn_to("backward")
        scaled.backward()
    with part("optimizer"):
        scaler.unscale_(optimizer)
    with part("optimizer"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with part("optimizer"):
        scaler.step(optimizer)
    del output, loss, scaled  # else the next forward ends with freeing this graph
    stopwatch.step()
    with part("optimizer"):
        scaler.update()
    with part("optimizer"):
        optimizer.zero_grad()
stopwatch.report()
