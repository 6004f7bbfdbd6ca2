"""`modtrace check`: find faults in a trace."""

import click

from ..._errors import TraceError
from ..._tables import json_text
from ..options import TextFormat, echo, say, show_reading, text_or_json_option


@click.command("check")
@click.argument("traces", type=click.Path(), metavar="TRACE...", nargs=-1, required=True)
@click.option("--strict", is_flag=True, help="Exit with 1 also for faults in events of torch.profiler.")
@text_or_json_option
@click.pass_context
def check_command(context: click.Context, traces: tuple[str, ...], strict: bool, output_format: TextFormat) -> None:
    """Check each TRACE: Chrome JSON or Perfetto, plain or gzipped, from modtrace or any other program.

    The trace inside a report's .zip is checked too; a ring file is converted first. Prints events that viewers drop,
    hide or draw wrongly: the first 20 faults of each rule, then a count by rule. Faults of events that torch.profiler
    wrote are marked. Exits with 1 if there are other faults, or a file cannot be read.
    """
    from ...checking import check

    results = []
    is_good = True
    for trace in traces:
        try:
            with show_reading(trace) as progress:
                result = check(trace, progress=progress)
        except TraceError as error:
            say(error)
            is_good = False
            continue
        results.append(result)
        if result.faults if strict else result.own_faults:
            is_good = False
        if output_format == "text":
            for line in result.lines(named=len(traces) > 1):
                echo(line)
    if output_format == "json":
        values = [{"path": result.path, "faults": [fault._asdict() for fault in result.faults]} for result in results]
        click.echo(json_text(values), nl=False)
    if not is_good:
        context.exit(1)
