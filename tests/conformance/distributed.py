"""Models wrapped for distributed training, in a group of one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from .case import Step, case
from .modules import Scale, leaf


class Model(nn.Module):
    """Two modules in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Scale(), Scale()

    def forward(self, x: Tensor) -> Any:
        return self.b(self.a(x))


def _one_process() -> None:
    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()  # type: ignore[attr-defined]
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)


@case(
    """
    forward:
      DistributedDataParallel
        Model
          Model.a
          Model.b
      DistributedDataParallel #1
        Model #1
          Model.a #1
          Model.b #1
    backward:
      DistributedDataParallel
        Model
          Model.b
          Model.a
      DistributedDataParallel #1
        Model #1
          Model.b #1
          Model.a #1
    """,
    renamed=("Model", "DistributedDataParallel.module"),
)
def distributed_data_parallel() -> Step:
    """DistributedDataParallel: its reducer's hooks are on the accumulation of gradients."""
    _one_process()
    model = DistributedDataParallel(Model())

    def step() -> None:
        for _ in range(2):
            model(leaf()).sum().backward()

    return step


@case(
    """
    forward:
      Model
        Model.a
        Model.b
      Model #1
        Model.a #1
        Model.b #1
    backward:
      Model
        Model.b
        Model.a
      Model #1
        Model.b #1
        Model.a #1
    """,
    renamed=("Model", "FSDPModel"),
)
def fully_sharded() -> Step:
    """fully_shard (FSDP2) of each module: its hooks make nodes and gather parameters around each call."""
    _one_process()
    model = Model()
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    for module in (model.a, model.b, model):
        fully_shard(module, mesh=mesh)

    def step() -> None:
        for _ in range(2):
            model(leaf()).sum().backward()

    return step
