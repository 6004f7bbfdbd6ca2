"""Saving at the end of a recording, and its files if it fails."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch
from torch import nn

import modtrace
from modtrace.record_options import EngineName
from tests.support.forked_python import run_forked
from tests.support.test_scale import PYTHON_IN_FULL

FULL_DISK = """
import resource, signal, sys
import torch
from torch import nn
import modtrace

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
sys.dont_write_bytecode = True  # what is compiled would be cut off too, and stay
path, engine = sys.argv[1:]
model, x = nn.Sequential(*[nn.Linear(2, 2) for _ in range(100)]), torch.ones(2)
recording = modtrace.record(path, engine=engine)
recording.start()
for _ in range(20):
    model(x).sum().backward()
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
try:
    recording.stop()
except modtrace.WriteError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
model(x).sum().backward()
print(len(recording.timeline().spans))
"""


def test_a_folder_that_is_not_there_is_an_error_before_the_training(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "trace.json"

    with pytest.raises(modtrace.WriteError, match="nowhere"):
        modtrace.record(path)


def test_a_folder_that_vanishes_is_an_error_that_names_the_path(engine: EngineName, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    model = nn.Linear(2, 2)
    recording = modtrace.record(folder / "trace.json", engine=engine)
    recording.start()
    model(torch.ones(2)).sum().backward()
    folder.rmdir()

    with pytest.raises(modtrace.WriteError, match="folder/trace\\.json"):
        recording.stop()

    # Nothing is lost: another path works.
    recording.save(tmp_path / "trace.json")
    saved = [(span.phase, span.fqn, span.call) for span in modtrace.load(tmp_path / "trace.json").spans]
    assert saved == [("forward", "Linear", 0), ("backward", "Linear", 0)]


@pytest.mark.skipif(os.geteuid() == 0, reason="root can write everywhere")
def test_a_folder_that_is_read_only_is_an_error_that_names_the_path(tmp_path: Path) -> None:
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)

    with pytest.raises(modtrace.WriteError, match="trace\\.json"), modtrace.record(tmp_path / "trace.json"):
        pass


def test_the_users_own_error_is_not_hidden_by_one_of_saving(
    engine: EngineName, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()

    def train() -> None:
        with modtrace.record(folder / "trace.json", engine=engine):
            folder.rmdir()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()

    assert "could not be saved" in caplog.text
    assert "trace.json" in caplog.text


@PYTHON_IN_FULL
@pytest.mark.parametrize("suffix", [".json", ".json.gz", ".pftrace", ".html"])
def test_a_full_disk_is_an_error_that_names_the_path_and_keeps_the_old_file(
    engine: EngineName, tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / f"trace{suffix}"
    path.write_text("what was there before")

    done = run_forked("-c", FULL_DISK, path, engine)

    error, spans = done.stdout.splitlines()
    assert str(path) in error
    assert "File too large" in error
    # Twenty steps of 101 modules, forward and backward.
    assert int(spans) == 20 * 101 * 2
    assert path.read_text() == "what was there before"
    assert list(tmp_path.iterdir()) == [path]


def test_after_max_steps_it_stops_and_saves(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    with modtrace.record(tmp_path / "trace.json", engine="python", max_steps=2) as recording:
        for _ in range(3):
            model(torch.ones(1, 1))
            recording.step()

        assert not recording.running
        assert [span.step for span in modtrace.load(tmp_path / "trace.json").spans] == [0, 1]
        (tmp_path / "trace.json").unlink()
    assert not (tmp_path / "trace.json").exists()


def test_max_steps_of_0_is_refused() -> None:
    with pytest.raises(modtrace.RecordingError, match="max_steps is 0; it must be a whole number, 1 or more"):
        modtrace.record(max_steps=0)


def test_a_trace_that_cannot_be_saved_after_max_steps_is_logged_and_the_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with modtrace.record(folder / "trace.json", engine="python", max_steps=1) as recording:
        folder.rmdir()
        recording.step()

    assert [record.message.split(":")[0] for record in caplog.records] == [
        "the recording could not be saved after max_steps"
    ]
