"""Runs one training without and with a recording, and judges what the recording told and changed.

The truth comes from the run without a recording: torch's global forward hooks count the calls of each module, and the
framework itself counts its steps.
"""

from __future__ import annotations

import logging
import random
import re
import struct
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

import modtrace
from modtrace.checking import check
from modtrace.record_options import EngineName

__all__ = ["COLUMNS", "Run", "Verdict", "judge", "train_on"]

_KNOWN_NOTE = "modtrace: the Python engine does not see the collectives of DDP's reducer"
COLUMNS = ("loss the same", "no warnings", "calls", "backward", "steps", "check")


@dataclass
class Run:
    """Facts that a training reports about itself.

    Attributes:
        models: the model, as it was before it was wrapped, or its parts; names start at the class, or at `root`.
        losses: one per batch.
        steps: how many steps the framework counted.
        root: what names begin with.
        outermost: what is called in the place of the model.
    """

    models: list[nn.Module]
    losses: list[float] = field(default_factory=list)
    steps: int = 0
    root: str | None = None
    outermost: nn.Module | None = None


@dataclass(frozen=True)
class Verdict:
    """The faults of a recording by column; a column without a fault is missing."""

    faults: dict[str, str]

    def cell(self, column: str) -> str:
        """Return what the table shows."""
        return "no" if column in self.faults else "yes"


def train_on(
    run: Run,
    optimizer: torch.optim.Optimizer,
    losses: Iterable[Tensor],
    backward: Callable[[Tensor], object] = Tensor.backward,
) -> Run:
    """Step with each loss, in the way of a loop without a framework; return `run` with what came of it."""
    for loss in losses:
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(loss.item())
        run.steps += 1
    return run


class _Calls:
    """Counts the calls of each module by torch's global hooks."""

    def __init__(self) -> None:
        self.forward: Counter[int] = Counter()
        self.recompute: Counter[int] = Counter()
        # Module and number of each call that made nodes and got a gradient.
        self.backward: set[tuple[int, int]] = set()
        self._returned = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        handles = [register_module_forward_pre_hook(self._count), register_module_forward_hook(self._note_backward)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _count(self, module: nn.Module, inputs: Any) -> None:
        # Before the call: activation checkpoints leave the last ones of a recomputation by an exception.
        recompute = torch._C._current_graph_task_id() != -1
        (self.recompute if recompute else self.forward)[id(module)] += 1

    def _note_backward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._returned += 1
        call = (id(module), self._returned)
        before = {id(tensor.grad_fn) for tensor in _tensors(inputs)}
        for tensor in _tensors(output):
            if tensor.requires_grad and tensor.grad_fn is not None and id(tensor.grad_fn) not in before:
                tensor.register_hook(lambda _: self.backward.add(call))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, tuple | list):
        for inner in value:
            yield from _tensors(inner)


def judge(train: Callable[[], Run], engine: EngineName) -> Verdict:
    """Run `train` twice, and return what is wrong with the second, recorded time."""
    calls = _Calls()
    with calls.counting():
        with _logged_warnings() as plain_logged:
            plain, plain_warnings = _run(train)
        plain_warnings += plain_logged
    recording = modtrace.record(engine=engine, capacity=1 << 18)
    with _logged_warnings() as logged, recording:
        recorded, recorded_warnings = _run(train)
    timeline = recording.timeline()
    faults: dict[str, str] = {}
    if [struct.pack("d", loss) for loss in recorded.losses] != [struct.pack("d", loss) for loss in plain.losses]:
        faults["loss the same"] = f"{recorded.losses} is not {plain.losses}"
    if new := recorded_warnings + logged - plain_warnings:
        faults["no warnings"] = str(new)
    faults |= _judge_spans(timeline, plain, calls)
    if recording.steps != plain.steps:
        faults["steps"] = f"{recording.steps} instead of {plain.steps}"
    if problem := _check(timeline):
        faults["check"] = problem
    return Verdict(faults)


@contextmanager
def _logged_warnings() -> Iterator[Counter[str]]:
    """Yield what any logger says at the level of a warning or above, filled in when the block ends."""
    logged = Counter[str]()
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: logged.update([f"{record.name}: {record.getMessage()}"])  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    try:
        yield logged
    finally:
        logging.getLogger().removeHandler(handler)
        for text in [text for text in logged if text.startswith(_KNOWN_NOTE)]:
            del logged[text]


def _run(train: Callable[[], Run]) -> tuple[Run, Counter[str]]:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = train()
    return run, Counter(f"{warning.category.__name__}: {warning.message}" for warning in caught)


def _judge_spans(timeline: modtrace.Timeline, run: Run, calls: _Calls) -> dict[str, str]:
    """Compare the calls and backward passes of the model's modules, by name."""
    root = run.root or type(run.models[0]).__name__
    expected: dict[str, Counter[str]] = {"forward": Counter(), "recompute": Counter(), "backward": Counter()}
    for path, inner in (named for model in run.models for named in model.named_modules()):
        name = f"{root}.{path}" if path else root
        module = inner if path or run.outermost is None else run.outermost
        expected["forward"][name] += calls.forward[id(module)]
        expected["recompute"][name] += calls.recompute[id(module)]
        expected["backward"][name] += sum(called == id(module) for called, _ in calls.backward)
    told: dict[str, set[tuple[str, str, int]]] = {"forward": set(), "recompute": set(), "backward": set()}
    for span in timeline.spans:
        # The parts of a pipeline are models of one class: `Net` and `Net#2`.
        name = re.sub(r"#\d+", "", span.fqn)
        if f"{name}.".startswith(f"{root}."):
            told[span.phase].add((name, span.fqn, span.call))
    told_calls = {phase: Counter(name for name, *_ in pairs) for phase, pairs in told.items()}
    faults = {}
    for column, phases in (("calls", ("forward", "recompute")), ("backward", ("backward",))):
        wrong = [
            f"{phase} {name}: {told_calls[phase][name]} instead of {+expected[phase][name]}"
            for phase in phases
            for name in sorted({*+expected[phase], *told_calls[phase]})
            if told_calls[phase][name] != expected[phase][name]
        ]
        if wrong:
            faults[column] = f"{len(wrong)} names, as " + "; ".join(wrong[:4])
    return faults


def _check(timeline: modtrace.Timeline) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        timeline.save(path)
        return "; ".join(str(finding) for finding in check(path).faults)[:300]
