"""`modtrace ranks`: the recordings of all ranks of a job together."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import click

from ..._terminal import counted
from ..options import TableFormat, format_option, steps_option
from ..output import echo, show_status
from ..rank_datasets import engine_option, find_readable, pack_command, query_command, require_extra

if TYPE_CHECKING:
    from ...ranks import JobTime, RankFile
    from ...ranks.slow import SlowRun

__all__ = ["ranks_command"]


@click.group("ranks", short_help="All ranks of a job on one timeline.")
def ranks_command() -> None:
    """Look at the recordings of all ranks of a job together.

    DIR holds a recording of each rank, as record(ring="run/%r.modtrace") or modtrace run --ring run/%r.modtrace make
    them; DATASET is what `modtrace ranks pack` makes of it.
    """


ranks_command.add_command(pack_command)
ranks_command.add_command(query_command)


def _ranks(_context: click.Context, _parameter: click.Parameter, text: str | None) -> tuple[list[int], int] | None:
    """Parse the value of --ranks."""
    if text is None:
        return None
    from ...ranks import parse_rank_list

    try:
        return parse_rank_list(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is no list of ranks such as 0-7,worst:4.") from None


@ranks_command.command("timeline", short_help="Write one trace of all ranks.")
@click.argument("folder", type=click.Path(), metavar="DIR")
@click.option("-o", "--output", type=click.Path(), required=True, metavar="OUT", help=".pftrace, .json or .html.")
@steps_option
@click.option(
    "--ranks", callback=_ranks, metavar="LIST", help="Take some ranks, as in 0-7,worst:4: those that were late most."
)
def timeline(
    folder: str,
    output: str,
    steps: tuple[int | None, int | None] | None,
    ranks: tuple[list[int], int] | None,
) -> None:
    """Write the recordings in DIR as one trace: a process per rank, and arrows between the calls of one collective.

    Times are those of one clock: each rank's are moved by what its clock was ahead, and by how that changed. Where no
    clock was measured, by collectives, which no rank can leave before the last one has come; else by the wall clock. A
    process says in its name how far its times are off at most (rank 3 · python ±12.3 µs).
    """
    from ...ranks import JobTime, all_ranks_timeline, load_rank
    from ...write import check_writable

    check_writable(output)
    with show_status(f"reading {folder}"):
        files = find_readable(folder)
        job = JobTime(files)
        chosen = files if ranks is None else _choose(files, job, *ranks)
        if not chosen:
            raise click.UsageError(f"There is none of these ranks in {folder}; it holds {_list(job.ranks)}.")
        read = [
            load_rank(file, job[file.rank], lambda part: part if steps is None else part.steps(*steps))
            for file in chosen
        ]
        whole = all_ranks_timeline(read, job)
    whole.save(output)
    for line in describe_time(job):
        echo(line, err=True)
    worst = max(read, key=lambda one: one.bound_ns)
    bound = (
        "" if worst.bound_ns == 0 else f"; times are off by at most {worst.bound_ns / 1e3:,.1f} µs (rank {worst.rank})"
    )
    ranks_read, spans = counted(len(read), "rank"), counted(len(whole.columns), "span")
    echo(f"{ranks_read}, {spans} are in {output}{bound}", err=True)


def _choose(files: list[RankFile], job: JobTime, ranks: list[int], worst: int) -> list[RankFile]:
    wanted = set(ranks)
    if worst:
        from ...ranks.find_slow import slow_of_files, worst_ranks

        wanted.update(worst_ranks(slow_of_files(files, job), worst))
    return [file for file in files if file.rank in wanted]


@ranks_command.command("slow", short_help="Say who is late: rank, module, milliseconds.")
@click.argument("source", type=click.Path(), metavar="DATASET|DIR")
@format_option
@click.option("-o", "--output", type=click.Path(), metavar="PAGE", help="Write a page with a picture too: .html.")
@click.option("--limit", type=click.IntRange(1), metavar="N", default=10, show_default=True, help="Rows of each table.")
@engine_option
def slow(source: str, output_format: TableFormat, output: str | None, limit: int, engine: str) -> None:
    """Say per step which rank kept the others waiting, in which module and for how long, and what that cost the run.

    A rank is late where it calls a collective behind all others, after more time of its own (without its waits) than
    they took since the collective before. The module is the one that took more self time than on the other ranks in
    between. "even": no rank stands out of what all vary by. "cannot tell": one does, but by less than their times are
    off.
    """
    if output is not None and not output.lower().endswith(".html"):
        raise click.UsageError(f"The page is .html, and {output} is not.")
    run = _find_slow(source, engine)
    if output is not None:
        from ...ranks.slow.lateness_page import write_lateness_page

        write_lateness_page(run, output, os.path.basename(os.path.abspath(source)))
    _print_slow(run, output_format, limit)


def _find_slow(source: str, engine: str) -> SlowRun:
    from ...ranks import JobTime
    from ...ranks.dataset.dataset_folder import is_dataset
    from ...ranks.find_slow import slow_of_dataset, slow_of_files

    if not is_dataset(source):
        if engine != "local":
            raise click.UsageError("--engine needs a DATASET; make one with modtrace ranks pack.")
        with show_status(f"reading {source}"):
            files = find_readable(source)
            return slow_of_files(files, JobTime(files))
    require_extra("pyarrow")
    with show_status(f"reading {source}"):
        return slow_of_dataset(source, engine=engine)


def _print_slow(run: SlowRun, output_format: TableFormat, limit: int) -> None:
    from ..._tables import to_csv, to_markdown, to_text
    from ...ranks.slow.slow_report import headline, module_table, rank_table, step_finding_table, to_json

    if output_format == "json":
        click.echo(json.dumps(to_json(run)))
        return
    if output_format == "csv":
        table = step_finding_table(run)
        click.echo(to_csv(table.headings, table.rows), nl=False)
        return
    for line in headline(run):
        echo(line)
    for table in (rank_table(run, limit), module_table(run, limit), step_finding_table(run, limit)):
        if table.rows:
            echo("")
            for line in to_markdown(table) if output_format == "markdown" else to_text(table):
                echo(line)


def describe_time(job: JobTime) -> list[str]:
    """Say how the ranks were placed in the time of the job; nothing where all read one clock."""
    ways = {
        "pings": "by pings between their hosts",
        "collectives": "without pings, by the ends of collectives",
        "wall clock": "by the wall clock alone, which nothing has measured",
    }
    return [f"ranks {_list(ranks)}: placed {ways[how]}" for how, ranks in job.methods.items() if how in ways]


def _list(ranks: list[int]) -> str:
    from ...ring.collective_text import format_ranks

    return format_ranks(ranks)
