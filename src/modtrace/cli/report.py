"""`modtrace report`: pack a trace for a bug report."""

from __future__ import annotations

import click

__all__ = ["command"]


@click.command("report")
@click.argument("trace")
@click.option("-o", "--output", metavar="OUT", help="The .zip to write; may be left out with --show.")
@click.option("--anonymize", is_flag=True, help="Replace names of modules and classes by aliases.")
@click.option("--show", is_flag=True, help="First print what the archive holds.")
def command(trace: str, output: str | None, anonymize: bool, show: bool) -> None:
    """Pack TRACE for an issue: the trace, a page that shows it, a summary to paste, and the environment.

    TRACE is any file that modtrace reads. The archive has no source code, no
    command line, no name of a user or a machine, no path and no value of the environment in it, and at most 25 MB: of
    a longer trace it holds the end.
    """
    from ..write import check_writable

    if output is None and not show:
        raise click.UsageError("Say where to write it: -o bug.zip.")
    if output is not None:
        check_writable(output)
        if not output.lower().endswith(".zip"):
            raise click.UsageError(f"A report is a .zip, and {output} is none.")
    from rich.console import Console

    from ..report import MAX_REPORT_BYTES, report_file, write_archive

    with Console(stderr=True).status("packing"):
        report = report_file(trace, anonymize=anonymize)
    if show:
        for name, data in report.files.items():
            click.echo(f"{len(data):12,} {name}")
        for name in ("summary.md", "environment.txt"):
            click.echo(f"\n--- {name}\n{report.files[name].decode()}", nl=False)
        click.echo()
    if report.cut is not None:
        megabytes = MAX_REPORT_BYTES // 10**6
        click.echo(f"The trace is cut to {report.cut}, so that the archive has no more than {megabytes} MB.", err=True)
    if output is not None:
        write_archive(report.files, output)
        click.echo(f"{output}: {report.size:,} bytes", err=True)
