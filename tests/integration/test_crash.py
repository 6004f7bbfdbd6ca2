"""Processes that die at random moments of a recording: their ring has every call that they reported as finished."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import modtrace
from modtrace.record_options import EngineName
from tests.support.crash_processes import DEATHS, CrashProcesses, Death
from tests.support.test_scale import scaled
from tests.support.trace_processor import TraceProcessor

KILLS = int(os.environ.get("MODTRACE_TEST_KILLS", scaled(36, 204, 2_000)))
"""Number over all ways to die and both engines."""
EACH = max(1, KILLS // (2 * len(DEATHS)))

STATUS = {
    "SIGKILL": -signal.SIGKILL,
    "SIGTERM": -signal.SIGTERM,
    "SIGSEGV": -signal.SIGSEGV,
    "os._exit": 7,
    "exception": 1,
    "fork": -signal.SIGKILL,
}


@pytest.fixture(scope="module")
def crash_processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CrashProcesses]:
    processes = CrashProcesses(tmp_path_factory.mktemp("crashes"))
    yield processes
    processes.close()


def assert_nothing_is_missing(timeline: modtrace.Timeline, death: Death) -> None:
    spans = {(span.phase, span.fqn, span.call) for span in timeline.spans if span.complete}
    assert [call for call in death.finished if tuple(call) not in spans] == []


@pytest.mark.parametrize("death", DEATHS)
def test_calls_finished_before_a_death_survive(
    death: str,
    engine: EngineName,
    crash_processes: CrashProcesses,
    trace_processor: type[TraceProcessor],
    tmp_path: Path,
) -> None:
    for seed in range(EACH):
        chance = random.Random(f"{death} {engine} {seed}")
        ring, path = tmp_path / f"{seed}.modtrace", tmp_path / f"{seed}.json"
        trace = tmp_path / ("recovered.pftrace" if seed % 2 else "recovered.json")

        died = crash_processes.kill(
            engine=engine,
            death=death,
            ring=str(ring),
            path=str(path),
            calls=chance.randrange(1, 400),
            delay_us=chance.randrange(3000),
        )
        timeline = modtrace.load(ring)
        timeline.save(trace)

        assert died.status == STATUS[death], died.errors
        assert len(died.finished) > 0
        assert_nothing_is_missing(timeline, died)
        assert trace_processor.open(trace).import_problems() == {}
        assert "Stranger" not in {name.fqn for name in timeline.names}
        if death == "exception":
            # An uncaught exception leaves an interpreter that can still save.
            assert died.errors.rstrip().endswith("RuntimeError: the process's own")
            assert_nothing_is_missing(modtrace.load(path), died)
        else:
            assert not path.exists()


def test_a_forked_child_records_itself(engine: EngineName, crash_processes: CrashProcesses, tmp_path: Path) -> None:
    ring = tmp_path / "run.modtrace"

    crash_processes.kill(engine=engine, death="fork", ring=str(ring), path=None, calls=100, delay_us=0)
    child = modtrace.load(f"{ring}.stranger")

    assert {span.fqn for span in child.spans} == {"Stranger"}
