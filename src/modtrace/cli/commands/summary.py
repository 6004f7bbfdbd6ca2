"""`modtrace summary`: tables of the times of modules and steps."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import click

from ..._tables import SORT_KEYS, SortKey
from .. import options

if TYPE_CHECKING:
    from ...timeline import Summary
    from ...timeline.summary import GroupBy

_FIRST_ROWS = (20, 12, 8, 4)
"""Numbers of rows to try until the lists fit a first screen."""
_FLOP_TABLES = ["flops", "rates", "compiled"]
SLOWEST_STEPS = 5
"""Number of slowest steps listed below the modules."""


@click.command("summary")
@click.argument("trace", type=click.Path())
@options.value_option(
    "--by", click.Choice(["module", "class", "step"]), None, "The unit of a row; steps come slowest first.", "module"
)
@click.option("--tree", is_flag=True, help="Show the modules as a tree.")
@options.value_option(
    "--sort",
    click.Choice(SORT_KEYS),
    "COLUMN",
    "Column to sort by: self, total, p95, calls, name … [gpu if known, otherwise self; total with --tree]",
)
@options.value_option("--limit", click.IntRange(0), "N", "Show the first N rows of each list; 0: all. [a first screen]")
@click.option("--flops", is_flag=True, help="Show only FLOPs of modules, and their rates.")
@options.value_option(
    "--peak-tflops",
    click.FloatRange(0, min_open=True),
    "X",
    "Peak rate of the device in 10¹² FLOP/s, for MFU and shares of the peak. [by the device's name]",
)
@click.option("--memory", is_flag=True, help="Show only memory: kept and used by modules, and the holders at the peak.")
@click.option("--ranges", is_flag=True, help="Show only ranges: part of the step, calls and times of each.")
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
    sort: SortKey | None,
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
    """Print the findings in TRACE, the parts of a step, and the times of modules.

    TRACE is any file that modtrace reads; a merged trace has GPU times and kernels too. The parts of a step add up to
    its duration. --limit shortens all other lists, and --limit 0 shows all modules and columns.
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
    summary = _select_modules(summary, trace, only, max_depth).sort_by(sort or ("total" if tree else None), limit)
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
        tables = ["steps"] if by == "step" else [*(_FLOP_TABLES if flops else []), *(["memory"] if memory else [])]
        whole_run = _whole_run(trace, only, limit) if steps is None and not (tree or tables) else ""
        if tree:
            blocks = [summary.to_tree(width)]
        elif tables:
            blocks = _first_rows(summary, tables, width) if is_first else _table_texts(summary, tables, limit, width)
        elif is_first:
            hint = "more: --limit 0 (all modules and columns), --tree, --by step, --ranges"
            blocks = [summary.first_screen(width), whole_run, hint]
        else:
            blocks = [*_all_texts(summary, limit, width, with_steps=only is None), whole_run]
        console.print("\n\n".join(filter(None, blocks)), soft_wrap=True)


def _refuse_contradictions(values: Mapping[str, Any]) -> None:
    """Raise UsageError if options contradict each other."""
    by, tree, costs = values["by"], values["tree"], values["memory"] or values["flops"]
    selects_modules = values["only"] is not None or values["max_depth"] is not None
    if tree and (values["output_format"] != "table" or by != "module"):
        raise click.UsageError("--tree is a table of modules; leave out --format and --by.")
    if values["ranges"] and (tree or costs or selects_modules or by != "module"):
        raise click.UsageError("--ranges shows no modules; leave out --by, --tree, --memory, --flops and --only.")
    if tree and costs:
        raise click.UsageError("--tree shows times; leave out --memory and --flops.")
    if values["max_depth"] is not None and by == "class":
        raise click.UsageError("--max-depth applies to modules; leave out --by class.")
    if by == "step" and (values["sort"] is not None or selects_modules):
        raise click.UsageError("--sort, --only and --max-depth apply to modules; leave out --by step.")
    if by == "step" and costs:
        raise click.UsageError("--memory and --flops apply to modules; leave out --by step.")


