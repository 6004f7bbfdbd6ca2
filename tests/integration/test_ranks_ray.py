"""A dataset asked on a Ray cluster, started here: the same answers as in processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from modtrace.ranks import find_rank_recordings
from modtrace.ranks.slow import find_slow_ranks
from tests.support.event_script import EventScript
from tests.support.made_job import Culprit, MadeJob, read_template
from tests.unit.test_ranks_slow import MS, write_steps

ray = pytest.importorskip("ray")
pytest.importorskip("duckdb")

from modtrace.ranks.pack import pack  # noqa: E402 (it needs pyarrow)
from modtrace.ranks.query import query_each_bucket  # noqa: E402


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.filterwarnings("ignore")  # Ray's own
@pytest.mark.usefixtures("cluster")
def test_ray_says_what_processes_say(tmp_path: Path) -> None:
    script = EventScript(1024, tmp_path / "one.modtrace", {"rank": 0, "pid": 1})
    write_steps(script, sharded=True)
    script.close()
    rings, dataset = tmp_path / "rings", tmp_path / "dataset"
    rings.mkdir()
    MadeJob(read_template(tmp_path / "one.modtrace"), 4, 24, [Culprit(2, "Net.first", "forward", 2 * MS)]).write(rings)
    pack(find_rank_recordings(rings), dataset, processes=1)

    found = find_slow_ranks(dataset, runner="ray")

    assert found.steps == find_slow_ranks(dataset).steps
    assert [(one.rank, one.is_slow) for one in found.late] == [(2, True)]
    counted = "select step, count(*) as n from spans group by step order by step"
    assert query_each_bucket(dataset, counted, runner="ray") == query_each_bucket(dataset, counted)
