"""`modtrace summary`: tables of the time that modules and steps took."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import click

from ..._tables import SORT_KEYS
from .. import options

if TYPE_CHECKING:
    from ...timeline import Summary
    from ...timeline.summary import GroupBy

_FIRST_ROWS = (20, 12, 8, 4)
"""The numbers of rows that lists are cut to, one after the other, until they fit a first screen."""
_COSTS = "flops", "rates", "compiled", "memory"
SLOWEST_STEPS = 5
"""The number of the slowest steps that are listed below the modules."""


@click.command("summary")
@click.argument("trace", type=click.Path())
@options.value_option(
    "--by", click.Choice(["module", "class", "step"]), None, "What gets a row; steps come slowest first.", "module"
)
@click.option("--tree", is_flag=True, help="Show the modules as a tree.")
@options.value_option(
    "--sort",
    click.Choice(SORT_KEYS),
    "COLUMN",
    "Column to sort by: self, total, p95, calls, name … [gpu if known, else self; total with --tree]",
)
@options.value_option("--limit", click.IntRange(0), "N", "Show the first N rows of each list; 0: all. [a first screen]")
@click.option("--flops", is_flag=True, help="Show FLOPs only: what modules cost, and how well they use the time.")
@options.value_option(
    "--peak-tflops",
    click.FloatRange(0, min_open=True),
    "X",
    "The highest rate of the device, 10¹² FLOP/s, for MFU and shares of it. [by its name]",
)
@click.option(
    "--memory", is_flag=True, help="Show memory only: what modules keep and take, and who holds it at the peak."
)
@click.option("--ranges", is_flag=True, help="Show ranges only: the part of each, how often and how long.")
@options.step_by_option
@options.only_option
@options.max_depth_option
@options.steps_option
@options.format_option
def summary_command(
    trace: str,
    output_format: options.TableFormat,
    by: Literal["module", "class", "step"],
    tree: bool,
    sort: str | None,
    limit: int | None,
    only: str | None,
    max_depth: int | None,
    steps: options.StepRange | None,
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
    from ...timeline.summary.tables import ranges_table

    _refuse_contradictions(click.get_current_context().params)
    with options.show_status(f"reading {trace}"):
        summary, notes = summarize_file(trace, "class" if by == "class" else "module", steps, step_by)
    for note in notes:
        options.echo(note, err=True)
    _refuse_missing(summary, trace, gpu=sort == "gpu", memory=memory, flops=flops)
    summary = (summary if peak_tflops is None else summary.with_peak(peak_tflops)).of_file(trace, step_by)
    is_first, limit = limit is None and only is None and max_depth is None, limit or None
    summary = _only(summary, trace, only, max_depth).sort_by(sort or ("total" if tree else None), limit)
    console = options.make_console()
    width = console.width
    if output_format == "json":
        click.echo(summary.to_json(limit), nl=False)
    elif ranges:
        text = ranges_table(summary).to(options.FORMS[output_format], limit, width).removesuffix("\n")
        console.print(text, soft_wrap=True)
    elif output_format != "table":
        click.echo(_csv_or_markdown(summary, output_format, limit, by_step=by == "step"), nl=False)
    else:
        asked = ["steps"] if by == "step" else [*_COSTS[:3] * flops, *_COSTS[3:] * memory]
        whole_run = _whole_run(trace, only, limit) if steps is None and not (tree or asked) else ""
        if tree:
            blocks = [summary.to_tree(width)]
        elif asked:
            blocks = _first_rows(summary, asked, width) if is_first else _cost_texts(summary, asked, limit, width)
        elif is_first:
            more = "more: --limit 0 (all modules and columns), --tree, --by step, --ranges"
            blocks = [summary.first_screen(width), whole_run, more]
        else:
            blocks = [*_all_texts(summary, limit, width, of_steps=only is None), whole_run]
        console.print("\n\n".join(filter(None, blocks)), soft_wrap=True)


def _refuse_contradictions(given: Mapping[str, Any]) -> None:
    """Raise UsageError if two of the given options do not go together."""
    by, tree, costs = given["by"], given["tree"], given["memory"] or given["flops"]
    some_modules = given["only"] is not None or given["max_depth"] is not None
    if tree and (given["output_format"] != "table" or by != "module"):
        raise click.UsageError("--tree is a table of modules; leave out --format and --by.")
    if given["ranges"] and (tree or costs or some_modules or by != "module"):
        raise click.UsageError("--ranges is about no modules; leave out --by, --tree, --memory, --flops and --only.")
    if tree and costs:
        raise click.UsageError("--tree is about times; leave out --memory and --flops.")
    if given["max_depth"] is not None and by == "class":
        raise click.UsageError("--max-depth is about modules; leave out --by class.")
    if by == "step" and (given["sort"] is not None or some_modules):
        raise click.UsageError("--sort, --only and --max-depth are about modules; leave out --by step.")
    if by == "step" and costs:
        raise click.UsageError("--memory and --flops are about modules; leave out --by step.")


def _refuse_missing(summary: "Summary", trace: str, *, gpu: bool, memory: bool, flops: bool) -> None:
    """Raise UsageError if the recording does not have what is asked for."""
    if gpu and summary.gpu is None:
        raise click.UsageError(f"{trace} has no GPU times; {_gpu_hint(trace)}.")
    if memory and summary.memory is None:
        raise click.UsageError(f"{trace} has no memory; record with --memory, or record(memory=True).")
    if flops and summary.flops is None and not summary.compiled:
        raise click.UsageError(f"{trace} has no FLOPs; record with --flops, or record(flops=True).")


def _csv_or_markdown(summary: "Summary", form: str, limit: int | None, *, by_step: bool) -> str:
    from ...timeline.summary.tables import steps_table

    if form == "csv":
        return summary.steps_csv(limit) if by_step else summary.to_csv()
    return str(steps_table(summary).to("md", limit)) if by_step else summary.to_markdown()


def _whole_run(trace: str, only: str | None, limit: int | None) -> str:
    """Return what a watcher wrote of the run; it knows all of it, and the ring has only its end."""
    from ...live.read_whole_run import read_whole_run, whole_run_text

    values = read_whole_run(trace)
    return "" if values is None else whole_run_text(values, only, limit)


def _only(whole: "Summary", trace: str, pattern: str | None, max_depth: int | None) -> "Summary":
    """Return the summary of some modules; their names may lack what all names begin with, as in the table."""
    summary = whole.only(pattern, max_depth)
    if pattern is None or summary.rows:
        return summary
    summary = whole.only(f"*.{pattern}", max_depth)
    if not summary.rows:
        example = whole.rows[0].fqn or whole.rows[0].module_class if whole.rows else ""
        hint = "; --ranges lists saving, loading and the like" if whole.ranges else ""
        raise options.no_such_module(trace, pattern, example, hint)
    return summary


def _gpu_hint(trace: str) -> str:
    """Say why a file that was read has no GPU times: its profile has none, or it has no profile."""
    from ...formats.trace_file import FileKind, file_kind
    from ...read import trace_path

    with trace_path(trace) as path:
        profiled = file_kind(path) in {FileKind.PROFILE, FileKind.MERGED_JSON, FileKind.MERGED_PERFETTO}
    return "the profile in it has no work of a GPU" if profiled else "'modtrace merge' adds them"


def _first_rows(summary: "Summary", names: Sequence[str], width: int) -> list[str]:
    """Return the tables of these names, with as many rows of each as a first screen has room for."""
    from ...timeline.summary.module_summary import FIRST_BYTES

    for rows in (None, *_FIRST_ROWS):
        blocks = _cost_texts(summary, names, rows, width)
        if sum(len(block.encode()) for block in blocks) <= FIRST_BYTES:
            break
    return blocks if rows is None else [*blocks, "more: --limit 0 (all rows)"]


def _cost_texts(summary: "Summary", names: Sequence[str], limit: int | None, width: int) -> list[str]:
    """Return the tables of these names that the recording has."""
    tables = summary.tables
    return [
        summary.memory_text(limit, width) if name == "memory" else tables[name].to("text", limit, width)
        for name in names
        if name in tables
    ]


def _all_texts(summary: "Summary", limit: int | None, width: int, *, of_steps: bool) -> list[str]:
    """Return all tables; without those of steps, where the question is about some modules."""
    from ...timeline.summary.tables import parts_table, steps_table

    costs = _cost_texts(summary, ("flops", "compiled", "memory"), limit, width)
    of_modules = [summary.modules_text(width), *costs, summary.device_text(limit, width)]
    if not of_steps:
        return of_modules
    parts = parts_table(summary, limit).to("text", width=width) if summary.step_parts else ""
    units = summary.tables["units"].to("text", width=width) if "units" in summary.tables else ""
    slowest = min(limit or SLOWEST_STEPS, SLOWEST_STEPS)
    steps = "slowest steps\n" + steps_table(summary).to("text", slowest, width) if len(summary.steps) > 1 else ""
    return [summary.findings_text(width, limit), units, parts, *of_modules, steps]


def summarize_file(
    trace: str, by: "GroupBy" = "module", steps: options.StepRange | None = None, step_by: str | None = None
) -> tuple["Summary", list[str]]:
    """Return the summary of a file or of some of its steps, and notes for the user on what is not in it."""
    from ...public import Timeline
    from ...read import load_around, load_shown, ring_pieces
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
        options.require_spans(timeline, whole, trace, chosen=steps is not None)
    return timeline.summary(by, step_by), notes
