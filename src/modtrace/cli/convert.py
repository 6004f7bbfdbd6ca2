"""`modtrace convert`: write any trace that modtrace reads in any format that it writes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from ._interval import interval
from ._output import echo, show_status

if TYPE_CHECKING:
    from ..timeline import Timeline

__all__ = ["command"]


@click.command("convert", short_help="Write a trace in another format.")
@click.argument("source", type=click.Path(), metavar="IN")
@click.argument("target", type=click.Path(), metavar="OUT")
@click.option(
    "--window",
    metavar="START:END",
    type=interval(float),
    help="Keep what lies between two times, in ms from the first span.",
)
@click.option("--steps", metavar="A:B", type=interval(int), help="Keep steps A to B, without B; the first is 0.")
@click.option("--modules", metavar="PATTERN", help="Keep modules whose full name matches, as in GPT.blocks.*.")
@click.option("--max-depth", type=click.IntRange(1), metavar="N", help="Keep N levels of modules.")
def command(
    source: str,
    target: str,
    window: tuple[float | None, float | None] | None,
    steps: tuple[int | None, int | None] | None,
    modules: str | None,
    max_depth: int | None,
) -> None:
    """Convert IN, any file that modtrace reads, to OUT, whose suffix picks the format.

    Of a merged trace or one of torch.profiler, OUT holds the modules and not the profiler's own events. The options cut
    the timeline before it is written: first to steps, then to a window, then to modules. Exits with 1, and writes
    nothing, where they leave no span.
    """
    from .._errors import ModtraceError, WriteError
    from ..read import load
    from ..write import check_writable

    check_writable(target)
    if os.path.exists(target) and os.path.exists(source) and os.path.samefile(source, target):
        raise WriteError(f"{target}: IN and OUT are the same file; give OUT another name")
    with show_status(f"reading {source}"):
        timeline = whole = load(source)
    if steps is not None:
        timeline = timeline.steps(*steps)
    if window is not None and len(timeline.columns):
        first = int(timeline.columns.start[0])
        timeline = timeline.window(*(None if ms is None else first + round(ms * 1e6) for ms in window))
    if modules is not None or max_depth is not None:
        timeline = timeline.modules(modules, max_depth)
    if not len(timeline.columns):
        if len(whole.columns):
            raise ModtraceError(f"nothing is left of {source}: {_describe(whole)}")
        notes = whole.metadata.get("notes")
        if isinstance(notes, list) and notes:
            raise ModtraceError(f"{source} holds no module: {notes[0]}")
    timeline.save(target)
    echo(f"{len(timeline.columns)} spans are in {target}", err=True)


def _describe(timeline: Timeline) -> str:
    """Say what a selection can choose from."""
    columns = timeline.columns
    first, last = int(columns.step.min()), int(columns.step.max())
    length = (int(columns.end.max()) - int(columns.start[0])) / 1e6
    return (
        f"it holds {len(columns)} spans in steps {first} to {last}, over {length:.3f} ms, of modules such as "
        f"{timeline.names[columns.name[0]].fqn}"
    )
