"""Forks, of workers and with other threads: a child records itself, and never into its parent's ring."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import modtrace
from modtrace.record_options import EngineName
from tests.support.forked_python import run_forked
from tests.support.forking_process import Outcome, fork_and_count
from tests.support.pretended_clock import with_preloaded
from tests.support.python_process import run_python
from tests.support.test_scale import PROMISED, PYTHON_IN_FULL, scaled

HEAD = """
import os, sys, threading, torch, modtrace
from torch import nn
from torch.utils.data import DataLoader, Dataset
import torch.multiprocessing as processes

class Parent(nn.Module):
    def forward(self, x):
        return x + 1

class Child(nn.Module):
    def forward(self, x):
        return x * 2

class Numbers(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, at):
        # The collate function is called in the worker too, and so is whatever module a data set uses.
        return Child()(torch.tensor([float(at)]))

def child(path, engine):
    Child()(torch.ones(1))
    with modtrace.record(path, engine=engine, ring=path + ".modtrace"):
        Child()(torch.ones(1))

def main(engine, folder, method):
    with modtrace.record(f"{folder}/parent.json", engine=engine, ring=f"{folder}/parent.modtrace") as recording:
        Parent()(torch.ones(1))
        run(engine, folder, method)
        Parent()(torch.ones(1))
        recording.step()
"""

PROCESS = """
def run(engine, folder, method):
    process = processes.get_context(method).Process(target=child, args=(f"{folder}/child.json", engine))
    process.start()
    process.join()
    assert process.exitcode == 0, process.exitcode
"""

LOADER = """
def run(engine, folder, method):
    loader = DataLoader(Numbers(), batch_size=2, num_workers=2, multiprocessing_context=method)
    assert torch.cat(list(loader)).flatten().tolist() == [2.0 * at for at in range(8)]
"""

THREADS = """
def run(engine, folder, method):
    # Other threads hold whatever lock they hold when the process forks.
    done = threading.Event()

    def work():
        module = Parent()
        while not done.is_set():
            module(torch.ones(1))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(6):
        pid = os.fork()
        if pid == 0:
            child(f"{folder}/child.json", engine)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
    done.set()
    for thread in threads:
        thread.join()
"""

INSIDE = """
def run(engine, folder, method):
    class Forks(nn.Module):
        def forward(self, x):
            pid = os.fork()
            y = Child()(x)
            if pid == 0:
                # What goes on after the fork ends in the child, as it would without a recording.
                child(f"{folder}/child.json", engine)
                sys.exit(0)
            assert os.waitpid(pid, 0)[1] == 0
            return y

    Forks()(torch.ones(1))
"""

TAIL = """
if __name__ == "__main__":
    main(*sys.argv[1:])
"""


def run(body: str, engine: EngineName, folder: Path, method: str = "fork") -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(HEAD + body + TAIL)
    return run_forked("-W", "ignore::DeprecationWarning", script, engine, folder, method, status=None)


def calls(path: Path) -> list[tuple[str, int, bool]]:
    return [(span.fqn, span.call, span.complete) for span in modtrace.load(path).spans]


BEFORE_AND_AFTER = [("Parent", 0, True), ("Parent", 1, True)]


@PYTHON_IN_FULL
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_child_process_records_itself_and_not_into_its_parents_ring(
    engine: EngineName, method: str, tmp_path: Path
) -> None:
    done = run(PROCESS, engine, tmp_path, method)

    assert (done.returncode, done.stderr) == (0, "")
    for name in ("parent.json", "parent.modtrace"):
        assert calls(tmp_path / name) == BEFORE_AND_AFTER
    for name in ("child.json", "child.json.modtrace"):
        assert calls(tmp_path / name) == [("Child", 0, True)]
    assert modtrace.load(tmp_path / "parent.modtrace").stats.torn == 0


@PYTHON_IN_FULL
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_of_a_data_loader_leave_the_recording_alone(engine: EngineName, method: str, tmp_path: Path) -> None:
    done = run(LOADER, engine, tmp_path, method)

    assert (done.returncode, done.stderr) == (0, "")
    for name in ("parent.json", "parent.modtrace"):
        assert calls(tmp_path / name) == BEFORE_AND_AFTER


def test_forks_while_other_threads_record(engine: EngineName, tmp_path: Path) -> None:
    done = run(THREADS, engine, tmp_path)

    assert (done.returncode, done.stderr) == (0, "")
    timeline = modtrace.load(tmp_path / "parent.modtrace")
    # Each thread has its own model.
    assert {span.fqn.partition("#")[0] for span in timeline.spans} == {"Parent"}
    assert (timeline.stats.unfinished, timeline.stats.torn) == (0, 0)
    assert calls(tmp_path / "child.json") == [("Child", 0, True)]


def test_a_fork_inside_a_forward(engine: EngineName, tmp_path: Path) -> None:
    done = run(INSIDE, engine, tmp_path)

    assert (done.returncode, done.stderr) == (0, "")
    assert calls(tmp_path / "parent.modtrace") == [
        ("Parent", 0, True),
        ("Forks", 0, True),
        ("Child", 0, True),
        ("Parent", 1, True),
    ]
    assert calls(tmp_path / "child.json") == [("Child", 0, True)]


FIRST = """
import sys, torch, modtrace
from torch import nn
torch.optim.SGD([torch.ones(1, requires_grad=True)]).step()
record = modtrace.record
before = {*sys.modules}
for suffix in ("json", "pftrace"):
    with record(f"{sys.argv[2]}/first.{suffix}", engine=sys.argv[1], ring=f"{sys.argv[2]}/first.modtrace"):
        nn.Identity()(torch.ones(1))
