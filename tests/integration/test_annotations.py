"""Ranges that a program names by NVTX and ITT, compared with the calls that it made, with both engines."""

from __future__ import annotations

import threading
from itertools import count
from typing import Any

import pytest
import torch
from torch import nn
from torch.cuda import nvtx
from torch.profiler import itt
from torch.profiler.itt import range_pop, range_push

import modtrace
from modtrace.record_options import EngineName

ENGINES: list[EngineName] = ["native", "python"]


class FakeNvtx:
    """Stand-in for the C functions of torch built with CUDA; it logs its calls."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, object]] = []
        self.depth, self.handles = 0, count(100)

    def rangePushA(self, message: str) -> int:  # its name in torch
        self.asked.append(("push", message))
        self.depth += 1
        return self.depth - 1

    def rangePop(self) -> int:  # its name in torch
        self.asked.append(("pop", None))
        self.depth -= 1
        return self.depth

    def rangeStartA(self, message: str) -> int:  # its name in torch
        self.asked.append(("start", message))
        return next(self.handles)

    def rangeEnd(self, handle: int) -> None:  # its name in torch
        self.asked.append(("end", handle))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeNvtx:
    fake = FakeNvtx()
    monkeypatch.setattr(nvtx, "_nvtx", fake)
    return fake


def user_ranges(recording: modtrace.Recording) -> list[tuple[str, int, bool]]:
    """Return name, depth and completeness of each of the user's ranges, by start."""
    return [(run.name, run.depth, run.complete) for run in recording.timeline().ranges if run.category == "user"]


@pytest.mark.parametrize("engine", ENGINES)
def test_push_and_pop_are_nested_ranges_and_return_the_same_as_before(engine: EngineName, fake: FakeNvtx) -> None:
    with modtrace.record(engine=engine) as recording:
        nn.Linear(1, 1)(torch.ones(1))
        depths = [nvtx.range_push("step"), nvtx.range_push(msg="augment"), nvtx.range_pop()]
        with nvtx.range("batch {}", 7):
            pass
        depths.append(nvtx.range_pop())

    assert depths == [0, 1, 1, 0]
    assert user_ranges(recording) == [("step", 0, True), ("augment", 1, True), ("batch 7", 1, True)]
    pushes = [("push", "step"), ("push", "augment"), ("pop", None), ("push", "batch 7"), ("pop", None), ("pop", None)]
    assert fake.asked == pushes


@pytest.mark.parametrize("engine", ENGINES)
def test_functions_that_were_imported_before_are_recorded_too(engine: EngineName) -> None:
    with modtrace.record(engine=engine) as recording:
        range_push("of Intel's")
        with itt.range("inner"):
            pass
        range_pop()

    assert user_ranges(recording) == [("of Intel's", 0, True), ("inner", 1, True)]


@pytest.mark.parametrize("engine", ENGINES)
def test_one_thread_starts_a_range_and_another_one_ends_it(engine: EngineName, fake: FakeNvtx) -> None:
    with modtrace.record(engine=engine) as recording:
        first, second = nvtx.range_start("request 1"), nvtx.range_start("request 2")
        thread = threading.Thread(target=nvtx.range_end, args=(first,))
        thread.start()
        thread.join()
        nvtx.range_end(range_id=second)

    assert sorted(name for name, _, complete in user_ranges(recording) if complete) == ["request 1", "request 2"]
    assert fake.asked == [("start", "request 1"), ("start", "request 2"), ("end", 100), ("end", 101)]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_pop_ends_the_range_of_its_own_push_in_any_recording(engine: EngineName, fake: FakeNvtx) -> None:
    with modtrace.record(engine=engine):  # from here on the functions are watched
        nvtx.range_push("of the first recording")
    nvtx.range_push("of none")
    with modtrace.record(engine=engine) as recording:
        nvtx.range_pop()  # of the range outside recordings
        nvtx.range_push("of the second recording")
        nvtx.range_pop()
        nvtx.range_pop()  # of the first recording's range
        nvtx.range_pop()  # of no range
        nvtx.range_push("left open")
    nvtx.range_pop()

    assert user_ranges(recording) == [("of the second recording", 0, True), ("left open", 0, False)]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has NVTX")
def test_without_cuda_nvtx_raises_the_same_error_and_nothing_is_recorded(engine: EngineName) -> None:
    with modtrace.record(engine=engine) as recording:
        with pytest.raises(RuntimeError, match="NVTX functions not installed"):
            nvtx.range_push("step")
        with itt.range("around"):
            pass

    assert user_ranges(recording) == [("around", 0, True)]


@pytest.mark.parametrize("engine", ENGINES)
def test_torch_compile_breaks_graphs_where_it_did(engine: EngineName) -> None:
    def double(x: Any) -> Any:
        itt.range_push("double")
        y = x * 2
        itt.range_pop()
        return y + 1

    def breaks() -> tuple[dict[str, int], Any]:
        torch._dynamo.reset()
        counters: Any = torch._dynamo.utils.counters
        counters.clear()
        result = torch.compile(double, backend="eager")(torch.ones(2))
        return {**counters["graph_break"]}, result

    before, expected = breaks()
    with modtrace.record(engine=engine) as recording:
        during, result = breaks()

    assert during == before != {}
    assert torch.equal(result, expected)
    # torch 2.8 adds ranges of its compiler, whose names contain "(dynamo_timed)".
    assert [row for row in user_ranges(recording) if "(dynamo_timed)" not in row[0]] == [("double", 0, True)]
