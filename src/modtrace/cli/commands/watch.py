"""`modtrace watch`: save the windows around slow moments of a running job."""

import re
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..options import say, value_option

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ...live.watch import UpdateSink
    from ...live.windows import LateArrival
    from ...ring import RingSnapshot

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kMG]?)B?")
_FACTORS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}


def _duration(text: str) -> int:
    from ...live.triggers import parse_duration

    ns = parse_duration(text)
    if ns is None:
        raise click.BadParameter(f"{text!r} is not a duration such as 500ms, 1s or 2min.")
    return ns


def _size(text: str) -> int:
    match = _SIZE.fullmatch(text)
    if match is None:
        raise click.BadParameter(f"{text!r} is not a size such as 500MB.")
    return int(float(match[1]) * _FACTORS[match[2]])


def _find_late(rings: "Mapping[int, RingSnapshot]") -> "Sequence[LateArrival]":
    from ...ranks.slow import find_late_in_rings  # only if there are several ranks: it reads all kinds of files

    return find_late_in_rings(rings)


@click.command("watch")
@click.argument("rings", type=click.Path(), metavar="RING|DIR...", nargs=-1, required=True)
@click.option("--keep-when", "conditions", metavar="CONDITION", multiple=True, help="Save windows with this condition.")
@value_option("-o --output", click.Path(), "FOLDER", "Folder of windows. [run.kept next to run.modtrace, DIR/kept]")
@value_option("--around", click.IntRange(0, 100), "N", "Number of steps to save before and after.", 2)
@value_option("--every", _duration, "TIME", "Time between two readings.", "1s")
@value_option("--pause", _duration, "TIME", "Minimum time between two windows with one reason.", "30s")
@value_option("--max-kept", click.IntRange(1), "N", "Maximum number of windows.", 20)
@value_option("--max-bytes", _size, "SIZE", "Maximum size of FOLDER, with the windows of earlier runs.", "500MB")
@click.option("--lines", type=click.Path(), metavar="FILE", help="File with a JSON line per step. [FOLDER/steps.jsonl]")
@click.option("--no-wait", is_flag=True, hidden=True, help="Exit if there is no ring.")
@click.option("--metrics", type=click.IntRange(0, 65535), metavar="PORT", help="Serve OpenMetrics at 127.0.0.1:PORT.")
def watch_command(
    rings: tuple[str, ...],
    conditions: tuple[str, ...],
    output: str | None,
    lines: str | None,
    no_wait: bool,
    metrics: int | None,
    **limits: Any,
) -> None:
    """Watch a running job, and save the steps around slow moments as small traces.

    RING is a file that a process records to (modtrace.record(ring=...), modtrace run --ring), DIR a folder of them.
    If one rank of a folder is slow, the same window of all ranks is saved. The command only reads the rings, so the
    training is not affected. They need not exist yet. It ends when all processes have ended, or with Ctrl-C.

    CONDITION is one of "step > 3x" (times the median of the last steps), "step > 500ms", "data > 1s", "gc > 200ms"
    and other parts of a step, "range NAME > 50ms", "module GPT.head > 50ms" (a pattern of names) and "hang 60s" (no
    event for that time); "signal" is only for modtrace run --keep-when. Windows that the program requests with
    Recording.keep("why") are saved too. The first step never counts as slow.
    """
    from ..._errors import ModtraceError
    from ..._pools import lower_priority
    from ...live.triggers import parse_conditions
    from ...live.watch import Watcher
    from ...live.whole_run import StepsFile, WholeRunWriter
    from ...live.windows import STEPS_FILE, KeepLimits, KeptFolder, WindowKeeper, kept_folder

    try:
        parsed = parse_conditions(conditions)
    except ModtraceError as error:
        raise click.UsageError(f"--keep-when: {error}.") from None
    lower_priority()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM saves pending windows too
    folder = KeptFolder(Path(output), is_named=True) if output else KeptFolder(kept_folder(rings[0]))
    keep = KeepLimits(limits["around"], limits["pause"], limits["max_kept"], limits["max_bytes"])
    keeper = WindowKeeper(folder, keep, say, _find_late)
    steps = StepsFile(folder, STEPS_FILE, say)
    if lines:
        steps = StepsFile(KeptFolder(Path(lines).parent, is_named=True), Path(lines).name, say, is_named=True)
    sinks: list[UpdateSink] = [steps, WholeRunWriter(say)]
    if metrics is not None:
        from ...live.watch import Metrics  # only here, because it imports a web server

        try:
            served = Metrics(metrics)
        except OSError as error:
            raise click.UsageError(f"--metrics {metrics}: {error.strerror or error}.") from None
        say(f"metrics at http://127.0.0.1:{served.port}/metrics")
        sinks.append(served)
    if not Watcher(rings, parsed, keeper, say, sinks, waits=not no_wait).run(limits["every"] / 1e9):
        sys.exit(1)
