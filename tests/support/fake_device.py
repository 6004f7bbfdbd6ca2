"""A device that computes on the CPU, and for which autograd runs backward on a thread of its own, as for a GPU.

`python -m tests.support.fake_device SCENARIO ENGINE` runs a scenario and prints what the recording of it shows, as
JSON. A device cannot be taken back, so it needs a process of its own.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import backend_registration
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

import modtrace
from modtrace.record_options import EngineName
from modtrace.ring import Kind
from tests.support.small_modules import Failing

__all__ = ["SCENARIOS", "backend", "missing"]

NAME = "fake"
_held: dict[int, tuple[Tensor, Tensor]] = {}
_libraries: list[torch.library.Library] = []


def missing() -> str | None:
    """Say why there can be no such device; None where there can."""
    if hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        return None
    return f"torch {torch.__version__} knows no devices written in Python"


class _Backend:
    """The answers to the questions of torch and of checkpoints about the device.

    Attributes:
        initialized: whether the device was used, as torch's own devices are initialized by their first use.
    """

    initialized = True

    def is_initialized(self) -> bool:
        return self.initialized

    def is_available(self) -> bool:
        # Of CUDA, it starts the driver.
        assert self.initialized, "the device was asked before it was used"
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float32]

    def get_rng_state(self, device: object = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: object = None) -> None:
        pass

    def device(self, device: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


backend = _Backend()
"""The answers for the one fake device."""


def set_up() -> None:
    """Make the device."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=backend)
    everything: Any = torch.library.Library("_", "IMPL")
    everything.fallback(_run, "PrivateUse1")
    # What it registers goes with it.
    _libraries.append(everything)
    torch.library.impl("aten::_copy_from", "PrivateUse1")(_copy)


def on_device(value: Any) -> Any:
    """Move a CPU tensor to the device."""
    if not isinstance(value, Tensor) or value.device.type != "cpu":
        return value
    made: Tensor = torch._C._acc.create_empty_tensor(value.shape, value.dtype)
    _held[made.untyped_storage()._cdata] = (made, value)
    return made


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if not isinstance(value, Tensor) or value.device.type != NAME:
        return value
    return _held[value.untyped_storage()._cdata][1]


def _run(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return tree_map(on_device, op(*tree_map(_on_cpu, args), **tree_map(_on_cpu, kwargs)))


def _copy(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    _on_cpu(target).copy_(_on_cpu(source))
    return target


class Scale(nn.Module):
    """Two nodes of its own per call, on the device or on the CPU."""

    def __init__(self, device: bool = True) -> None:
        super().__init__()
        weight = torch.tensor(2.0)
        self.weight = nn.Parameter(on_device(weight) if device else weight)

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).cos()


class Chain(nn.Module):
    """Two modules in a row, with a node of its own between them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Scale(), Scale()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.a(x).cos())
        return out


class Offloaded(nn.Module):
    """The first module on the CPU, the second on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.host, self.device = Scale(device=False), Scale()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.device(self.host(x).to(NAME))
        return out


class Checkpointed(nn.Module):
    """Runs its inner module again in backward, and a backward pass of that inside of the outer one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Chain()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.inner, x, use_reentrant=True)
        return out


def _input() -> Tensor:
    x: Tensor = on_device(torch.ones(2))
    return x.requires_grad_()


def plain() -> None:
    """Two steps."""
    model = Chain()
    for _ in range(2):
        model(_input()).sum().backward()


def observed() -> None:
    """A pass that builds a graph, and so is observed node by node."""
    model, x = Chain(), _input()
    torch.autograd.grad(model(x).sum(), [x, *model.parameters()], create_graph=True)


def offloaded() -> None:
    """One step over two devices."""
    Offloaded()(torch.ones(2, requires_grad=True)).sum().backward()


def reentrant() -> None:
    """One step, with a pass that the device's thread begins inside of the outer one."""
    Checkpointed()(_input()).sum().backward()


def failing() -> None:
    """A pass that fails on the device's thread, and one that does not."""
    model = Chain()
    try:
        model.b(Failing.apply(model.a(_input()))).sum().backward()
    except ValueError:
        model(_input()).sum().backward()


def shared() -> None:
    """A pass alone, and then two threads whose passes take turns on the device."""
    start = threading.Barrier(2)

    def train() -> None:
        model = Chain()
        start.wait()
        for _ in range(50):
            model(_input()).sum().backward()

    Chain()(_input()).sum().backward()
    threads = [threading.Thread(target=train) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


SCENARIOS: dict[str, Callable[[], None]] = {
    run.__name__: run for run in (plain, observed, offloaded, reentrant, failing, shared)
}


def main() -> None:
    """Run what the command line names."""
    scenario = SCENARIOS[sys.argv[1]]
    engine: EngineName = "native" if sys.argv[2] == "native" else "python"
    set_up()
    with modtrace.record(engine=engine) as recording:
        scenario()
    timeline = recording.timeline()
    events = recording._require_capture().ring.read().slots.events
    spans = [
        (span.track.rpartition(" · ")[2], span.phase, span.fqn, span.depth, span.complete)
        for span in timeline.spans
        if span.phase != "forward"
    ]
    kinds = {Kind(kind).name for kind in events.kind.tolist()}
    over = [
        a.end_ns > b.start_ns
        for a, b in itertools.pairwise(s for s in timeline.spans if s.phase == "backward" and s.depth == 0)
    ]
    print(json.dumps({"spans": spans, "kinds": sorted(kinds), "overlaps": sum(over)}))


if __name__ == "__main__":
    main()
