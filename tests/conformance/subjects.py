"""The engines and trackers under test, and their answers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch.distributed._tools.mod_tracker import ModTracker as TorchModTracker
from torch.utils.module_tracker import ModuleTracker as TorchModuleTracker

import modtrace
from modtrace.record_options import EngineName

from .case import CASES, Case, Step
from .live import tracker_trees
from .notation import Node, Trees, project, rename, render, variants

__all__ = ["OURS", "SUBJECTS", "Answer", "Verdict", "answer", "count_unattributed"]

Verdict = Literal["right", "wrong", "crash", "n.a."]


@dataclass(frozen=True)
class Answer:
    """Answer of a subject to a case.

    Attributes:
        verdict: whether the trees are right.
        trees: the trees that the subject reported, or its crash.
    """

    verdict: Verdict
    trees: str


LIVE: dict[str, Callable[[], Any]] = {
    "modtrace.ModuleTracker": modtrace.ModuleTracker,
    "modtrace.ModTracker": modtrace.ModTracker,
    "torch ModuleTracker": TorchModuleTracker,
    "torch ModTracker": TorchModTracker,
}
ENGINES: dict[str, EngineName] = {"native engine": "native", "Python engine": "python"}
OURS = [*ENGINES, "modtrace.ModuleTracker", "modtrace.ModTracker"]
SUBJECTS = [*ENGINES, *LIVE]


def answer(case: Case, subject: str) -> Answer:
    """Run a case and judge the trees that `subject` reports."""
    if subject in LIVE and case.not_live is not None:
        return Answer("n.a.", case.not_live)
    expected = variants(case.expected)
    with _as_it_was():
        try:
            if subject in ENGINES:
                trees, _ = _recorded(case.name, ENGINES[subject])
            else:
                if case.renamed is not None:
                    expected = [rename(trees, *case.renamed) for trees in expected]
                expected = [project(trees) for trees in expected]
                trees = project(_live(LIVE[subject], _made(case)))
        except Exception as error:
            return Answer("crash", f"{type(error).__name__}: {error}")
    return Answer("right" if trees in expected else "wrong", render(trees))


def count_unattributed(case: Case, engine: EngineName) -> int:
    """Return the number of nodes outside all modules that an engine counts in a case."""
    with _as_it_was():
        return _recorded(case.name, engine)[1]


def _made(case: Case) -> Step:
    torch.manual_seed(0)
    return case.make()


@cache
def _recorded(name: str, engine: EngineName) -> tuple[Trees, int]:
    """Run a case, once; return its trees and its number of nodes outside all modules."""
    step = _made(CASES[name])
    with modtrace.record(engine=engine, capacity=1 << 14) as recording:
        step()
    timeline = recording.timeline()
    return timeline_trees(timeline), timeline.stats.unattributed


def _live(make: Callable[[], Any], step: Callable[[], object]) -> Trees:
    tracker = make()
    with tracker:
        return tracker_trees(tracker, step)


def timeline_trees(timeline: modtrace.Timeline) -> Trees:
    """Return the trees of a timeline."""
    columns = timeline.columns
    spans = list(timeline.spans)
    children: dict[int, list[int]] = {}
    for index, parent in enumerate(columns.parent.tolist()):
        children.setdefault(parent, []).append(index)

    def node(index: int) -> Node:
        span = spans[index]
        inner = tuple(node(child) for child in children.get(index, ()))
        return Node(span.fqn, span.call, span.phase == "recompute", not span.complete, children=inner)

    trees: dict[str, list[Node]] = {}
    for index in children.get(-1, ()):
        track = timeline.tracks[columns.track[index]]
        title = track.kind if track.thread == "MainThread" else f"{track.kind} @{track.thread}"
        trees.setdefault(title, []).append(node(index))
    return {title: tuple(nodes) for title, nodes in trees.items()}


@contextmanager
def _as_it_was() -> Iterator[None]:
    """Undo the changes that torch's trackers do not undo."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        form = warnings.formatwarning
        try:
            yield
        finally:
            warnings.formatwarning = form
