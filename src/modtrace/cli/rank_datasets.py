"""The commands of `modtrace ranks` that make datasets and ask them."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
from collections.abc import Sequence
from decimal import Decimal
from typing import TYPE_CHECKING

import click

from .._errors import ModtraceError
from .._terminal import counted
from .options import TableFormat
from .output import echo, show_count, show_status

if TYPE_CHECKING:
    import pyarrow as pa

    from .._tables import CellKind
    from ..ranks import RankFile

__all__ = ["engine_option", "find_readable", "pack_command", "query_command", "require_extra"]

engine_option = click.option(
    "--engine",
    default="local",
    show_default=True,
    metavar="ENGINE",
    help="Where buckets are looked at: local (processes), ray (the cluster of this machine) or ray://HOST:PORT.",
)


def require_extra(*modules: str) -> None:
    """Check that what the extra `ranks` installs is there.

    Raises:
        ModtraceError: it is not; says what to run.
    """
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        raise ModtraceError(f"this needs {' and '.join(missing)}; run: pip install 'modtrace[ranks]'")


def find_readable(folder: str) -> list[RankFile]:
    """Return the recordings of ranks in a folder, and say which files are left out, and why.

    Raises:
        ModtraceError: there is none, or two are of one rank.
    """
    from ..ranks import find_rank_files

    return find_rank_files(folder, lambda error: echo(f"modtrace: left out: {error}", err=True))


@click.command("pack", short_help="Write all ranks as Parquet files.")
@click.argument("folder", type=click.Path(), metavar="DIR")
@click.option("-o", "--output", type=click.Path(), required=True, metavar="DATASET", help="A folder, new or begun.")
@click.option(
    "--steps-per-bucket",
    type=click.IntRange(1),
    metavar="N",
    default=10,
    show_default=True,
    help="Steps that lie together.",
)
@click.option("--processes", type=click.IntRange(1), metavar="N", help="Pack with N processes; else one per processor.")
def pack_command(folder: str, output: str, steps_per_bucket: int, processes: int | None) -> None:
    """Write the spans, collectives and steps of the ranks in DIR as a dataset of Parquet files.

    Run it again where it was cut off, or where ranks were added: what is packed already stays. Each file holds some
    ranks, and in it a row group some steps, so that a question about steps reads only these.
    """
    require_extra("pyarrow")
    from ..ranks.dataset.pack import pack

    with show_status(f"looking at {folder}"):
        files = find_readable(folder)
    with show_count("packing ranks", len(files)) as progress:
        done = pack(files, output, steps_per_bucket=steps_per_bucket, processes=processes, progress=progress)
    there = f" ({done.ranks - done.packed:,} were there)" if done.packed < done.ranks else ""
    each = f", {done.nbytes / done.spans:.1f} bytes each" if done.spans else ""
    echo(f"{counted(done.ranks, 'rank')}{there} and {counted(done.spans, 'span')}{each} are in {output}", err=True)


@click.command("query", short_help="Ask a dataset by SQL.")
@click.argument("dataset", type=click.Path())
@click.argument("sql")
@click.option(
    "--format",
    "output_format",
    type=click.Choice(["table", "markdown", "csv", "json"]),
    default="table",
    show_default=True,
)
@click.option("--each-bucket", is_flag=True, help="Run SQL for each bucket of steps apart, in parallel.")
@click.option("--then", metavar="SQL", help="With --each-bucket: SQL over all their results, as the table results.")
@engine_option
def query_command(
    dataset: str, sql: str, output_format: TableFormat, each_bucket: bool, then: str | None, engine: str
) -> None:
    """Ask DATASET, which `modtrace ranks pack` wrote, by SQL (DuckDB's).

    There are the tables spans (rank, step, track, phase, fqn, module_class, call, start_ns, duration_ns, self_ns,
    depth), collectives (rank, step, operator, group, peer, kind, counter, start_ns, end_ns, done_ns, bytes), steps
    (rank, step, end_ns) and ranks (rank, bound_ns, method, clock, spans). Times are Unix nanoseconds of the job's
    clock; those of two ranks are off by at most the sum of their bound_ns, where their clocks differ.
    """
    require_extra("pyarrow", "duckdb")
    if (then is not None or engine != "local") and not each_bucket:
        raise click.UsageError("--then and --engine need --each-bucket.")
    from ..ranks.dataset.query import query, query_each_bucket

    with show_status(f"asking {dataset}"):
        found = query_each_bucket(dataset, sql, then, engine=engine) if each_bucket else query(dataset, sql)
    _print(found, output_format)


def _print(found: pa.Table, output_format: TableFormat) -> None:
    from .._tables import Table, to_csv, to_markdown, to_text

    names = _distinct(found.column_names)
    rows = list(zip(*(column.to_pylist() for column in found.columns), strict=True))
    if output_format == "json":
        objects = [{name: _json_value(value) for name, value in zip(names, row, strict=True)} for row in rows]
        click.echo(json.dumps(objects, default=str))
        return
    cells = [["" if value is None else str(value) for value in row] for row in rows]
    if output_format == "csv":
        click.echo(to_csv(names, cells), nl=False)
        return
    import pyarrow.types as types

    kinds: list[CellKind] = [
        "number" if types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind) else "name"
        for kind in found.schema.types
    ]
    table = Table(names, cells, kinds, [0] * len(names))
    for line in to_markdown(table) if output_format == "markdown" else to_text(table):
        echo(line)


def _distinct(names: Sequence[str]) -> list[str]:
    """Return the names of columns; of those with one name, as a join can have, all but the first are numbered."""
    taken: dict[str, None] = {}
    for name in names:
        candidates = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(1)))
        taken[next(candidate for candidate in candidates if candidate not in taken)] = None
    return list(taken)


def _json_value(value: object) -> object:
    """Return a value as JSON has it: a sum, which DuckDB makes a decimal, as a number, and NaN as null."""
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value
