"""SQL over a dataset, by DuckDB: over all of it, or over each bucket apart."""

from __future__ import annotations

import glob
import os
from typing import Any

import duckdb
import pyarrow as pa

from ..._errors import ModtraceError
from .dataset_folder import TABLES
from .dataset_tables import DatasetTables
from .engines import map_buckets

__all__ = ["query", "query_bucket", "query_each_bucket"]


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
    dataset: str | os.PathLike[str], sql: str, then: str | None = None, *, engine: str = "local"
) -> pa.Table:
    """Return what SQL says of each bucket of steps, below each other in the order of the steps.

    Args:
        dataset: its folder.
        sql: over the tables, which hold one bucket each time.
        then: SQL over all these results, as the table `results`.
        engine: where the buckets are asked, see `check_engine`.

    Raises:
        ModtraceError: it is no dataset, the SQL is wrong, or there is no such engine.
    """
    tables = DatasetTables(dataset)
    found = dict(map_buckets(query_bucket, os.fspath(dataset), tables.buckets(), sql, engine=engine))
    if not found:
        raise ModtraceError(f"{dataset}: nothing is in it, so there is no bucket to ask")
    results = pa.concat_tables([found[bucket] for bucket in sorted(found)], promote_options="permissive")
    if then is None:
        return results
    connection = duckdb.connect()
    connection.register("results", results)
    return _run(connection, then)


def _connect(tables: DatasetTables, steps: tuple[int, int] | None) -> Any:
    connection = duckdb.connect()
    only = "" if steps is None else f" WHERE step >= {steps[0]} AND step < {steps[1]}"
    try:
        for table in TABLES:
            files = ", ".join("'" + glob.escape(str(path)).replace("'", "''") + "'" for path in tables.files(table))
            # Texts of ours in SQL: the names of tables, paths with their quotes doubled, and numbers.
            connection.execute(f"CREATE VIEW {table} AS SELECT * FROM read_parquet([{files}]){only}")  # noqa: S608
    except duckdb.Error as error:
        # Behind its first line stands our SQL.
        text = str(error).partition("\n")[0]
        raise ModtraceError(f"{tables.path}: cannot be read: {text}; delete it and pack again") from error
    ranks = pa.Table.from_pylist([{**entry, "source": None} for entry in tables.ranks]).drop_columns(["source"])
    connection.register("ranks", ranks)
    return connection


def _run(connection: Any, sql: str) -> pa.Table:
    try:
        relation = connection.sql(sql)
        if relation is None:
            raise ModtraceError("the SQL returns nothing; it should be one SELECT")
        return relation.to_arrow_table()
    except duckdb.Error as error:
        raise ModtraceError(f"the SQL cannot be run: {error}") from error
