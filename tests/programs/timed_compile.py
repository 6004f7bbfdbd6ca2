"""A compiled model, which another length of the batch has compiled again."""

import stopwatch
import torch
from stopwatch import part

torch.manual_seed(0)
torch.set_num_threads(1)
model = stopwatch.Net()
compiled = torch.compile(model, backend="aot_eager", dynamic=False)
optimizer = torch.optim.AdamW(model.parameters())
for number in range(16):
    with part("batch"), torch.profiler.record_function("batch"):
        batch = torch.randn(160 if number == 11 else 192, stopwatch.WIDTH)
    with part("optimizer"):
        optimizer.zero_grad()
    with part("forward+compile"):
        output = compiled(batch)
    with part("loss+backward"):
        loss = output.square().mean()
        loss.backward()
    with part("optimizer"):
        optimizer.step()
    stopwatch.step()
stopwatch.report()
