"""Tensors, graphs, modules and recordings are freed as soon as without a recording, and memory stays flat."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import tracemalloc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import modtrace
from modtrace.record_options import EngineName
from modtrace.track import step_notes
from modtrace.track.naming.modules import MethodCall
from modtrace.track.sampling import RunDelay
from tests.support.models import ARCHITECTURES
from tests.support.small_modules import made_in_place_of
from tests.support.test_scale import PYTHON_IN_FULL

STEPS = int(os.environ.get("MODTRACE_TEST_STEPS", "400"))
"""Steps of the long runs; 10,000 steps show leaks that the default does not."""


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor
        if self.kind == "plain":
            out = self.inner(x)
        else:
            out = checkpoint(self.inner, x, use_reentrant=self.kind == "reentrant")
        return out


class Payload:
    """An object that a node of the graph holds: it lives as long as the graph."""


class Carry(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, payload: Payload) -> Tensor:
        ctx.payload = payload
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class Carries(nn.Module):
    """Puts a payload in the graph, and shows by a weak reference whether it is alive."""

    payload: weakref.ref[Payload]

    def forward(self, x: Tensor) -> Tensor:
        payload = Payload()
        self.payload = weakref.ref(payload)
        out: Tensor = Carry.apply(x, payload)
        return out


@pytest.mark.parametrize("kind", ["plain", "reentrant", "non-reentrant"])
def test_no_tensor_and_no_graph_outlives_its_step(engine: EngineName, kind: str) -> None:
    model = nn.Sequential(Block(kind), first := Carries(), Block(kind), last := Carries())
    x = torch.ones(2, 4, requires_grad=True)
    # The first checkpoint of a process leaves a cycle behind, recorded or not.
    model(x).sum().backward()
    with modtrace.record(engine=engine, shapes=True):
        for _ in range(3):
            out = model(x)
            tensor = weakref.ref(out)
            out.sum().backward()
            assert last.payload() is not None
            del out
            assert tensor() is None
            assert first.payload() is None
            assert last.payload() is None


def test_a_graph_that_is_dropped_without_a_backward_is_freed(engine: EngineName) -> None:
    model, x = nn.Sequential(Block("plain"), carries := Carries(), Block("plain")), torch.ones(2, 4)
    with modtrace.record(engine=engine):
        out = model(x)
        assert carries.payload() is not None
        del out
        assert carries.payload() is None


def test_no_module_outlives_its_step(engine: EngineName) -> None:
    with modtrace.record(engine=engine):
        for _ in range(3):
            model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.ReLU())
            alive = [weakref.ref(module) for module in model.modules()]
            model(torch.ones(2, 4)).sum().backward()
            del model
            assert [ref() for ref in alive if ref() is not None] == []


def test_a_new_module_at_the_place_of_a_dead_one_has_its_own_name(engine: EngineName) -> None:
    x = torch.ones(2, 4, requires_grad=True)
    with modtrace.record(engine=engine) as recording, ThreadPoolExecutor(1) as pool:
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        model(x)
        dying = [model[1]]
        model[1] = nn.Identity()
        model.append(made_in_place_of(dying, nn.ReLU))
        model(x).sum().backward()
        # On a thread that has not called the model.
        dying = [model]
        del model
        model = made_in_place_of(dying, nn.Sequential, nn.Sigmoid())
        pool.submit(model, x).result()
    names = [(span.fqn, span.module_class, span.phase) for span in recording.timeline().spans]

    assert names[:3] == [
        ("Sequential", "Sequential", "forward"),
        ("Sequential.0", "Linear", "forward"),
        ("Sequential.1", "Tanh", "forward"),
    ]
    assert names[3:7] == [
        ("Sequential", "Sequential", "forward"),
        ("Sequential.0", "Linear", "forward"),
        ("Sequential.1#2", "Identity", "forward"),
        ("Sequential.2", "ReLU", "forward"),
    ]
    assert names[7:10] == [
        ("Sequential", "Sequential", "backward"),
        ("Sequential.2", "ReLU", "backward"),
        ("Sequential.0", "Linear", "backward"),
    ]
    assert names[10:] == [("Sequential", "Sequential", "forward"), ("Sequential.0#2", "Sigmoid", "forward")]


def test_a_new_module_at_the_place_of_an_unnamed_one_is_recorded(engine: EngineName) -> None:
    class Helped(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            # A call directly inside the module's own call is not shown.
            calls: list[nn.Module] = [MethodCall(self, "help")]
            calls[0](x)
            out: Tensor = made_in_place_of(calls, nn.ReLU)(x)
            return out

        def help(self, x: Tensor) -> Tensor:
            return x

    with modtrace.record(engine=engine) as recording:
        Helped()(torch.ones(1))

    assert [span.fqn for span in recording.timeline().spans] == ["Helped", "ReLU"]


def test_nothing_is_kept_after_an_exception(engine: EngineName) -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError

    def attempt(x: Tensor) -> list[weakref.ref[nn.Module]]:
        model = nn.Sequential(nn.Linear(4, 4), Fails())
        with contextlib.suppress(ValueError):
            model(x)
        return [weakref.ref(module) for module in model.modules()]

    with modtrace.record(engine=engine):
        assert [ref() for ref in attempt(torch.ones(2, 4)) if ref() is not None] == []


def test_the_model_of_names_is_not_kept(engine: EngineName) -> None:
    model = nn.Sequential(nn.ReLU())
    with modtrace.record(engine=engine, model=model) as recording:
        model[0](torch.ones(1))
        alive = weakref.ref(model)
        del model
        assert alive() is None

    assert [span.fqn for span in recording.timeline().spans] == ["Sequential.0"]


def test_a_recording_is_freed(engine: EngineName) -> None:
    recording = modtrace.record(engine=engine)
    with recording:
        nn.ReLU()(torch.ones(1))
    alive = weakref.ref(recording)
    del recording

    gc.collect()
    assert alive() is None


class Memory:
    """Memory of the process and of Python's allocator beyond their memory at the mark.

    It is made before the first steps: the allocator's tracing does not know earlier memory, so its replacements
    would count as growth.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        tracemalloc.start()

    def mark(self) -> None:
        gc.collect()
        self._rss, self._traced = self._process.memory_info().rss, tracemalloc.get_traced_memory()[0]

    def grown(self) -> tuple[int, int]:
        """Return the growth of the resident set and of Python's objects, in bytes."""
        gc.collect()
        return self._process.memory_info().rss - self._rss, tracemalloc.get_traced_memory()[0] - self._traced

    def stop(self) -> None:
        tracemalloc.stop()


