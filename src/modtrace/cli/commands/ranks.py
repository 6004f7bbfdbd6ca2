"""`modtrace ranks`: the recordings of all ranks of a job together."""

import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import click

from ..._errors import ModtraceError, require_extra
from ..._tables import counted
from .. import options

if TYPE_CHECKING:
    from concurrent.futures import Executor

    import pyarrow as pa


_CONNECT_SECONDS = 10
_BYTES_PER_STEP = 1_000_000
"""Maximum bytes of a step of all ranks in a trace, unless --ranks or --max-depth is given."""


@click.group("ranks")
def ranks_command() -> None:
    """Examine the recordings of all ranks of a job together.

    DIR contains a recording of each rank, made by record(ring="run/%r.modtrace") or modtrace run --ring
    run/%r.modtrace; DATASET is the output of `modtrace ranks pack`.
    """


def _ranks(text: str) -> tuple[list[int], int]:
    """Parse the value of --ranks."""
    from ...ranks import parse_rank_list

    try:
        return parse_rank_list(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a list of ranks such as 0-7,worst:4.") from None


_role_option = click.option("--role", metavar="NAME", help="Only processes with this role.")
_executor_option = click.option(
    "--executor", metavar="ADDRESS", help="Run on the workers of the Dask scheduler at dask:tcp://HOST:PORT."
)


@contextmanager
def _open_executor(address: str | None) -> "Iterator[Executor | None]":
    """Yield the executor that runs the parts of a command; None for this machine."""
    if address is None:
        yield None
        return
    kind, _, scheduler = address.partition(":")
    if kind != "dask" or not scheduler:
        raise click.BadParameter(f"{address!r} is not of the form dask:tcp://HOST:PORT.", param_hint="--executor")
    require_extra("dask", "distributed")
    from distributed import Client

    try:
        client = Client(scheduler, timeout=_CONNECT_SECONDS)
    except (OSError, ValueError, MemoryError) as error:  # it reads a web server's answer as a length
        raise ModtraceError(f"{scheduler}: no Dask scheduler answers: {error}") from error
    with client:
        # Calls with equal arguments must run again, because their result is a file.
        yield client.get_executor(pure=False)


def _left_out(error: ModtraceError) -> None:
    """Print the recording that is left out, and the reason."""
    options.say(f"left out: {error}")


@ranks_command.command("timeline", short_help="Write one trace of all ranks.")
@click.argument("folder", type=click.Path(), metavar="DIR")
@click.option("-o", "--output", type=click.Path(), required=True, metavar="OUT", help=".pftrace, .json or .html.")
@options.steps_option
@options.value_option("--ranks", _ranks, "LIST", "Only these ranks, such as 0-7,worst:4 (the 4 that were late most).")
@options.max_depth_option
@_role_option
@_executor_option
def timeline(
    folder: str,
    output: str,
    steps: options.StepRange | None,
    ranks: tuple[list[int], int] | None,
    max_depth: int | None,
    role: str | None,
    executor: str | None,
) -> None:
    """Write the recordings in DIR as one trace: a process per rank, and arrows between the calls of one collective.

    All times use one clock: the offset and the drift of each rank's clock are subtracted. If clocks were not compared
    while the job ran, the offset comes from collectives, which no rank leaves before the last one enters; without
    collectives, from the wall clocks. The name of a process has its maximum error (rank 3 · python ±12.3 µs).
    """
    from ...ranks import damage_sentences, load_ranks, peak_sentence
    from ...timeline.contents import process_label
    from ...write import check_writable

    check_writable(output)
    numbers, worst_count = ranks or (None, 0)
    with options.show_status(f"reading {folder}"), _open_executor(executor) as workers:
        timeline_of_all = load_ranks(
            folder,
            steps=steps,
            ranks=numbers,
            worst=worst_count,
            role=role,
            on_left_out=_left_out,
            executor=workers,
            bytes_per_step=_BYTES_PER_STEP if ranks is None and max_depth is None else None,
        )
    if max_depth is not None:
        timeline_of_all = timeline_of_all.only(None, max_depth)
    timeline_of_all.save(output)
    rank_facts = timeline_of_all.metadata["ranks"]
    levels = Counter((rank.get("role") or "rank", rank["levels"]) for rank in rank_facts if "levels" in rank)
    for (role, number), count in sorted(levels.items()):
        shortened = f"{counted(count, role)} with {counted(number, 'level')} of modules"
        options.echo(f"{shortened}, to limit a step to 1 MB; --max-depth selects more", err=True)
    if timeline_of_all.metadata["left_out"]:
        left_out = counted(timeline_of_all.metadata["left_out"], "rank")
        options.echo(f"{left_out} left out, to limit a step to 1 MB; --ranks selects others", err=True)
    by_name = {process_label(rank.get("role", ""), rank["rank"]): rank for rank in rank_facts}
    peaks = peak_sentence({name: rank["peak_bytes"] for name, rank in by_name.items() if "peak_bytes" in rank})
    damage = damage_sentences({name: rank["damage"] for name, rank in by_name.items() if "damage" in rank})
    for line in [*_describe_time(rank_facts), *([peaks] if peaks else []), *damage]:
        options.echo(line, err=True)
    worst, bound_ns = max(((name, rank["bound_ns"]) for name, rank in by_name.items()), key=lambda bound: bound[1])
    bound = f"; times are off by at most {bound_ns / 1e3:,.1f} µs ({worst})" if bound_ns else ""
    ranks_read, spans = counted(len(rank_facts), "rank"), counted(len(timeline_of_all.columns), "span")
    options.echo(f"{ranks_read}, {spans} are in {output}{bound}", err=True)


@ranks_command.command("slow", short_help="List late ranks: rank, module, milliseconds.")
@click.argument("source", type=click.Path(), metavar="DATASET|DIR")
@options.steps_option
@options.format_option
@click.option("-o", "--output", type=click.Path(), metavar="PAGE", help="Also write a page with a picture: .html.")
@click.option("--limit", type=click.IntRange(1), metavar="N", default=10, show_default=True, help="Rows per table.")
@_role_option
@_executor_option
def slow(
    source: str,
    steps: options.StepRange | None,
    output_format: options.TableFormat,
    output: str | None,
    limit: int,
    role: str | None,
    executor: str | None,
) -> None:
    """List per step the rank that kept the others waiting, the module, the delay, and the cost for the run.

    A rank is late if it enters a collective last, and spent the most time outside waits since the previous collective.
    The module is the one whose self time exceeds that on the other ranks most. "even": the differences are ordinary
    variation. "cannot tell": the difference is smaller than the error of the clocks.
    """
    if output is not None and not output.lower().endswith(".html"):
        raise click.UsageError(f"{output} does not end in .html.")
    from ...ranks import is_dataset
    from ...ranks.slow import find_slow_ranks

    if is_dataset(source):
        require_extra("ranks", "pyarrow")
    with options.show_status(f"reading {source}"), _open_executor(executor) as workers:
        run = find_slow_ranks(source, steps=steps, role=role, on_left_out=_left_out, executor=workers)
    if output is not None:
        run.save(output, os.path.basename(os.path.abspath(source)))
    if output_format == "csv":
        click.echo(run.to_csv(), nl=False)
    elif output_format == "json":
        click.echo(run.to_json(), nl=False)
    else:
        click.echo(run.to_markdown(limit) if output_format == "markdown" else run.to_text(limit))


@ranks_command.command("pack", short_help="Write all ranks as Parquet files.")
@click.argument("folder", type=click.Path(), metavar="DIR")
@click.option(
    "-o", "--output", type=click.Path(), required=True, metavar="DATASET", help="A folder or URL, new or incomplete."
)
@options.value_option("--steps-per-bucket", click.IntRange(1), "N", "Number of steps stored together.", 10)
@click.option("--processes", type=click.IntRange(1), metavar="N", help="Number of processes. [one per CPU]")
@click.option("--this-host", is_flag=True, help="Keep the files that other hosts have packed there.")
@_role_option
@_executor_option
def pack_ranks(
    folder: str,
    output: str,
    steps_per_bucket: int,
    processes: int | None,
    this_host: bool,
    role: str | None,
    executor: str | None,
) -> None:
    """Write the spans, collectives and steps of the ranks in DIR as a dataset of Parquet files.

    Run it again if it was interrupted, or if ranks were added: packed files stay. Each file contains a few steps of a
    few ranks, so that a query on steps reads only these files. DIR and DATASET may be URLs, such as s3://bucket/run.
    With --this-host, each host of a job packs the recordings on its own disk.
    """
    require_extra("ranks", "pyarrow")
    from ...ranks import as_folder, damage_sentences, find_rank_recordings
    from ...ranks.pack import pack

    with _open_executor(executor) as workers, ExitStack() as copied:
        with options.show_status(f"reading {folder}"):
            local_folder = copied.enter_context(as_folder(folder, workers))
            files = find_rank_recordings(local_folder, _left_out, role)
        with options.show_count("packing ranks", len(files)) as progress:
            result = pack(
                files,
                output,
                steps_per_bucket=steps_per_bucket,
                processes=processes,
                executor=workers,
                progress=progress,
                this_host=this_host,
                source=None if local_folder == folder else folder,
            )
    for line in damage_sentences(result.damage):
        options.echo(line, err=True)
    already = (
        f" ({result.rank_count - result.packed_count:,} were there)" if result.packed_count < result.rank_count else ""
    )
    size = f", {result.span_bytes / result.span_count:.1f} bytes each" if result.span_count else ""
    ranks, spans = counted(result.rank_count, "rank"), counted(result.span_count, "span")
    options.echo(f"{ranks}{already} and {spans}{size} are in {output}", err=True)


@ranks_command.command("query", short_help="Query a dataset with SQL.")
@click.argument("dataset", type=click.Path())
@click.argument("sql")
@options.format_option
@click.option("--each-bucket", is_flag=True, help="Run SQL on each bucket of steps separately, in parallel.")
@click.option("--then", metavar="SQL", help="With --each-bucket: SQL over the results of all buckets, table results.")
@_executor_option
def query_dataset(
    dataset: str,
    sql: str,
    output_format: options.TableFormat,
    each_bucket: bool,
    then: str | None,
    executor: str | None,
) -> None:
    """Query DATASET, the output of `modtrace ranks pack`, with SQL (DuckDB's dialect).

    The tables are spans (rank, step, track, phase, fqn, module_class, call, start_ns, duration_ns, self_ns, depth,
    flops), collectives (rank, step, operator, group, peer, kind, counter, start_ns, end_ns, done_ns, bytes), steps
    (rank, step, end_ns) and ranks (rank, bound_ns, method, clock, spans). Times are Unix nanoseconds of the job's
    clock. If the clocks of two ranks differ, the maximum error between their times is the sum of their bound_ns.
    """
    require_extra("ranks", "pyarrow", "duckdb")
    if then is not None and not each_bucket:
        raise click.UsageError("--then needs --each-bucket.")
    if executor is not None and not each_bucket:
        raise click.UsageError("--executor needs --each-bucket: one query runs in one process.")
    from ...ranks.dataset_tables import query, query_each_bucket

    with options.show_status(f"querying {dataset}"), _open_executor(executor) as workers:
        answer = query_each_bucket(dataset, sql, then, workers) if each_bucket else query(dataset, sql)
    _print(answer, output_format)


def _print(answer: "pa.Table", output_format: options.TableFormat) -> None:
    import pyarrow.types as types

    from ..._tables import NAME, NUMBER, Column, Table

    rows = answer.to_pylist()
    if output_format == "json":
        rows = [{name: _json_value(value) for name, value in row.items()} for row in rows]
    is_number = (types.is_integer, types.is_floating, types.is_decimal)
    columns = [
        Column(field.name, field.name, NUMBER if any(is_of(field.type) for is_of in is_number) else NAME, 0, "never")
        for field in answer.schema
    ]
    click.echo(Table(columns, rows).to(options.FORMS[output_format]).removesuffix("\n"))


def _json_value(value: object) -> object:
    """Return a value for JSON: a sum, which is a decimal in DuckDB, as a number, and NaN as null."""
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _describe_time(rank_facts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return sentences on the method that placed the ranks in the job's time; empty if all read one clock."""
    from ...live.places import processes_phrase

    ways = {
        "pings": "by pings between their hosts",
        "collectives": "without pings, by the ends of collectives",
        "wall clock": "only by the wall clock, whose error is unknown",
    }
    processes: dict[str, list[tuple[str, int]]] = {}
    for rank in rank_facts:
        processes.setdefault(rank["method"], []).append((rank.get("role", ""), rank["rank"]))
    return [
        f"{processes_phrase(places)}: placed {ways[method]}" for method, places in processes.items() if method in ways
    ]
