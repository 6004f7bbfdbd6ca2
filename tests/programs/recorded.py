"""Finds faults in the recordings of a program, by comparing them with what the program logs about itself."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import modtrace
from modtrace.checking import check

__all__ = ["RECORDED", "find_faults", "told_by", "without_pids"]

RECORDED = """
import os, runpy, sys
import modtrace
program, path, engine = sys.argv[1:]
sys.argv, sys.path[0] = [program], os.path.dirname(program)
with modtrace.record(path, engine=engine):
    runpy.run_path(program, run_name="__main__")
"""
"""Runs a program and records it: its path, where to, and the engine."""

Row = tuple[str, int, int, int]


def told_by(stdout: str) -> list[dict[str, Any]]:
    """Return what each process said of itself, by the process's name."""
    lines = [json.loads(line) for line in stdout.splitlines() if line.startswith('{"process"')]
    return sorted(lines, key=lambda told: str(told["process"]))


def without_pids(told: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return what does not differ between two runs."""
    return [{key: value for key, value in process.items() if key != "pid"} for process in told]


def find_faults(folder: Path, told: list[dict[str, Any]]) -> list[str]:
    """Return a sentence per fault of the files in `folder`, where one is expected per process that `told` of itself."""
    faults = []
    files: dict[int, list[Path]] = {}
    for path in sorted(folder.iterdir()):
        faults += [f"{path.name}: {violation.rule}: {violation.message}" for violation in check(path).faults]
        pid = modtrace.load(path).metadata["pid"]
        assert isinstance(pid, int)
        files.setdefault(pid, []).append(path)
    for process in told:
        name, paths = process["process"], files.pop(process["pid"], [])
        if len(paths) != 1:
            faults.append(f"{name}: {len(paths)} files instead of one")
        else:
            faults += [f"{name}: {fault}" for fault in _faults_of(modtrace.load(paths[0]), process)]
    faults += [f"{path.name}: is of a process that called no module" for paths in files.values() for path in paths]
    return faults


def _faults_of(timeline: modtrace.Timeline, told: Mapping[str, Any]) -> list[str]:
    faults = [f"{count} {name}" for name, count in timeline.stats.items() if count and name in _LOSSES]
    steps = sum(mark.kind == "step" for mark in timeline.marks)
    if steps != told["steps"]:
        faults.append(f"{steps} steps instead of {told['steps']}")
    rows = _rows(timeline)
    # The largest first: a smaller one can look like a part of it.
    for root in sorted(told["roots"], key=lambda root: -len(root["modules"])):
        expected = {path: tuple(row) for path, row in root["modules"].items()}
        prefix = next((name for name in _candidates(root["name"], rows) if _fits(name, expected, root, rows)), None)
        if prefix is None:
            faults.append(f"no rows as those of {root['name']}: {expected}")
        else:
            for path in expected:
                del rows[_join(prefix, path)]
    if rows:
        faults.append(f"unexpected rows: {rows}")
    return faults


_LOSSES = ("overwritten", "torn", "unfinished", "unstarted")


def _rows(timeline: modtrace.Timeline) -> dict[str, list[Row]]:
    """Return by name the classes of its modules, with the number of their calls in each phase."""
    calls: Counter[tuple[str, str, str]] = Counter()
    classes: dict[str, set[str]] = {}
    once = set()
    for span in timeline.spans:
        classes.setdefault(span.fqn, set()).add(span.module_class)
        # Its backward can be cut into several spans.
        if span.phase != "backward" or (span.fqn, span.module_class, span.call) not in once:
            calls[span.fqn, span.module_class, span.phase] += 1
        if span.phase == "backward":
            once.add((span.fqn, span.module_class, span.call))
    return {
        fqn: [
            (name, *(calls[fqn, name, phase] for phase in ("forward", "recompute", "backward")))  # type: ignore[misc]
            for name in sorted(names)
        ]
        for fqn, names in classes.items()
    }


def _candidates(name: str, rows: Mapping[str, object]) -> list[str]:
    """Return the prefixes that a root may have: its name, with or without a suffix such as `#2`."""
    pattern = re.compile(re.escape(name) + r"(#\w+)?(?=\.|$)")
    return sorted({match.group() for row in rows if (match := pattern.match(row))})


def _fits(
    prefix: str, expected: Mapping[str, tuple[Any, ...]], root: Mapping[str, Any], rows: Mapping[str, list[Row]]
) -> bool:
    return all(
        _without_backward(rows.get(_join(prefix, path), []), root["backward"])
        == _without_backward([row], root["backward"])
        for path, row in expected.items()
    )


def _without_backward(rows: list[Row], backward: bool) -> list[Any]:
    return list(rows) if backward else [row[:3] for row in rows]


def _join(prefix: str, path: str) -> str:
    return f"{prefix}.{path}" if path else prefix
