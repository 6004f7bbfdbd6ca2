"""Workers of a DataLoader: their rows, counted by the dataset itself, for both start methods and both engines."""

from __future__ import annotations

import ast
import os
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import modtrace
from modtrace.checking import check
from modtrace.record_options import EngineName
from tests.support.forked_python import run_forked
from tests.support.python_process import HANGS_AFTER_S, python_environment, run_python


class Augment(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1


class Rows(Dataset[Tensor]):
    """Twelve rows, each with the id of the process that made it."""

    def __init__(self) -> None:
        self._augment = Augment()

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        with modtrace.range("decode"):
            row: Tensor = self._augment(torch.tensor([os.getpid(), index]))
        return row


def train(
    start_method: str, engine: EngineName, processes: int, *, workers: bool
) -> tuple[modtrace.Timeline, Counter[int]]:
    """Train three steps on batches of four rows; return the recording, and the number of rows of each worker."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-12)
    loader = DataLoader(Rows(), batch_size=4, num_workers=processes, multiprocessing_context=start_method)
    made: Counter[int] = Counter()
    with modtrace.record(engine=engine, workers=workers) as recording:
        for batch in loader:
            made.update((batch[:, 0] - 1).tolist())
            model(batch.float()).sum().backward()
            optimizer.step()
    return recording.timeline(), made


@pytest.mark.usefixtures("native_engine")
@pytest.mark.parametrize(
    ("start_method", "engine", "processes"), [("fork", "native", 2), ("fork", "python", 2), ("spawn", "native", 1)]
)
def test_each_worker_is_a_process_of_the_timeline(
    start_method: str, engine: EngineName, processes: int, tmp_path: Path
) -> None:
    timeline, made = train(start_method, engine, processes, workers=True)
    own, *others = dict.fromkeys(track.process for track in timeline.tracks)

    assert own.pid == os.getpid()
    assert [process.program for process in others] == [f"worker {number}" for number in range(processes)]
    assert {process.pid for process in others} == made.keys()
    rows = zip(timeline.slices.track.tolist(), timeline.slices.name.tolist(), strict=True)
    done = Counter((timeline.tracks[track].process.pid, timeline.names[name].label) for track, name in rows)
    for pid, count in made.items():
        assert done[pid, "decode"] == done[pid, "Augment"] == count
        assert done[pid, "enumerate(DataLoader)#_MapDatasetFetcher.fetch"] == count // 4
    assert Counter(row.process.pid for row in timeline.ranges if row.name == "decode") == made
    assert Counter(span.process.pid for span in timeline.spans if span.name == "Augment") == made
    assert {row.process for row in timeline.ranges if row.category == "optimizer"} == {own}
    assert [step.step for step in timeline.summary().steps] == [0, 1, 2]
    timeline.save(tmp_path / "trace.pftrace")
    assert check(tmp_path / "trace.pftrace").faults == []


@pytest.mark.usefixtures("native_engine")
def test_workers_record_nothing_unless_they_are_asked_to() -> None:
    train("fork", "native", 1, workers=True)
    timeline, made = train("fork", "native", 1, workers=False)

    assert sum(made.values()) == 12
    assert {track.process.pid for track in timeline.tracks} == {os.getpid()}


DIES = """
import os, signal, tempfile
os.setsid()
from pathlib import Path
import torch, modtrace
from torch.utils.data import DataLoader, TensorDataset

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
recording = modtrace.record(ring="run.modtrace", workers=True)
recording.start()
for (batch,) in DataLoader(TensorDataset(torch.ones(8, 4)), 2, num_workers=2):
    model(batch).sum().backward()
    optimizer.step()
print([path.name for path in Path(tempfile.gettempdir()).glob("modtrace-*")], flush=True)
"""


@pytest.mark.parametrize(
    "death", ["os._exit(7)", "os.kill(os.getpid(), signal.SIGTERM)", "os.killpg(0, signal.SIGKILL)"]
)
def test_the_rings_of_workers_go_with_the_process_however_it_ends(
    death: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    # Workers send tensors by sockets in this folder, and a socket's path has at most 107 bytes.
    temporary = tmp_path_factory.getbasetemp() / f"t{len(death)}"
    temporary.mkdir()
    environment = python_environment(TMPDIR=str(temporary))

    died = run_forked("-c", DIES + death, status=None, cwd=tmp_path, env=environment)
    said = modtrace.load(tmp_path / "run.modtrace").summary().to_text()
    where = run_python("-m", "modtrace", "where", tmp_path / "run.modtrace").stdout
    [state] = modtrace.where(tmp_path / "run.modtrace").ranks

    [made] = ast.literal_eval(died.stdout)
    assert died.returncode != 0
    deadline = time.monotonic() + HANGS_AFTER_S
    while (temporary / made).exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    lost = "the process ended without saving: the work of its DataLoader workers is lost"
    assert lost in " ".join(said.split())
    assert f"run.modtrace: {lost}" in " ".join(where.split())
    assert state.to_dict()["unsaved"] == "the work of its DataLoader workers"
    assert "nothing was lost" not in said


def test_workers_have_no_schedule() -> None:
    with pytest.raises(modtrace.ModtraceError, match="with a schedule"):
        modtrace.record(workers=True, schedule=torch.profiler.schedule(wait=1, warmup=1, active=1))
