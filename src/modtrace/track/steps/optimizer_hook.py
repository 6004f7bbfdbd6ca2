"""Where optimizers step: torch's hook behind each step, and what stands in for it in compiled code.

torch.compile traces the hooks of an optimizer that it compiles, so nothing of them is left to run. Most optimizers keep
their own step out of what calls it, by graph breaks: then torch's wrapper around `step` is on the stack where what was
compiled of the step runs. Where the step is a part of a larger graph, the graph knows of it, noted while it was traced.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import weakref
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from torch.compiler import is_compiling
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from ..._after_import import call_after_import
from ..._weak_map import WeakMap
from ..skip_dynamo import skip_all

__all__ = ["OptimizerRef", "add_step_hook", "is_compiled", "remove_step_hook", "step_frames", "stepped_in_graph"]

OptimizerRef = weakref.ref[Optimizer]

# The same name each time, and the same function: torch.compile compiles what it met again where these change, and after
# eight times no more.
_NAME: Any = "modtrace"
_WRAPPER: CodeType = Optimizer.profile_hook_step(lambda: None).__code__
"""Of what torch puts around the `step` of each class of optimizers, and calls the hooks from."""

_LOOP_VARIABLE = "post_hook"
"""Of the loop in there over the hooks behind a step."""

_log = logging.getLogger("modtrace")
_listeners: list[Callable[[Optimizer], None]] = []
_stepped: WeakMap[Any, list[OptimizerRef]] = WeakMap()
"""The optimizers that step in a graph, by that."""

_comptime: Any = None
_finders: list[Callable[[], None]] = []
"""What calls off looking for `_comptime`."""


def _hook(optimizer: Optimizer, *_: object) -> None:
    if is_compiling():
        if _comptime is not None:
            _comptime(_note_traced)
        return
    for listener in tuple(_listeners):
        listener(optimizer)


skip_all(_hook)


def add_step_hook(listener: Callable[[Optimizer], None]) -> None:
    """Call `listener` behind each optimizer step that is not compiled, until it is removed."""
    _finders.append(call_after_import("torch._dynamo.comptime", _find_comptime))
    _listeners.append(listener)
    hooks = torch_optimizer._global_optimizer_post_hooks
    if _NAME not in hooks:
        if _is_iterated():
            _log.warning("steps of optimizers are not told: the recording began within one")
        else:
            hooks[_NAME] = _hook


def remove_step_hook(listener: Callable[[Optimizer], None]) -> None:
    """Call it no longer; does nothing where it is removed already.

    Within the step of an optimizer, torch's dictionary keeps our hook until the next recording ends: it does nothing.
    """
    with contextlib.suppress(ValueError):
        _listeners.remove(listener)
    if not _listeners:
        while _finders:
            _finders.pop()()
        if not _is_iterated():
            torch_optimizer._global_optimizer_post_hooks.pop(_NAME, None)


def _is_iterated() -> bool:
    """Whether a thread is calling the hooks: where these change meanwhile, the step of the user's raises."""
    frames = [step for frame in sys._current_frames().values() for step in step_frames(frame)]
    # Before the first hook behind the step is called, in a closure say, the loop's variable is not there.
    return any(_LOOP_VARIABLE not in frame.f_code.co_varnames or _LOOP_VARIABLE in frame.f_locals for frame in frames)


def step_frames(frame: FrameType | None) -> list[FrameType]:
    """Return the frames of torch's wrapper around `step`, compiled or not, from `frame` outwards."""
    line, file, name = _WRAPPER.co_firstlineno, _WRAPPER.co_filename, _WRAPPER.co_name
    found = []
    while frame is not None:
        code = frame.f_code
        if code.co_firstlineno == line and code.co_name == name and code.co_filename == file:
            found.append(frame)
        frame = frame.f_back
    return found


def is_compiled(step_frame: FrameType) -> bool:
    """Whether a frame of `step_frames` runs what torch.compile made of it, and so no hooks."""
    return step_frame.f_code is not _WRAPPER


def stepped_in_graph(graph: object) -> tuple[OptimizerRef, ...]:
    """Return the optimizers that step inside a graph that torch.compile captured while a recording ran."""
    return tuple(_stepped.get(graph) or ())


def _find_comptime() -> None:
    global _comptime
    from torch._dynamo.comptime import comptime

    _comptime = comptime


def _note_traced(context: Any) -> None:
    """Note whose step is traced; called by torch.compile while it traces `_hook`."""
    # What it says of a variable is private, and differs between versions of torch; no error may reach the compilation.
    with contextlib.suppress(Exception):
        optimizer = context.get_local("optimizer")._ComptimeVar__variable.value
        graph = context.graph()
        noted = _stepped.get(graph)
        if noted is None:
            noted = _stepped[graph] = []
        noted.append(weakref.ref(optimizer))
