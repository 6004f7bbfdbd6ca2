"""Fixtures that more than one test file uses."""

from __future__ import annotations

import fcntl
import gc
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import pytest

from modtrace.record_options import EngineName
from modtrace.recording import record
from modtrace.track.native.build import build, missing_compiler
from tests.support import trace_processor as processor
from tests.support.guard_times import measure_no_guards
from tests.support.kineto import GPU_TRACES
from tests.support.test_scale import EFFORT, scaled

_IN_CI = os.environ.get("CI") == "true"

# A machine under load is not a fault of the example that it draws: no deadline.
hypothesis.settings.register_profile(
    "modtrace",
    deadline=None,
    derandomize=_IN_CI and EFFORT == "quick",
    max_examples=scaled(25, 100, 1000),
    print_blob=True,
)
hypothesis.settings.load_profile("modtrace")

# A shell starts background processes with SIGINT ignored, and their child processes would ignore it too.
signal.signal(signal.SIGINT, signal.default_int_handler)


# Nothing compiles by itself, which is slow; the fixture `native_engine` does.
os.environ.setdefault("MODTRACE_BUILD", "0")
# Else each process that compiles with inductor first compiles a library to see that the compiler knows the processor.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")


@pytest.fixture(scope="session", autouse=True)
def _priority() -> Iterator[None]:
    """Keep this process's priority: commands that lower it would slow all later tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "nice", lambda _: 0)
        yield


@pytest.fixture(scope="session")
def trace_processor() -> type[processor.TraceProcessor]:
    """`TraceProcessor`, whose `open(path_or_bytes)` loads a trace; without one it skips, in CI it fails."""
    reason = processor.missing()
    if reason is not None and not _IN_CI:
        pytest.skip(reason)
    return processor.TraceProcessor


@pytest.fixture(scope="session")
def gpu_traces() -> list[Path]:
    """Return `GPU_TRACES`; in a source distribution, which does not ship them, the test is skipped."""
    absent = [path.name for path in GPU_TRACES if not path.exists()]
    if absent and not _IN_CI:
        pytest.skip(f"there is no tests/data/kineto/{absent[0]}: source distributions come without it")
    return GPU_TRACES


@pytest.fixture(scope="session")
def native_engine(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The native engine, built; without a compiler it skips, in CI it fails."""
    reason = missing_compiler()
    if reason is not None and not _IN_CI:
        pytest.skip(f"no native engine: {reason}")
    # The workers of one run share the folder above their own; the first one builds.
    with open(tmp_path_factory.getbasetemp().parent / "native-engine.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        build()


@pytest.fixture(scope="session", params=["native", "python"])
def engine(request: pytest.FixtureRequest) -> EngineName:
    """Each engine in turn: "native", "python"."""
    if request.param == "native":
        request.getfixturevalue("native_engine")
    name: EngineName = request.param
    return name


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage of imports, and exclude their objects from later collections: a full one takes 0.3 s.

    Then give recordings rings of 4 MB unless a test sets a size: a whole ring is mapped before it is written and read.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        measure_no_guards()
        defaults = record.__kwdefaults__ or {}
        defaults["capacity"] = 1 << 17
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """Collect no garbage while a test and its fixtures run: recordings have slices of collections, at any moment."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
