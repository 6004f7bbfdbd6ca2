"""Print the graphs that torch.compile captures: `python -m tests.support.captured_graphs none|native|python`.

Prints one JSON object: of each case the graphs in their order, each as its nodes, the number of graph breaks, all that
dynamo counts, why it compiled again, and the names of the spans and ranges where it was recorded.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import re
import sys
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import modtrace

__all__ = ["CASES"]

Step = Callable[[], object]
Backend = Callable[..., Any]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.layer(x).relu()
        return hidden


class Net(nn.Module):
    """Three blocks, with what `between` does before the second one."""

    def __init__(
        self,
        between: Step = lambda: None,
        wrap: Callable[[nn.Module], Any] = lambda block: block,
        width: int = 4,
    ) -> None:
        super().__init__()
        self.a, self.b, self.c = Block(width), wrap(Block(width)), Block(width)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        self.between()
        hidden: Tensor = self.c(self.b(x))
        return hidden


class Checkpointed(Net):
    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.c(checkpoint(self.b, self.a(x), use_reentrant=False))
        return hidden


def _step_of(model: Any, width: int = 4) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.ones(2, width)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _backend(name: str) -> Callable[[Backend], Step]:
    # The backends by name are wrapped in one that notes the graphs.
    return lambda note: _step_of(torch.compile(Net(), backend=_noted(note, name)))


def _noted(note: Backend, name: str) -> Backend:
    inner = torch._dynamo.lookup_backend(name)

    def backend(graph: torch.fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
        note(graph, inputs)
        return inner(graph, inputs, **options)

    return backend


def _dynamic(note: Backend) -> Step:
    model = torch.compile(Net(), backend=note, dynamic=True)

    def step() -> None:
        for batch in (2, 3, 5):
            model(torch.ones(batch, 4)).sum().backward()

    return step


def _with_ranges(note: Backend) -> Step:
    """A loop that clips, collects garbage and saves, eagerly and compiled; another length compiles its model again."""
    net = Net()
    model = torch.compile(net, backend=note, dynamic=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def end() -> None:
        with modtrace.range("clip"), torch.profiler.record_function("norm"):
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        gc.collect()
        torch.save(net.state_dict(), io.BytesIO())

    compiled_end = torch.compile(end, backend=note)

    def step() -> None:
        for batch in (2, 3):
            model(torch.ones(batch, 4)).sum().backward()
            end()
            compiled_end()
            optimizer.step()
            optimizer.zero_grad()

    return step


def _distributed(note: Backend) -> Step:
    if not dist.is_initialized():
        store = tempfile.mkdtemp()
        dist.init_process_group("gloo", init_method=f"file://{store}/store", rank=0, world_size=1)
    # Each layer fills a bucket, and torch.compile cuts the graph between them.
    width = 600
    model = DistributedDataParallel(Net(width=width), bucket_cap_mb=1)
    return _step_of(torch.compile(model, backend=note), width)


def _compiled_in_place(note: Backend) -> Step:
    net = Net()
    net.b.compile(backend=note)
    return _step_of(net)


def _compiled_optimizer(note: Backend) -> Step:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step_optimizer = torch.compile(optimizer.step, backend=note)

    def step() -> None:
        net(torch.ones(2, 4)).sum().backward()
        step_optimizer()
        optimizer.zero_grad()

    return step


def _with_compiled_autograd(
    make: Callable[[Backend], Any], autograd_backend: str = "eager"
) -> Callable[[Backend], Step]:
    def case(note: Backend) -> Step:
        step = _step_of(make(note))

        def with_compiled_autograd() -> None:
            with torch._dynamo.compiled_autograd._enable(torch.compile(backend=_noted(note, autograd_backend))):
                step()

        return with_compiled_autograd

    return case


CASES: dict[str, Callable[[Backend], Step]] = {
    "eager": _backend("eager"),
    "aot_eager": _backend("aot_eager"),
    "inductor": _backend("inductor"),
    "cudagraphs": _backend("cudagraphs"),
    "the whole graph": lambda note: _step_of(torch.compile(Net(), backend=note, fullgraph=True)),
    "dynamic shapes": _dynamic,
    "around a break": lambda note: _step_of(torch.compile(Net(torch._dynamo.graph_break), backend=note)),
    "around a disabled part": lambda note: _step_of(torch.compile(Net(wrap=torch._dynamo.disable), backend=note)),
    "a part of an eager model": _compiled_in_place,
    "activation checkpoints": lambda note: _step_of(torch.compile(Checkpointed(), backend=note)),
    "clipping, collecting and saving": _with_ranges,
    "DistributedDataParallel": _distributed,
    "DistributedDataParallel by aot_eager": lambda note: _distributed(_noted(note, "aot_eager")),
    "a training step": lambda note: torch.compile(_step_of(Net()), backend=note),
    "an optimizer's step": _compiled_optimizer,
    "compiled autograd": _with_compiled_autograd(lambda note: torch.compile(Net(), backend=_noted(note, "aot_eager"))),
    "compiled autograd of an eager model": _with_compiled_autograd(lambda note: Net()),
    "compiled autograd by inductor": _with_compiled_autograd(lambda note: Net(), "inductor"),
}


def _run(make: Callable[[Backend], Step], engine: Any) -> dict[str, Any]:
    graphs: list[list[str]] = []

    def note(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        # Without addresses.
        graphs.append([re.sub(r" at 0x\w+", "", f"{node.op} {node.target}") for node in graph.graph.nodes])
        return graph

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    gc.freeze()  # what cases before had imported is not looked through when this one collects
    torch.manual_seed(0)
    step = make(note)
    recording = contextlib.nullcontext() if engine == "none" else modtrace.record(engine=engine)
    with recording:
        for _ in range(3):
            step()
    names, ranges = set(), set()
    if isinstance(recording, modtrace.Recording):
        names = {f"{span.phase} {span.fqn}" for span in recording.timeline().spans}
        ranges = {row.name for row in recording.timeline().ranges}
    counters = {group: dict(counted) for group, counted in torch._dynamo.utils.counters.items()}
    breaks = sum(counters.get("graph_break", {}).values())
    return {"graphs": graphs, "breaks": breaks, "counters": counters, "names": sorted(names), "ranges": sorted(ranges)}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps({name: _run(make, sys.argv[1]) for name, make in CASES.items()}))
    if dist.is_initialized():
        dist.destroy_process_group()
