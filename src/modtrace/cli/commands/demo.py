"""`modtrace demo`: record the training of a small GPT, to get an example trace."""

import click

from ..._errors import check_can_record
from ..._files import next_step_hint
from ...record_options import ENGINES, EngineName
from ..options import make_console, say, value_option

STEPS = 20


@click.command("demo")
@value_option("-o --output", click.Path(), "OUT", "Trace to write; the suffix picks the format.", "demo.json")
@value_option("--engine", click.Choice(ENGINES), None, "The engine that records.", "auto")
def demo_command(output: str, engine: EngineName) -> None:
    """Train a small GPT on its own source for 20 steps, and record it."""
    from ...write import check_writable

    check_can_record()
    check_writable(output)
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = make_console()
    with console.status("importing torch"):
        import torch

        from ...demo import GPT, batches, make_optimizer, train_step
        from ...recording import record
        from ...track.native.build import build_if_missing

    build_if_missing(engine, say)
    torch.manual_seed(0)
    # One thread: for a model this small, several would mostly wait for each other.
    torch.set_num_threads(1)
    model = GPT()
    optimizer, data = make_optimizer(model), batches()
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]:.3f}"))
    with (
        record(output, engine=engine) as recording,
        Progress(*columns, TimeElapsedColumn(), console=console) as progress,
    ):
        task = progress.add_task("training", total=STEPS, loss=float("nan"))
        for _ in range(STEPS):
            loss = train_step(model, optimizer, *next(data))
            recording.step()
            progress.update(task, advance=1, loss=loss)
    console.print()
    console.print(recording.timeline().summary().sort_by(limit=16))
    console.print()
    console.print(next_step_hint(output), soft_wrap=True)
