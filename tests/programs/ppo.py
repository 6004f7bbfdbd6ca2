"""One process of a small job of reinforcement learning on gloo: a driver, two trainers and two rollouts, in one world.

Run as `ppo.py RANK FOLDER [CULPRIT PLACE]`; the culprit, by its rank, takes 0.2 s longer in a range or module.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import modtrace

STEPS, TOKENS, WIDTH, WORLD = 24, 4, 8, 5
DRIVER, TRAINERS, ROLLOUTS = 0, (1, 2), (3, 4)


class Head(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        spend("head")
        return super().forward(x)


def spend(place: str) -> None:
    time.sleep(0.01 + 0.2 * (culprit == [str(rank), place]))


def receive(source: int) -> torch.Tensor:
    tensor = torch.zeros(WIDTH)
    dist.recv(tensor, source)
    return tensor


def drive(_: Any) -> None:
    for rollout in ROLLOUTS:
        dist.send(torch.ones(WIDTH), rollout)
    answers = [receive(rollout) for rollout in ROLLOUTS]
    with modtrace.range("reward"):
        spend("reward")
    for trainer, answer in zip(TRAINERS, answers, strict=True):
        dist.send(answer, trainer)
    for trainer in TRAINERS:
        receive(trainer)


def roll_out(model: Any) -> None:
    text = receive(DRIVER)
    with modtrace.range("generate"), torch.no_grad():
        spend("generate")
        for _ in range(TOKENS):
            text = model(text)
    dist.send(text, DRIVER)


def train(model: Any) -> None:
    answer = receive(DRIVER)
    with modtrace.range("advantages"):
        spend("advantages")
    model(answer).sum().backward()
    optimizer.step()
    dist.send(torch.ones(WIDTH), DRIVER)


rank, folder, culprit = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
torch.set_num_threads(1)
os.environ["RANK"] = str(rank)
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
trainers = dist.new_group(list(TRAINERS))
model: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), Head(WIDTH, WIDTH))
if rank in TRAINERS:
    model = DistributedDataParallel(model, process_group=trainers)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
role, work = ("driver", drive) if rank == DRIVER else ("trainer", train) if rank in TRAINERS else ("rollout", roll_out)
with modtrace.record(ring=Path(folder) / f"{role}{rank}.modtrace", capacity=1 << 16, role=role):
    for _ in range(STEPS):
        work(model)
    dist.barrier()
dist.destroy_process_group()
