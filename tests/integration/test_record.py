"""`modtrace.record` from outside: trees of calls, exceptions, snapshots, steps, marks, wrong arguments."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import modtrace
from modtrace.checking import check
from modtrace.record_options import EngineName
from modtrace.track.naming.module_names import ModuleNames, OpenCall
from tests.support.random_models import Spec, Tree, called, specs, with_gradient
from tests.support.test_scale import scaled
from tests.support.trace_processor import TraceProcessor

Slice = tuple[str, int]


def slices(trace: TraceProcessor, category: str) -> list[Slice]:
    """Name and depth of each slice of a category, outer ones first."""
    rows = trace.query(
        "select coalesce(extract_arg(arg_set_id, 'args.fqn'), extract_arg(arg_set_id, 'debug.fqn')) as fqn, depth"
        f" from slice where category = '{category}' order by ts, depth"
    )
    return [(row["fqn"], row["depth"]) for row in rows]


@settings(max_examples=scaled(12, 30, 1000), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(spec=specs(), suffix=st.sampled_from([".json", ".pftrace"]))
def test_slices_are_the_tree_of_calls(
    engine: EngineName,
    trace_processor: type[TraceProcessor],
    tmp_path_factory: pytest.TempPathFactory,
    spec: Spec,
    suffix: str,
) -> None:
    path = tmp_path_factory.mktemp("tree") / f"trace{suffix}"
    model = Tree(spec)
    with modtrace.record(path, engine=engine):
        model.loss().backward()

    assert check(path).faults == []
    trace = trace_processor.open(path)
    assert trace.import_problems() == {}
    assert slices(trace, "forward") == list(called(spec))
    # Depths in backward are those of the call, so that backward mirrors forward.
    backward = set(slices(trace, "backward"))
    assert backward <= set(called(spec))
    assert with_gradient(model) <= {fqn for fqn, _ in backward}


class Fails(nn.Module):
    def forward(self, x: Tensor, error: BaseException | None = None) -> Tensor:
        x = x * 2
        if error is not None:
            raise error
        return x


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(2, 2), nn.Sequential(Fails())

    def forward(self, x: Tensor, error: BaseException | None = None) -> Tensor:
        x = self.first(x)
        for module in self.inner:
            x = module(x, error)
        return x


def forward_rows(timeline: modtrace.Timeline) -> list[tuple[str, int, int]]:
    return [(span.fqn, span.depth, span.call) for span in timeline.spans if span.phase == "forward"]


def test_calls_after_an_exception_nest_right(engine: EngineName) -> None:
    model, x = Outer(), torch.ones(2)
    with modtrace.record(engine=engine) as recording:
        for error in (ValueError("caught outside"), None, ValueError("again"), None):
            if error is None:
                model(x).sum().backward()
            else:
                with pytest.raises(ValueError, match=str(error)):
                    model(x, error)

    timeline = recording.timeline()
    assert forward_rows(timeline) == [
        row for call in range(4) for row in (("Outer", 0, call), ("Outer.first", 1, call), ("Outer.inner.0", 1, call))
    ]
    assert all(span.complete for span in timeline.spans)
    backward = [(span.fqn, span.depth, span.call) for span in timeline.spans if span.phase == "backward"]
    assert backward == [
        row for call in (1, 3) for row in (("Outer", 0, call), ("Outer.inner.0", 1, call), ("Outer.first", 1, call))
    ]


class Interrupted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        os.kill(os.getpid(), signal.SIGINT)
        # The handler runs between two bytecodes of this thread, at the latest when this call returns.
        time.sleep(60)
        return x


def test_an_interrupt_inside_forward_is_saved_and_goes_on_to_the_user(engine: EngineName, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    call = nn.Module.__call__

    with pytest.raises(KeyboardInterrupt), modtrace.record(path, engine=engine):
        nn.Sequential(nn.ReLU(), Interrupted())(torch.ones(1))

    assert nn.Module.__call__ is call
    assert forward_rows(modtrace.load(path)) == [("Sequential", 0, 0), ("Sequential.0", 1, 0), ("Sequential.1", 1, 0)]


class Interrupt(BaseException):
    """An interrupt that is no Exception, like KeyboardInterrupt."""


class TooSlow(Exception):
    """Like the exceptions of time limits."""


class Alarm:
    """A handler of SIGALRM that raises at any bytecode.

    Attributes:
        error: the exception to raise.
        count: number of calls.
    """

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error
        self.count = 0

    def __call__(self, number: int, frame: object) -> None:
        self.count += 1
        raise self.error

    # Not called in the block that expects the exception: in CPython 3.13, an `except` around a loop does not catch an
    # exception that is raised where the loop starts again.
    def wait_for(self, count: int) -> None:
        while self.count < count:
            pass


@pytest.fixture(params=[Interrupt, TooSlow])
def alarm(request: pytest.FixtureRequest) -> Iterator[Alarm]:
    alarm = Alarm(request.param)
    old = signal.signal(signal.SIGALRM, alarm)
    yield alarm
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, old)


# A file that the interrupted code had just opened is closed when it dies.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_calls_after_an_interrupt_anywhere_nest_right(engine: EngineName, alarm: Alarm) -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Identity(), nn.Identity()) for _ in range(20)])
    x = torch.ones(1)
    interrupted = 0
    with modtrace.record(engine=engine) as recording:
        model(x)
        for attempt in range(300):
            try:
                # The n-th attempt is interrupted a little later than the one before.
                signal.setitimer(signal.ITIMER_REAL, 20e-6 + attempt % 100 * 2e-6)
                model(x)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except alarm.error:
                interrupted += 1
            recording.mark(f"attempt {attempt}")
        model(x)
    timeline = recording.timeline()

    assert interrupted > 30
    last = [span for span in timeline.spans if span.start_ns > timeline.marks[-1].time_ns]
    assert [(span.fqn, span.depth) for span in last] == [
        ("Sequential", 0),
        *[row for n in range(20) for row in ((f"Sequential.{n}", 1), *((f"Sequential.{n}.{m}", 2) for m in range(2)))],
    ]
    assert {span.depth for span in timeline.spans if span.fqn == "Sequential"} == {0}


def test_an_exception_of_a_signal_handler_while_modules_are_named_reaches_the_user(
    engine: EngineName, alarm: Alarm, caplog: pytest.LogCaptureFixture
) -> None:
    interrupted = 0
    models = []  # keeps all models alive
    with modtrace.record(engine=engine) as recording:
        for attempt in range(200):
            # New modules get names, which Python code does for both engines.
            models.append(nn.Sequential(*[nn.Sequential(nn.Identity()) for _ in range(20)]))
            try:
                signal.setitimer(signal.ITIMER_REAL, 20e-6 + attempt % 100 * 10e-6)
                models[-1](torch.ones(1))
                alarm.wait_for(attempt + 1)
            except alarm.error:
                interrupted += 1
        model = nn.Sequential(nn.Identity())
        model(torch.ones(1))

    # Each alarm came out of the call that it interrupted, or of the loop after it, and none ended the recording.
    assert interrupted == 200
    assert caplog.records == []
    assert [(span.fqn, span.depth) for span in recording.timeline().spans[-2:]] == [
        ("Sequential#65+", 0),
        ("Sequential#65+.0", 1),
    ]


def test_one_recording_runs_at_a_time(engine: EngineName) -> None:
    with modtrace.record(engine=engine) as first:
        with pytest.raises(modtrace.RecordingError, match="a recording is running"):
            modtrace.record(engine=engine).start()
        nn.ReLU()(torch.ones(1))

    assert len(first.timeline().spans) == 1
    with modtrace.record(engine=engine) as second:
        nn.ReLU()(torch.ones(1))
    assert len(second.timeline().spans) == 1
    with pytest.raises(modtrace.RecordingError, match="started before"):
        first.start()


def test_a_recording_asked_before_its_start_or_stop_says_so(engine: EngineName) -> None:
    recording = modtrace.record(engine=engine)
    for ask in (recording.timeline, recording.snapshot, recording.step, lambda: recording.engine):
        with pytest.raises(modtrace.RecordingError, match="was not started"):
            ask()
    recording.stop()
    with recording:
        assert recording.engine == engine
        with pytest.raises(modtrace.RecordingError, match="call stop"):
            recording.timeline()
    recording.stop()
    assert len(recording.timeline().spans) == 0


def test_invalid_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(modtrace.RecordingError, match="'fast'; it must be"):
        modtrace.record(engine="fast")  # type: ignore[arg-type]
    with pytest.raises(modtrace.RecordingError, match="needs a path"):
        modtrace.record(on_signal=signal.SIGUSR1)
    with pytest.raises(modtrace.WriteError, match="trace\\.docx"):
        modtrace.record(tmp_path / "trace.docx")
    with pytest.raises(modtrace.RecordingError, match="capacity is 3; it must be a whole number of events, 16 to"):
        modtrace.record(capacity=3)
    with pytest.raises(modtrace.RecordingError, match="capacity is '5'"):
        modtrace.record(capacity="5")  # type: ignore[arg-type]
    with pytest.raises(modtrace.RecordingError, match="model is 3; give a module, or the name of a class"):
        modtrace.record(model=3)  # type: ignore[arg-type]
    with pytest.raises(modtrace.RecordingError, match="memory_interval is 'x'; it must be a number of seconds"):
        modtrace.record(memory_interval="x")  # type: ignore[arg-type]
    with pytest.raises(modtrace.RecordingError, match=r"max_steps is 1\.5; it must be a whole number"):
        modtrace.record(max_steps=1.5)  # type: ignore[arg-type]


def test_a_snapshot_shows_what_is_open(engine: EngineName) -> None:
    seen: list[modtrace.Timeline] = []

    class Looks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(recording.snapshot())
            return x

    with modtrace.record(engine=engine) as recording:
        nn.Sequential(nn.ReLU(), Looks())(torch.ones(1))

    assert [(span.fqn, span.depth, span.complete) for span in seen[0].spans] == [
        ("Sequential", 0, False),
        ("Sequential.0", 1, True),
        ("Sequential.1", 1, False),
    ]
    assert seen[0].stats.unfinished == 2


def test_steps_and_marks(engine: EngineName) -> None:
    model, x = nn.ReLU(), torch.ones(1)
    with modtrace.record(engine=engine) as recording:
        for step in range(3):
            model(x)
            if step == 1:
                recording.mark("half way")
            recording.step()
    recording.step()

    timeline = recording.timeline()
    assert [(mark.kind, mark.text) for mark in timeline.marks] == [
        ("step", "step 0"),
        ("mark", "half way"),
        ("step", "step 1"),
        ("step", "step 2"),
    ]
    assert [(span.step, span.call) for span in timeline.spans] == [(0, 0), (1, 1), (2, 2)]


def test_the_ring_keeps_the_last_events(engine: EngineName) -> None:
    model, x = nn.Sequential(nn.ReLU(), nn.ReLU()), torch.ones(1)
    with modtrace.record(engine=engine, capacity=50) as recording:
        for _ in range(100):
            model(x)

    timeline = recording.timeline()
    assert timeline.stats.recorded == 600
    assert timeline.stats.overwritten == 550
    assert timeline.stats.torn == 0
    # Fifty events are eight calls of six, and the last two of the call before: the exits of "1" and of the model.
    assert timeline.stats.unstarted == 2
    assert timeline.stats.unfinished == 0
    assert [(span.fqn, span.depth, span.call, span.complete) for span in timeline.spans] == [
        ("Sequential", 0, 91, False),
        ("Sequential.1", 1, 91, False),
        *[
            row
            for call in range(92, 100)
            for row in (
                ("Sequential", 0, call, True),
                ("Sequential.0", 1, call, True),
                ("Sequential.1", 1, call, True),
            )
        ],
    ]


class Spoilsport(nn.Module):
    """Has one part, whose naming fails inside modtrace."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


def test_an_error_inside_is_logged_once_and_the_training_goes_on(
    engine: EngineName, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    resolve = ModuleNames.resolve

    def fail_below(names: ModuleNames, module: nn.Module, open_calls: Sequence[OpenCall]) -> int:
        if isinstance(module, nn.Linear):
            raise RuntimeError("no parts to see here")
        return resolve(names, module, open_calls)

    monkeypatch.setattr(ModuleNames, "resolve", fail_below)
    model, call = Spoilsport(), nn.Module.__call__
    path = tmp_path / "trace.json"
    with caplog.at_level(logging.WARNING, "modtrace"), modtrace.record(path, engine=engine) as recording:
        for _ in range(3):
            model(torch.ones(2)).sum().backward()
            recording.step()
        assert nn.Module.__call__ is call
        recording.mark("ignored")

    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "the training goes on" in caplog.text
    assert "no parts to see here" in caplog.text
    assert model.inner.weight.grad is not None
    assert forward_rows(modtrace.load(path)) == [("Spoilsport", 0, 0)]
    with modtrace.record(engine=engine) as after:
        nn.ReLU()(torch.ones(1))
    assert len(after.timeline().spans) == 1
