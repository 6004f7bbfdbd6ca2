"""Ctrl-C all over a recording and at random moments: it reaches the user, and the next step is complete."""

from __future__ import annotations

import contextlib
import functools
import gc
from bisect import bisect_right
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import modtrace
from modtrace.record_options import EngineName
from modtrace.track.python.engine import PythonEngine
from modtrace.track.trackers.follower import Follower
from tests.support.forked_python import run_forked
from tests.support.interrupts import Interrupt, every, interrupted_at, positions
from tests.support.small_modules import made_in_place_of
from tests.support.test_scale import PROMISED, scaled

CALL = nn.Module.__call__
COMPLETE = [
    ("Sequential", "forward", 0),
    ("Sequential.0", "forward", 1),
    ("Sequential.1", "forward", 1),
    ("Sequential", "backward", 0),
    ("Sequential.1", "backward", 1),
    ("Sequential.0", "backward", 1),
]


def in_a_thread_of_its_own(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test that raises at single bytecodes on a thread that ends with it.

    An exception that is raised in the end of an except block, where CPython delivers no signal, leaves the earlier
    exception behind as the one its thread handles, and later tests would see it as the context of their own.
    """

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(test, *args, **kwargs).result()

    return run


def train() -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    return [parameter.grad.sum().item() for parameter in model.parameters() if parameter.grad is not None]


def assert_unharmed(engine: EngineName, gradients: list[float]) -> None:
    """Assert that torch is as before, and that a next recording is complete."""
    assert nn.Module.__call__ is CALL
    assert modtrace.recording.current() is None
    assert train() == gradients
    with modtrace.record(engine=engine, capacity=64) as recording:
        assert train() == gradients
    timeline = recording.timeline()
    assert [(span.fqn, span.phase, span.depth) for span in timeline.spans] == COMPLETE
    assert all(span.complete for span in timeline.spans)


def in_a_block(engine: EngineName, path: Path) -> None:
    with modtrace.record(path, engine=engine, capacity=64, shapes=True, ring=f"{path}.modtrace") as recording:
        train()
        recording.step()
        recording.mark("done")


def started_and_stopped(engine: EngineName, path: Path) -> None:
    recording = modtrace.record(path, engine=engine, capacity=64)
    try:
        recording.start()
        train()
        recording.stop()
    finally:
        recording.stop()


def saved_twice(engine: EngineName, path: Path) -> None:
    with modtrace.record(engine=engine, capacity=64) as recording:
        train()
        recording.save(path)
    recording.save(path)


def in_the_block_of_a_handler(engine: EngineName, path: Path) -> None:
    with modtrace.on_trace_ready(path.parent / "traces", engine=engine, capacity=64):
        train()


# A file that the interrupted code had just opened is closed when it dies.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("event", ["line", "opcode"])
@pytest.mark.parametrize("run", [in_a_block, started_and_stopped, saved_twice, in_the_block_of_a_handler])
@in_a_thread_of_its_own
def test_an_interrupt_anywhere_in_a_recording_harms_nothing(
    engine: EngineName, run: Callable[[EngineName, Path], None], event: str, tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    gradients = train()
    run(engine, path)
    count = positions(event, lambda: run(engine, path))
    bad: list[str] = []
    for number in every(count, scaled(12, 40, count)):
        where = interrupted_at(event, number, lambda: run(engine, path))
        if number % 256 == 0:
            # Files that only cycles hold, such as the error's traceback, are closed only here.
            gc.collect()
        try:
            assert_unharmed(engine, gradients)
        except AssertionError as error:
            bad.append(f"{number}: {where}: {error}")
    assert bad == []


@in_a_thread_of_its_own
def test_the_step_after_one_that_was_interrupted_anywhere_is_complete_in_the_same_recording(
    engine: EngineName,
) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    bad: list[str] = []

    def step() -> None:
        model(torch.ones(1, 2)).sum().backward()

    with modtrace.record(engine=engine, capacity=1 << 18) as recording, modtrace.ModuleTracker() as tracker:
        step()
        count = positions("opcode", step)
        numbers = list(every(count, scaled(100, 600, count)))
        for number in numbers:
            where = interrupted_at("opcode", number, step)
            if tracker.parents != {"Global"}:
                bad.append(f"{number}: {where}: {tracker.parents}")
            recording.mark("whole")
            step()
            recording.mark("over")
    timeline = recording.timeline()
    times = [mark.time_ns for mark in timeline.marks if mark.kind == "mark"]
    begins = np.array([span.start_ns for span in timeline.spans])
    for number, first, last in zip(numbers, times[::2], times[1::2], strict=True):
        # Spans of a backward pass that an interrupt left open are incomplete, and not among the calls of this step.
        spans = timeline.spans[int(np.searchsorted(begins, first)) : int(np.searchsorted(begins, last))]
        seen = [(span.fqn, span.phase, span.depth) for span in spans if span.complete]
        if seen != COMPLETE:
            bad.append(f"{number}: {seen}")
    assert bad == []


@pytest.mark.timeout(3600 if PROMISED else 900)
@pytest.mark.parametrize("number", ["SIGALRM", "SIGINT"])
def test_real_signals_at_random_moments_harm_nothing(engine: EngineName, number: str) -> None:
    count = scaled(6, 20, 2000)

    done = run_forked("-m", "tests.support.interrupted_process", engine, count, number, 1, timeout_s=3600)

    assert done.stdout == f"{count} interrupts, 0 bad\n"


class Outer(nn.Module):
    """Calls another module, which is not a part of it."""

    def forward(self, inner: nn.Module, x: torch.Tensor) -> Any:
        return inner(x)


@in_a_thread_of_its_own
def test_an_interrupt_after_a_module_died_is_not_lost_and_a_new_one_at_its_place_has_its_own_name(
    engine: EngineName,
) -> None:
    outer, x, called = Outer(), torch.ones(1), list[nn.Module]()

    def call_one() -> None:
        called.append(nn.Identity())
        outer(called[0], x)

    def replace() -> None:
        outer(made_in_place_of(called, nn.ReLU), x)

    with modtrace.record(engine=engine, capacity=1 << 16) as recording:
        for _ in range(5):  # only few calls are looked at, including those after 1, 2, 4 and 8
            outer(nn.Identity(), x)
        call_one()
        count = positions("opcode", replace)
        for number in range(count):
            call_one()
            interrupted_at("opcode", number, replace)
            recording.mark("interrupted")
            call_one()
            replace()
    timeline = recording.timeline()

    begins = [mark.time_ns for mark in timeline.marks]
    assert len(begins) == count
    spans = [(span.start_ns, span.fqn.partition("#")[0]) for span in timeline.spans]
    for begin in begins:
        first = bisect_right(spans, (begin, ""))
        # A module that the interrupt left alive keeps its name: then the next one is another (`ReLU#2`).
        assert [name for _, name in spans[first : first + 4]] == ["Outer", "Identity", "Outer", "ReLU"]


@in_a_thread_of_its_own
def test_an_interrupted_backward_pass_ends_all_the_same() -> None:
    model, x = nn.Sequential(*[nn.Linear(2, 2) for _ in range(3)]), torch.ones(1, 2)

    with modtrace.record(engine="python") as recording:
        count = {event: positions(event, model(x).sum().backward) for event in ("line", "opcode")}
        for event in ("line", "opcode"):
            for number in every(count[event], scaled(20, 60, count[event])):
                interrupted_at(event, number, model(x).sum().backward)
        recording.mark("last")
        model(x).sum().backward()
    timeline = recording.timeline()

    (mark,) = (mark.time_ns for mark in timeline.marks if mark.kind == "mark")
    last = [(span.fqn, span.phase, span.depth) for span in timeline.spans if span.start_ns > mark]
    names = ["Sequential.0", "Sequential.1", "Sequential.2"]
    assert last == [
        ("Sequential", "forward", 0),
        *((name, "forward", 1) for name in names),
        ("Sequential", "backward", 0),
        *((name, "backward", 1) for name in reversed(names)),
    ]


def test_an_interrupt_as_soon_as_a_handlers_recording_runs_leaves_nothing_running(
    engine: EngineName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = modtrace.Recording.start

    def start_and_interrupt(recording: modtrace.Recording) -> None:
        start(recording)
        raise Interrupt

    monkeypatch.setattr(modtrace.Recording, "start", start_and_interrupt)
    # Unlike `pytest.raises`, this drops the exception, whose frames hold the handler.
    with contextlib.suppress(Interrupt):
        modtrace.on_trace_ready(tmp_path, engine=engine, capacity=64)
    monkeypatch.undo()

    assert_unharmed(engine, train())


@pytest.mark.parametrize("kind", [PythonEngine, Follower])
@pytest.mark.parametrize("at", [0, 1], ids=["outermost", "inner"])
def test_an_interrupt_between_a_calls_entry_and_its_caller_ends_the_call(
    at: int, kind: type[PythonEngine | Follower], monkeypatch: pytest.MonkeyPatch
) -> None:
    # As when torch.compile evaluates frames: there CPython checks for signals after each call of Python code.
    model = nn.Sequential(nn.Identity())
    interrupted = [model, model[0]][at]

    def interrupt_after(enter: Callable[..., Any]) -> Callable[..., Any]:
        def entered(engine: object, module: nn.Module, args: object, kwargs: object) -> Any:
            frame = enter(engine, module, args, kwargs)
            if module is interrupted:
                raise Interrupt
            return frame

        return entered

    with modtrace.record(engine="python") as recording, modtrace.ModuleTracker() as tracker:
        model(torch.ones(1))
        with monkeypatch.context() as patch:
            patch.setattr(kind, "enter", interrupt_after(kind.enter))
            for _ in range(2):
                with pytest.raises(Interrupt):
                    model(torch.ones(1))
        assert tracker.parents == {"Global"}
        model(torch.ones(1))

    spans = recording.timeline().spans
    one = [("Sequential", 0), ("Sequential.0", 1)]
    # The tracker is around the recording, which does not see calls that the tracker does not pass on.
    seen = one[: at + (kind is PythonEngine)]
    assert [(span.fqn, span.depth) for span in spans] == [*one, *2 * seen, *one]
    assert all(span.complete for span in spans)
