"""Traces of Meta's MTIA: what its streams do counts as work of a GPU, but for what they wait for and signal."""

from __future__ import annotations

from typing import Any

from tests.support.kineto import recording, x
from tests.support.overlaid import overlaid

CALLS = recording(("Net", 1000, 5000, 0), ("a: Linear", 1100, 2000, 1))


def on_stream(name: str, start: int, end: int, **args: Any) -> dict[str, Any]:
    return x("mtia_ccp_events", name, start, end, pid=9, tid=4, **args)


def test_kernels_and_copies_count_and_belong_to_the_calls_that_asked_for_them() -> None:
    events = [
        x("cpu_op", "aten::add", 1200, 1300, Sequence_number=1),
        x("mtia_runtime", "runFunction - job_prep_and_submit_for_execution", 1210, 1290, correlation=6145),
        x("mtia_runtime", "recordEvent", 2300, 2310, correlation=21600000),
        on_stream("add-dtype_Float", 6000, 6400, correlation=6145, stream=1, column="0", row="0"),
        on_stream("dma_request", 6400, 6420, stream=1, direction="DEVICE_TO_HOST", size=2048),
        on_stream("event_record", 6420, 6421, stream=1, seq_num=259094),
        on_stream("event_wait", 6500, 9000, stream=1, wait_on_stream=104, seq_num=550218),
    ]
    summary = overlaid(CALLS, *events).summary
    assert summary.gpu is not None
    assert tuple(summary.gpu) == (400, 20, 0, 0, 0)
    assert {row.fqn: (row.kernel_ns, row.memcpy_ns) for row in summary.rows if row.gpu_self_ns or row.memcpy_ns} == {
        "Net.a": (400, 0),
        "(no module: no correlation id)": (0, 20),
    }
