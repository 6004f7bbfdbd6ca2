"""One rank of a job on gloo: collectives of each parallelism, recorded, and counted by torch.profiler beside that.

Run as `-m tests.support.collectives_job RANK RANKS STORE ENGINE SCENARIO…`; prints one JSON object per scenario.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import modtrace
from modtrace.ring.event_text import OPERATORS
from modtrace.timeline import launching_spans
from tests.support.own_output import keep_own_output

Step = Callable[[], object]


class Net(nn.Module):
    """Two layers in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> Any:
        return self.down(self.up(x).relu())


def data_parallel() -> Step:
    """DistributedDataParallel: its C++ reducer makes the collectives."""
    model = DistributedDataParallel(Net())
    return lambda: model(torch.ones(2, 8)).sum().backward()


def sharded() -> Step:
    """FSDP2."""
    model = Net()
    for module in (model.up, model.down, model):
        fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return lambda: model(torch.ones(2, 8)).sum().backward()


def tensor_parallel() -> Step:
    """Tensor parallelism, by functional collectives."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = parallelize_module(Net(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return lambda: model(torch.ones(2, 8)).sum().backward()


def point_to_point() -> Step:
    """Sends and receives around the ring, alone and in a batch."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % ranks, (rank - 1) % ranks

    def step() -> None:
        sent, received = torch.full((3,), float(rank)), torch.empty(3)
        work = dist.isend(sent, after)
        dist.recv(received, before)
        assert work is not None
        work.wait()
        both = [dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, received, before)]
        for work in dist.batch_isend_irecv(both):
            work.wait()

    return step


def subgroups() -> Step:
    """Collectives of the default group, and of one of the even and one of the odd ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group(list(range(first, ranks, 2))) for first in range(2)]

    def step() -> None:
        dist.all_reduce(torch.ones(4), group=groups[rank % 2])
        dist.broadcast(torch.ones(4), src=0)
        dist.all_gather([torch.empty(2) for _ in range(ranks)], torch.ones(2), async_op=True).wait()
        dist.barrier()

    return step


def pipeline() -> Step:
    """GPipe with one stage and one micro-batch per rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    stage = PipelineStage(nn.Linear(8, 8), rank, ranks, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, ranks, loss_fn=lambda output, target: (output - target).sum())

    def step() -> None:
        inputs = (torch.ones(2 * ranks, 8),) if rank == 0 else ()
        schedule.step(*inputs, target=torch.ones(2 * ranks, 8) if rank == ranks - 1 else None)

    return step


SCENARIOS = {
    make.__name__: make for make in (data_parallel, sharded, tensor_parallel, point_to_point, subgroups, pipeline)
}


def run(name: str, engine: Any, folder: Path) -> dict[str, Any]:
    """Record two steps, count their operators by torch.profiler, and return both."""
    step = SCENARIOS[name]()
    step()
    ring = folder / f"{name}-{dist.get_rank()}.modtrace"
    with modtrace.record(engine=engine, ring=ring) as recording:
        with torch.profiler.profile() as profile:
            for _ in range(2):
                step()
        dist.barrier()
    timeline = recording.timeline()
    made = Counter(
        event.name.removeprefix("c10d::").removesuffix("_")
        for event in profile.events() or []
        if event.name.startswith("c10d::") and event.name != "c10d::check_for_nan"
    )
    calls = [row for row in timeline.collectives if not row.is_wait]
    path = folder / f"{name}-{dist.get_rank()}.json"
    timeline.save(path)
    launched_by = launching_spans(timeline).tolist()
    made["barrier"] += 1
    read_back, from_ring = modtrace.load(path), modtrace.load(ring)
    # 66 MB on the disk for each scenario of each rank, while the suite runs.
    ring.unlink()
    return {
        "made": {OPERATORS.get(operator, operator): count for operator, count in made.items()},
        "seen": dict(Counter(row.operator for row in calls)),
        "counters": [(row.group, row.counter) for row in calls if row.peer is None],
        "peers": sorted((row.operator, row.peer, row.counter) for row in calls if row.peer is not None),
        "without_done": sum(row.done_ns is None for row in calls if row.peer is None),
        "unknown_waits": sum(row.is_wait and row.counter is None for row in timeline.collectives),
        "waits": sum(row.is_wait for row in timeline.collectives),
        "launchers": sorted({timeline.spans[span].fqn for span in launched_by if span >= 0}),
        "groups": {group.name: list(group.ranks) for group in timeline.collectives.groups},
        "reloaded": list(read_back.collectives) == list(timeline.collectives),
        "from_ring": list(from_ring.collectives) == list(timeline.collectives),
    }


def main() -> None:
    rank, ranks, store, engine, *names = sys.argv[1:]
    keep_own_output()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(ranks))
    for name in names:
        print(json.dumps({"scenario": name, **run(name, engine, Path(store).parent)}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
