"""`modtrace report`: pack a trace for a bug report."""

from pathlib import Path

import click

from ..options import StepRange, echo, show_status, steps_option, value_option


@click.command("report")
@click.argument("trace", type=click.Path())
@value_option("-o --output", click.Path(), "OUT", "The .zip to write; optional with --show.")
@steps_option
@click.option("--anonymize", is_flag=True, help="Replace names of modules and classes with aliases.")
@click.option("--show", is_flag=True, help="First print the contents of the archive, with every name and text in it.")
def report_command(trace: str, output: str | None, steps: StepRange | None, anonymize: bool, show: bool) -> None:
    """Pack TRACE for an issue: the trace, a page that shows it, a summary to paste, and the environment.

    TRACE is any file that modtrace reads. The report keeps names of modules, classes and operations. It replaces texts
    of marks, names of threads and annotations, process ids and the time of the recording. It leaves out source code,
    command lines, hosts and paths. The archive has up to 25 MB; for a longer trace it contains the slowest steps. For a
    ring with more than 4 million events it contains the last steps, unless --steps selects others.
    """
    from ..._files import share_hint
    from ...write import check_writable

    if output is None and not show:
        raise click.UsageError("Give a file to write: -o bug.zip.")
    if output is not None:
        if not output.lower().endswith(".zip"):
            raise click.UsageError(f"A report is a .zip archive; name it {Path(output).with_suffix('.zip')}.")
        check_writable(output)
    from ...reporting import MAX_REPORT_BYTES, report

    with show_status(f"packing {trace}"):
        packed = report(trace, anonymize=anonymize, steps=steps)
    if show:
        for name, data in packed.files.items():
            click.echo(f"{len(data):12,} {name}")
        for name in ("summary.md", "environment.txt"):
            echo("")
            echo(f"--- {name}")
            for line in packed.files[name].decode().splitlines():
                echo(line)
        click.echo("\n--- names and texts in the trace")
        for kind, texts in packed.texts.items():
            for text in texts:
                echo(f"{kind}: {text}")
        click.echo()
    for note in packed.notes:
        echo(note, err=True)
    if packed.cut is not None:
        megabytes = MAX_REPORT_BYTES // 10**6
        echo(f"The trace is cut to {packed.cut}, to keep the archive within {megabytes} MB.", err=True)
    if output is not None:
        packed.save(output)
        echo(f"{output}: {packed.size:,} bytes", err=True)
        echo(share_hint(output), err=True)
        if not anonymize:
            echo(
                "It names your modules and classes: --show lists the names in it, --anonymize replaces them.", err=True
            )
