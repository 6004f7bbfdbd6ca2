"""The same function for each bucket of a dataset, in processes or as tasks of a Ray cluster; and SQL, by DuckDB."""

from __future__ import annotations

import glob
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa

from .._errors import ModtraceError
from .._system.processes import map_in_processes, processor_count
from .dataset_tables import TABLES, DatasetTables

Result = TypeVar("Result")
Bucket = tuple[int, int]


def check_runner(runner: str) -> None:
    """Check the name of a runner: `local`, `ray` (the cluster that this machine is in) or `ray://HOST:PORT`.

    Raises:
        ModtraceError: it is none of them, or Ray is not installed.
    """
    if runner != "local" and runner != "ray" and not runner.startswith("ray://"):
        raise ModtraceError(f"there is no runner {runner!r}; there are local, ray and ray://HOST:PORT")
    if runner != "local" and importlib.util.find_spec("ray") is None:
        raise ModtraceError("Ray is not installed; install the version that the cluster runs (pip install ray)")


def map_buckets(
    function: Callable[..., Result], dataset: str, buckets: Sequence[Bucket], *arguments: Any, runner: str = "local"
) -> Iterator[tuple[Bucket, Result]]:
    """Yield what a function returns for each bucket, as they are done.

    Args:
        function: called with the dataset's path, the first step of a bucket, the one behind its last, and `arguments`;
            of a module that can be imported where it runs.
        dataset: its path; on a cluster a path that all of it can read.
        buckets: which.
        arguments: passed on.
        runner: see `check_runner`.
    """
    check_runner(runner)
    if runner != "local":
        yield from _by_ray(function, dataset, buckets, arguments, runner)
        return
    yield from map_in_processes(partial(_call, function, dataset, arguments), buckets, processor_count())


def _call(function: Callable[..., Result], dataset: str, arguments: Sequence[Any], bucket: Bucket) -> Result:
    return function(dataset, *bucket, *arguments)


def _by_ray(
    function: Callable[..., Result], dataset: str, buckets: Sequence[Bucket], arguments: Sequence[Any], runner: str
) -> Iterator[tuple[Bucket, Result]]:
    ray: Any = importlib.import_module("ray")
    started = not ray.is_initialized()
    if started:
        ray.init(address="auto" if runner == "ray" else runner, log_to_driver=False)
    try:
        task = ray.remote(function)
        left = {task.remote(os.path.abspath(dataset), *bucket, *arguments): bucket for bucket in buckets}
        while left:
            ready, _ = ray.wait(list(left))
            for done in ready:
                yield left.pop(done), ray.get(done)
    finally:
        if started:
            ray.shutdown()


def query(dataset: str | os.PathLike[str], sql: str) -> pa.Table:
    """Return what SQL says of the tables `spans`, `collectives`, `steps` and `ranks`.

    Raises:
        ModtraceError: it is no dataset, or the SQL is wrong.
    """
    return _run(_connect(DatasetTables(dataset), None), sql)


def query_bucket(dataset: str, first: int, last: int, sql: str) -> pa.Table:
    """Return what SQL says of the steps from `first` to before `last`."""
    return _run(_connect(DatasetTables(dataset), (first, last)), sql)


def query_each_bucket(
    dataset: str | os.PathLike[str], sql: str, then: str | None = None, *, runner: str = "local"
) -> pa.Table:
    """Return what SQL says of each bucket of steps, below each other in the order of the steps.

    Args:
        dataset: its folder.
        sql: over the tables, which hold one bucket each time.
        then: SQL over all these results, as the table `results`.
        runner: where the buckets are asked, see `check_runner`.

    Raises:
        ModtraceError: it is no dataset, the SQL is wrong, or there is no such runner.
    """
    tables = DatasetTables(dataset)
    found = dict(map_buckets(query_bucket, os.fspath(dataset), tables.buckets(), sql, runner=runner))
    if not found:
        raise ModtraceError(f"{dataset}: nothing is in it, so there is no bucket to ask")
    results = pa.concat_tables([found[bucket] for bucket in sorted(found)], promote_options="permissive")
    if then is None:
        return results
    import duckdb

    connection = duckdb.connect()
    connection.register("results", results)
    return _run(connection, then)


def _connect(tables: DatasetTables, steps: tuple[int, int] | None) -> Any:
    import duckdb

    connection = duckdb.connect()
    only = "" if steps is None else f" WHERE step >= {steps[0]} AND step < {steps[1]}"
    try:
        for table in TABLES:
            files = ", ".join("'" + glob.escape(str(path)).replace("'", "''") + "'" for path in tables.files(table))
            # Texts of ours in SQL: the names of tables, paths with their quotes doubled, and numbers.
            connection.execute(f"CREATE VIEW {table} AS SELECT * FROM read_parquet([{files}]){only}")  # noqa: S608
    except duckdb.Error as error:
        # The lines after the first are our SQL.
        text = str(error).partition("\n")[0]
        raise ModtraceError(f"{tables.path}: cannot be read: {text}; delete it and pack again") from error
    ranks = pa.Table.from_pylist([entry._asdict() | {"source": None} for entry in tables.ranks])
    connection.register("ranks", ranks.drop_columns(["source"]))
    return connection


def _run(connection: Any, sql: str) -> pa.Table:
    import duckdb

    try:
        relation = connection.sql(sql)
        if relation is None:
            raise ModtraceError("the SQL returns nothing; it should be one SELECT")
        return relation.to_arrow_table()
    except duckdb.Error as error:
        raise ModtraceError(f"the SQL cannot be run: {error}") from error
