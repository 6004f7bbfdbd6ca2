"""Two ranks with DistributedDataParallel over gloo, which also share a figure in each step."""

import os
import sys
import tempfile
import time

import stopwatch
import torch
from stopwatch import part
from torch import distributed
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

WORLD_SIZE = 2


def train_rank(rank: int, store: str) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD_SIZE)
    torch.manual_seed(rank)
    model = DistributedDataParallel(stopwatch.Net())
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(192, stopwatch.WIDTH)
    for _ in range(12):
        loss = stopwatch.learn(optimizer, lambda: model(batch), backward="backward+communication")
        with part("backward+communication"):
            total = loss.detach()
            distributed.all_reduce(total)
    # gloo's thread gives a tensor back to Python after the collective; a process that ends meanwhile is aborted.
    while sys.getrefcount(total) > 2:
        time.sleep(0)
    distributed.destroy_process_group()
    stopwatch.report(f"rank {rank}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        spawn(train_rank, args=(os.path.join(folder, "store"),), nprocs=WORLD_SIZE)
