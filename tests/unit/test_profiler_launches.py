"""Kernels are matched to launches of their own process, even if several processes in a trace use one correlation id."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modtrace.profiler.device_work import find_launches
from modtrace.profiler.event_collector import EventCollector
from modtrace.timeline.summary import summarize
from tests.support.kineto import GPU_TRACES, PID, TID, recording, x
from tests.support.overlaid import overlaid

OTHER = PID + 50
Event = dict[str, Any]


def launch(pid: int, at: int, correlation: int, name: str = "cudaLaunchKernel", **args: Any) -> Event:
    return x("cuda_runtime", name, at, at + 5, pid=pid, tid=pid + 1, correlation=correlation, **args)


def kernel(device: int, start: int, correlation: int, **args: Any) -> Event:
    return x("kernel", "gemm", start, start + 10, pid=device, tid=7, correlation=correlation, **args)


def launch_starts(*events: Event) -> list[int | None]:
    """Return for each kernel, in the order of the events, the start of its launch."""
    collector = EventCollector()
    collector.add(json.loads(json.dumps(events)))
    read = collector.events()
    rows = find_launches(read)
    return [int(read.launches.start_ns[row]) if row >= 0 else None for row in rows.tolist()]


def test_a_launch_that_starts_after_the_work_is_of_another_process() -> None:
    """The second process's launches are first in the file but later in time."""
    second = [launch(OTHER, 5000 + at, number) for number, at in enumerate((0, 100))]
    first = [launch(PID, 1000 + at, number) for number, at in enumerate((0, 100))]
    work = [kernel(0, 1050, 0), kernel(0, 1150, 1), kernel(1, 5050, 0), kernel(1, 5150, 1)]
    assert launch_starts(*second, *first, *work) == [1000, 1100, 5000, 5100]


def test_a_device_with_a_long_queue_works_for_one_process() -> None:
    """The first device works for the first process; most kernels run after both processes have launched."""
    launches = [
        *(launch(PID, 1000 + at, at) for at in (0, 10, 20)),
        *(launch(OTHER, 1030 + at, at) for at in (0, 10, 20)),
    ]
    work = [kernel(0, 1005, 0), kernel(0, 9000, 10), kernel(0, 9100, 20)]
    work += [kernel(1, 1040, 0), kernel(1, 9000, 10), kernel(1, 9100, 20)]
    assert launch_starts(*launches, *work) == [1000, 1010, 1020, 1030, 1040, 1050]


def test_devices_and_processes_are_paired_in_order_without_other_evidence() -> None:
    launches = [launch(OTHER, 1001, 1), launch(PID, 1000, 1)]
    assert launch_starts(*launches, kernel(1, 8000, 1), kernel(0, 9000, 1)) == [1001, 1000]


def test_processes_that_share_a_device_are_distinguished_by_external_ids() -> None:
    launches = [launch(PID, 1000, 1, External_id=5), launch(OTHER, 1010, 1, External_id=6)]
    work = [kernel(0, 1100, 1, External_id=6), kernel(0, 1200, 1, External_id=5)]
    assert launch_starts(*launches, *work) == [1010, 1000]


def test_without_external_ids_the_nearest_launch_counts() -> None:
    launches = [launch(PID, 1000, 1), launch(OTHER, 1010, 1), launch(PID, 2000, 2), launch(OTHER, 3000, 2)]
    work = [kernel(0, 1005, 1), kernel(0, 1200, 1), kernel(0, 2001, 2), kernel(0, 3001, 2)]
    work += [kernel(0, 3500, 3)]
    launches += [launch(PID, 3400, 3), launch(OTHER, 3600, 3), launch(PID, 4000, 4), launch(OTHER, 3900, 4)]
    assert launch_starts(*launches, *work, kernel(0, 3950, 4)) == [1000, 1010, 2000, 3000, 3400, 3900]


