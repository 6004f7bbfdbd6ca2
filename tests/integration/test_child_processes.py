"""Children of `modtrace run` and `MODTRACE=` that call modules get their own recordings."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import modtrace
from modtrace.record_options import EngineName
from tests.support.forked_python import run_forked
from tests.support.python_process import python_environment, run_python
from tests.support.test_scale import PYTHON_IN_FULL

HEAD = """
import os, signal, subprocess, sys
import torch, torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Net(nn.Module):
    calls = 0

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        Net.calls += 1
        return x * self.weight

def train(rank, count=2, net=None, end=None):
    Net.calls = 0
    net = net or Net()
    for _ in range(count + rank):
        net(torch.ones(1)).sum().backward()
    # One write: lines of several processes do not mix.
    os.write(1, f"{os.getpid(), Net.calls}\\n".encode())
    if end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if end == "_exit":
        os._exit(0)

def start(method, *arguments):
    process = mp.get_context(method).Process(target=train, args=arguments)
    process.start()
    return process

def nested(method):
    train(3)
    start(method, 0).join()

class Numbers(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, at):
        return Net()(torch.tensor([float(at)])).detach()

def ddp(rank, store):
    import torch.distributed as dist
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    net = nn.parallel.DistributedDataParallel(Net())
    Net.calls = 0
    net(torch.ones(1)).sum().backward()
    os.write(1, f"{os.getpid(), Net.calls}\\n".encode())
    dist.destroy_process_group()

"""

MAIN = 'if __name__ == "__main__":\n    '

PROGRAMS = {
    "fork": "for process in [start('fork', rank) for rank in range(2)]: process.join()",
    "spawn": "for process in [start('spawn', rank) for rank in range(2)]: process.join()",
    "forkserver": "for process in [start('forkserver', rank) for rank in range(2)]: process.join()",
    "fork while recording": "train(5)\n    for process in [start('fork', rank) for rank in range(2)]: process.join()",
    "not joined": "train(5)\n    start('spawn', 0)\n    start('fork', 1)",
    "torch's spawn": "mp.spawn(train, nprocs=2)",
    "hogwild": (
        "net = Net().share_memory()\n    processes = [start('spawn', rank, 2, net) for rank in range(2)]\n"
        "    for process in processes: process.join()\n    train(5)"
    ),
    "DDP": "mp.spawn(ddp, args=(os.path.abspath('store'),), nprocs=2)",
    "subprocess": "subprocess.run([sys.executable, '-c', 'import script; script.train(1)'], check=True)",
    "a shell": "os.system(f'{sys.executable} -c \"import script; script.train(1)\"')",
    "nested": "process = mp.Process(target=nested, args=('fork',))\n    process.start()\n    process.join()",
    "nested and spawned": (
        "process = mp.get_context('spawn').Process(target=nested, args=('spawn',))\n"
        "    process.start()\n    process.join()"
    ),
    "os.fork": ("train(5)\n    pid = os.fork()\n    train(0 if pid else 1)\n    if pid:\n        os.waitpid(pid, 0)"),
}


_TRIED_BY_PROGRAMS = ("spawn", "forkserver", "torch's spawn", "hogwild", "DDP")
"""Programs that `tests/programs` has too; the quick tests skip them here."""
_PROGRAMS = [pytest.param(name, marks=pytest.mark.full) if name in _TRIED_BY_PROGRAMS else name for name in PROGRAMS]


def told(stdout: str) -> dict[int, int]:
    """Calls by process, as counted by the processes themselves."""
    counts: dict[int, int] = {}
    for line in stdout.splitlines():
        pid, calls = ast.literal_eval(line)
        counts[pid] = counts.get(pid, 0) + calls
    return counts


def recorded(files: list[Path]) -> dict[int, int]:
    """Calls by process, as read from the files."""
    timelines = [modtrace.load(file) for file in files]
    return {
        timeline.tracks[0].process.pid: sum(
            span.module_class == "Net" and span.phase == "forward" for span in timeline.spans
        )
        for timeline in timelines
    }


def run(body: str, folder: Path, *options: str, method: str = "run") -> tuple[dict[int, int], list[str]]:
    """Run a program; return the calls that its processes counted, and modtrace's own lines."""
    first = "import modtrace\n" if method == "variable" else ""
    (folder / "script.py").write_text(first + HEAD + MAIN + body + "\n")
    if method == "variable":
        done = run_forked("script.py", cwd=folder, env=python_environment(MODTRACE=",".join(options)))
    else:
        done = run_forked("-m", "modtrace", "run", *options, "script.py", cwd=folder)
    assert all(line.startswith("modtrace: ") for line in done.stderr.splitlines()), done.stderr
    return told(done.stdout), done.stderr.splitlines()


