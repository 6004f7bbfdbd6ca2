"""Signals that dump or save: in hung and waiting processes, with others' handlers and descriptors, and at exit."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import modtrace
from modtrace import RecordingError
from modtrace.record_options import EngineName
from modtrace.recording.signals import SaveOnSignal
from tests.support.forked_python import start_forked
from tests.support.python_process import HANGS_AFTER_S, run_python, users_environment
from tests.support.test_scale import PYTHON_IN_FULL


class Gate(nn.Module):
    """A module that waits inside its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.open = threading.Event(), threading.Event()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.reached.set()
        assert self.open.wait(HANGS_AFTER_S)
        return x


@pytest.fixture
def dumps() -> Iterator[tuple[SaveOnSignal, threading.Semaphore]]:
    """A started dump on SIGUSR1 that counts."""
    count = threading.Semaphore(0)
    dump = SaveOnSignal(signal.SIGUSR1, count.release)
    dump.start()
    yield dump, count
    dump.stop()


HUNG = """
import os, signal, sys, torch, modtrace
from torch import nn

class Hung(nn.Module):
    def forward(self, x):
        print("hung", flush=True)
        # One call into C, which Python handlers cannot interrupt: it goes on after a signal.
        return os.read(pipe, 1)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.hung = nn.Linear(2, 2), Hung()

    def forward(self, x):
        return self.hung(self.layer(x))

pipe, _ = os.pipe()
with modtrace.record(sys.argv[1], engine=sys.argv[2], on_signal=signal.SIGUSR1):
    Net()(torch.ones(1, 2))
"""


def test_a_hung_process_saves_on_a_signal_and_goes_on(engine: EngineName, tmp_path: Path) -> None:
    path = tmp_path / "hung.json"
    process = start_forked("-c", HUNG, path, engine)
    assert process.stdout is not None
    assert process.stdout.readline() == "hung\n"
    for _ in range(2):
        path.unlink(missing_ok=True)
        process.send_signal(signal.SIGUSR1)
        while not path.exists():
            assert process.poll() is None
        spans = {span.fqn: span.complete for span in modtrace.load(path).spans}
        assert spans == {"Net": False, "Net.layer": True, "Net.hung": False}
    process.kill()
    process.communicate()


def test_a_dump_comes_while_the_main_thread_waits(dumps: tuple[SaveOnSignal, threading.Semaphore]) -> None:
    _, count = dumps

    signal.raise_signal(signal.SIGUSR1)

    assert count.acquire(timeout=HANGS_AFTER_S)


def test_a_handler_that_was_there_is_called_and_put_back(engine: EngineName, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    seen: list[int] = []
    handler = lambda number, _frame: seen.append(number)  # noqa: E731 (identity is asked for below)
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with modtrace.record(path, engine=engine, on_signal=signal.SIGUSR1):
            signal.raise_signal(signal.SIGUSR1)
        assert seen == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGUSR1) is handler
        assert signal.set_wakeup_fd(-1) == -1
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_descriptor_of_the_program_stays_and_the_dump_comes() -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)
    count = threading.Semaphore(0)
    dump = SaveOnSignal(signal.SIGUSR1, count.release)
    try:
        dump.start()
        signal.raise_signal(signal.SIGUSR1)

        assert count.acquire(timeout=HANGS_AFTER_S)
        assert os.read(read, 8) == bytes([signal.SIGUSR1])
        dump.stop()
    finally:
        assert signal.set_wakeup_fd(-1) == write
        os.close(read)
        os.close(write)


def test_a_descriptor_that_was_taken_since_does_not_silence_it(
    dumps: tuple[SaveOnSignal, threading.Semaphore],
) -> None:
    dump, count = dumps
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)

    signal.raise_signal(signal.SIGUSR1)
    assert count.acquire(timeout=HANGS_AFTER_S)
    dump.stop()

    assert signal.set_wakeup_fd(-1) == write
    os.close(read)
    os.close(write)


