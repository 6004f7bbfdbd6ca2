"""`modtrace where` of processes that run, wait, hang or have ended: open modules, collectives, Python stacks."""

from __future__ import annotations

import json
import os
import pty
import random
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import modtrace
from modtrace.demo import GPT
from modtrace.live.rank_state import read_rank_state
from modtrace.record_options import EngineName
from modtrace.timeline import RingAnalysis
from modtrace.timeline.decode import open_calls
from tests.support.forked_python import run_forked, start_forked
from tests.support.python_process import HANGS_AFTER_S, python_environment, run_python, start_python
from tests.support.test_scale import PYTHON_IN_FULL

HANGS = """
import os, sys, torch, modtrace
from torch import nn

engine, ring, rank, place = sys.argv[1:]
os.environ["RANK"] = rank
pipe, _ = os.pipe()

def hang():
    print("hangs", flush=True)
    os.read(pipe, 1)

class Stuck(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if place == "backward" and step == 2:
            hang()
        return gradient

class Layer(nn.Module):
    def __init__(self, place):
        super().__init__()
        self.place, self.linear = place, nn.Linear(2, 2)

    def forward(self, x):
        x = self.linear(x)
        if self.place == place and step == 2:
            hang()
        return Stuck.apply(x) if self.place == "attn" else x

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.mlp = Layer("attn"), Layer("mlp")

    def forward(self, x):
        return self.mlp(self.attn(x))

net = Net()
with modtrace.record(engine=engine, ring=ring) as recording:
    for step in range(3):
        net(torch.ones(1, 2)).sum().backward()
        recording.step()
"""

LOADER = """
import os, sys, torch, modtrace
from torch import nn
from torch.utils.data import DataLoader, Dataset

engine, ring, workers = sys.argv[1:]
os.environ["RANK"] = "3"
pipe = os.dup(0)

class Data(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 5:
            print("hangs", flush=True)
            os.read(pipe, 1)
        return torch.ones(2)

net = nn.Linear(2, 2)
with modtrace.record(engine=engine, ring=ring) as recording, modtrace.range("epoch"):
    for batch in DataLoader(Data(), num_workers=int(workers), multiprocessing_context="fork" if int(workers) else None):
        net(batch).sum().backward()
        recording.step()
"""

STACKS = """
import os, signal, sys, threading, torch, modtrace
from torch import nn

pipe, _ = os.pipe()
blocks = threading.Event()

def block():  # as multiprocessing's threads do that share files
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    blocks.set()
    os.read(pipe, 1)

threading.Thread(target=block, daemon=True).start()
blocks.wait()

class Stuck(nn.Module):
    def forward(self, x):
        print("hangs", flush=True)
        os.read(pipe, 1)
        print("goes on", flush=True)
        return x

with modtrace.record(engine=sys.argv[1], ring=sys.argv[2], stacks_on_signal=12):
    Stuck()(torch.ones(1))
"""

DDP = """
import os, sys, torch, modtrace
import torch.distributed as dist
from torch import nn
from tests.support.own_output import keep_own_output

keep_own_output()
engine, folder, rank = sys.argv[1:]
os.environ["RANK"] = rank
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=int(rank), world_size=2)
pipe, _ = os.pipe()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.head = nn.Embedding(4, 2), nn.Linear(2, 2)

    def forward(self, x):
        return self.head(self.wte(x))

net = nn.parallel.DistributedDataParallel(Net())
with modtrace.record(engine=engine, ring=f"{folder}/run-{rank}.modtrace") as recording:
    for step in range(3):
        loss = net(torch.tensor([1, 2])).sum()
        if step == 2:
            print("at backward", flush=True)
            if rank == "1":
                os.read(pipe, 1)
        loss.backward()
        recording.step()
"""