def _refuse_missing(summary: "Summary", trace: str, *, gpu: bool, memory: bool, flops: bool) -> None:
    """Raise UsageError if the recording lacks the data that an option asks for."""
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
    """Return the text of a watcher's file on the whole run, of which the ring has only the end; empty without one."""
    from ...live.read_whole_run import read_whole_run, whole_run_text

    values = read_whole_run(trace)
    return "" if values is None else whole_run_text(values, only, limit)


def _select_modules(summary: "Summary", trace: str, pattern: str | None, max_depth: int | None) -> "Summary":
    """Return the summary of the matching modules; the pattern may omit the common start of names, like the table."""
    selected = summary.only(pattern, max_depth)
    if pattern is None or selected.rows:
        return selected
    selected = summary.only(f"*.{pattern}", max_depth)
    if not selected.rows:
        example = summary.rows[0].fqn or summary.rows[0].module_class if summary.rows else ""
        hint = "; --ranges lists saving, loading and the like" if summary.ranges else ""
        raise options.no_such_module(trace, pattern, example, hint)
    return selected


def _gpu_hint(trace: str) -> str:
    """Return the reason why a file has no GPU times: its profile has none, or it has no profile."""
    from ...formats.trace_file import FileKind, file_kind
    from ...read import trace_path

    with trace_path(trace) as path:
        profiled = file_kind(path) in {FileKind.PROFILE, FileKind.MERGED_JSON, FileKind.MERGED_PERFETTO}
    return "its profile has no GPU work" if profiled else "'modtrace merge' adds them"


def _first_rows(summary: "Summary", names: Sequence[str], width: int) -> list[str]:
    """Return the tables with the names, shortened to fit a first screen."""
    from ...timeline.summary.module_summary import FIRST_BYTES

    for rows in (None, *_FIRST_ROWS):
        blocks = _table_texts(summary, names, rows, width)
        if sum(len(block.encode()) for block in blocks) <= FIRST_BYTES:
            break
    return blocks if rows is None else [*blocks, "more: --limit 0 (all rows)"]


def _table_texts(summary: "Summary", names: Sequence[str], limit: int | None, width: int) -> list[str]:
    """Return the tables with the names that the recording has."""
    tables = summary.tables
    return [
        summary.memory_text(limit, width) if name == "memory" else tables[name].to("text", limit, width)
        for name in names
        if name in tables
    ]


def _all_texts(summary: "Summary", limit: int | None, width: int, *, with_steps: bool) -> list[str]:
    """Return all tables; tables of steps only if `with_steps`."""
    from ...timeline.summary.tables import parts_table, steps_table

    costs = _table_texts(summary, ("flops", "compiled", "memory"), limit, width)
    module_texts = [summary.modules_text(width), *costs, summary.device_text(limit, width)]
    if not with_steps:
        return module_texts
    parts = parts_table(summary, limit).to("text", width=width) if summary.step_parts else ""
    units = summary.tables["units"].to("text", width=width) if "units" in summary.tables else ""
    slowest = min(limit or SLOWEST_STEPS, SLOWEST_STEPS)
    steps = "slowest steps\n" + steps_table(summary).to("text", slowest, width) if len(summary.steps) > 1 else ""
    return [summary.findings_text(width, limit), units, parts, *module_texts, steps]


def summarize_file(
    trace: str, by: "GroupBy" = "module", steps: options.StepRange | None = None, step_by: str | None = None
) -> tuple["Summary", list[str]]:
    """Return the summary of a file or of the steps `steps`, and notes for the user on data left out."""
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
    timeline = full_timeline = Timeline.of(timeline)
    if steps is not None:
        timeline = full_timeline.steps(*steps, step_by)
    if steps is not None or timeline.gpu_work is None:
        options.require_spans(timeline, full_timeline, trace, is_selection=steps is not None)
    return timeline.summary(by, step_by), notes
