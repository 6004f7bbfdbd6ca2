"""The verdicts of all frameworks, and the table of them in `tests/README.md`."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from modtrace.record_options import EngineName
from tests.support.forked_python import start_forked
from tests.support.python_process import python_environment

from .judge import COLUMNS, Verdict
from .ranks import RANKS, TRAININGS

__all__ = ["ENGINES", "judge_on_ranks", "title", "write_table"]

ENGINES: tuple[EngineName, ...] = ("native", "python")
_README = Path(__file__).parents[1] / "README.md"
_BEGIN, _END = "<!-- scripts/frameworks writes what follows -->", "<!-- and ends here -->"


def title(function: object) -> str:
    """Return what a training is called in the table."""
    return (getattr(function, "__doc__", None) or "").splitlines()[0]


def judge_on_ranks(engines: tuple[EngineName, ...] = ENGINES) -> dict[tuple[str, str], Verdict]:
    """Run all trainings on two ranks; return the verdicts of both together, by name of the training and engine.

    Raises:
        CalledProcessError: a rank failed.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        outs = [folder / f"{rank}.json" for rank in range(RANKS)]
        ranks = [
            start_forked(
                *("-m", "tests.frameworks.ranks", rank, folder / "store", ",".join(engines), out),
                env=python_environment(RANK=str(rank), WORLD_SIZE=str(RANKS)),
                stderr=subprocess.STDOUT,
            )
            for rank, out in enumerate(outs)
        ]
        texts = [rank.communicate()[0] for rank in ranks]
        for rank, text in zip(ranks, texts, strict=True):
            if rank.returncode:
                raise subprocess.CalledProcessError(rank.returncode, rank.args, text)
        told = [json.loads(out.read_text()) for out in outs]
    return {
        (training.__name__, engine): Verdict(
            {
                column: f"rank {rank}: {fault}"
                for rank in range(RANKS)
                for column, fault in told[rank][training.__name__][engine].items()
            }
        )
        for training in TRAININGS
        for engine in engines
    }


def write_table(verdicts: Mapping[tuple[str, str], Verdict]) -> str:
    """Write the table to `tests/README.md`, and return it.

    Args:
        verdicts: by title and engine.
    """
    rows = [
        f"| {name} | {engine} | {' | '.join(map(verdict.cell, COLUMNS))} |"
        for (name, engine), verdict in verdicts.items()
    ]
    head = [f"| | engine | {' | '.join(COLUMNS)} |", f"| --- | --- |{' --- |' * len(COLUMNS)}"]
    table = "\n".join([*head, *rows])
    text = _README.read_text()
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    _README.write_text(f"{before}{_BEGIN}\n\n{table}\n\n{_END}{after}")
    return table
