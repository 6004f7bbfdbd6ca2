"""Both engines on collectives of tensors that are on a device: real ones of C++, and a group that computes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from modtrace.track.engine import EngineName
from tests.support.fake_streams import compile_for_torch
from tests.support.python_process import run_python

pytestmark = [
    pytest.mark.usefixtures("native_engine"),  # as the same compiler and headers are needed
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed"),
]
SCRIPT = """
import ctypes, json, sys
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeProcessGroup
import modtrace

library = ctypes.PyDLL(sys.argv[1])
library.device_tensor.restype, library.device_tensor.argtypes = ctypes.py_object, [ctypes.c_int64]
on_device, on_cpu = library.device_tensor(5), torch.ones(3)
make = getattr(FakeProcessGroup, "_create_internal", FakeProcessGroup)
device = on_device.device.type
dist.Backend.register_backend("accelerator", lambda *arguments: make(0, 1), devices=[device])
dist.init_process_group(f"cpu:gloo,{device}:accelerator", store=dist.HashStore(), rank=0, world_size=1)
with modtrace.record(engine=sys.argv[2]) as recording:
    dist.all_reduce(on_device)
    dist.all_reduce(on_cpu)
    dist.all_reduce(on_device, async_op=True)
    dist.broadcast(on_device, 0)
    dist.all_gather([on_device], on_device)
    dist.barrier()
rows = [row for row in recording.timeline().collectives if not row.is_wait]
print(json.dumps([(row.operator, row.counter, row.device, row.nbytes) for row in rows]))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("device") / "device_tensor.so"
    source = Path(__file__).parents[1] / "support" / "device_tensor.cpp"
    compile_for_torch(source, path, "c10", "torch_cpu", "torch_python")
    return path


def test_which_device_runs_a_collective_is_told_and_they_are_counted_together(
    library: Path, engine: EngineName
) -> None:
    printed = run_python("-W", "ignore", "-c", SCRIPT, library, engine).stdout

    device = "privateuseone"
    assert json.loads(printed) == [
        ["all_reduce", 0, device, 20],
        ["all_reduce", 1, "", 12],
        ["all_reduce", 2, device, 20],
        ["broadcast", 3, device, 20],
        ["all_gather", 4, device, 20],
        ["barrier", 5, "", 0],
    ]
