"""`modtrace report`: what one attaches to an issue."""

from __future__ import annotations

import click

__all__ = ["command"]


@click.command("report")
@click.argument("trace")
@click.option("-o", "--out", metavar="OUT", help="The .zip to write; may be left out with --show.")
@click.option("--anonymize", is_flag=True, help="Replace names of modules and classes by aliases.")
@click.option("--show", is_flag=True, help="First print what the archive holds.")
def command(trace: str, out: str | None, anonymize: bool, show: bool) -> None:
    """Pack TRACE for an issue: the trace, a page that shows it, a summary to paste, and the environment.

    TRACE is a ring file, anything that modtrace saved, or a trace of torch.profiler. The archive has no source code, no
    command line, no name of a user or a machine, no path and no value of the environment in it, and at most 25 MB: of
    a longer trace it holds the end.
    """
    from ..write import check_path

    if out is None and not show:
        raise click.UsageError("say where to write it: -o bug.zip")
    if out is not None:
        check_path(out)
        if not out.lower().endswith(".zip"):
            raise click.UsageError(f"a report is a .zip, and {out} is none")
    from rich.console import Console

    from ..report import LIMIT, report_of_trace, write_archive

    with Console(stderr=True).status("packing"):
        report = report_of_trace(trace, anonymize=anonymize)
    if show:
        for name, data in report.files.items():
            click.echo(f"{len(data):12,} {name}")
        for name in ("summary.md", "environment.txt"):
            click.echo(f"\n--- {name}\n{report.files[name].decode()}", nl=False)
        click.echo()
    if report.cut is not None:
        click.echo(
            f"The trace is cut to {report.cut}, so that the archive has no more than {LIMIT // 10**6} MB.", err=True
        )
    if out is not None:
        write_archive(report.files, out)
        click.echo(f"{out}: {report.size:,} bytes", err=True)
