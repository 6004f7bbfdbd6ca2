"""`modtrace convert`: convert any file that modtrace reads to any format that it writes."""

import os

import click

from ..._tables import counted
from .. import options


@click.command("convert")
@click.argument("source", type=click.Path(), metavar="IN")
@click.argument("target", type=click.Path(), metavar="OUT", required=False)
@click.option("-o", "--output", type=click.Path(), metavar="OUT", help="Alternative to the argument OUT.")
@options.steps_option
@options.step_by_option
@options.only_option
@options.max_depth_option
@options.value_option(
    "--window", options.interval(float), "START:END", "Only the time between START and END, in ms from the first span."
)
def convert_command(
    source: str,
    target: str | None,
    output: str | None,
    window: tuple[float | None, float | None] | None,
    steps: options.StepRange | None,
    step_by: str | None,
    only: str | None,
    max_depth: int | None,
) -> None:
    """Convert IN, any file that modtrace reads, to OUT, whose suffix picks the format.

    OUT may be .pftrace, .json (each also .gz), .html, .speedscope.json or .folded; modtrace cannot read the last three.

    For a merged trace or a trace of torch.profiler, OUT contains the modules without the profiler's events. The options
    cut the timeline before it is written: first to steps, then to a window, then to modules. If no span is left, the
    command writes nothing and exits with 1.
    """
    from ..._errors import WriteError
    from ...public import Timeline
    from ...read import load_around, read_pieces
    from ...timeline import OnePiece
    from ...write import check_writable, write

    if (target is None) == (output is None):
        raise click.UsageError("Give one file to write, as OUT or -o OUT.")
    target = target or output or ""
    check_writable(target)
    if os.path.exists(target) and os.path.exists(source) and os.path.samefile(source, target):
        raise WriteError(f"{target}: IN and OUT are the same file; give OUT another name")
    is_selection = any(option is not None for option in (steps, window, only, max_depth))
    with options.show_status(f"reading {source}"):
        pieces = OnePiece(load_around(source, steps, step_by)) if is_selection else read_pieces(source)
        timeline = full_timeline = Timeline.of(pieces.join()) if pieces.is_single else None
    if timeline is not None and full_timeline is not None:
        if steps is not None:
            timeline = timeline.steps(*steps, step_by)
        if window is not None and len(timeline.columns):
            first = int(timeline.columns.start[0])
            timeline = timeline.window(*(None if ms is None else first + round(ms * 1e6) for ms in window))
        if only is not None or max_depth is not None:
            timeline = timeline.only(only, max_depth)
        options.require_spans(timeline, full_timeline, source, is_selection=is_selection)
        pieces = OnePiece(timeline)
    write(pieces, target)
    options.echo(f"{counted(pieces.spans, 'span')} {'is' if pieces.spans == 1 else 'are'} in {target}", err=True)
