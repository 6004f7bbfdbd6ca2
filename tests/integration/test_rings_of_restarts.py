"""Rings of processes that are restarted under one name, or that run in namespaces of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import modtrace
from modtrace.live.rank_state import read_rank_state
from modtrace.ranks import find_rank_recordings
from tests.support.forked_python import run_forked
from tests.support.python_process import python_environment

# Attempt n trains for 3 + 2 n steps. In the first two, a rank then kills itself, and both ranks are restarted.
TRAIN = """
import os, signal
import torch, torch.distributed as dist
from torch import nn
import modtrace

attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
# The launcher keeps its store, in which gloo would find the addresses of those that ended.
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
dist.init_process_group("gloo", store=dist.PrefixStore(str(attempt), store), rank=rank, world_size=2)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
recording = modtrace.record(ring="job-%r.modtrace", capacity=4096, engine="python").start()
for step in range(3 + 2 * attempt):
    model(torch.ones(2, 4)).sum().backward()
    dist.all_reduce(model.weight.grad)
    optimizer.step()
if (attempt, rank) in ((0, 1), (1, 0)):
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
recording.stop()
dist.destroy_process_group()
"""


def test_each_restart_of_a_job_leaves_a_ring_per_rank(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    run_forked("-m", "tests.support.forked_ranks", 2, "train.py", cwd=tmp_path)

    rings = {path.name: modtrace.load(path) for path in tmp_path.glob("*.modtrace")}
    steps = {"job-%d.1.modtrace": 3, "job-%d.2.modtrace": 5, "job-%d.modtrace": 7}
    assert {name: len(ring.summary().steps) for name, ring in rings.items()} == {
        name % rank: count for name, count in steps.items() for rank in range(2)
    }
    assert all(ring.stats["torn"] == 0 for ring in rings.values())
    killed = [read_rank_state(tmp_path / name) for name in ("job-1.1.modtrace", "job-0.2.modtrace")]
    assert [(state.rank, state.state, state.step) for state in killed] == [(1, "dead", 2), (0, "dead", 4)]
    look = modtrace.where(tmp_path)
    assert [(state.rank, state.state, state.step) for state in look.ranks] == [(0, "stopped", 6), (1, "stopped", 6)]
    assert len(look.older) == 4
    assert modtrace.where([killed[0].path]).sentence == "rank 1 died in no module, after step 2"
    assert [file.path.name for file in find_rank_recordings(tmp_path)] == ["job-0.modtrace", "job-1.modtrace"]


HOLD = """
import os, sys
from modtrace.ring import Kind, Ring
from modtrace.ring.slot_format import KIND_SHIFT

ring = Ring(64, sys.argv[1], {"pid": os.getpid(), "rank": 0, "host": "box"})
ring.names.thread("MainThread", 1, 1)
ring.make_writer()(Kind.FORWARD_ENTER << KIND_SHIFT | ring.names.name("Net", "Net", "Net"), 0)
print(os.getpid(), flush=True)
sys.stdin.readline()
if sys.argv[2] == "stop":
    ring.close()
os.kill(os.getpid(), 9)
"""
ISOLATE = ("unshare", "--pid", "--mount", "--uts", "--fork", "--kill-child", "--mount-proc")


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_a_process_of_another_pid_namespace_runs_as_long_as_it_holds_its_ring(end: str, tmp_path: Path) -> None:
    if sys.platform != "linux" or subprocess.run([*ISOLATE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespaces can be made here")
    ring = tmp_path / "run.modtrace"
    with subprocess.Popen(
        [*ISOLATE, sys.executable, "-c", HOLD, ring, end],
        env=python_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "1\n"  # its number in the namespace; here another process has that number
        alive = read_rank_state(ring)
        again = modtrace.ring.Ring(64, ring)
        process.communicate("\n")
    ended = read_rank_state(ring)

    assert (alive.state, alive.pid, alive.known_pid) == ("running", 1, False)
    assert [call.fqn for thread in alive.threads for call in thread.calls] == ["Net"]
    hung = alive._replace(now_ns=alive.now_ns + 3600 * 10**9)
    assert hung.seems_hung(hung.threads[0])
    assert ended.state == ("stopped" if end == "stop" else "dead")
    assert not ended.seems_hung(ended.threads[0])
    assert again.path == str(tmp_path / "run.1.modtrace")
    again.close()
    # A copy from the namespace does not show whether its process lives.
    ring.with_name("copy").write_bytes(ring.read_bytes())
    assert read_rank_state(ring.with_name("copy")).state == ("stopped" if end == "stop" else "unknown")
