"""The operator by which compiled graphs of torch 2.15 wait for several collectives; older versions get a stand-in."""

from __future__ import annotations

import json

import pytest

from tests.support.forked_python import run_forked

SCRIPT = """
import json, sys
import torch
import torch.distributed as dist
import modtrace
from torch.distributed._functional_collectives import all_reduce

library = torch.library.Library("_c10d_functional", "FRAGMENT")
if not hasattr(torch.ops._c10d_functional, "wait_tensors"):
    library.define("wait_tensors(Tensor[] tensors) -> Tensor[]")
    library.impl("wait_tensors", lambda tensors: [tensor.clone() for tensor in tensors], "CPU")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
with modtrace.record(engine="native") as recording:
    made = [torch.ops._c10d_functional.all_reduce(torch.ones(n), "sum", dist.group.WORLD.group_name) for n in (2, 3)]
    done = torch.ops._c10d_functional.wait_tensors(made)
rows = recording.timeline().collectives
rows = [[row.operator, row.counter, row.is_wait] for row in rows if row.complete]
print(json.dumps([[tensor.tolist() for tensor in done], rows]))
"""


@pytest.mark.usefixtures("native_engine")
def test_waiting_for_several_collectives_at_once_is_a_wait() -> None:
    # gloo of torch 2.8 prints a line first.
    done, rows = json.loads(run_forked("-W", "ignore", "-c", SCRIPT).stdout.splitlines()[-1])

    assert done == [[1, 1], [1, 1, 1]]
    # The wait is for the collective of the first tensor.
    assert rows == [["all_reduce", 0, False], ["all_reduce", 1, False], ["all_reduce", 0, True]]
