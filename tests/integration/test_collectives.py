"""Collectives on a timeline are those that were made, as counted by torch.profiler; on 2, 4 and 8 ranks of gloo."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.collectives_job import SCENARIOS
from tests.support.forked_python import start_forked

TIMEOUT_S = 540
"""Long, as eight ranks take turns on a machine with few cores."""

pytestmark = pytest.mark.timeout(TIMEOUT_S + 60)

UNSEEN_BY_PYTHON = {
    "data_parallel": {"all_reduce", "broadcast"},
    "tensor_parallel": {"all_reduce"},
}
"""Collectives that C++ starts by itself: DistributedDataParallel's reducer, and functional collectives."""

Result = dict[str, Any]


def run_job(folder: Path, engine: str, ranks: int) -> dict[tuple[str, int], Result]:
    """Run all scenarios, and return the result of each rank and scenario."""
    outputs = [folder / f"{rank}.out" for rank in range(ranks)]
    processes = []
    for rank, path in enumerate(outputs):
        with path.open("wb") as out, path.with_suffix(".err").open("wb") as err:
            arguments = ("-W", "ignore", "-m", "tests.support.collectives_job", rank, ranks, folder / "store", engine)
            processes.append(start_forked(*arguments, *SCENARIOS, stdout=out, stderr=err))
    try:
        for process, path in zip(processes, outputs, strict=True):
            assert process.wait(TIMEOUT_S) == 0, path.with_suffix(".err").read_text()
    finally:
        for process in processes:
            process.kill()
            process.wait()
    by_scenario: dict[tuple[str, int], Result] = {}
    for rank, path in enumerate(outputs):
        results = [json.loads(line) for line in path.read_text().splitlines()]
        by_scenario.update(((result["scenario"], rank), result) for result in results)
    return by_scenario


class Job:
    def __init__(self, engine: str, ranks: int, results: dict[tuple[str, int], Result]) -> None:
        self.engine, self.ranks, self._results = engine, ranks, results

    def of(self, scenario: str) -> list[Result]:
        """Return each rank's result of a scenario."""
        return [self._results[scenario, rank] for rank in range(self.ranks)]


JOBS = [
    pytest.param(("native", 2), id="native-2"),
    pytest.param(("python", 2), id="python-2"),
    pytest.param(("native", 4), id="native-4", marks=pytest.mark.full),
    pytest.param(("native", 8), id="native-8", marks=pytest.mark.full),
]


@pytest.fixture(scope="module", params=JOBS)
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Job:
    engine, ranks = request.param
    if engine == "native":
        request.getfixturevalue("native_engine")
    return Job(engine, ranks, run_job(tmp_path_factory.mktemp("job"), engine, ranks))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_collectives_seen_are_those_made(job: Job, scenario: str) -> None:
    unseen = UNSEEN_BY_PYTHON.get(scenario, set()) if job.engine == "python" else set()
    for result in job.of(scenario):
        assert result["seen"] == {op: count for op, count in result["made"].items() if op not in unseen}
        assert len(result["seen"]) > (scenario in UNSEEN_BY_PYTHON and job.engine == "native")


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_counters_of_a_group_run_from_0_and_join_ranks(job: Job, scenario: str) -> None:
    of_group: dict[str, set[int]] = {}
    for result in job.of(scenario):
        for group in {group for group, _ in result["counters"]}:
            counters = [counter for name, counter in result["counters"] if name == group]
            assert counters == [*range(len(counters))]
            of_group.setdefault(group, set()).add(len(counters))
    assert all(len(counts) == 1 for counts in of_group.values())


@pytest.mark.parametrize("scenario", ["point_to_point", "pipeline"])
def test_the_nth_send_of_a_rank_is_the_nth_receive_of_its_peer(job: Job, scenario: str) -> None:
    results = job.of(scenario)
    sent = sorted((rank, peer, n) for rank, r in enumerate(results) for op, peer, n in r["peers"] if op == "send")
    received = sorted((peer, rank, n) for rank, r in enumerate(results) for op, peer, n in r["peers"] if op == "recv")
    assert sent == received
    assert sent


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_saved_collectives_are_those_of_the_recording_and_of_its_ring(job: Job, scenario: str) -> None:
    assert all(result["reloaded"] and result["from_ring"] for result in job.of(scenario))


def test_every_wait_that_python_calls_is_for_a_known_collective(job: Job) -> None:
    for scenario in SCENARIOS:
        assert [result["unknown_waits"] for result in job.of(scenario)] == [0] * job.ranks


def test_groups_have_their_global_ranks(job: Job) -> None:
    for rank, result in enumerate(job.of("subgroups")):
        own = [*range(rank % 2, job.ranks, 2)]
        assert sorted(result["groups"].values()) == sorted([own, [*range(job.ranks)]])


def test_modules_launch_collectives(job: Job) -> None:
    launchers = [result["launchers"] for result in job.of("sharded")]
    assert launchers == [["Net.down", "Net.up"]] * job.ranks
    if job.engine == "native":
        expected = ["DistributedDataParallel", "Net.up"]
        assert [result["launchers"] for result in job.of("data_parallel")] == [expected] * job.ranks
        assert [result["launchers"] for result in job.of("tensor_parallel")] == [["Net.down"]] * job.ranks


def test_the_native_engine_knows_when_collectives_are_complete(job: Job) -> None:
    if job.engine == "native":
        for scenario in ("data_parallel", "tensor_parallel", "subgroups"):
            assert [result["without_done"] for result in job.of(scenario)] == [0] * job.ranks