def test_hooks_do_not_pile_up_on_an_input_that_stays(engine: EngineName) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.ones(2, 4, requires_grad=True)
    node = x * 1

    def step() -> None:
        model(node).sum().backward(retain_graph=True)

    memory = Memory()
    with modtrace.record(engine=engine):
        for _ in range(20):
            step()
        memory.mark()
        for _ in range(300):
            step()
        objects = memory.grown()[1]
        memory.stop()

    assert not x._backward_hooks
    assert not node._backward_hooks
    # One hook per step would be more than a hundred bytes each.
    assert objects < 10_000


@PYTHON_IN_FULL
def test_memory_is_flat(engine: EngineName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The number of steps that a busy machine delays is unknown: the longest are noted, and tests of notes count them.
    monkeypatch.setattr(RunDelay, "__call__", lambda self: 0)
    monkeypatch.setattr(step_notes, "_MAX_SLOW_STEPS", 0)
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model, loss = ARCHITECTURES["GPT"]()
    other = nn.Sequential(*[Block("non-reentrant") for _ in range(3)])
    x = torch.ones(2, 4, requires_grad=True)
    memory = Memory()

    def grown(end_step: Callable[[], None]) -> tuple[int, int]:
        # The first steps fill the ring and the caches of the allocators.
        for step in range(STEPS // 10 + STEPS):
            if step == STEPS // 10:
                memory.mark()
            model.zero_grad()
            loss().backward()
            other(x).sum().backward()
            end_step()
        return memory.grown()

    # CPython 3.10 keeps frames, and torch 2.8 objects, of tens of kilobytes without a recording too.
    keeps_some = sys.version_info < (3, 11) or torch.__version__ < "2.9"
    unrecorded = grown(lambda: None)[1] if keeps_some else 0
    with modtrace.record(engine=engine, capacity=1 << 12, ring=tmp_path / "ring") as recording:
        rss, objects = grown(recording.step)
    memory.stop()
    torch.set_num_threads(threads)

    assert recording.snapshot().stats.overwritten > 1 << 12
    # Ten bytes per step would be seen: nothing is kept for a step, a call or a node.
    assert objects - unrecorded < 10 * STEPS + 10_000
    assert rss < 4 << 20


@PYTHON_IN_FULL
def test_a_long_run_of_a_wide_model_keeps_the_ring_and_no_more(engine: EngineName) -> None:
    calls, capacity = 2_000, 100_000
    steps = max(30, STEPS // 20)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Identity() for _ in range(calls - 1)])
    x = torch.ones(1)
    memory = Memory()
    # Without ranges, which would include the garbage collections of `Memory`.
    with modtrace.record(engine=engine, capacity=capacity, ranges=False) as recording:
        for _ in range(capacity // (2 * calls) + 1):
            model(x)
        memory.mark()
        for _ in range(steps):
            model(x)
        rss, objects = memory.grown()
        memory.stop()
    stats = recording.timeline().stats

    total = (capacity // (2 * calls) + 1 + steps) * 2 * calls
    assert stats.recorded == total
    assert stats.overwritten == total - capacity
    assert stats.torn == 0
    assert objects < 20_000
    assert rss < 4 << 20
