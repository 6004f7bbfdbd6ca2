"""Small steps, some of which something makes slow: loader, clipping, the file of a save, compilation, the collector."""

from __future__ import annotations

import gc
import io
import time

import stopwatch
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.utils.data import DataLoader, Dataset

SLOW_BATCHES, SLOW_CLIP, SLOW_SAVE, OTHER_LENGTH, COLLECTION = (9, 29), 13, 19, 25, 31
SLOWNESS_S, SLOW_BATCH_S = 0.25, 0.05


class Rows(Dataset[Tensor]):
    """A row is a batch."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Tensor:
        if index in SLOW_BATCHES:
            time.sleep(SLOW_BATCH_S)
        return torch.ones(6 if index == OTHER_LENGTH else 4, 64)


class SlowFile(io.BytesIO):
    """Waits before it takes the first bytes."""

    def write(self, data: object) -> int:
        if not self.tell():
            time.sleep(SLOWNESS_S)
        return super().write(data)  # type: ignore[arg-type]


def norm_slowly(*args: object, **kwargs: object) -> Tensor:
    """Stand in for what `clip_grad_norm_` calls."""
    time.sleep(SLOWNESS_S)
    result: Tensor = total_norm(*args, **kwargs)
    return result


total_norm = vars(clip_grad)["_get_total_norm"]
torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
gc.disable()
heap: list[list[int]] = [[] for _ in range(1_500_000)]
compiled = torch.compile(model, backend="eager", dynamic=False)
optimizer = torch.optim.Adam(model.parameters())
for number, batch in enumerate(DataLoader(Rows(), batch_size=None)):
    loss = compiled(batch).square().mean()
    loss.backward()
    vars(clip_grad)["_get_total_norm"] = norm_slowly if number == SLOW_CLIP else total_norm
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.save(model.state_dict(), SlowFile() if number == SLOW_SAVE else io.BytesIO())
    if number == COLLECTION:
        gc.collect()
    optimizer.step()
    stopwatch.step()
    optimizer.zero_grad()
stopwatch.report()
