"""A watcher beside real processes: slow steps are kept with their reason, and the processes never notice."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import modtrace
from modtrace.live.windows import KEPT
from modtrace.record_options import EngineName
from tests.support.forked_python import run_forked
from tests.support.python_process import HANGS_AFTER_S, run_python

# The other steps take under a millisecond. Slow steps take longer than a busy machine delays one.
SLOW_JOB = """
import gc, glob, io, os, signal, sys, time
import modtrace, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Rows(Dataset):
    def __len__(self): return 60
    def __getitem__(self, number):
        time.sleep(1.5 if number == 15 else 0)
        return torch.ones(4, 64)

class Head(nn.Linear):
    def forward(self, x):
        time.sleep(1.5 if number == 23 else 0)
        return super().forward(x)

class SlowFile(io.BytesIO):
    def write(self, data):
        time.sleep(1.5 if not self.tell() else 0)
        return super().write(data)

engine, ending = sys.argv[1:]
torch.manual_seed(0); torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), Head(64, 1))
optimizer = torch.optim.Adam(model.parameters())
conditions = ["data > 1.2s; saving > 1.2s", "module *.2 > 1.2s", "range augment > 1.2s", "hang 3s"]
with modtrace.record(ring="run.modtrace", engine=engine, keep_when=conditions) as recording:
    for number, batch in enumerate(DataLoader(Rows(), batch_size=None)):
        with modtrace.range("augment"):
            time.sleep(1.5 if number == 31 else 0)
        model(batch).square().mean().backward()
        if number == 39:
            torch.save(model.state_dict(), SlowFile())
        if number == 45:
            recording.keep("loss is nan")
        if number == 50:
            while not glob.glob("run.kept/*hang*"):
                time.sleep(0.05)
        optimizer.step(); optimizer.zero_grad()
    if ending == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
"""
UNSEEN_JOB = """
import os, signal, sys
import modtrace, torch
from torch import nn

seen = []
signal.signal(signal.SIGCHLD, lambda *_: seen.append("SIGCHLD"))
model = nn.Linear(2, 2)
recording = modtrace.record(ring="run.modtrace", **eval(sys.argv[1])).start()
for number in range(50):
    model(torch.ones(1, 2)).sum().backward()
    recording.step()
    try:
        print(os.wait())
    except ChildProcessError:
        pass
recording.stop()
print(seen)
print(os.waitpid(os.posix_spawn("/bin/false", ["false"], {}), 0)[1], seen)
sys.exit(3)
"""

SIGNAL_JOB = """
import signal
import modtrace, torch
from torch import nn

model = nn.Linear(2, 2)
with modtrace.record(ring="run.modtrace", keep_when="signal") as recording:
    for number in range(20):
        model(torch.ones(1, 2)).sum().backward()
        if number == 6:
            signal.raise_signal(signal.SIGUSR1)
            while not any(mark.text == "modtrace.keep signal" for mark in recording.snapshot().marks):
                pass
        recording.step()