@PYTHON_IN_FULL
@pytest.mark.parametrize("program", _PROGRAMS)
def test_each_child_has_a_file_with_all_its_calls(engine: EngineName, program: str, tmp_path: Path) -> None:
    counted, lines = run(PROGRAMS[program], tmp_path, "--engine", engine)

    files = list(tmp_path.glob("script*.pftrace"))
    assert recorded(files) == counted != {}
    children = [file.name for file in files if file.name != "script.pftrace"]
    (line,) = [line for line in lines if "child process" in line]
    where = f"1 child process is in {children[0]}" if len(children) == 1 else f"{len(children)} child processes are in "
    assert line == lines[-1]
    assert line.startswith(f"modtrace: {where}")
    of_rank = r"\.rank[01]" if program == "DDP" else ""
    told_files = line.removeprefix(f"modtrace: {where}").partition(". Next")[0]
    if len(children) > 1:
        assert {file.name for file in tmp_path.glob(told_files)} == {*children}
    for name in children:
        assert re.fullmatch(rf"script{of_rank}\.pid\d+\.pftrace", name)
    if program == "DDP":
        assert sorted(name.split(".")[1] for name in children) == ["rank0", "rank1"]


def test_the_variable_reaches_children_too(tmp_path: Path) -> None:
    body = PROGRAMS["fork while recording"] + "\n    start('spawn', 0).join()"
    counted, lines = run(body, tmp_path, "path=out.json", "engine=python", method="variable")

    assert recorded(list(tmp_path.glob("out*.json"))) == counted
    assert len(counted) == 4
    assert [line.partition(". Next")[0] for line in lines] == [
        f"modtrace: recorded to {tmp_path / 'out.json'}",
        "modtrace: 3 child processes are in out.pid*.json",
    ]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_of_a_data_loader_are_not_recorded(engine: EngineName, method: str, tmp_path: Path) -> None:
    body = f"list(DataLoader(Numbers(), num_workers=2, multiprocessing_context='{method}'))\n    train(0)"
    counted, lines = run(body, tmp_path, "--engine", engine)

    assert {file.name for file in tmp_path.glob("*.pftrace")} == {"script.pftrace"}
    assert recorded([tmp_path / "script.pftrace"]) == counted
    assert not any("child" in line for line in lines)


def test_children_that_call_no_module_leave_nothing(tmp_path: Path) -> None:
    body = (
        "import concurrent.futures\n    with concurrent.futures.ProcessPoolExecutor(2) as pool:\n"
        "        assert list(pool.map(abs, [-1, -2])) == [1, 2]\n"
        "    subprocess.run([sys.executable, '-c', 'import torch'], check=True)\n    train(0)"
    )
    _, lines = run(body, tmp_path, "--ring", "ring.modtrace")

    assert {file.name for file in tmp_path.iterdir()} - {"__pycache__"} == {
        "script.py", "script.pftrace", "ring.modtrace",
    }  # fmt: skip
    assert not any("child" in line for line in lines)


@PYTHON_IN_FULL
@pytest.mark.parametrize("end", ["kill", "_exit"])
def test_the_calls_of_a_killed_child_are_in_its_ring_and_its_loss_is_reported(
    engine: EngineName, end: str, tmp_path: Path
) -> None:
    body = f"start('fork', 0, 2, None, '{end}').join()\n    start('fork', 0).join()"
    counted, lines = run(body, tmp_path, "--engine", engine, "--ring", "ring.modtrace")

    assert recorded(list(tmp_path.glob("ring.pid*.modtrace"))) == counted
    (saved,) = tmp_path.glob("*.pid*.pftrace")
    of_saved = saved.name.replace("script", "ring").replace("pftrace", "modtrace")
    (killed,) = {ring.name for ring in tmp_path.glob("ring.pid*.modtrace")} - {of_saved}
    assert lines[-1].partition(". Next")[0] == (
        f"modtrace: 1 child process is in {saved.name}; 1 child process called modules and saved nothing "
        f"(killed, ended by os._exit, or still running): see {killed}"
    )


def test_a_child_of_the_users_own_recording_is_not_recorded(tmp_path: Path) -> None:
    body = "import modtrace\n    with modtrace.record('own.json'):\n        start('fork', 0).join()"
    run(body, tmp_path)

    assert {file.name for file in tmp_path.iterdir()} - {"__pycache__"} == {"script.py", "own.json"}


def test_a_child_sees_the_search_path_and_sitecustomize_that_it_would_see(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import sys\nsys.customized = sys.path[:]")
    show = "import sys; print((sys.path, sys.customized, sys.modules['sitecustomize'].__file__))"
    (tmp_path / "script.py").write_text(f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {show!r}])")
    environment = python_environment()
    environment["PYTHONPATH"] = f"{tmp_path / 'site'}:{environment['PYTHONPATH']}"

    plain = run_python("script.py", cwd=tmp_path, env=environment)
    done = run_python("-m", "modtrace", "run", "script.py", cwd=tmp_path, env=environment)

    assert done.stdout == plain.stdout != ""
