"""Between which lines of the program time passes outside of modules, backward passes and ranges."""

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

_MAX_PLACES = 256  # gaps that are told apart
_MAX_GAPS = 12  # of these the longest, which are noted
_NOT_THE_PROGRAM = (
    os.path.join(os.path.dirname(torch.__file__), ""),
    os.path.join(Path(__file__).parents[1], ""),
    contextlib.__file__,
)
"""How the files begin whose lines say nothing of where a program is."""
_FILE = re.compile(r"(?<![^/\\])[\w .<>+-]{1,80}\Z")
"""The name of a file, without folders. Others can be anything that was given to `compile`, such as the code itself."""
_WORK = ("forward", "backward")
_KINDS = frozenset({*_WORK, "step", *CATEGORIES})

_Gap = tuple[str, str, str, str]
"""Where something ended and what, where something begins and what."""


class LineGaps:
    """Adds up the time between spans, by what ends before it and what begins after it, on one thread, in some steps.

    What is after a forward that builds a graph, or before a backward pass, is of the loss, as in the parts of a step.
    A span is an outermost call of a module, a backward pass or a range. The thread that begins or ends one calls this,
    with the GIL: so it looks at no other thread's frames, and it keeps none. The inputs of calls go to `on_call`.
    """

    def __init__(self, on_call: Callable[[object, tuple[Any, ...]], object] | None = None) -> None:
        self._on_call = on_call
        self._thread: int | None = None
        self._open: list[str] = []
        self._since_ns, self._since = 0, ("", "")
        self._builds_graph = False
        self._chain: dict[_Gap, int] = {}
        self._step_ns: dict[tuple[_Gap, str], int] = {}
        self._ns: dict[tuple[_Gap, str], list[int]] = {}

    def begin(self, kind: str) -> None:
        """Look at this thread from now on; `kind`: what ends here."""
        self._open.clear()
        self._chain.clear()
        self._step_ns.clear()
        self._builds_graph = False
        self._ended(kind)
        self._thread = threading.get_ident()

    def end(self, kind: str) -> None:
        """Look no more, as this begins here."""
        self(kind)
        self._thread = None
        self._add("other")

    def count(self) -> list[tuple[str, str, str, str, str, list[int]]]:
        """Count the step; return the longest gaps so far, each with its part and the nanoseconds of its steps."""
        for key, ns in self._step_ns.items():
            if key in self._ns or len(self._ns) < _MAX_PLACES:
                self._ns.setdefault(key, []).append(ns)
        rows = [(*gap, part, ns_of_steps) for (gap, part), ns_of_steps in self._ns.items()]
        return sorted(rows, key=lambda row: -sum(row[-1]))[:_MAX_GAPS]

    def __call__(self, begins: str | None, module: object = None, inputs: tuple[Any, ...] = ()) -> None:
        """Note that a span begins, of this kind or by a range of this name, or with None that the last one ends.

        Of a call it is given the module and its inputs.
        """
        now_ns = time.monotonic_ns()
        if threading.get_ident() != self._thread:
            return
        if begins is not None:
            kind = begins if begins in _KINDS else category_of(begins)
            if not self._open:
                gap = (*self._since, _program_line(), kind)
                self._chain[gap] = self._chain.get(gap, 0) + now_ns - self._since_ns
                if kind in _WORK:
                    self._add("loss" if kind == "backward" or self._builds_graph else "other")
                if module is not None and self._on_call is not None:
                    self._on_call(module, inputs)
            self._open.append(kind)
        else:
            # One that began before the step ends with what ended that.
            kind = self._open.pop() if self._open else self._since[1]
            if not self._open:
                if kind in _WORK:
                    self._builds_graph = kind == "forward" and torch.is_grad_enabled()
                self._ended(kind)

    def _add(self, part: str) -> None:
        for gap, ns in self._chain.items():
            if (key := (gap, part)) in self._step_ns or len(self._step_ns) < _MAX_PLACES:
                self._step_ns[key] = self._step_ns.get(key, 0) + ns
        self._chain.clear()

    def _ended(self, kind: str) -> None:
        self._since = _program_line(), kind
        self._since_ns = time.monotonic_ns()


def _program_line() -> str:
    """Return where this thread is outside of torch and modtrace, `train.py:12`, without folders; empty if nowhere."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        # A function that a range is put around has the file and the line of what it was. The name may be of a class of
        # the program's, whose methods are none of ours to call.
        if not str.startswith(code.co_filename, _NOT_THE_PROGRAM) and INNER not in code.co_varnames:
            name = _FILE.search(code.co_filename)
            return f"{name[0] if name else '<code>'}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
