"""A training in which each kind of slowness comes once; it prints which step each is in, by a clock of its own.

Arguments: the engine, the ring's file.
"""

from __future__ import annotations

import gc
import io
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

import modtrace

SLOWNESS_S, HANG_S, FIRST, APART, EPOCH = 1.0, 12.0, 12, 8, 28
KINDS = (
    *("item", "collate", "epoch", "forward", "nested", "module_backward", "parameter_hook", "recompute", "loss"),
    *("loss_module", "optimizer", "optimizer_hook", "clip", "scheduler", "recompile", "save", "load", "range"),
    *("record_function", "evaluation", "other", "gc", "hang", "keep", "signal"),
)
STEP_OF = {kind: FIRST + APART * number for number, kind in enumerate(KINDS)}  # "epoch" is in step 28
KIND_AT = {step: kind for kind, step in STEP_OF.items()}
number = 0
took: dict[str, float] = {}


def slow(kind: str, seconds: float = SLOWNESS_S) -> None:
    """Sleep if it is the step of this kind, once."""
    if KIND_AT.get(number) == kind and kind not in took:
        begin = time.perf_counter()
        time.sleep(seconds)
        took[kind] = time.perf_counter() - begin


class Rows(Dataset[Tensor]):
    def __len__(self) -> int:
        return EPOCH

    def __getitem__(self, index: int) -> Tensor:
        slow("item")
        return torch.ones(64)


def collate(rows: list[Tensor]) -> Tensor:
    slow("collate")
    return torch.stack(rows)


class Order(torch.utils.data.Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        slow("epoch")
        return iter(range(EPOCH))

    def __len__(self) -> int:
        return EPOCH


class Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        slow("module_backward")
        return gradient.clone()


class LateModule(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Late.apply(x)  # type: ignore[no-any-return]


class Layer(nn.Linear):
    def __init__(self, kind: str) -> None:
        super().__init__(64, 64)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        slow(self.kind)
        return super().forward(x)


class Rerun(nn.Linear):
    """Slow where a checkpoint runs it again."""

    def forward(self, x: Tensor) -> Tensor:
        global runs
        runs += 1
        if runs == 2:
            slow("recompute")
        return super().forward(x)


class SlowLoss(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        slow("loss_module")
        return x.square().mean()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = Layer("forward")
        self.body = nn.Sequential(nn.Sequential(Layer("nested"), nn.GELU()), LateModule())
        self.again = Rerun(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.again, self.body(self.head(x)), use_reentrant=False)
        return out


class Optimizer(torch.optim.Adam):
    def step(self, closure: Any = None) -> Any:
        slow("optimizer")
        return super().step(closure)


class Scheduler(torch.optim.lr_scheduler.LambdaLR):
    def get_lr(self) -> Any:
        slow("scheduler")
        return super().get_lr()


class SlowFile(io.BytesIO):
    def write(self, data: Any) -> int:
        if not self.tell():
            slow("save")
        return super().write(data)

    def read(self, *size: Any) -> bytes:
        slow("load")
        return super().read(*size)


class Cycle:
    """The collector finalizes it."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        slow("gc")


def norm(*args: Any, **kwargs: Any) -> Tensor:
    slow("clip")
    result: Tensor = total_norm(*args, **kwargs)
    return result


def backend(module: torch.fx.GraphModule, _: Any) -> Any:
    slow("recompile")
    return module.forward


total_norm = vars(clip_grad)["_get_total_norm"]
vars(clip_grad)["_get_total_norm"] = norm
torch.manual_seed(0)
torch.set_num_threads(1)
gc.disable()
net, loss_module = Net(), SlowLoss()
compiled = torch.compile(nn.Linear(64, 1), backend=backend, dynamic=False)
optimizer = Optimizer(net.parameters(), lr=1e-3)
optimizer.register_step_pre_hook(lambda *_: slow("optimizer_hook"))
scheduler = Scheduler(optimizer, lambda _: 1.0)
net.head.weight.register_hook(lambda _: slow("parameter_hook"))
seen = io.BytesIO()
torch.save(net.state_dict(), seen)
loader = DataLoader(Rows(), batch_size=1, sampler=Order(), collate_fn=collate)


@torch.no_grad()
def evaluate() -> None:
    net.eval()
    net(torch.ones(1, 64))
    slow("evaluation")
    net(torch.ones(1, 64))
    net.train()


engine, ring = sys.argv[1:]
with modtrace.record(ring=ring, engine=engine, keep_when="signal") as recording:  # type: ignore[arg-type]
    while number <= max(STEP_OF.values()) + APART:
        for batch in loader:
            runs = 0
            out = net(batch)
            compiled(torch.ones(6 if number == STEP_OF["recompile"] else 4, 64))
            slow("loss")
            loss_module(out).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            number += 1
            scheduler.step()
            if KIND_AT.get(number) == "evaluation":
                evaluate()
            with modtrace.range("augment"):
                slow("range")
            with torch.profiler.record_function("tokenize"):
                slow("record_function")
            slow("other")
            if KIND_AT.get(number) == "save":
                torch.save(net.state_dict(), SlowFile())
            if KIND_AT.get(number) == "load":
                torch.load(SlowFile(seen.getvalue()))
            if KIND_AT.get(number) == "gc":
                Cycle()
                gc.collect()
            slow("hang", HANG_S)
            if KIND_AT.get(number) == "keep":
                recording.keep("loss is nan")
            if KIND_AT.get(number) == "signal":
                os.kill(os.getpid(), signal.SIGUSR1)
                while not any(mark.text == "modtrace.keep signal" for mark in recording.snapshot().marks):
                    time.sleep(0.001)  # a thread of the recording writes it
Path(f"{ring}.truth.json").write_text(json.dumps({kind: [STEP_OF[kind], took.get(kind)] for kind in KINDS}))
