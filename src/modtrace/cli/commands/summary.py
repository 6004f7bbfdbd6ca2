"""`modtrace summary`: tables of the time that modules and steps took."""

from typing import TYPE_CHECKING, Literal

import click

from ..options import (
    FORMS,
    StepRange,
    TableFormat,
    format_option,
    max_depth_option,
    no_such_module,
    only_option,
    require_spans,
    step_by_option,
    steps_option,
    value_option,
)
from ..output import echo, make_console, show_status

if TYPE_CHECKING:
    from ...timeline import Summary
    from ...timeline.summary import GroupBy

SORT_COLUMNS = ("gpu", "self", "total", "forward", "backward", "recompute", "mean", "p50", "p95", "calls", "name")
"""`SORT_KEYS` of summaries: the help says them without NumPy, which that import brings."""
SLOWEST_STEPS = 5
"""How many of the slowest steps are listed below the modules."""


@click.command("summary")
@click.argument("trace", type=click.Path())
@value_option(
    "--by", click.Choice(["module", "class", "step"]), None, "What gets a row; steps come slowest first.", "module"
)
@click.option("--tree", is_flag=True, help="Show the modules as a tree.")
@click.option(
    "--sort",
    type=click.Choice(SORT_COLUMNS),
    metavar="COLUMN",
    help="Column to sort by: self, total, p95, calls, name … [gpu if known, else self; total with --tree]",
)
@click.option(
    "--limit", type=click.IntRange(0), metavar="N", help="Show the first N rows of each list; 0: all. [a first screen]"
)
@click.option("--flops", is_flag=True, help="Show FLOPs only: what modules cost, and how well they use the time.")
@value_option(
    "--peak-tflops",
    click.FloatRange(0, min_open=True),
    "X",
    "The highest rate of the device, 10¹² FLOP/s, for MFU and shares of it. [by its name]",
)
@click.option(
    "--memory", is_flag=True, help="Show memory only: what modules keep and take, and who holds it at the peak."
)
@click.option("--ranges", is_flag=True, help="Show ranges only: the part of each, how often and how long.")
@step_by_option
@only_option
@max_depth_option
@steps_option
@format_option
def summary_command(
    trace: str,
    output_format: TableFormat,
    by: Literal["module", "class", "step"],
    tree: bool,
    sort: str | None,
    limit: int | None,
    only: str | None,
    max_depth: int | None,
    steps: StepRange | None,
    step_by: str | None,
    memory: bool,
    flops: bool,
    ranges: bool,
    peak_tflops: float | None,
) -> None:
    """Print what stands out in TRACE, the parts of a step, and what each module took.

    TRACE is any file that modtrace reads; a merged trace has GPU times and kernels too. The parts of a step add up to
    its duration; --limit shortens every other list, and --limit 0 shows all modules and columns.
    """
    from ...live.read_whole_run import read_whole_run, whole_run_text
    from ...timeline.summary.tables import parts_table, ranges_table, steps_table

    if tree and (output_format != "table" or by != "module"):
        raise click.UsageError("--tree is a table of modules; leave out --format and --by.")
    if ranges and (tree or memory or flops or only is not None or max_depth is not None or by != "module"):
        raise click.UsageError("--ranges is about no modules; leave out --by, --tree, --memory, --flops and --only.")
    if tree and (memory or flops):
        raise click.UsageError("--tree is about times; leave out --memory and --flops.")
    if max_depth is not None and by == "class":
        raise click.UsageError("--max-depth is about modules; leave out --by class.")
    if by == "step" and (sort is not None or only is not None or max_depth is not None):
        raise click.UsageError("--sort, --only and --max-depth are about modules; leave out --by step.")
    if by == "step" and (memory or flops):
        raise click.UsageError("--memory and --flops are about modules; leave out --by step.")
    with show_status(f"reading {trace}"):
        summary, notes = summarize_file(trace, "class" if by == "class" else "module", steps, step_by)
    for note in notes:
        echo(note, err=True)
    if summary.gpu is None and sort == "gpu":
        raise click.UsageError(f"{trace} has no GPU times; 'modtrace merge' adds them.")
    if memory and summary.memory is None:
        raise click.UsageError(f"{trace} has no memory; record with --memory, or record(memory=True).")
    if flops and summary.flops is None and not summary.compiled:
        raise click.UsageError(f"{trace} has no FLOPs; record with --flops, or record(flops=True).")
    summary = (summary if peak_tflops is None else summary.with_peak(peak_tflops)).of_file(trace, step_by)
    whole, summary = summary, summary.only(only, max_depth)
    if only is not None and not summary.rows:
        example = whole.rows[0].fqn or whole.rows[0].module_class if whole.rows else ""
        raise no_such_module(
            trace, only, example, "; --ranges lists saving, loading and the like" if whole.ranges else ""
        )
    is_first, limit = limit is None and output_format == "table", limit or None
    summary = summary.sort_by(sort or ("total" if tree else None), limit)
    console = make_console()
    if output_format == "json":
        click.echo(summary.to_json(limit), nl=False)
        return
    if ranges:
        text = ranges_table(summary).to(FORMS[output_format], limit, console.width).removesuffix("\n")
        console.print(text, soft_wrap=True)
        return
    if output_format != "table":
        if by == "step":
            text = summary.steps_csv(limit) if output_format == "csv" else steps_table(summary).to("md", limit)
        else:
            text = summary.to_csv() if output_format == "csv" else summary.to_markdown()
        click.echo(text, nl=False)
        return
    known = summary.tables

    def text_of(name: str) -> str:
        return known[name].to("text", limit, console.width) if name in known else ""

    def of_whole_run() -> str:
        # The watcher knows the whole run; the ring has only its end.
        values = read_whole_run(trace) if steps is None else None
        return "" if values is None else whole_run_text(values, only, limit)

    of_flops = [*(("flops",) if flops or not memory else ()), *(("rates",) if flops else ())]
    of_flops += ["compiled"] if flops or not memory else []
    costs = [*map(text_of, of_flops), "" if flops and not memory else summary.memory_text(limit, console.width)]
    if by == "step":
        blocks = [steps_table(summary).to("text", limit, console.width)]
    elif tree:
        blocks = [summary.to_tree(console.width)]
    elif memory or flops:
        blocks = costs
    elif is_first and only is None and max_depth is None:
        blocks = [summary.first_screen(console.width), of_whole_run()]
        blocks.append("more: --limit 0 (all modules and columns), --tree, --by step, --ranges")
    else:
        found = summary.findings_text(console.width, limit) if only is None else ""
        blocks = [summary.modules_text(console.width), *costs, summary.device_text(limit, console.width)]
        if only is None:  # else the question is about these modules
            parts = parts_table(summary, limit).to("text", width=console.width) if summary.step_parts else ""
            units = known["units"].to("text", width=console.width) if "units" in known else ""
            blocks = [units, parts, *blocks]
        blocks.insert(0, found)
        if only is None and len(summary.steps) > 1:
            slowest = min(limit or SLOWEST_STEPS, SLOWEST_STEPS)
            blocks.append("slowest steps\n" + steps_table(summary).to("text", slowest, console.width))
        blocks.append(of_whole_run())
    console.print("\n\n".join(filter(None, blocks)), soft_wrap=True)


def summarize_file(
    trace: str, by: "GroupBy" = "module", steps: StepRange | None = None, step_by: str | None = None
) -> tuple["Summary", list[str]]:
    """Return the summary of a file, or of some of its steps, and what the user should know of what is not in it."""
    from ...public import Timeline
    from ...read.ring_file import load_around, load_shown, ring_pieces
    from ...timeline.summary import summarize_pieces

    by_optimizer = step_by in (None, "optimizer")
    pieces = ring_pieces(trace) if steps is None else None
    if by_optimizer and pieces is not None and pieces.has_step_ends:
        return summarize_pieces(pieces, by), []
    if steps is None:
        timeline, notes = load_shown(trace, None, pieces)
    else:
        timeline, notes = load_around(trace, steps, step_by), []
    timeline = whole = Timeline.of(timeline)
    if steps is not None:
        timeline = whole.steps(*steps, step_by)
    if steps is not None or timeline.gpu_work is None:
        require_spans(timeline, whole, trace, chosen=steps is not None)
    return timeline.summary(by, step_by), notes
