"""Two ranks of an elastic launch, as torchrun makes it; without torchrun it launches itself."""

import os
import sys
import time

import torch
import truth
from small_training import Net, train_epoch
from torch import distributed


def train_rank() -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    torch.manual_seed(distributed.get_rank())
    model = Net()
    truth.watch(model)
    train_epoch(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=3)
    total = torch.ones(1)
    distributed.all_reduce(total)
    truth.loss(total)
    truth.report(f"rank {distributed.get_rank()}")
    # gloo's thread gives a tensor back to Python after the collective; a process that ends meanwhile is aborted.
    while sys.getrefcount(total) > 2:
        time.sleep(0)
    distributed.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        train_rank()
    else:
        from torch.distributed.run import main

        main(["--standalone", "--nproc-per-node", "2", __file__])
