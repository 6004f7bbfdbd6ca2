"""`modtrace demo`: record the training of a small GPT, for a trace to look at."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

import click

__all__ = ["command", "next_step_hint"]

STEPS = 20


@click.command("demo")
@click.option(
    "-o",
    "--output",
    metavar="OUT",
    default="demo.json",
    show_default=True,
    help="Trace to write; the suffix picks the format.",
)
def command(output: str) -> None:
    """Train a small GPT on its own source for 20 steps, and record it."""
    from ..write import check_writable

    check_writable(output)
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console()
    with console.status("importing torch"):
        import torch

        from ..demo import GPT, batches, make_optimizer, train_step
        from ..recording import record

    torch.manual_seed(0)
    # One thread: at this size several mostly wait for each other.
    torch.set_num_threads(1)
    model = GPT()
    optimizer, data = make_optimizer(model), batches()
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]:.3f}"))
    with record(output) as recording, Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("training", total=STEPS, loss=float("nan"))
        for _ in range(STEPS):
            loss = train_step(model, optimizer, *next(data))
            recording.step()
            progress.update(task, advance=1, loss=loss)
    console.print()
    console.print(recording.timeline().summary().sort_by(limit=16))
    console.print()
    console.print(next_step_hint(output), highlight=False, markup=False, soft_wrap=True)


def next_step_hint(path: str) -> str:
    """Return a line that says how to look at the trace in `path`."""
    suffix = Path(path).suffix.lower()
    if suffix == ".html":
        return f"Next: open {path} in a browser; it needs no network"
    if suffix == ".zip":
        return f"Next: unpack {path} and open its viewer.html in a browser, or attach it to a bug report"
    return f"Next: {_command_name()} view {shlex.quote(path)}, or drop {path} onto https://ui.perfetto.dev"


def _command_name() -> str:
    """Return how to call this command from a shell, also where the virtual environment is not activated."""
    script = Path(sys.executable).with_name("modtrace")
    if shutil.which("modtrace"):
        return "modtrace"
    return shlex.quote(str(script)) if script.exists() else f"{shlex.quote(sys.executable)} -m modtrace"
