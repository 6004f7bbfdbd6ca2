"""A job of Ray: a driver, two trainers and two rollout actors, one of which is killed and comes back.

All wait for trainer 0, whose state takes long.

usage: ray_actors.py FOLDER
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")

import ray
import torch
from torch import nn

import modtrace

STEPS, KILLED_AT = 24, 2


class Rollout:
    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def generate(self, state: dict[str, torch.Tensor]) -> Any:
        self.model.load_state_dict(state)
        with torch.no_grad():
            return self.model(torch.ones(4, 8))

    def process(self) -> int:
        return os.getpid()


class Trainer:
    def __init__(self, slow: bool) -> None:
        self.model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.slow = slow

    def train(self, batch: torch.Tensor) -> Any:
        loss = self.model(batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def state(self) -> dict[str, torch.Tensor]:
        if self.slow:
            numbers = torch.rand(500, 500)
            for _ in range(12):
                numbers = torch.tanh(numbers @ numbers)
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}


def actors(kind: type, folder: str, *arguments: tuple[Any, ...]) -> list[Any]:
    """Start an actor for each tuple of arguments, with a ring of its own."""
    role = kind.__name__.lower()
    started: list[Any] = []
    for rank, own in enumerate(arguments):
        environment = {"MODTRACE": f"ring={folder}/{role}{rank}.modtrace,role={role}", "RANK": str(rank)}
        options = {"max_restarts": 1, "max_task_retries": 1, "num_cpus": 0.1, "runtime_env": {"env_vars": environment}}
        started.append(ray.remote(kind).options(**options).remote(*own))
    return started


def main(folder: str) -> None:
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        runtime_env={"worker_process_setup_hook": "modtrace.current"},
    )
    rollouts, trainers = actors(Rollout, folder, (), ()), actors(Trainer, folder, (True,), (False,))
    with modtrace.record(ring=f"{folder}/driver.modtrace", role="driver") as recording:
        for step in range(STEPS):
            state = ray.get(trainers[0].state.remote())
            if step == KILLED_AT:
                os.kill(ray.get(rollouts[1].process.remote()), signal.SIGKILL)
            batches = ray.get([rollout.generate.remote(state) for rollout in rollouts])
            ray.get([trainer.train.remote(batch) for trainer, batch in zip(trainers, batches, strict=True)])
            recording.step()
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
