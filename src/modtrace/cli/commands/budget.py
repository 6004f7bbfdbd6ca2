"""`modtrace budget`: what modules may take, in a file beside the code, and recordings held against it."""

from __future__ import annotations

import click

from ..._system.files import find_recordings
from ..._terminal import counted
from ..comparison import fail_above_option, map_option, show_comparison
from ..options import TableFormat, format_option, only_option
from ..output import echo, show_status

__all__ = ["budget_command"]


@click.group("budget", short_help="Keep what modules take, and fail where they become slower.")
def budget_command() -> None:
    """Keep what the modules of a program take in a small JSON file, and hold later recordings against it."""


@budget_command.command("save", short_help="Make a budget of recordings.")
@click.argument("recordings", type=click.Path(), nargs=-1, required=True)
@click.option("-o", "--output", type=click.Path(), required=True, help="The file to write: budget.json.")
def save(recordings: tuple[str, ...], output: str) -> None:
    """Make a budget of RECORDINGS: files, folders or quoted patterns; five or more of one program are best."""
    from ...compare import Budget

    files = find_recordings(recordings)
    with show_status(f"measuring {counted(len(files), 'recording')}"):
        budget = Budget.of(files)
    budget.save(output)
    modules, steps = counted(len(budget.modules), "module"), counted(budget.steps, "step")
    echo(f"{output}: {modules}, {steps} of {counted(budget.recordings, 'recording')}")
    echo(f"Next: modtrace budget check {output} NEW.pftrace")


@budget_command.command("check", short_help="Hold recordings against a budget.")
@click.argument("budget", type=click.Path())
@click.argument("recordings", type=click.Path(), nargs=-1, required=True)
@format_option
@click.option("-o", "--output", type=click.Path(), help="Write the table too: .md, .csv or .json.")
@only_option
@map_option
@fail_above_option
def check(
    budget: str,
    recordings: tuple[str, ...],
    output_format: TableFormat,
    output: str | None,
    only: str | None,
    name_map: dict[str, str],
    fail_above: float | None,
) -> None:
    """Compare RECORDINGS with a BUDGET, and exit with 1 where the step or a module is slower by more than 5 %.

    Only what is slower with its whole interval counts; with `--only`, modules alone. `--fail-above` is another limit.
    What differs in the environment (torch, CPU, GPU) is named.
    """
    from ...compare import Budget, suffix_of

    if output is not None and suffix_of(output) not in {".md", ".csv", ".json"}:
        raise click.UsageError(f"A budget holds no step to show: {output} must end in .md, .csv or .json.")
    files = find_recordings(recordings)
    allowed = Budget.load(budget)
    with show_status(f"comparing {len(files):,} recordings with {budget}"):
        found = allowed.check(files, map=name_map)
    limit = 0.05 if fail_above is None else fail_above
    show_comparison(found, f"{budget} and the recordings", output_format, output, only, limit)
