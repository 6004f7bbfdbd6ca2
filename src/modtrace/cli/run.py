"""`modtrace run`: record a script that knows nothing of modtrace."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import click

from .._errors import ModtraceError
from ._group import ScriptEnded

__all__ = ["command"]


@click.command("run", context_settings={"allow_interspersed_args": False})
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("-m", "as_module", is_flag=True, help="SCRIPT is a module, as for python -m.")
@click.option("-o", "--output", metavar="OUT", help="Trace to write; the suffix picks the format. [SCRIPT.pftrace]")
@click.option("--steps", type=click.IntRange(1), metavar="N", help="Stop recording after N optimizer steps.")
@click.option("--engine", type=click.Choice(["auto", "native", "python"]), default="auto", show_default=True)
@click.option(
    "--capacity",
    type=click.IntRange(1),
    default=1 << 20,
    show_default=True,
    metavar="N",
    help="Events kept; the oldest are overwritten.",
)
@click.option("--ring", metavar="FILE", help="A file behind the ring: it survives SIGKILL.")
def command(
    script: str,
    arguments: tuple[str, ...],
    as_module: bool,
    output: str | None,
    steps: int | None,
    engine: Literal["auto", "native", "python"],
    capacity: int,
    ring: str | None,
) -> None:
    """Run SCRIPT with its ARGUMENTS, unchanged, and record its modules.

    The script sees what it would see under python: sys.argv, sys.path, __main__, exit code and traceback. Under
    torchrun each rank writes its own files (OUT.rank3.pftrace).
    """
    from ..write import check_path
    from ._recorded import Recorded
    from ._script import run_file, run_module

    if not as_module and not os.path.isfile(script):
        raise click.UsageError(f"There is no script {script!r}.")
    trace = _of_rank(output or _trace_name(script, as_module))
    check_path(trace)
    recorded = Recorded(trace, engine, capacity, ring and _of_rank(ring), steps)
    try:
        (run_module if as_module else run_file)(script, arguments)
    except ScriptEnded as ended:
        if recorded.failure is not None and ended.error is recorded.failure:
            raise recorded.failure from None
        try:
            recorded.finish()
        except ModtraceError as error:
            click.echo(f"modtrace: {error}", err=True)  # what the script raised is what its user has to see
        raise
    recorded.finish()


def _trace_name(script: str, as_module: bool) -> str:
    stem = script.removesuffix(".__main__").rpartition(".")[2] if as_module else Path(script).stem
    return f"{stem}.pftrace"


def _of_rank(path: str) -> str:
    """Give each of several ranks a file of its own."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return path
    whole = Path(path)
    stem, dot, suffixes = whole.name.partition(".")
    return str(whole.with_name(f"{stem}.rank{os.environ.get('RANK', '0')}{dot}{suffixes}"))
