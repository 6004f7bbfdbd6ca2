"""Collectives on a simulated device: tensors of C++, and a group whose collectives are kernels, as NCCL's are."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from modtrace.live.rank_state import read_rank_state
from modtrace.record_options import EngineName
from tests.support import fake_device
from tests.support.fake_streams import compile_fake_streams, compile_for_torch
from tests.support.forked_python import run_forked, start_forked
from tests.support.python_process import run_python
from tests.support.test_scale import PYTHON_IN_FULL

pytestmark = [
    pytest.mark.usefixtures("native_engine"),  # the same compiler and headers are needed
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed"),
]
MS = 1_000_000
SCRIPT = """
import ctypes, json, os, sys
import torch, torch.distributed as dist
import modtrace
from modtrace.timeline.decode.analysis import wall_clock
from tests.support import fake_device
from tests.support.fake_streams import FakeStreams

engine, scenario, streams_library, group_library, ring = sys.argv[1:]
fake_device.set_up()
fake_device.backend.initialized = True
streams = FakeStreams(streams_library, 123_456_789_000, 30.0)
library = ctypes.PyDLL(group_library)
library.device_tensor.restype = library.device_group.restype = ctypes.py_object
library.device_tensor.argtypes = [ctypes.c_int64]
library.device_group.argtypes = [ctypes.c_void_p, ctypes.c_int64]
library.set_kernel_ns.argtypes = [ctypes.c_int64]
launch = ctypes.cast(streams._library.fake_launch, ctypes.c_void_p)
on_device, on_cpu = library.device_tensor(5), torch.ones(3)
dist.Backend.register_backend("pretended", lambda *_: library.device_group(launch, 3_000_000), devices=["fake"])
dist.init_process_group("cpu:gloo,fake:pretended", store=dist.HashStore(), rank=0, world_size=1)

class Reduce(torch.nn.Module):
    def forward(self):
        dist.all_reduce(on_device)

def counted(recording):
    dist.all_reduce(on_device)
    dist.all_reduce(on_cpu)
    dist.all_reduce(on_device, async_op=True)
    dist.barrier()

def timed(recording):
    with streams.behind_a_kernel(10_000_000):
        Reduce()()
        dist.all_reduce(on_cpu)
        work = dist.all_reduce(on_device, async_op=True)
        dist.all_reduce(on_device, async_op=True)
        work.wait()
        Reduce()()

def hangs(recording):
    \"\"\"In a collective that another rank never comes to.\"\"\"
    reduce = Reduce()
    reduce()
    library.set_kernel_ns(3600 * 10**9)
    reduce()
    print("hangs", flush=True)
    sys.stdin.readline()
    os._exit(0)

with modtrace.record(ring=ring, engine=engine, device_times=engine == "native") as recording:
    globals()[scenario](recording)
timeline = recording.timeline()
clock = wall_clock(recording._require_capture().ring.read().records)
truth = [int(clock.to_other(torch.tensor([int(event.host_ns)]).numpy())[0]) for event in streams.timed]
print(json.dumps({
    "rows": [(r.operator, r.counter, r.device, r.nbytes, r.is_wait, r.done_ns) for r in timeline.collectives],
    "spans": [(s.fqn, s.end_ns - s.start_ns) for s in timeline.spans if s.track.startswith("gpu")],
    "truth": truth,
    "bound": timeline.metadata.get("device_clock_bound_ns"),
}))
"""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    reason = fake_device.missing()
    if reason is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("device")
    compile_fake_streams(folder / "streams.so")
    source = Path(__file__).parents[1] / "support" / "device_group.cpp"
    compile_for_torch(source, folder / "group.so", "c10", "torch_cpu", "torch_python")
    return folder / "streams.so", folder / "group.so"


def run(libraries: tuple[Path, Path], engine: str, scenario: str, tmp_path: Path) -> dict[str, Any]:
    done = run_forked("-c", SCRIPT, engine, scenario, *libraries, tmp_path / "run.modtrace")
    told: dict[str, Any] = json.loads(done.stdout)
    return told


@PYTHON_IN_FULL
def test_the_device_of_a_collective_is_known_and_all_are_counted_together(
    libraries: tuple[Path, Path], engine: EngineName, tmp_path: Path
) -> None:
    rows = run(libraries, engine, "counted", tmp_path)["rows"]

    assert [row[:4] for row in rows if not row[4]] == [
        *(["all_reduce", 0, "fake", 20], ["all_reduce", 1, "", 12], ["all_reduce", 2, "fake", 20]),
        ["barrier", 3, "", 0],
    ]


def test_device_times_include_the_completion_of_collectives(libraries: tuple[Path, Path], tmp_path: Path) -> None:
    told = run(libraries, "native", "timed", tmp_path)

    done = {counter: done_ns for _, counter, device, _, is_wait, done_ns in told["rows"] if device and not is_wait}
    # Events: the module's are 0, 3, 8 and 11; its collectives' 1, 2, 9 and 10; 4 and 5 start two that are waited for;
    # 6 and 7 are around the wait.
    assert len(told["truth"]) == 12
    assert sorted(done) == [0, 2, 3, 4]
    for counter, event in ((0, 2), (2, 7), (4, 10)):
        assert abs(done[counter] - told["truth"][event]) <= told["bound"]
    assert done[3] is None
    assert [name for name, _ in told["spans"]] == ["Reduce", "Reduce"]
    assert [ns for _, ns in told["spans"]] == pytest.approx([3 * MS, 3 * MS], abs=2 * told["bound"])


def test_where_says_in_which_collective_a_device_is(libraries: tuple[Path, Path], tmp_path: Path) -> None:
    ring = tmp_path / "run.modtrace"
    arguments = ("-W", "ignore", "-c", SCRIPT, "native", "hangs", *libraries, ring)
    with start_forked(*arguments, stdin=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "hangs\n"
        while True:
            assert process.poll() is None
            (stream,) = read_rank_state(ring).streams
            # Before that, the stream may be in the first collective, or not be read yet.
            if stream.is_known and stream.collective and stream.queued == 0:
                break
        shown = run_python("-m", "modtrace", "where", ring).stdout
        process.kill()
        process.wait()

    assert (stream.collective, stream.queued, stream.unread) == ("all_reduce", 0, 2)
    assert [(call.fqn, call.phase) for call in stream.calls] == [("Reduce", "forward")]
    assert "device 0, stream 0  forward Reduce, in all_reduce; 0 calls queued behind it" in shown
