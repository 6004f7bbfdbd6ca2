"""One rank of four on gloo: good steps, and then hangs, each until the file that releases it is there.

Run as `-m tests.support.hang_job RANK FOLDER ENGINE`. Hang 0: rank 3 does not call all_reduce #3. Hang 1: rank 1 stays
in the module `slow` before all_reduce #4. Hang 2: rank 2 calls broadcast instead of all_reduce #5.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import modtrace


class Slow(nn.Module):
    """Passes its input on, once `held` is there."""

    held: Path | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.held is not None:
            wait_for(self.held)
        return x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.slow = nn.Linear(4, 4), Slow()

    def forward(self, x: torch.Tensor) -> Any:
        return self.slow(self.first(x))


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def main() -> None:
    rank, folder, engine = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
    model, gradients = Net(), torch.ones(8)
    with modtrace.record(engine=engine, ring=folder / f"{rank}.modtrace") as recording:  # type: ignore[arg-type]
        for _ in range(3):
            model(torch.ones(2, 4))
            dist.all_reduce(gradients)
            recording.step()
        if rank == 3:
            wait_for(folder / "release-0")
        dist.all_reduce(gradients)
        if rank == 1:
            model.slow.held = folder / "release-1"
        model(torch.ones(2, 4))
        dist.all_reduce(gradients)
        if rank == 2:
            dist.broadcast(gradients, src=2)
            wait_for(folder / "release-2")
        else:
            dist.all_reduce(gradients)


if __name__ == "__main__":
    main()
