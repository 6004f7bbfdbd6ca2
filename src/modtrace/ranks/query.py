"""SQL over a dataset, or over each of its buckets in processes, by DuckDB."""

from __future__ import annotations

import glob
import os
from functools import partial
from typing import Any

import pyarrow as pa

from .._errors import ModtraceError
from .._system.processes import map_in_processes, processor_count
from .dataset_tables import TABLES, DatasetTables


def query(dataset: str | os.PathLike[str], sql: str) -> pa.Table:
    """Return what SQL says of the tables `spans`, `collectives`, `steps` and `ranks`.

    Raises:
        ModtraceError: it is no dataset, or the SQL is wrong.
    """
    return _run(_connect(DatasetTables(dataset), None), sql)


def _query_bucket(dataset: str, sql: str, steps: tuple[int, int]) -> pa.Table:
    return _run(_connect(DatasetTables(dataset), steps), sql)


def query_each_bucket(dataset: str | os.PathLike[str], sql: str, then: str | None = None) -> pa.Table:
    """Return what SQL says of each bucket of steps, below each other in the order of the steps.

    Args:
        dataset: its folder.
        sql: over the tables, which hold one bucket each time.
        then: SQL over all these results, as the table `results`.

    Raises:
        ModtraceError: it is no dataset, or the SQL is wrong.
    """
    tables = DatasetTables(dataset)
    ask = partial(_query_bucket, os.fspath(dataset), sql)
    found = dict(map_in_processes(ask, tables.buckets(), processor_count()))
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