def test_a_recording_can_be_stopped_on_another_thread(engine: EngineName, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    recording = modtrace.record(tmp_path / "trace.json", engine=engine, on_signal=signal.SIGUSR1)
    recording.start()
    thread = threading.Thread(target=recording.stop)
    thread.start()
    thread.join()
    try:
        assert not recording.running
        # The handler is still there, and does nothing.
        signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("number", [signal.SIGKILL, 9999, -1])
def test_a_signal_that_cannot_be_listened_to_is_an_error_before_anything_starts(
    engine: EngineName, number: int, tmp_path: Path
) -> None:
    call = nn.Module.__call__
    with (
        pytest.raises(RecordingError, match="on_signal"),
        modtrace.record(tmp_path / "trace.json", engine=engine, on_signal=number),
    ):
        raise AssertionError
    assert nn.Module.__call__ is call


def test_away_from_the_main_thread_it_is_an_error(tmp_path: Path) -> None:
    errors: list[str] = []

    def start() -> None:
        try:
            modtrace.record(tmp_path / "trace.json", engine="python", on_signal=signal.SIGUSR1).start()
        except RecordingError as error:
            errors.append(str(error))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()

    assert len(errors) == 1
    assert "SIGUSR1 cannot be listened to" in errors[0]
    with modtrace.record(engine="python"):
        pass


def test_a_snapshot_from_another_thread_while_threads_record(engine: EngineName) -> None:
    gate, leaf = Gate(), nn.Identity()

    def work() -> None:
        for _ in range(20_000):
            leaf(torch.ones(1))

    with modtrace.record(engine=engine) as recording:
        threads = [
            threading.Thread(target=work, name="works"),
            threading.Thread(target=gate, args=(torch.ones(1),), name="waits"),
        ]
        for thread in threads:
            thread.start()
        assert gate.reached.wait(HANGS_AFTER_S)
        while threads[0].is_alive():
            timeline = recording.snapshot()
            assert [span.complete for span in timeline.spans if span.fqn == "Gate"] == [False]
            assert sum(not span.complete for span in timeline.spans if span.fqn == "Identity") <= 1
            stacks = {stack.thread: [call.fqn for call in stack.calls] for stack in recording.where()}
            assert stacks["waits"] == ["Gate"]
            assert stacks.get("works", []) in ([], ["Identity"])
        gate.open.set()
        for thread in threads:
            thread.join()

    assert len(recording.timeline().spans) == 20_001
    assert all(span.complete for span in recording.timeline().spans)


AT_EXIT = """
import sys, torch, modtrace
from torch import nn
recording = modtrace.record(sys.argv[1], engine=sys.argv[2], ring=sys.argv[3])
recording.start()
nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
{}
"""


@PYTHON_IN_FULL
@pytest.mark.parametrize(("end", "status"), [("", 0), ("sys.exit(3)", 3), ("raise ValueError", 1)])
def test_a_recording_that_was_never_stopped_is_saved_at_exit(
    engine: EngineName, end: str, status: int, tmp_path: Path
) -> None:
    path, ring = tmp_path / "trace.pftrace", tmp_path / "run.modtrace"

    run_python("-c", AT_EXIT.format(end), path, engine, ring, status=status, env=users_environment())

    for file in (path, ring):
        assert [(span.fqn, span.phase, span.complete) for span in modtrace.load(file).spans] == [
            ("Linear", "forward", True),
            ("Linear", "backward", True),
        ]


def test_an_exception_that_leaves_the_block_is_saved_and_untouched(engine: EngineName, tmp_path: Path) -> None:
    path = tmp_path / "trace.pftrace"
    error = ValueError("the user's own")

    class Raises(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise error

    with pytest.raises(ValueError, match="the user's own") as raised, modtrace.record(path, engine=engine):
        Raises()(torch.ones(1))

    assert raised.value is error
    assert error.__context__ is None
    assert error.__cause__ is None
    assert [span.fqn for span in modtrace.load(path).spans] == ["Raises"]


def test_slots_of_threads_that_have_ended_stay_readable(engine: EngineName, tmp_path: Path) -> None:
    path = tmp_path / "run.modtrace"
    with modtrace.record(engine=engine, ring=path):
        for number in range(50):
            thread = threading.Thread(target=nn.Identity(), args=(torch.ones(1),), name=f"short {number}")
            thread.start()
            thread.join()
        beside = modtrace.load(path)

    assert [track.thread for track in beside.tracks] == [f"short {number}" for number in range(50)]
    assert [span.track for span in beside.spans] == [f"forward · short {number}" for number in range(50)]
    assert all(span.complete for span in beside.spans)
