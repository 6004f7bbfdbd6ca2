"""Judges all frameworks that are installed, prints what is wrong, and writes the table."""

from __future__ import annotations

from .judge import Verdict, judge
from .ranks import TRAININGS
from .table import ENGINES, judge_on_ranks, title, write_table
from .trainers import TRAINERS, import_torchvision

import_torchvision()
verdicts: dict[tuple[str, str], Verdict] = {}
for train in TRAINERS:
    for engine in ENGINES:
        verdicts[title(train), engine] = judge(train, engine)
titles = {training.__name__: title(training) for training in TRAININGS}
for (name, engine_name), verdict in judge_on_ranks().items():
    verdicts[titles[name], engine_name] = verdict
print(write_table(verdicts))
for (name, engine_name), verdict in verdicts.items():
    for column, fault in verdict.faults.items():
        print(f"{name}, {engine_name} engine: {column}: {fault}")