print(sorted({*sys.modules} - before))
"""


def test_a_recording_imports_nothing(engine: EngineName, tmp_path: Path) -> None:
    """A child forked while another thread imports a module waits forever if it needs that module too."""
    assert run_python("-c", FIRST, engine, tmp_path).stdout == "[]\n"


WAIT_FOR_CHILD = """
    hangs = threading.Timer(30, os.kill, [pid, signal.SIGKILL])
    hangs.start()
    print(holds.value, os.waitpid(pid, 0)[1])
    hangs.cancel()
    thread.join()
"""

WHILE_COUNTING = """
import ctypes, os, signal, threading, torch, modtrace
x, holds = torch.ones(1), ctypes.c_int.in_dll(ctypes.CDLL(None), "holds")

def train():
    rec.step()  # after which operators outside modules are counted
    x + x
    holds.value = 1
    x + x

with modtrace.record(engine="native") as rec:
    thread = threading.Thread(target=train)
    thread.start()
    while thread.is_alive() and holds.value != 2:
        pass
    pid = os.fork()
    if pid == 0:
        os._exit(0)
"""


@pytest.mark.usefixtures("native_engine")
def test_a_fork_while_a_thread_counts_an_operator_outside_modules(tmp_path: Path) -> None:
    env = with_preloaded(Path(__file__).parents[1] / "support/held_lock.c", tmp_path)

    assert run_python("-c", WHILE_COUNTING + WAIT_FOR_CHILD, env=env).stdout == "2 0\n"


WHILE_TORCH_READS = """
import ctypes, os, signal, sys, threading, torch, modtrace
options = {"engine": sys.argv[1], "flops": sys.argv[2] == "flops"}
x, holds = torch.ones(1), ctypes.c_int.in_dll(ctypes.CDLL(None), "holds")
net = torch.nn.Linear(1, 1)
seen, is_looked_at = threading.Event(), threading.Event()

def train():
    x + x
    seen.set()
    is_looked_at.wait()
    holds.value = 1
    x + x  # the first operator of this thread since observers changed: it reads them under torch's lock

def fork(_):
    global pid
    is_looked_at.set()
    while thread.is_alive() and holds.value != 2:
        pass
    pid = os.fork()
    if pid == 0:
        # A new thread has read no observers yet.
        forks = threading.Thread(target=lambda: os.waitpid(os.fork() or os._exit(0), 0))
        forks.start()
        forks.join()
        with modtrace.record(**options) as again:
            again.step()  # after which operators would be counted
            net(x)
        os._exit(0)

with modtrace.record(**options) as rec:
    thread = threading.Thread(target=train)
    thread.start()
    seen.wait()
    for _ in range(int(sys.argv[3])):
        rec.step()
    loss = net(x)
    if sys.argv[4] == "in a pass":
        loss.register_hook(fork)
        loss.backward(create_graph=True)  # every node of it is observed
    else:
        fork(None)
"""


@pytest.mark.parametrize("place", ["in a pass", ""])
@pytest.mark.parametrize("steps", [0, 1, 3])  # operators are looked at after the first step, and not after the third
@pytest.mark.parametrize("flops", ["flops", ""])
@pytest.mark.usefixtures("native_engine")
def test_a_fork_while_a_thread_is_in_torchs_lock_of_observers(
    flops: str, steps: int, place: str, tmp_path: Path
) -> None:
    env = with_preloaded(Path(__file__).parents[1] / "support/held_lock.c", tmp_path)
    arguments = "native", flops, str(steps), place

    done = run_python("-c", WHILE_TORCH_READS + WAIT_FOR_CHILD, *arguments, env=env | {"HELD_LOCK_OF": "libtorch_cpu"})

    assert done.stdout == "2 0\n"


@pytest.mark.timeout(7200 if PROMISED else 300)
def test_forks_while_other_threads_start_and_stop_and_train(engine: EngineName) -> None:
    count = scaled(50, 200, 10_000)

    assert fork_and_count(engine, count) == Outcome(count, 0, 0, ())