def test_a_graph_launch_has_many_kernels() -> None:
    launches = [
        *(launch(PID, 1000, 1, "cudaGraphLaunch"), launch(OTHER, 3000, 1, "cudaGraphLaunch")),
        *(launch(PID, 5000, 2), launch(OTHER, 6000, 2)),
    ]
    work = [kernel(0, 1100, 1), kernel(0, 1200, 1), kernel(0, 3100, 1), kernel(0, 3200, 1), kernel(0, 5500, 2)]
    assert launch_starts(*launches, *work, kernel(0, 6001, 2)) == [1000, 1000, 3000, 3000, 5000, 6000]


def test_work_without_its_launch_in_the_trace_has_no_process() -> None:
    """Device 1 works for the second process, which launched its last kernel before the profiler began."""
    launches = [launch(PID, 1000 + at, at) for at in range(1, 5)] + [
        launch(OTHER, 1500 + at, at) for at in range(20, 40)
    ]
    work = [kernel(0, 1010 + at, at) for at in range(1, 5)] + [kernel(1, 1600 + at, at) for at in range(20, 40)]
    assert launch_starts(*launches, *work, kernel(1, 1700, 3))[-1] is None


def test_in_a_trace_of_one_process_the_id_is_enough() -> None:
    assert launch_starts(launch(PID, 1000, 1), kernel(0, 990, 1), kernel(1, 2000, 1), kernel(0, 3000, 2)) == [
        1000,
        1000,
        None,
    ]


def test_a_merge_counts_launches_of_the_other_process_separately() -> None:
    calls = recording(("Net", 1000, 5000, 0), ("a: Linear", 1100, 2000, 1))
    ours = x("cuda_runtime", "cudaLaunchKernel", 1500, 1505, tid=TID, correlation=1)
    theirs = launch(OTHER, 1510, 1)
    ran = x("cpu_op", "aten::op", 1490, 1600, Sequence_number=1)
    seen = overlaid(calls, theirs, ours, ran, kernel(0, 1507, 1), kernel(1, 1530, 1))
    rows = summarize(seen.unique_thread_timeline).rows
    assert {row.fqn: row.kernel_ns for row in rows if row.kernel_ns} == {
        "Net.a": 10,
        "(no module: launched by another process)": 10,
    }
    assert seen.unattributed == {"launched by another process": 1}


SKEWS = pytest.mark.parametrize(
    "skew_us", [0.5, -700.0, *(pytest.param(skew, marks=pytest.mark.full) for skew in (40.0, 2_000.0, 3_000_000.0))]
)


@pytest.mark.usefixtures("gpu_traces")
@pytest.mark.parametrize("path", GPU_TRACES, ids=lambda path: path.name)
@pytest.mark.parametrize("shared", [False, True], ids=["own devices", "one device"])
@SKEWS
def test_two_ranks_of_a_real_trace_keep_their_own_kernels(path: Path, skew_us: float, shared: bool) -> None:
    """A rank beside a copy of itself, with another pid and later. Each kernel finds its own rank's launch."""
    events = [e for e in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"] if e.get("ph") == "X"]
    gpu = ("kernel", "gpu_memcpy", "gpu_memset")
    events = [e for e in events if e.get("cat") in (*gpu, "cuda_runtime", "cuda_driver")]
    random = np.random.default_rng(1)
    later = []
    for event in events:
        copy = json.loads(json.dumps(event))
        copy["ts"] = event["ts"] + skew_us
        copy["pid"] = event["pid"] if shared and event["cat"] in gpu else event["pid"] + 1
        # Launches in another order have other external ids.
        if shared and "External id" in copy["args"]:
            copy["args"]["External id"] += 1_000_000
        later.append(copy)
    # The rank of each event: 0 for the first rank, 1 for the second. Rows are in the order of the events.
    both = [*((event, 0) for event in events), *((event, 1) for event in later)]
    both = [both[index] for index in random.permutation(len(both)).tolist()]
    collector = EventCollector()
    collector.add([event for event, _ in both])
    read = collector.events()
    work = [(e["args"]["correlation"], rank) for e, rank in both if e["cat"] in gpu]
    launches = [
        (e["args"]["correlation"], rank) for e, rank in both if e["cat"] not in gpu and "correlation" in e["args"]
    ]
    assert len(work) == len(read.work)
    assert len(launches) == len(read.launches)
    assert [launches[row] for row in find_launches(read).tolist()] == work
