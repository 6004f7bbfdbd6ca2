"""Trainings on two ranks. As a program, one of the ranks: it writes its verdicts to the file that it is given."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleavedZeroBubble
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from .judge import Run, judge, train_on

__all__ = ["RANKS", "TRAININGS"]

RANKS = 2
_STEPS = 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(torch.relu(self.up(x)))
        return down


class Net(nn.Module):
    """Blocks, the last of which is left out where it is to be."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])
        self.used = blocks

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[: self.used]:
            x = block(x)
        return x


def _train(net: nn.Module, model: nn.Module, accumulate: Callable[[], Any] | None = None) -> Run:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())

    def losses() -> Iterator[Tensor]:
        for _ in range(_STEPS):
            if accumulate is not None:
                with accumulate():
                    model(torch.randn(2, 4, generator=generator)).square().mean().backward()
            yield model(torch.randn(2, 4, generator=generator)).square().mean()

    return train_on(Run([net], root="Net"), optimizer, losses())


def ddp() -> Run:
    """DDP"""
    net = Net()
    return _train(net, DistributedDataParallel(net))


def ddp_static_graph() -> Run:
    """DDP, static graph"""
    net = Net()
    return _train(net, DistributedDataParallel(net, static_graph=True))


def ddp_unused_parameters() -> Run:
    """DDP, unused parameters"""
    net = Net()
    net.used = 1
    return _train(net, DistributedDataParallel(net, find_unused_parameters=True))


def ddp_no_sync() -> Run:
    """DDP, no_sync"""
    net = Net()
    model = DistributedDataParallel(net)
    return _train(net, model, model.no_sync)


def fsdp1() -> Run:
    """FSDP1"""
    net, cpu = Net(), torch.device("cpu")
    blocks = list(net.blocks)
    for number, block in enumerate(blocks):
        net.blocks[number] = FullyShardedDataParallel(block, device_id=cpu)
    run = _train(net, FullyShardedDataParallel(net, device_id=cpu))
    # It is judged by the names that it has without the wrappers.
    for number, block in enumerate(blocks):
        net.blocks[number] = block
    return run


def fsdp2() -> Run:
    """FSDP2"""
    net = Net()
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return _train(net, net)


def tensor_parallel() -> Run:
    """tensor parallel"""
    net = Net()
    plan = {f"blocks.{number}.{name}": style() for number in range(2) for name, style in _STYLES.items()}
    parallelize_module(net, init_device_mesh("cpu", (RANKS,)), plan)
    return _train(net, net)


_STYLES = {"up": ColwiseParallel, "down": RowwiseParallel}


def _pipeline(make_schedule: Any, stages_per_rank: int) -> Run:
    rank = dist.get_rank()
    parts = [Net(1) for _ in range(stages_per_rank)]
    count = RANKS * stages_per_rank
    stages = [
        PipelineStage(part, rank + RANKS * number, count, torch.device("cpu")) for number, part in enumerate(parts)
    ]

    def loss_of(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean()

    schedule = make_schedule(stages[0] if stages_per_rank == 1 else stages, n_microbatches=4, loss_fn=loss_of)
    optimizer = torch.optim.SGD([each for part in parts for each in part.parameters()], lr=0.1)
    run = Run(list(parts), root="Net")
    for step in range(_STEPS):
        generator = torch.Generator().manual_seed(step)
        batch = torch.randn(8, 4, generator=generator)
        losses: list[Tensor] = []
        last = {"target": batch, "losses": losses} if rank == RANKS - 1 else {}
        schedule.step(*([batch] if rank == 0 else []), **last)
        optimizer.step()
        optimizer.zero_grad()
        run.losses += [loss.item() for loss in losses]
        run.steps += 1
    return run


def pipeline_gpipe() -> Run:
    """pipeline, GPipe"""
    return _pipeline(ScheduleGPipe, 1)


def pipeline_1f1b() -> Run:
    """pipeline, 1F1B"""
    return _pipeline(Schedule1F1B, 1)


def pipeline_zero_bubble() -> Run:
    """pipeline, zero bubble"""
    return _pipeline(ScheduleInterleavedZeroBubble, 2)


TRAININGS: list[Callable[[], Run]] = [
    ddp,
    ddp_static_graph,
    ddp_unused_parameters,
    ddp_no_sync,
    fsdp1,
    fsdp2,
    tensor_parallel,
    pipeline_gpipe,
    pipeline_1f1b,
    pipeline_zero_bubble,
]
"""The first line of each docstring names it in the table."""


def _main(rank: int, store: str, engines: list[Any], out: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    verdicts = {
        training.__name__: {engine: judge(training, engine).faults for engine in engines} for training in TRAININGS
    }
    out.write_text(json.dumps(verdicts))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2], sys.argv[3].split(","), Path(sys.argv[4]))
