"""The ends of optimizer steps: the hook that torch calls after each step, and frames of compiled steps.

torch.compile traces the hooks of an optimizer that it compiles, so that only guards on them are left to run. So
modtrace's hook is registered only if others are, to run after them. Most optimizers break the graph at their own step:
torch's wrapper around `step` is then on the stack while the compiled parts of the step run.
"""

import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import cache, wraps
from types import CodeType, FrameType
from typing import Any

from torch.compiler import is_compiling
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from .._interrupts import raised_by_handler
from .unseen import hide_wrapper, skip_all, skip_frame

# The name and the function never change: torch.compile would compile known code again if they did.
_NAME: Any = "modtrace"
_WRAPPER: CodeType = Optimizer.profile_hook_step(lambda: None).__code__
"""The code of torch's wrapper around the `step` of each optimizer class, which calls the hooks."""

_log = logging.getLogger("modtrace")
_listeners: list[Callable[[Optimizer], None]] = []
_torch_hooks: dict[int, Mapping[Any, Callable[..., object]]] = {}
"""The dictionaries that modtrace replaced, by id; they still hold the hooks that were registered before."""


def _hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for hooks in _torch_hooks.values():
        for hook in tuple(hooks.values()):
            hook(optimizer, args, kwargs)
    if not is_compiling():
        _notify(optimizer)


skip_frame(_hook)


@skip_all
def _notify(optimizer: Optimizer) -> None:
    for listener in tuple(_listeners):
        if not call_listener(listener, optimizer):
            remove_step_hook(listener)


@skip_all
def report_own_step(optimizer: Any) -> None:
    """Call the listeners after a step of an optimizer that does not derive from torch's: torch's hooks miss it."""
    if not is_of_torch(optimizer):
        _notify(optimizer)


def is_of_torch(optimizer: object) -> bool:
    """Return whether an object is an instance of torch's `Optimizer`, without running the user's code."""
    return issubclass(type(optimizer), Optimizer)


def add_step_hook(listener: Callable[[Optimizer], None]) -> None:
    """Call `listener` after each optimizer step that is not compiled, until it is removed."""
    _listeners.append(listener)
    _install()


def remove_step_hook(listener: Callable[[Optimizer], None]) -> None:
    """Stop calling `listener`; does nothing if it was removed."""
    with contextlib.suppress(ValueError):
        _listeners.remove(listener)


def call_listener(listener: Callable[..., None], *arguments: object) -> bool:
    """Call a listener after a step. If it raises, log the error, which must not reach the user's step: return False."""
    try:
        listener(*arguments)
    except Exception as error:
        if raised_by_handler(error):
            raise
        _log.error("steps are counted no longer, after an error inside modtrace; the training goes on", exc_info=error)
        return False
    return True


_STEP_CODE = Optimizer._optimizer_step_code


@wraps(_STEP_CODE)
def _optimizer_step_code(self: Optimizer) -> None:
    _STEP_CODE(self)
    hooks = torch_optimizer._global_optimizer_post_hooks
    if not hooks and not self._optimizer_step_post_hooks:
        _notify(self)
    elif _NAME not in hooks:
        # Any thread may be iterating over the dictionary of hooks, and torch raises in its step if the dictionary
        # changes meanwhile. So a new dictionary replaces it. modtrace's hook calls the hooks in the old one, from which
        # the users' handles still remove them.
        _torch_hooks[id(hooks)] = hooks
        torch_optimizer._global_optimizer_post_hooks = OrderedDict({_NAME: _hook})


@cache
def _install() -> None:
    """Wrap the function that torch calls after each step, before the hooks, for its profiler; once per process."""
    Optimizer._optimizer_step_code = hide_wrapper(_optimizer_step_code, _STEP_CODE)  # type: ignore[method-assign]


def step_frames(frame: FrameType | None) -> list[FrameType]:
    """Return the frames of torch's wrapper around `step`, compiled or not, from `frame` outward."""
    line, file, name = _WRAPPER.co_firstlineno, _WRAPPER.co_filename, _WRAPPER.co_name
    frames = []
    while frame is not None:
        code = frame.f_code
        if code.co_firstlineno == line and code.co_name == name and code.co_filename == file:
            frames.append(frame)
        frame = frame.f_back
    return frames


def is_compiled_step(step_frame: FrameType) -> bool:
    """Return whether a frame of `step_frames` runs compiled code, which calls no hooks."""
    return step_frame.f_code is not _WRAPPER
