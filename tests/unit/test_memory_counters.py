"""Counters of CUDA memory, with a fake torch.cuda that returns set numbers; a real one: tests/gpu/test_engines.py."""

from __future__ import annotations

from typing import NoReturn

import pytest
import torch
from torch import nn

import modtrace
from modtrace.record_options import EngineName


def counted(engine: EngineName) -> dict[str, list[int]]:
    """Record two calls of a module with memory; return the counters' values by name."""
    model = nn.Linear(2, 2)
    with modtrace.record(engine=engine, memory_interval=0) as recording:
        for _ in range(2):
            model(torch.ones(1, 2))
    return {series.name: series.value.tolist() for series in recording.timeline().counters}


def refuse() -> NoReturn:
    pytest.fail("it starts CUDA's driver: children that are forked after that cannot use CUDA")


@pytest.mark.parametrize("engine", ["native", "python"])
def test_cuda_is_not_asked_before_it_is_used(engine: EngineName, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("is_available", "current_device", "device_count", "_lazy_init"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)

    assert list(counted(engine)) == ["process RSS"]


@pytest.mark.parametrize("engine", ["native", "python"])
def test_cuda_is_counted_once_it_is_used(engine: EngineName, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "memory_allocated", {3: 70}.__getitem__)
    monkeypatch.setattr(torch.cuda, "memory_reserved", {3: 90}.__getitem__)

    counters = counted(engine)

    assert list(counters) == ["process RSS", "cuda:3 allocated", "cuda:3 reserved"]
    assert (set(counters["cuda:3 allocated"]), set(counters["cuda:3 reserved"])) == ({70}, {90})


def test_a_recording_goes_on_if_the_allocator_has_no_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_as_pluggable(device: int) -> NoReturn:
        raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats. If you need it, please file an")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "memory_allocated", raise_as_pluggable)
    model = nn.Linear(2, 2)
    with modtrace.record(memory_interval=0) as recording:
        for _ in range(2):
            model(torch.ones(1, 2))

    timeline = recording.timeline()
    assert [series.name for series in timeline.counters] == ["process RSS"]
    assert [span.call for span in timeline.spans] == [0, 1]
