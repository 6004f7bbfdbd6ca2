"""`modtrace merge`: add a recording to a trace of torch.profiler."""

import click

from ..options import echo, show_reading


@click.command("merge")
@click.argument("profiler_trace", metavar="PROFILE", type=click.Path())
@click.argument("timeline", metavar="[RECORDING]", type=click.Path(), required=False)
@click.option("-o", "--output", type=click.Path(), required=True, metavar="OUT", help=".json, .json.gz or .pftrace.")
@click.option("--capture", type=click.Path(), metavar="TRACE", help="The trace in which CUDA graphs were captured.")
def merge_command(profiler_trace: str, timeline: str | None, output: str, capture: str | None) -> None:
    """Write a copy of PROFILE, a trace of torch.profiler, with the module tracks of RECORDING added.

    RECORDING is any file that modtrace reads. Without it, the module tracks come from the module events in PROFILE.
    """
    from ...public import merge

    with show_reading(profiler_trace) as progress:
        merged = merge(profiler_trace, timeline, output, capture=capture, progress=progress)
    for line in str(merged).splitlines():
        echo(line, err=True)