def test_open_stacks_from_the_last_events_equal_those_from_all(
    engine: EngineName, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens = GPT(layers=2, width=16), torch.randint(0, 256, (1, 4))

    def step() -> None:
        model(tokens).sum().backward()

    with modtrace.record(engine=engine, capacity=1 << 14) as recording:
        for _ in range(20):
            step()
            checkpoint(model.blocks[0], torch.ones(1, 4, 16, requires_grad=True), use_reentrant=False).sum().backward()
            thread = threading.Thread(target=step)
            thread.start()
            thread.join()
    snapshot = recording._require_capture().ring.read()
    events = snapshot.slots.events
    inside = parts = 0

    for count in random.Random(0).sample(range(len(events)), 200):
        cut = snapshot._replace(slots=snapshot.slots._replace(events=events.take(np.arange(count))))
        stacks = RingAnalysis(cut).open_stacks
        parts += open_calls._last_cut(RingAnalysis(cut)) > 0
        with monkeypatch.context() as of_all:
            of_all.setattr(open_calls, "_last_cut", lambda _: 0)
            assert stacks == RingAnalysis(cut).open_stacks
        inside += any(thread.calls for thread in stacks)
    assert min(inside, parts) > 150


@pytest.fixture
def ranks(engine: EngineName, tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Four ranks that hang: 0 and 1 in Net.attn, 2 in Net.mlp, 3 in the backward of Net.attn."""
    places = ("attn", "attn", "mlp", "backward")
    processes = [
        start_forked("-c", HANGS, engine, tmp_path / f"run-{rank}.modtrace", rank, place)
        for rank, place in enumerate(places)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "hangs\n"
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


@PYTHON_IN_FULL
def test_command_groups_hung_ranks_by_open_modules(ranks: list[subprocess.Popen[str]], tmp_path: Path) -> None:
    done = run_python("-m", "modtrace", "where", f"{tmp_path}/run-*.modtrace")
    ranks[2].kill()
    ranks[2].wait()
    told = run_python(
        "-m", "modtrace", "where", "--format", "json", f"{tmp_path}/run-2.modtrace", f"{tmp_path}/run-3.modtrace"
    )

    lines = done.stdout.splitlines()
    assert lines[0] == "rank 2 is in Net.mlp, the other 3 in Net.attn"
    rows = [re.sub(" {2,}.*", "", re.sub(".*MainThread +", "", line)) for line in lines if "MainThread" in line]
    assert sorted(rows) == ["backward Net › attn (Layer)", "forward Net › attn (Layer)", "forward Net › mlp (Layer)"]
    pids = f"{ranks[0].pid}, {ranks[1].pid}"
    lasted = r"[\d.]+ m?s( to [\d.]+ m?s)?"
    shown = rf"ranks 0-1 +{pids} +running +1 +MainThread +forward Net › attn \(Layer\) +{lasted} +{lasted}"
    assert len([line for line in lines if re.fullmatch(shown, line)]) == 1
    states = json.loads(told.stdout)["ranks"]
    assert [(state["rank"], state["state"], state["step"]) for state in states] == [(2, "dead", 1), (3, "running", 1)]
    assert [call["phase"] for call in states[1]["threads"][0]["stack"]] == ["backward", "backward"]
    assert states[1]["threads"][0]["stack"][0]["seconds"] > 0


def is_fetching(ring: Path) -> bool:
    state = read_rank_state(ring)
    return state.step == 4 and any(
        call.phase == "data loading" for thread in state.threads for call in thread.calls[-1:]
    )


@PYTHON_IN_FULL
@pytest.mark.parametrize("workers", [0, 1])
def test_a_process_that_waits_for_its_data_is_named_so(engine: EngineName, workers: int, tmp_path: Path) -> None:
    ring = tmp_path / "run.modtrace"
    process = start_forked("-c", LOADER, engine, ring, workers, stdin=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == "hangs\n"
    # A worker runs ahead of the process that waits for it.
    while not is_fetching(ring):
        assert process.poll() is None
    done = run_python("-m", "modtrace", "where", ring, env=python_environment(COLUMNS="200"))
    result = modtrace.where(ring)
    process.kill()
    process.communicate()  # its worker then reads the end of its queue

    name = f"_{'MultiProcessing' if workers else 'SingleProcess'}DataLoaderIter"
    lasted = r"<?[\d.]+ m?s"
    place = rf"range epoch › data loading \(enumerate\(DataLoader\)#{name}\.__next__\)"
    assert re.search(rf"MainThread +{place} +{lasted} +{lasted}", done.stdout), done.stdout
    # After 5 seconds it seems hung: a slow machine may take that long.
    place = "seems hung: in range epoch › data loading" if result.ranks[0].hung_threads else "is in data loading"
    assert re.match(rf"rank 3 {place} for {lasted} \(usually {lasted}\)", result.sentence)


@PYTHON_IN_FULL
def test_watch_shows_changes(ranks: list[subprocess.Popen[str]], tmp_path: Path) -> None:
    terminal, inner = pty.openpty()
    watching = start_python(
        *("-m", "modtrace", "where", "--watch", f"{tmp_path}/run-*.modtrace"),
        stdout=inner,
        stderr=inner,
        env=python_environment(COLUMNS="120", TERM="xterm"),
    )
    os.close(inner)

    def read_until(text: str) -> None:
        shown = ""
        while text not in shown:
            part = os.read(terminal, 1 << 16)
            assert part
            shown += re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", part.decode())

    read_until(f"ranks 0-1  {ranks[0].pid}, {ranks[1].pid}  running")
    ranks[0].kill()
    ranks[0].wait()
    read_until(f"rank 0  {ranks[0].pid}  dead")
    watching.send_signal(signal.SIGINT)

    assert watching.wait(HANGS_AFTER_S) == 0
    os.close(terminal)


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch was built without gloo")
def test_a_rank_that_waits_in_backward_is_distinguished_from_one_that_has_not_called_it(
    engine: EngineName, tmp_path: Path
) -> None:
    processes = [start_forked("-c", DDP, engine, tmp_path, rank) for rank in range(2)]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "at backward\n"
        # Rank 0 runs its nodes, and then waits for the other rank forever, so it gets to this state.
        while [call.phase for call in read_rank_state(tmp_path / "run-0.modtrace").threads[0].calls] != [
            "after backward"
        ]:
            assert processes[0].poll() is None
        done = run_python("-m", "modtrace", "where", f"{tmp_path}/run-*.modtrace")
    finally:
        for process in processes:
            process.kill()
            process.communicate()

    waits = "backward, waiting after the last node of Net.wte"
    lines = done.stdout.splitlines()
    assert lines[0] == f"rank 0 is in {waits}, rank 1 in no module"
    pids = [process.pid for process in processes]
    shown = rf"rank 0 +{pids[0]} +running +1 +MainThread +{re.escape(waits)} \(Embedding\) +[\d.]+ m?s"
    # Once rank 0 has waited for a second, the hang is above the table, and the rank that causes it is the first row.
    header = next(number for number, line in enumerate(lines) if line.split()[:2] == ["pid", "state"])
    rows = sorted(line.rstrip() for line in lines[header + 1 : header + 3])
    assert re.fullmatch(shown, rows[0])
    assert re.fullmatch(rf"rank 1 +{pids[1]} +running +1 +no module +[\d.]+ m?s", rows[1])


@PYTHON_IN_FULL
def test_stacks_of_a_hung_process_come_from_its_faulthandler_and_leave_it_as_it_was(
    engine: EngineName, tmp_path: Path
) -> None:
    ring, without_py_spy = tmp_path / "run.modtrace", python_environment(PATH="/nowhere")
    with start_python("-c", STACKS, engine, ring) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "hangs\n"
        asked = [run_python("-m", "modtrace", "where", "--stacks", ring, env=without_py_spy) for _ in range(2)]
        state = Path(f"/proc/{process.pid}/wchan").read_text()
        process.kill()
        rest = process.stdout.read()

    for done in asked:
        head, _, stacks = done.stdout.partition("--- run.modtrace\n")
        _, _, stacks = stacks.partition("Current thread")
        assert "forward Stuck" in head
        functions = re.findall(r'^  File ".*", line \d+ in (.+)$', stacks, re.MULTILINE)
        assert functions[0] == "forward"
        assert functions[-1] == "<module>"
        assert done.stderr == ""
    assert "pipe" in state, "the read that the signal interrupted goes on"
    assert rest == ""
    assert (tmp_path / "run.modtrace.stacks").stat().st_mode & 0o777 == 0o600


HANDLES = """
import os, signal, sys, faulthandler, modtrace
from modtrace import RecordingError

taken, ring = sys.argv[1:]
if taken == "python":
    signal.signal(signal.SIGUSR2, lambda *_: None)
if taken == "faulthandler":
    faulthandler.register(signal.SIGUSR2)
for number in (signal.SIGUSR2, signal.SIGKILL, 1000):
    try:
        modtrace.record(ring=ring, stacks_on_signal=number).start()
    except RecordingError as error:
        print(error)
print(os.listdir(os.path.dirname(ring)))
try:
    modtrace.record(stacks_on_signal=signal.SIGUSR2)
except RecordingError as error:
    print(error)
"""


@pytest.mark.parametrize("taken", ["python", "faulthandler"])
def test_signal_that_the_program_handles_is_not_used_for_stacks(tmp_path: Path, taken: str) -> None:
    done = run_forked("-c", HANDLES, taken, tmp_path / "run.modtrace")

    assert done.stdout.splitlines() == [
        "stacks_on_signal: this program handles SIGUSR2 itself; choose another signal",
        "stacks_on_signal: Python cannot handle SIGKILL: [Errno 22] Invalid argument; choose another signal",
        "stacks_on_signal is 1000; give a signal, such as signal.SIGUSR2",
        "[]",
        "stacks_on_signal needs a ring: the stacks are written next to its file",
    ]


def test_signal_for_stacks_stays_harmless_when_the_recording_is_over(tmp_path: Path) -> None:
    twice = """
import os, signal, sys, modtrace
for ring in sys.argv[1:]:
    modtrace.record(ring=ring, stacks_on_signal=signal.SIGUSR2).start().stop()
    os.kill(os.getpid(), signal.SIGUSR2)
print("lives")
"""
    rings = [tmp_path / "first.modtrace", tmp_path / "second.modtrace"]

    done = run_python("-W", "error::ResourceWarning", "-c", twice, *rings)

    assert (done.stdout, done.stderr) == ("lives\n", "")
    assert all(Path(f"{ring}.stacks").read_text().count("Current thread") == 1 for ring in rings)


@pytest.mark.parametrize("trains", [True, False])
def test_a_model_that_is_evaluated_is_in_an_evaluation(engine: EngineName, tmp_path: Path, trains: bool) -> None:
    stacks: dict[str, list[str]] = {}

    class Inner(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            (thread,) = read_rank_state(tmp_path / "ring").threads
            stacks[when] = [call.place for call in thread.calls]
            return x

    class Net(torch.nn.Sequential):
        pass

    net, teacher = Net(torch.nn.Linear(2, 2), Inner()), torch.nn.Sequential(Inner()).eval()
    with modtrace.record(engine=engine, ring=tmp_path / "ring") as recording:
        for _ in range(2):
            when = "trained" if trains else "evaluated first"
            net.train(trains)(torch.ones(1, 2)).sum().backward()
            recording.step()
        when = "evaluated"
        with torch.no_grad():
            net.eval()(torch.ones(1, 2))
        when = "teacher"
        teacher(torch.ones(1, 2))

    calls = ["forward Net", "forward Net.1"]
    assert stacks.pop("trained" if trains else "evaluated first") == calls
    # A model that is never in training mode looks like a served model, or another model's teacher.
    assert stacks == {
        "evaluated": ["evaluation", *calls] if trains else calls,
        "teacher": ["forward Sequential", "forward Sequential.0"],
    }
