"""Gaps: the time outside modules, backward passes and ranges, by the lines of the program around it."""

import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from ..ring.event_text import CATEGORIES
from .ranges import category_of
from .torch_ranges import INNER

_MAX_GAPS = 256  # maximum number of different gaps
_MAX_ROWS = 12  # maximum number of gaps in the notes, the longest
_LIBRARY_PREFIXES = (
    os.path.join(os.path.dirname(torch.__file__), ""),
    os.path.join(Path(__file__).parents[1], ""),
    contextlib.__file__,
)
"""Prefixes of the files that are not the program's."""
_FILE = re.compile(r"(?<![^/\\])[\w .<>+-]{1,80}\Z")
"""The name of a file, without folders. Other texts come from calls of `compile`; they may be the code itself."""
_WORK = ("forward", "backward")
INNER_CALL = "inner call"
"""The name under which engines report the start of a call inside another call; they do not report its end."""
_KINDS = frozenset({*_WORK, "step", *CATEGORIES})

_OnCall = Callable[[object, tuple[Any, ...]], object]
_Gap = tuple[str, str, str, str]
"""Line and kind of the span that ended, line and kind of the span that starts."""


class LineGaps:
    """Sums the time of each gap between two spans of one thread, in sampled steps.

    A gap after a forward that builds a graph, or before a backward pass, belongs to the part `loss` of a step. A span
    is an outermost call of a module, a backward pass or a range. The thread that starts or ends a span calls this, with
    the GIL: so no other thread's frames are read, and no frame is kept. `on_call` gets the inputs of outermost calls,
    `on_any_call` also the inputs of inner calls, which start as `INNER_CALL`. Backward passes call `on_backward` first.
    """

    def __init__(
        self,
        on_call: _OnCall | None = None,
        on_any_call: _OnCall | None = None,
        on_backward: Callable[[], object] | None = None,
    ) -> None:
        self._on_call, self._on_any_call, self._on_backward = on_call, on_any_call, on_backward
        self._thread: int | None = None
        self._open: list[str] = []
        self._last_end_ns, self._last_end = 0, ("", "")
        self._builds_graph = False
        self._pending_ns: dict[_Gap, int] = {}
        self._step_ns: dict[tuple[_Gap, str], int] = {}
        self._ns_by_gap: dict[tuple[_Gap, str], list[int]] = {}

    def begin(self, kind: str) -> None:
        """Watch this thread from now on; a span of `kind` ends here."""
        self._open.clear()
        self._pending_ns.clear()
        self._step_ns.clear()
        self._builds_graph = False
        self._set_last_end(kind)
        self._thread = threading.get_ident()

    def end(self, kind: str) -> None:
        """Watch no longer: a span of `kind` starts here."""
        self(kind)
        self._thread = None
        self._add("other")

    def count(self) -> list[tuple[str, str, str, str, str, list[int]]]:
        """Count the step; return the longest gaps so far, each with its part and its time in each step, in ns."""
        for key, ns in self._step_ns.items():
            if key in self._ns_by_gap or len(self._ns_by_gap) < _MAX_GAPS:
                self._ns_by_gap.setdefault(key, []).append(ns)
        rows = [(*gap, part, ns_of_steps) for (gap, part), ns_of_steps in self._ns_by_gap.items()]
        return sorted(rows, key=lambda row: -sum(row[-1]))[:_MAX_ROWS]

    def __call__(self, start_name: str | None, module: object = None, inputs: tuple[Any, ...] = ()) -> None:
        """Note that a span starts, given its kind or a range's name, or with None that the last span ends.

        For a call, `module` and `inputs` are given.
        """
        now_ns = time.monotonic_ns()
        if threading.get_ident() != self._thread:
            return
        if module is not None and self._on_any_call is not None:
            self._on_any_call(module, inputs)
        if start_name == INNER_CALL:
            return
        if start_name == "backward" and self._on_backward is not None:
            self._on_backward()
        if start_name is not None:
            kind = start_name if start_name in _KINDS else category_of(start_name)
            if not self._open:
                gap = (*self._last_end, _program_line(), kind)
                self._pending_ns[gap] = self._pending_ns.get(gap, 0) + now_ns - self._last_end_ns
                if kind in _WORK:
                    self._add("loss" if kind == "backward" or self._builds_graph else "other")
                if module is not None and self._on_call is not None:
                    self._on_call(module, inputs)
            self._open.append(kind)
        else:
            # A span that started before the step ends as if it were of the kind that ended the step before.
            kind = self._open.pop() if self._open else self._last_end[1]
            if not self._open:
                if kind in _WORK:
                    self._builds_graph = kind == "forward" and torch.is_grad_enabled()
                self._set_last_end(kind)

    def _add(self, part: str) -> None:
        for gap, ns in self._pending_ns.items():
            if (key := (gap, part)) in self._step_ns or len(self._step_ns) < _MAX_GAPS:
                self._step_ns[key] = self._step_ns.get(key, 0) + ns
        self._pending_ns.clear()

    def _set_last_end(self, kind: str) -> None:
        self._last_end = _program_line(), kind
        self._last_end_ns = time.monotonic_ns()


def _program_line() -> str:
    """Return this thread's innermost line outside torch and modtrace (`train.py:12`), without folders, or ""."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        # A function that was put into a range keeps its file and line. A file's name may be an object of a class of
        # the program's, whose methods must not be called.
        if not str.startswith(code.co_filename, _LIBRARY_PREFIXES) and INNER not in code.co_varnames:
            name = _FILE.search(code.co_filename)
            return f"{name[0] if name else '<code>'}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
