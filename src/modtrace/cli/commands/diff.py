"""`modtrace diff`: changes between two sets of recordings, and a check of their size."""

import math
import shlex
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from ..._files import find_recordings
from ..._tables import counted, ratio_text
from .. import options

if TYPE_CHECKING:
    from ...compare import Diff
    from ...timeline.summary import GroupBy

LIMIT = 30


def _parse_share(text: str) -> float:
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share < float("inf"):
        raise click.BadParameter(f"{text!r} is not a share; write 5% or 0.05.")
    if share >= 1 and not text.endswith("%"):
        raise click.BadParameter(f"{text!r} would be {share:.0%}; write {text}% or {share / 100:g}.")
    return share


def _name_map(_context: click.Context, _parameter: click.Parameter, pairs: tuple[str, ...]) -> dict[str, str]:
    names = [pair.partition("=") for pair in pairs]
    for old, sign, new in names:
        if not (old and sign and new):
            raise click.BadParameter(f"{old + sign + new!r} is not OLD=NEW.")
    return {old: new for old, _, new in names}


@click.command("diff")
@click.argument("sides", type=click.Path(), nargs=-1, required=True, metavar="BASE NEW")
@options.format_option
@click.option(
    "-o",
    "--output",
    type=click.Path(),
    help="Write the comparison: .html shows a typical step of each side with its changes in colour, .pftrace the same "
    "for Perfetto; .md, .csv and .json are tables.",
)
@click.option("--verbose", is_flag=True, help="Also list modules without a difference beyond the noise.")
@options.only_option
@options.value_option(
    "--by", click.Choice(["module", "class"]), None, "The unit compared; a baseline has its own.", "module"
)
@options.step_by_option
@click.option(
    "--map",
    "name_map",
    metavar="OLD=NEW",
    multiple=True,
    callback=_name_map,
    help="The old and the new name of a module, which also applies to the modules inside it. Repeatable.",
)
@options.value_option(
    "--fail-above",
    _parse_share,
    "SHARE",
    "Exit with 1 if the step, a part of it or a module is slower by more than this (5% or 0.05), even at the lower end "
    "of its interval, or if its memory peak is higher by more. Exit with 3 if the step likely is, but noise or too few "
    "recordings hide it. With --only, only modules count.",
)
@options.value_option(
    "--fail-floor",
    _parse_share,
    "SHARE",
    "--fail-above ignores a module or a part whose time or memory grew by less than this share of the step.",
    "0.5%",
)
@options.value_option(
    "--save-baseline baseline",
    click.Path(),
    "FILE",
    "Compare nothing, and save the times of RECORDING… in FILE, a small JSON file that can be BASE or NEW.",
)
def diff_command(
    sides: tuple[str, ...],
    output_format: options.TableFormat,
    output: str | None,
    verbose: bool,
    only: str | None,
    by: "GroupBy",
    step_by: str | None,
    name_map: dict[str, str],
    fail_above: float | None,
    fail_floor: float,
    baseline: str | None,
) -> None:
    """Compare NEW with BASE by the self times of modules per step, and by the parts of the step.

    Each side is a file that modtrace reads, a baseline, a folder of recordings, or a quoted pattern ('base-*.pftrace').
    Record several runs per side, alternating: they show how much recordings of one program differ. Five or more per
    side find changes that one does not. The probability that all verdicts are right is 99 %.
    """
    if baseline is not None:
        _save_baseline(sides, baseline, by, step_by)
        return
    if len(sides) != 2:
        raise click.UsageError("Give two sides, BASE and NEW; quote a pattern of files.")
    from ...compare import diff, suffix_of

    if output is not None:
        suffix_of(output)
    base, new = (find_recordings([side]) for side in sides)
    with options.show_status(f"comparing {' and '.join(sides)}"):
        comparison = diff(base, new, map=name_map, by=by, step_by=step_by)
    flags = [("--by", by if by == "class" else None), ("--step-by", step_by)]
    flags += [("--map", f"{old}={new}") for old, new in name_map.items()]
    words = [word for name, value in flags if value is not None for word in (name, value)]
    comparison = replace(comparison, arguments=shlex.join([*sides, *words]))
    if only is not None:
        example = comparison.changes[0].fqn if comparison.changes else ""
        comparison = comparison.only(only)
        if not comparison.changes:
            raise options.no_such_module(" and ".join(sides), only, example)
    if output_format == "table":
        options.make_console().print(comparison.to_text(LIMIT, verbose=verbose), soft_wrap=True)
    elif output_format == "markdown":
        click.echo(comparison.to_markdown(verbose=verbose), nl=False)
    else:
        click.echo(comparison.to_csv() if output_format == "csv" else comparison.to_json(), nl=False)
    if output is not None:
        comparison.save(output)
        options.echo(f"the comparison is in {output}", err=True)
    if fail_above is not None and (status := _exit_status(comparison, fail_above, fail_floor)):
        sys.exit(status)


def _save_baseline(recordings: tuple[str, ...], path: str, by: "GroupBy", step_by: str | None) -> None:
    from ...compare import save_baseline

    files = find_recordings(recordings)
    with options.show_status(f"measuring {counted(len(files), 'recording')}"):
        runs = save_baseline(files, path, by=by, step_by=step_by)
    count = len({fqn for run in runs for fqn in run.classes})
    modules = counted(count, "module") if by == "module" else f"{count:,} classes"
    steps = counted(sum(run.steps for run in runs), "step")
    options.echo(f"{path}: {modules}, {steps} of {counted(len(runs), 'recording')}")
    options.echo(f"Next: modtrace diff {path} NEW.pftrace --fail-above 5%")


def _exit_status(comparison: "Diff", limit: float, floor: float) -> int:
    """Print increases above the limit on stderr; return 1 if there are any, 3 if the step's is only likely, else 0."""
    if comparison.unrelated:
        options.say(f"{comparison.sentence}; the limit cannot be checked")
    above = comparison.above(limit, floor=floor)
    for change in above:
        verb, kind = ("is", "slower") if change.outcome == change.verdict else (f"{change.outcome} and took", "longer")
        by = f"{kind} by {change.difference_ns / 1e6:.3f} ms"
        by = ratio_text(change.ratio, f"{kind} by {{:.1%}}") if math.isfinite(change.ratio) else by
        options.say(f"{change.label} {verb} {by}, more than {limit:.1%}")
    peaks = comparison.peaks_above(limit, floor=floor)
    for peak in peaks:
        ratio = peak.difference_bytes / (peak.base_bytes or 1)
        share = f" ({ratio_text(ratio, '{:.1%}', 'much')})" if peak.base_bytes else ""
        module = f"{peak.fqn}: " if peak.fqn else ""
        options.say(
            f"{module}peak_bytes are {peak.difference_bytes:,} more{share}: {peak.base_bytes:,} before, "
            f"{peak.new_bytes:,} after"
        )
    if above or peaks or comparison.unrelated:
        return 1
    unclear = comparison.likely_above(limit, floor=floor)
    for change in unclear:
        by = f"{ratio_text(change.ratio)}, but maybe {ratio_text((change.low_ns or 0) / change.base_ns)}"
        options.say(f"{change.label} is likely slower by more than {limit:.1%} ({by}): record more per side")
    return 3 if unclear else 0
