"""Device times if the device takes no more work, or does not answer; nothing in the training waits for that."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support import fake_device
from tests.support.fake_streams import compile_fake_streams
from tests.support.forked_python import run_forked

pytestmark = pytest.mark.usefixtures("native_engine")

GUARD = Path(torch.__file__).parent / "include/c10/core/impl/DeviceGuardImplInterface.h"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    reason = fake_device.missing()
    if reason is not None:
        pytest.skip(reason)
    path = tmp_path_factory.mktemp("fake") / "fake_streams.so"
    compile_fake_streams(path)
    return path


def run(library: Path, scenario: str) -> list[str]:
    """Run a scenario to its end, which it reaches only if nothing waits forever; return the log of device times."""
    done = run_forked("-m", "tests.support.device_times_job", scenario, library, 0, json.dumps({}))
    return [line for line in done.stderr.splitlines() if "device_times: " in line]


@pytest.mark.parametrize("scenario", ["forward_waits", "failed_backward_waits", "hangs_full", "starts_in_a_capture"])
def test_nothing_else_waits(library: Path, scenario: str) -> None:
    assert run(library, scenario) == []


def test_a_call_that_waited_past_its_recording_is_not_in_the_next(library: Path) -> None:
    assert run(library, "forward_waits_behind_the_end") == []


def test_a_reader_that_the_device_never_answers_is_left_alone_with_it(library: Path) -> None:
    (logged,) = run(library, "reader_waits")

    assert "device_times: the device has not answered for two seconds" in logged


@pytest.mark.skipif("isStreamCapturing" not in GUARD.read_text("utf-8"), reason="this torch's devices do not tell")
def test_a_stream_of_unknown_state_is_assumed_to_capture(library: Path) -> None:
    assert run(library, "does_not_tell_captures") == []
