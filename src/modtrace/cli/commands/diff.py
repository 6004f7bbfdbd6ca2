"""`modtrace diff`: what changed between two sets of recordings, and whether that is too much."""

from __future__ import annotations

import click

from ..._system.files import find_recordings
from ..comparison import fail_above_option, map_option, show_comparison
from ..options import TableFormat, format_option, only_option
from ..output import show_status

__all__ = ["diff_command"]


@click.command("diff", short_help="Say which modules became slower or faster.")
@click.argument("base", type=click.Path())
@click.argument("new", type=click.Path())
@format_option
@click.option(
    "-o",
    "--output",
    type=click.Path(),
    help="Write the comparison: .html shows a typical step of each side, coloured by what changed, .pftrace the same "
    "for Perfetto; .md, .csv and .json are tables.",
)
@only_option
@map_option
@fail_above_option
def diff_command(
    base: str,
    new: str,
    output_format: TableFormat,
    output: str | None,
    only: str | None,
    name_map: dict[str, str],
    fail_above: float | None,
) -> None:
    """Compare NEW with BASE by the self times of modules in each step.

    Each is a file that modtrace reads, a folder of them, or a quoted pattern ('base-*.pftrace'). Several recordings a
    side, taken in turns, tell how much recordings of one program differ: five or more are sure of changes that one does
    not tell. All verdicts hold together with 95 %.
    """
    from ...compare import diff, suffix_of

    if output is not None:
        suffix_of(output)
    before, after = find_recordings([base]), find_recordings([new])
    with show_status(f"comparing {base} and {new}"):
        found = diff(before, after, map=name_map)
    show_comparison(found, f"{base} and {new}", output_format, output, only, fail_above)
