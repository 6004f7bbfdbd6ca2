"""Collectives of one process under torch's modes, and the state that a recording leaves behind."""

from __future__ import annotations

import json

import pytest

from modtrace.record_options import EngineName
from tests.support.forked_python import run_forked

SCRIPT = """
import json, logging, sys, torch, torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor.debug import CommDebugMode
import modtrace
from tests.support.own_output import keep_own_output

keep_own_output()
engine = sys.argv[1]
messages = []
handler = logging.Handler()
handler.emit = lambda record: messages.append(record.getMessage())
logging.getLogger("modtrace").addHandler(handler)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
work, group = torch._C._distributed_c10d.Work, torch._C._distributed_c10d.ProcessGroup

def recorded(run):
    with modtrace.record(engine=engine) as recording:
        run()
    rows = list(recording.timeline().collectives)
    return [(row.operator, row.counter) for row in rows if not row.is_wait], sum(row.is_wait for row in rows)

def plain():
    dist.all_reduce(torch.ones(3))
    dist.barrier()

def debugged():
    with CommDebugMode() as mode:
        functional.all_reduce(torch.ones(3), "sum", dist.group.WORLD).wait()
        dist.all_reduce(torch.ones(3))
    assert mode.get_total_counts() == 2, mode.get_total_counts()

def without_gradients():
    with torch.no_grad():
        dist.all_reduce(torch.ones(3))

def inference():
    with torch.inference_mode():
        for _ in range(2):
            dist.all_reduce(torch.ones(3))

def fake():
    with FakeTensorMode():
        functional.all_reduce(torch.ones(3), "sum", dist.group.WORLD)

by_mode = {run.__name__: recorded(run) for run in (plain, debugged, without_gradients, inference, fake)}
# Wrappers are put there once, by the first recording.
before = [vars(work)["wait"], vars(group)["allreduce"]]
by_mode["again"] = recorded(plain)
assert [vars(work)["wait"], vars(group)["allreduce"]] == before
by_mode["messages"] = messages
print(json.dumps(by_mode))
"""


@pytest.fixture(scope="module")
def by_mode(engine: EngineName) -> dict[str, object]:
    printed: dict[str, object] = json.loads(run_forked("-c", SCRIPT, engine).stdout)
    return printed


def test_each_recording_counts_from_0_and_wraps_nothing_again(by_mode: dict[str, object]) -> None:
    assert by_mode["plain"] == by_mode["again"] == [[["all_reduce", 0], ["barrier", 1]], 2]


def test_a_mode_that_sees_operators_again_makes_none_twice(by_mode: dict[str, object], engine: EngineName) -> None:
    functional = 0 if engine == "python" else 1
    calls = [["all_reduce", number] for number in range(1 + functional)]
    assert by_mode["debugged"] == [calls, 1 + functional]


def test_collectives_without_gradients_are_seen(by_mode: dict[str, object]) -> None:
    assert by_mode["without_gradients"] == [[["all_reduce", 0]], 1]


def test_collectives_in_inference_mode_are_seen(by_mode: dict[str, object]) -> None:
    assert by_mode["inference"] == [[["all_reduce", 0], ["all_reduce", 1]], 2]


def test_collectives_unseen_by_the_python_engine_are_named_once(by_mode: dict[str, object], engine: EngineName) -> None:
    messages = [str(message) for message in by_mode["messages"]]  # type: ignore[attr-defined]
    assert ["the Python engine does not see the collectives" in message for message in messages] == [True] * (
        engine == "python"
    )


def test_collectives_of_fake_tensors_are_not_recorded(by_mode: dict[str, object]) -> None:
    assert by_mode["fake"] == [[], 0]
