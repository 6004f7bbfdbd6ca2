"""One rank of a job on gloo that trains a net of layers, recorded; with a module that is slow where it is told to be.

Run as `-m tests.support.ranks_job RANK RANKS FOLDER KIND LAYERS STEPS [CULPRIT FQN PHASE MS HOW]`; KIND is ddp, fsdp,
tp, gpipe or 1f1b, HOW is sleep or busy. In a pipeline each rank has LAYERS layers of its own. A slow module that waits
for the processor takes more than it was told: FOLDER/spent.json says what it took in each recorded step, ns.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import modtrace

WIDTH = 64
MICRO_BATCHES = 4
SPENT = "spent.json"
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


spent: list[int] = []
"""The duration of each delay in ns."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.down(self.up(x).relu())


class Delay(torch.autograd.Function):
    """Takes some time in forward, or in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_ns: int, backward_ns: int, how: str) -> torch.Tensor:
        ctx.delay = backward_ns, how
        spend(forward_ns, how)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        spend(*ctx.delay)
        return grads[0], None, None, None


def spend(duration_ns: int, how: str) -> None:
    if not duration_ns:  # even a sleep of nothing gives the processor away
        return
    begin = time.monotonic_ns()
    if how == "sleep":
        time.sleep(duration_ns / 1e9)
    else:
        end = time.thread_time_ns() + duration_ns
        while time.thread_time_ns() < end:
            pass
    spent.append(time.monotonic_ns() - begin)


def make_model(kind: str, layers: int, rank: int, ranks: int) -> nn.Module:
    first = rank * layers if kind in SCHEDULES else 0
    model: nn.Module = nn.Sequential(OrderedDict((str(first + number), Layer()) for number in range(layers)))
    if kind in SCHEDULES:
        return model
    if kind == "ddp":
        return DistributedDataParallel(model, bucket_cap_mb=layers * WIDTH * WIDTH * 16 / 4e6)
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in model.children():
        if kind == "fsdp":
            fully_shard(layer, mesh=mesh)
        else:
            parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def make_slow(model: nn.Module, fqn: str, phase: str, milliseconds: float, how: str) -> None:
    """Delay a module of `Sequential`, by its name there."""
    duration_ns = int(milliseconds * 1e6)
    module = next(child for name, child in model.named_modules() if name.removeprefix("module.") == fqn)
    inner = module.forward

    def forward(x: torch.Tensor) -> Any:
        forward_ns, backward_ns = (duration_ns, 0) if phase == "forward" else (0, duration_ns)
        return Delay.apply(inner(x), forward_ns, backward_ns, how)

    module.forward = forward


def main() -> None:
    rank, ranks, folder, kind, layers, steps, *culprit = sys.argv[1:]
    os.environ.update(RANK=rank, WORLD_SIZE=ranks)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=int(rank), world_size=int(ranks))
    model = make_model(kind, int(layers), int(rank), int(ranks))
    if culprit and culprit[0] == rank:
        make_slow(model, culprit[1], culprit[2], float(culprit[3]), culprit[4])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)

    if kind in SCHEDULES:
        stage = PipelineStage(model, int(rank), int(ranks), torch.device("cpu"))
        schedule: Any = SCHEDULES[kind](stage, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
    batch, target = torch.randn(16, WIDTH), torch.zeros(16, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        if kind in SCHEDULES:
            is_last = int(rank) == int(ranks) - 1
            schedule.step(*((batch,) if rank == "0" else ()), target=target if is_last else None)
        else:
            model(batch).square().mean().backward()
        optimizer.step()

    step()
    with modtrace.record(ring=Path(folder) / f"{rank}.modtrace", capacity=1 << 16):
        for _ in range(int(steps)):
            step()
        dist.barrier()
    if spent:
        each = len(spent) // (int(steps) + 1)
        of_steps = [sum(spent[begin : begin + each]) for begin in range(each, len(spent), each)]
        (Path(folder) / SPENT).write_text(json.dumps(of_steps))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
