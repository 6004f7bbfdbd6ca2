"""`modtrace top`: the current work of a job."""

import signal
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from ..._tables import json_text
from ..options import TextFormat, make_console, say, text_or_json_option, value_option

if TYPE_CHECKING:
    from ..._pools import ParallelReader
    from ...live.follow import RankRates
    from ...live.top import JobView

_MAX_EVENTS = 1 << 16
"""Maximum number of events read from all rings together, so that repeated reading does not keep a core busy."""
_MIN_EVENTS = 1 << 12
_PIPE_WIDTH = 120
_SECONDS = click.FloatRange(0.1, 3600)


@click.command("top")
@click.argument("rings", type=click.Path(), metavar="RING|DIR...", nargs=-1, required=True)
@value_option("--seconds", _SECONDS, "SECONDS", "Length of the time window that is shown.", 10.0)
@value_option("--refresh", _SECONDS, "SECONDS", "Time between readings.", 1.0)
@text_or_json_option
def top_command(rings: tuple[str, ...], seconds: float, refresh: float, output_format: TextFormat) -> None:
    """Show the current work of a job: steps per second, and the time of each module in the last seconds.

    RING is a file that a process records to (modtrace.record(ring=...), modtrace run --ring), DIR a folder of them.
    They are read from outside, so the training is not affected. A ring may not exist yet, and may be replaced by a new
    run. Ranks are shown together; ranks that hang, stall or died are in red.

    Keys: q quits, p pauses, s sorts by the next column, - and + fold, m shows a line per rank, [ and ] select a rank,
    arrows scroll. For a pipe or --format json, the current state is printed once.
    """
    from ..._pools import ParallelReader, lower_priority
    from ...live.top import ScreenState, render_screen

    console = make_console()
    with ParallelReader() as reader:
        if console.is_terminal and output_format == "text":
            from ...live.top import show_live

            lower_priority()
            signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM restores the terminal too
            show_live(lambda: read_rates(reader, rings, seconds), console, refresh)
            return
        job = read_rates(reader, rings, seconds)
    if output_format == "json":
        click.echo(json_text([_to_dict(rank) for rank in job.ranks]), nl=False)
        for error in job.errors:
            say(error)
    else:
        console.print(render_screen(job, ScreenState(), _PIPE_WIDTH))
    if not job.ranks:
        raise click.exceptions.Exit(1)


def _to_dict(rank: "RankRates") -> dict[str, Any]:
    """Return the state of a process as in `where`, and the times of modules in the window, as JSON values."""
    return rank.state.to_dict() | {
        "steps_per_s": rank.steps_per_s,
        "window_ns": rank.window_ns,
        "communication_ns": rank.communication_ns,
        "modules": [
            {"fqn": row.fqn, "module_class": row.module_class, "total_ns": row.total_ns, "self_ns": row.self_ns}
            for row in rank.rows
        ],
    }


def read_rates(reader: "ParallelReader", rings: Sequence[str], seconds: float) -> "JobView":
    """Return the work in the last seconds of the processes that write the rings."""
    from ...live.follow import read_rank_rates
    from ...live.top import JobView
    from ...ring import find_rings

    start = time.monotonic()
    paths, _, missing = find_rings(rings)
    events = max(_MIN_EVENTS, _MAX_EVENTS // max(1, len(paths)))
    ranks, errors = reader.read(partial(read_rank_rates, seconds=seconds, max_events=events), paths)
    ranks.sort(key=lambda rank: (rank.state.rank is None, rank.state.rank or 0, rank.state.path))
    return JobView(ranks, missing + errors, time.monotonic() - start)
