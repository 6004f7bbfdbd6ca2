"""Two processes by `mp.spawn` train with DistributedDataParallel over gloo, as in torch's tutorial."""

import os
import sys
import tempfile
import time

import torch
import truth
from small_training import Net, train_epoch
from torch import distributed
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

WORLD_SIZE = 2


def train_rank(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD_SIZE)
    torch.manual_seed(rank)
    model = Net()
    parallel = DistributedDataParallel(model)
    truth.watch(model)
    truth.watch(parallel)
    train_epoch(parallel, torch.optim.SGD(parallel.parameters(), lr=0.1), steps=3)
    # As in elastic.py: the threads of gloo outlive their group, as DDP still holds it.
    total = torch.ones(1)
    distributed.all_reduce(total)
    while sys.getrefcount(total) > 2:
        time.sleep(0)
    distributed.destroy_process_group()
    truth.report(f"rank {rank}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        spawn(train_rank, args=(os.path.join(folder, "store"),), nprocs=WORLD_SIZE)
