"""A program's own stopwatches, put by hand around each part of its steps, and what programs with them share.

What is stopped inside of another part counts for the inner one only. It shares no code and no clock with modtrace.
The variable `STOPWATCH_WIDTH` says how wide models are: 640 takes some milliseconds.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter_ns
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

__all__ = [
    "WIDTH",
    "Net",
    "Rows",
    "begin",
    "fetched",
    "learn",
    "part",
    "prepare",
    "report",
    "spread",
    "step",
    "turn_to",
]

WIDTH = int(os.environ.get("STOPWATCH_WIDTH", "640"))

_Batch = TypeVar("_Batch")

_steps: list[dict[str, tuple[int, int]]] = []
_now: dict[str, int] = {}
_starts: dict[str, int] = {}
_open: list[str] = []
_since = perf_counter_ns()
gc.disable()  # a collection comes into any part
torch.manual_seed(0)
torch.set_num_threads(1)


@contextmanager
def part(name: str) -> Iterator[None]:
    """Stop how long a block takes; `a+b` where the program cannot stop the two apart."""
    _turn()
    _starts[name] = _starts.get(name, 0) + 1
    _open.append(name)
    try:
        yield
    finally:
        _turn()
        _open.pop()


def turn_to(name: str) -> None:
    """End the part that runs, and begin another one in the same moment."""
    _turn()
    _starts[name] = _starts.get(name, 0) + 1
    _open[-1] = name


def fetched(batches: Iterable[_Batch]) -> Iterator[_Batch]:
    """Yield what a loader has, and stop how long it takes."""
    with part("data loading"):
        fetches = iter(batches)
    while True:
        with part("data loading"):
            batch = next(fetches, None)
        if batch is None:
            return
        yield batch


def step() -> None:
    """Begin the next step."""
    global _now, _starts
    _turn()
    _steps.append({name: (ns, _starts.get(name, 0)) for name, ns in _now.items()})
    _now, _starts = {}, {}


def begin() -> None:
    """Begin the first step of a training: what came before is in no step."""
    global _now, _starts
    _turn()
    _now, _starts = {}, {}


def prepare() -> None:
    """Do for a while what has no name, for as long as many steps."""
    for _ in range(40):
        torch.randn(WIDTH, WIDTH).sin().cos().sort()


def learn(
    optimizer: torch.optim.Optimizer,
    run_model: Callable[[], Tensor],
    loss_of: Callable[[Tensor], Tensor] = lambda output: output.square().mean(),
    forward: str = "forward",
    backward: str = "backward",
) -> Tensor:
    """Take a step of training, and return its loss; the last two say what the parts are called."""
    with part("optimizer"):
        optimizer.zero_grad()
    with part(forward):
        output = run_model()
        turn_to("loss")
        loss = loss_of(output)
        turn_to(backward)
        loss.backward()
    with part("optimizer"):
        optimizer.step()
    step()
    return loss


def report(process: str = "main") -> None:
    """Print for each step, by part, nanoseconds and how often it was begun, as one line."""
    # In one write, which the line of another process cannot break.
    sys.stdout.write(json.dumps({"process": process, "pid": os.getpid(), "parts": _steps}) + "\n")
    sys.stdout.flush()


def _turn() -> None:
    global _since
    now = perf_counter_ns()
    name = _open[-1] if _open else "other"
    _now[name] = _now.get(name, 0) + now - _since
    _since = now


class Net(nn.Module):
    """Four layers."""

    def __init__(self, outputs: int = 10) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, 2 * WIDTH), nn.GELU())
        self.head = nn.Linear(2 * WIDTH, outputs)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.encoder(x))
        return result


def spread(output: Tensor) -> Tensor:
    """Return how far all rows are apart: a loss that takes some milliseconds."""
    wide = output.repeat(1, 16)
    return (wide[:, None] - wide).square().mean()


class Rows(Dataset[tuple[Tensor, int]]):
    """Rows with a class each, made when they are asked for."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((WIDTH,), index / self._length).cos().sin(), index % 10