"""


def wait_for_end(log: Path) -> list[str]:
    """Wait until the watcher has ended, and return its output."""
    deadline = time.monotonic() + HANGS_AFTER_S
    while time.monotonic() < deadline:
        lines = log.read_text().splitlines() if log.exists() else []
        if lines and lines[-1].startswith("modtrace: ended"):
            return lines
        time.sleep(0.05)
    raise AssertionError(f"the watcher has not ended: {log.read_text() if log.exists() else 'no log'}")


@pytest.mark.parametrize(("engine", "ending"), [("native", "killed"), ("python", "stopped")])
def test_slow_steps_of_a_process_are_kept_with_their_reason(tmp_path: Path, engine: EngineName, ending: str) -> None:
    run_forked("-c", SLOW_JOB, engine, ending, cwd=tmp_path, status=-9 if ending == "killed" else 0)
    lines = wait_for_end(tmp_path / "run.kept" / "watch.log")
    files = {file.stem: modtrace.load(file) for file in (tmp_path / "run.kept").glob("*.pftrace")}
    reasons = {
        "step15-data-loading": "data loading in step 15 took",
        "step23-module-.2": "Sequential.2 took",
        "step31-augment": "augment in step 31 took",
        "step39-saving": "saving in step 39 took",
        "step45-keep-loss-is-nan": "loss is nan",
        "step50-hang": "no event for",
    }
    assert set(reasons) <= set(files), lines
    for name, reason in reasons.items():
        why = files[name].metadata[KEPT]
        assert isinstance(why, list)
        assert why[0].startswith(reason)
        number = int(name[4:6])
        steps = np.unique(files[name].columns.step)
        # A process that hangs has no later steps.
        assert steps.tolist() == [*range(number - 2, number + (1 if "hang" in name else 3))], name


def test_a_quiet_process_keeps_nothing_and_sees_no_child(tmp_path: Path) -> None:
    printed = []
    for name, arguments in (("plain", "{}"), ("watched", "dict(keep_when='step > 90s; gc > 90s; hang 90s')")):
        (tmp_path / name).mkdir()
        done = run_forked("-c", UNSEEN_JOB, arguments, cwd=tmp_path / name, status=3)
        printed.append((done.stdout, done.stderr))
    assert printed[0] == printed[1]
    assert printed[0][0].splitlines() == ["[]", "256 ['SIGCHLD']"]
    assert wait_for_end(tmp_path / "watched" / "run.kept" / "watch.log") == ["modtrace: ended: 0 kept"]
    assert not list((tmp_path / "watched").rglob("*.pftrace"))


def test_run_starts_the_watcher(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("import torch\nprint(torch.nn.Linear(2, 2)(torch.ones(1, 2)).shape)\n")
    options = ["--ring", "a.modtrace", "--keep-when", "step > 90s", "--keep-when", "gc > 90s", "job.py"]
    done = run_forked("-m", "modtrace", "run", *options, cwd=tmp_path)
    assert done.stdout == "torch.Size([1, 2])\n"
    assert wait_for_end(tmp_path / "a.kept" / "watch.log") == ["modtrace: ended: 0 kept"]
    for wrong in (["--keep-when", "step > 90s"], ["--keep-when", ""], ["--ring", "a.modtrace", "--keep-when", "step"]):
        done = run_python("-m", "modtrace", "run", *wrong, "job.py", cwd=tmp_path, status=2)
        assert "--keep-when" in done.stderr
        assert done.stdout == ""


@pytest.mark.parametrize("engine", ["native", "python"])
def test_without_a_watcher_the_process_keeps_what_it_asks_for(tmp_path: Path, engine: EngineName) -> None:
    model = nn.Linear(2, 2)
    with modtrace.record(tmp_path / "a.pftrace", engine=engine) as recording:
        for number in range(10):
            model(torch.ones(1, 2)).sum().backward()
            if number == 6:
                recording.keep("a spike")
                for thread in threading.enumerate():
                    if thread.name == "modtrace-keep":
                        thread.join()
            recording.step()
        with pytest.raises(TypeError):
            recording.keep(6)  # type: ignore[arg-type]
    with pytest.raises(modtrace.RecordingError, match=r"call keep\(\) before stop\(\), or save its last steps"):
        recording.keep("too late")
    timeline = modtrace.load(tmp_path / "a.kept" / "step6-keep-a-spike.pftrace")
    assert np.unique(timeline.columns.step).tolist() == [4, 5, 6]
    assert timeline.metadata[KEPT] == ["a spike"]
    assert [mark.text for mark in recording.timeline().marks if mark.kind == "mark"] == ["modtrace.keep a spike"]


def test_a_signal_keeps_the_steps_around_it(tmp_path: Path) -> None:
    run_forked("-c", SIGNAL_JOB, cwd=tmp_path)
    wait_for_end(tmp_path / "run.kept" / "watch.log")
    (file,) = (tmp_path / "run.kept").glob("*.pftrace")
    assert file.stem == "step6-keep-signal"
    why = modtrace.load(file).metadata[KEPT]
    assert isinstance(why, list)
    assert why[0] == "signal"


def test_to_keep_does_nothing_once_a_recording_has_ended_by_itself(tmp_path: Path) -> None:
    with modtrace.record(tmp_path / "a.pftrace", engine="python", max_steps=2) as recording:
        for _ in range(3):
            recording.step()
        recording.keep("after max_steps")
    assert not (tmp_path / "a.kept").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keep_when": "step > 3x"}, "keep_when needs a ring"),
        ({"keep_when": "step > 3", "ring": "a.modtrace"}, 'the forms are "step > 3x"'),
        ({"keep_when": "", "ring": "a.modtrace"}, "keep_when: '' is not a condition; the forms are"),
        ({"keep_when": [3], "ring": "a.modtrace"}, 'the forms are "step > 3x"'),
        (
            {
                "keep_when": "step > 3x",
                "ring": "a.modtrace",
                "schedule": torch.profiler.schedule(wait=1, warmup=1, active=1),
            },
            "with a schedule",
        ),
    ],
)
def test_conditions_that_cannot_be_watched_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(modtrace.ModtraceError, match=message):
        modtrace.record(**arguments)  # type: ignore[arg-type]


def test_metrics_of_each_step_come_once_and_their_parts_add_up(tmp_path: Path, engine: EngineName) -> None:
    model = nn.Linear(2, 2)
    inside_ms, around_ms = [], []
    with modtrace.record(ring=tmp_path / "run.modtrace", keep_when=(), engine=engine) as recording:
        for number in range(8):
            begun = time.monotonic()
            with recording.range("re/size"):
                entered = time.monotonic()
                time.sleep(0.05 if number == 5 else 0)
                inside_ms.append(1e3 * (time.monotonic() - entered))
            around_ms.append(1e3 * (time.monotonic() - begun))
            model(torch.ones(1, 2)).sum().backward()
            recording.step()
        early = recording.step_metrics()
    wait_for_end(tmp_path / "run.kept/watch.log")

    metrics = early | recording.step_metrics()

    assert list(metrics) == list(range(8))
    assert recording.step_metrics() == {}
    for of_step in metrics.values():
        parts = [ms for name, ms in of_step.items() if name != "modtrace/step_ms"]
        assert sum(parts) == pytest.approx(of_step["modtrace/step_ms"])
    assert inside_ms[5] <= metrics[5]["modtrace/re_size_ms"] <= around_ms[5]
    whole = {step.step: step.duration_ns / 1e6 for step in recording.timeline().summary().steps}
    # The watcher knew fewer readings of the clocks: its times may differ by a rounding error of one nanosecond.
    step_ms = {step: of_step["modtrace/step_ms"] for step, of_step in metrics.items()}
    assert step_ms == pytest.approx(whole, abs=1.5e-6)


def test_metrics_need_a_watcher(tmp_path: Path) -> None:
    recording = modtrace.record(ring=tmp_path / "run.modtrace")

    with pytest.raises(
        modtrace.RecordingError, match=r"needs a watcher: record\(ring='run.modtrace', keep_when=\(\)\)"
    ):
        recording.step_metrics()
    assert modtrace.record(ring=tmp_path / "run.modtrace", keep_when=()).step_metrics() == {}
