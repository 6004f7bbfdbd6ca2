"""A program's own count of its module calls, steps and losses as one line of JSON, made without modtrace.

Forward calls are counted by a wrapper of each class's `forward`, backward calls by hooks of the tensors that a call
returns. It imports no torch before the program does.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["add", "loss", "report", "restart", "step", "watch"]


class _Watched:
    """A module and its calls.

    Attributes:
        forward: calls of `forward`.
        recompute: calls of `forward` inside backward, where a checkpoint makes them.
        backward: the numbers of the calls whose outputs got a gradient.
    """

    def __init__(self, module: nn.Module, root: int, path: str, *, recompute: bool) -> None:
        self.module = module
        self.root = root
        self.path = path
        self.recomputes = recompute
        self.restart()

    def restart(self) -> None:
        self.forward = 0
        self.recompute = 0
        self.backward: set[int] = set()


_watched: dict[int, _Watched] = {}
_roots: list[dict[str, Any]] = []
_added: list[dict[str, Any]] = []
_counted_classes: set[type] = set()
_losses: list[str] = []
_steps = 0
_lock = threading.Lock()


def watch(module: nn.Module, *, name: str | None = None, backward: bool = True, recompute: bool = False) -> None:
    """Count the calls of a module and of all inside it.

    Args:
        module: what names start at.
        name: what a recording has to call it; else its class.
        backward: backward calls are counted; False where torch defines none (torch.func, compiled code).
        recompute: calls inside a backward pass are recomputed forwards of checkpoints.
    """
    _roots.append({"name": name or type(module).__name__, "backward": backward})
    for path, inner in module.named_modules():
        if id(inner) not in _watched:
            _watched[id(inner)] = _Watched(inner, len(_roots) - 1, path, recompute=recompute)
            _count_calls_of(type(inner), backward=backward)


def add(name: str, modules: dict[str, tuple[str, int, int]]) -> None:
    """Add a root whose calls the program counts itself, as torch.jit's modules have no `forward` that can be wrapped.

    Args:
        name: what a recording has to call it.
        modules: by path the class, and how many calls forward and backward has.
    """
    counts = {path: [name, forward, 0, backward] for path, (name, forward, backward) in modules.items()}
    _added.append({"name": name, "backward": True, "modules": counts})


def step() -> None:
    """Count a training step."""
    global _steps
    with _lock:
        _steps += 1


def loss(value: Tensor) -> None:
    """Note a loss, bit for bit."""
    _losses.append(repr(value.item()))


def restart() -> None:
    """Begin to count again, in a forked child."""
    global _steps
    _steps = 0
    _losses.clear()
    for watched in _watched.values():
        watched.restart()


def report(process: str = "main") -> None:
    """Print what was counted in this process as one line, at once."""
    roots = [{**root, "modules": {}} for root in _roots]
    for watched in _watched.values():
        if watched.forward or watched.recompute:
            counts = [watched.forward, watched.recompute, len(watched.backward)]
            roots[watched.root]["modules"][watched.path] = [type(watched.module).__name__, *counts]
    told = {
        "process": process,
        "pid": os.getpid(),
        "steps": _steps,
        "roots": [root for root in [*roots, *_added] if root["modules"]],
        "losses": _losses,
    }
    # In one write, which the line of another process cannot break.
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()


def _count_calls_of(module_class: type, *, backward: bool) -> None:
    if module_class in _counted_classes:
        return
    _counted_classes.add(module_class)
    forward = module_class.forward  # type: ignore[attr-defined]

    @functools.wraps(forward)
    def counted(self: nn.Module, *inputs: Any, **keywords: Any) -> Any:
        watched = _watched.get(id(self))
        if watched is None or type(self) is not module_class:  # or a subclass's forward called this one
            return forward(self, *inputs, **keywords)
        call = _count(watched)
        output = forward(self, *inputs, **keywords)
        if backward:
            # Objects, as torch makes one anew for each look, and another may get the place of one that is gone.
            before = {tensor.grad_fn for tensor in _tensors((inputs, keywords))}
            for tensor in _tensors(output):
                if tensor.requires_grad and tensor.grad_fn is not None and tensor.grad_fn not in before:
                    tensor.register_hook(lambda _: watched.backward.add(call))
        return output

    module_class.forward = counted  # type: ignore[attr-defined]


def _count(watched: _Watched) -> int:
    """Count a call and return its number, of forwards and recomputed ones."""
    import torch

    in_backward = torch._C._current_graph_task_id() != -1
    with _lock:
        if in_backward and watched.recomputes:
            watched.recompute += 1
        else:
            watched.forward += 1
        return watched.forward + watched.recompute


def _tensors(value: Any) -> Iterator[Tensor]:
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, (tuple, list)):
        for inner in value:
            yield from _tensors(inner)
