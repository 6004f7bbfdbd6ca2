"""One rank of four on gloo: steps in each of which one rank keeps the others waiting, until a file releases it.

Run as `-m tests.support.hang_job RANK FOLDER ENGINE LAST`. Step `i` of `HANGS` ends once `release-i` is there. The
step behind them does not end: LAST is "other", where rank 2 calls broadcast instead of all_reduce, or "dead", where
rank 1 is killed in the forward of `slow`. Once `dump` is there, each rank writes its flight recorder to `trace_RANK`.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import modtrace

HANGS = (("not called", 3), ("forward", 1), ("backward", 2), ("not sent", 0), ("subgroup", 3))
"""The kinds of hangs: the action of the rank that keeps the others waiting, and its number."""
RANKS = 4
FIRST_STEPS = 3


class Held(torch.autograd.Function):
    """Passes tensors on, and gradients once `path` is there."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, path: Path | None) -> torch.Tensor:
        ctx.path = path
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        if ctx.path is not None:
            wait_for(ctx.path)
        return gradients[0], None


class Slow(nn.Module):
    """Passes its input on, once what holds it is there."""

    forward_held: Path | None = None
    backward_held: Path | None = None
    dies = False

    def forward(self, x: torch.Tensor) -> Any:
        if self.dies:
            die_with_open_sockets()
        if self.forward_held is not None:
            wait_for(self.forward_held)
        return Held.apply(x, self.backward_held)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.slow, self.last = nn.Linear(4, 4), Slow(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.slow(self.first(x)))


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def die_with_open_sockets() -> None:
    """Die as a machine does that is unplugged: gloo tells the others at once where connections are closed."""
    if os.fork() == 0:
        wait_for(Path(sys.argv[2]) / "end")
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def dump_flight_recorder(path: Path, wanted: Path) -> None:
    wait_for(wanted)
    part = path.with_suffix(".part")
    part.write_bytes(torch._C._distributed_c10d._dump_fr_trace(includeStackTraces=True))  # type: ignore[attr-defined]
    part.rename(path)


def main() -> None:
    rank, folder, engine, last = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4]
    torch.set_num_threads(1)
    threading.Thread(target=dump_flight_recorder, args=(folder / f"trace_{rank}", folder / "dump"), daemon=True).start()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    pairs = [dist.new_group([0, 1], group_desc="mesh_tp"), dist.new_group([2, 3], group_desc="mesh_tp")]
    model, gradients = Net(), torch.ones(8)
    with modtrace.record(engine=engine, ring=folder / f"{rank}.modtrace") as recording:  # type: ignore[arg-type]
        for _ in range(FIRST_STEPS):
            model(torch.ones(2, 4)).sum().backward()
            dist.all_reduce(gradients, group=pairs[rank // 2])
            dist.all_reduce(gradients)
            recording.step()
        for number, (kind, culprit) in enumerate(HANGS):
            release = folder / f"release-{number}" if rank == culprit else None
            model.slow.forward_held = release if kind == "forward" else None
            model.slow.backward_held = release if kind == "backward" else None
            model(torch.ones(2, 4)).sum().backward()
            if release is not None and kind in ("not called", "not sent", "subgroup"):
                wait_for(release)
            if kind == "not sent" and rank == culprit:
                dist.send(gradients, culprit + 1)
            if kind == "not sent" and rank == culprit + 1:
                dist.recv(gradients, culprit)
            if kind == "subgroup":
                dist.barrier(group=pairs[rank // 2])
            dist.all_reduce(gradients)
            recording.step()
        model.slow.forward_held = model.slow.backward_held = None
        model.slow.dies = last == "dead" and rank == 1
        model(torch.ones(2, 4)).sum().backward()
        if last == "other" and rank == 2:
            dist.broadcast(gradients, src=2)
            wait_for(folder / "end")
        else:
            dist.all_reduce(gradients)


if __name__ == "__main__":
    main()
