"""Kernels that are fused of several modules: spans of a merged trace, whose time is divided among the modules."""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from .._typing import Int64Array
from ..timeline import PHASES
from ..timeline.contents import COMPILED, FUSED_TIMES

Rows = dict[tuple[str, str], Int64Array]
"""By name and phase: int64[steps]."""
_FUSED = "fused"


def divide_fused(
    self_ns: Rows,
    calls: Rows,
    classes: dict[str, str],
    metadata: Mapping[str, object],
    plain_name: Callable[[str], str] | None,
) -> None:
    """Give the time of fused kernels to their modules, in place.

    Args:
        self_ns: what each module took in each step.
        calls: how often it was called.
        classes: of each module its class.
        metadata: of the timeline.
        plain_name: of a fully qualified name what the module is called in the rows; None if rows are of classes.
    """
    shares: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for fused, phase, times in _fused_times(metadata):
        own = shares[plain_name(fused) if plain_name else _FUSED, phase]
        for fqn, module_class, time in times:
            name = plain_name(fqn) if plain_name else module_class
            own[name] = own.get(name, 0) + time
            classes.setdefault(name, module_class)
    for (fused, of_phase), own in shares.items():
        total = math.fsum(own.values())
        for phase in (of_phase, f"GPU {of_phase}"):
            if (fused, phase) in self_ns and total:
                fused_ns, fused_calls = self_ns.pop((fused, phase)), calls.pop((fused, phase))
                for name, time in own.items():
                    share = np.rint(fused_ns * (time / total)).astype(np.int64)
                    self_ns[name, phase] = self_ns.get((name, phase), 0) + share
                    calls[name, phase] = np.maximum(calls.get((name, phase), 0), fused_calls)
    there = {name for name, _ in self_ns}
    for name in [name for name in classes if name not in there]:
        del classes[name]


def _fused_times(metadata: Mapping[str, object]) -> Iterator[tuple[str, str, list[tuple[str, str, float]]]]:
    """Yield the name and the phase of fused kernels, and of each of their modules the name, the class and the time."""
    regions = metadata.get(COMPILED)
    for region, graphs in regions.items() if isinstance(regions, dict) else ():
        for graph in graphs if isinstance(graphs, list) else ():
            with contextlib.suppress(TypeError, ValueError, KeyError, IndexError, AttributeError):  # anybody's file
                classes = {path: kind for path, _, kind in (str(name).rpartition(": ") for name, *_ in graph["work"])}
                for label, phase, times in graph[FUSED_TIMES]:
                    parts = []
                    for path, time in times:
                        fqn = f"{region}.{path}" if path else str(region)
                        parts.append((fqn, classes[path] or fqn.rpartition(".")[2], max(float(time), 0.0)))
                    yield f"{region}.{label}", PHASES[phase], parts
