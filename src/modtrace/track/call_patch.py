"""Stackable wrappers of torch functions, `nn.Module.__call__` and autograd's `_engine_run_backward` among them.

They are installed and uninstalled in any order, together with wrappers of other code.

A wrapper always wraps the same function, so no wrapper ever ends up around itself, whatever the order of removals. A
wrapper that other code has wrapped meanwhile stays, and only passes calls on: nothing shows whether that code still
calls it. So `install` puts a new wrapper around the current function, and only one wrapper of a patch is active.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import nn

from .._after_import import call_after_import
from .._interrupts import Exclusive

_TORCH_CALL = getattr(nn.Module, "_wrapped_call_impl", None)
_DYNAMO, _KNOWN_CALL = "torch._dynamo.variables.nn_module", "unpatched_nn_module_call"

_exclusive = Exclusive()


class Wrapper:
    """A wrapper that a patch has put around a function of torch, another wrapper of modtrace, or one of other code.

    Attributes:
        replaced: the attribute that the wrapper replaced; for a class, the entry of its `__dict__`.
        wrapped: a function that calls `replaced`, with the object as the first argument.
    """

    __slots__ = ("function", "observer", "patch", "replaced", "wrapped", "wraps_torch")

    # The wrapper's function, which is called instead of `wrapped`. If `observer` is None, it only calls `wrapped`.
    function: Callable[..., Any]

    def __init__(self, patch: Patch, replaced: Callable[..., Any], wrapped: Callable[..., Any]) -> None:
        self.patch, self.replaced, self.wrapped = patch, replaced, wrapped
        names = getattr(getattr(wrapped, "__code__", None), "co_names", None)
        # True for torch's `nn.Module.__call__` with the known code: it calls `_compiled_call_impl`, or `_call_impl` if
        # that is None. A Python wrapper may then choose between these itself, which saves a frame.
        self.wraps_torch = wrapped is _TORCH_CALL and names == ("_compiled_call_impl", "_call_impl")
        self.observer: Any = None  # receives the calls; None makes the wrapper inactive


def as_method(attribute: Any) -> Callable[..., Any]:
    """Return a function that calls a class attribute as Python does: bound to the object if the attribute binds."""
    if isinstance(attribute, FunctionType):
        return attribute
    bind = getattr(type(attribute), "__get__", None)
    if bind is None:
        return lambda _module, *args, **kwargs: attribute(*args, **kwargs)
    return lambda module, *args, **kwargs: bind(attribute, module, type(module))(*args, **kwargs)


def _name_as(wrapper: Callable[..., Any], function: Callable[..., Any]) -> None:
    """Copy name, docstring and annotations to a wrapper; unlike `functools.wraps`, set no `__wrapped__`."""
    for name in ("__module__", "__name__", "__qualname__", "__doc__", "__annotations__"):
        with contextlib.suppress(AttributeError):  # a function written in C
            setattr(wrapper, name, getattr(function, name))


class PatchTarget:
    """A function that patches wrap: an attribute of a class or a module."""

    def __init__(self, owner: object, name: str, *, is_restored: bool = False) -> None:
        self._owner, self._name = owner, name
        self.is_restored = is_restored  # if False, the wrapper stays for good, and only passes calls on
        self._original = self._function()
        # By `id()` of the wrapper's function; reused, since torch.compile guards on the identity of traced functions.
        self._by_function: dict[int, Wrapper] = {}

    def _function(self) -> Callable[..., Any]:
        """Return the current attribute; for a class, the entry of its `__dict__`, which is not bound."""
        function: Callable[..., Any] = vars(self._owner)[self._name]
        return function

    def wrappers_of(self, patch: Patch) -> list[Wrapper]:
        """Return the wrappers that `patch` made."""
        return [wrapper for wrapper in list(self._by_function.values()) if wrapper.patch is patch]

    def outermost_wrapper(self, patch: Patch) -> Wrapper | None:
        """Return the outermost wrapper of `patch` that calls surely reach: around it are only modtrace's wrappers."""
        wrapper = self._by_function.get(id(self._function()))
        while wrapper is not None and wrapper.patch is not patch:
            wrapper = self._by_function.get(id(wrapper.replaced))
        return wrapper

    def add(self, patch: Patch) -> Wrapper:
        """Put an inactive wrapper of `patch` around the current function: one that wrapped it before, or a new one."""
        replaced = self._function()
        for wrapper in self.wrappers_of(patch):
            if wrapper.replaced is replaced:
                break
        else:
            wrapper = patch.wrap(replaced, as_method(replaced) if self._owner is nn.Module else replaced)
            _name_as(wrapper.function, self._original)
            # Registered before it can be called, so that it is found even after an interrupt.
            self._by_function[id(wrapper.function)] = wrapper
        self._set(wrapper.function)
        return wrapper

    def remove_inactive(self) -> None:
        """Remove the inactive wrappers, except those that other code has wrapped."""
        below = function = self._function()
        while (wrapper := self._by_function.get(id(below))) is not None and wrapper.observer is None:
            below = wrapper.replaced
        if below is not function:
            self._set(below)

    def _set(self, function: Callable[..., Any]) -> None:
        setattr(self._owner, self._name, function)
        if self._owner is nn.Module:
            call_after_import(_DYNAMO, self._update_dynamo)

    def _update_dynamo(self) -> None:
        """Let torch.compile skip to a module's `forward`, if all wrappers around the call are modtrace's."""
        dynamo = vars(sys.modules[_DYNAMO])
        # The call at the import of dynamo, which may be a wrapper of the user.
        imported = self.below_ours(dynamo.get(_KNOWN_CALL))
        function = self._function()
        if imported is not None:
            dynamo[_KNOWN_CALL] = function if self.below_ours(function) is imported else imported

    def below_ours(self, function: Callable[..., Any] | None) -> Callable[..., Any] | None:
        """Return the function below modtrace's wrappers; `function` itself if it is not one of them."""
        while (wrapper := self._by_function.get(id(function))) is not None:
            function = wrapper.replaced
        return function

    def is_ours_alone(self) -> bool:
        """Return whether no other code's wrapper is around torch's call of a module, or between modtrace's wrappers."""
        return self.below_ours(self._function()) is _TORCH_CALL


MODULE_CALL = (PatchTarget(nn.Module, "__call__", is_restored=True),)
RUN_BACKWARD = (
    PatchTarget(torch.autograd.graph, "_engine_run_backward"),
    PatchTarget(torch.autograd, "_engine_run_backward"),
)
"""`torch.autograd.backward` and `grad` call these to run a pass; other code can replace each separately."""

MAKE_GRADIENTS = (PatchTarget(torch.autograd, "_make_grads"),)
"""Both call this before they run a pass."""


class Patch:
    """A kind of wrapper, and the functions that it wraps.

    Args:
        make: returns the function of a new `wrapper`, which reads `wrapper.observer` and calls `wrapper.wrapped`.
        targets: the functions to wrap.
        activate: called with a wrapper's function, and whether it is active from now on; for the native engine.
    """

    def __init__(
        self,
        make: Callable[[Wrapper], Callable[..., Any]],
        targets: tuple[PatchTarget, ...] = MODULE_CALL,
        activate: Callable[[Callable[..., Any], bool], object] = lambda _function, _active: None,
    ) -> None:
        self._make, self._targets, self._activate = make, targets, activate

    def install(self, observer: object) -> None:
        """Pass each call to `observer` from now on, instead of an earlier one; safe to repeat after an interrupt."""
        _exclusive.run(lambda: self._install(observer))

    def uninstall(self) -> None:
        """Make all wrappers inactive; if a target is restored, remove those that no other code has wrapped."""
        _exclusive.run(self._uninstall)

    def _install(self, observer: object) -> None:
        for target in self._targets:
            outermost = target.outermost_wrapper(self) or target.add(self)
            for wrapper in target.wrappers_of(self):
                if wrapper is not outermost:
                    self._set_observer(wrapper, None)
            self._set_observer(outermost, observer)

    def _uninstall(self) -> None:
        for target in self._targets:
            for wrapper in target.wrappers_of(self):
                self._set_observer(wrapper, None)
        for target in self._targets:
            if target.is_restored:
                target.remove_inactive()

    def wrap(self, replaced: Callable[..., Any], wrapped: Callable[..., Any]) -> Wrapper:
        """Return a new, inactive wrapper that replaces `replaced`; `wrapped` calls `replaced`."""
        wrapper = Wrapper(self, replaced, wrapped)
        wrapper.function = self._make(wrapper)
        return wrapper

    def _set_observer(self, wrapper: Wrapper, observer: object) -> None:
        """Set the observer of a wrapper; None makes the wrapper inactive."""
        self._activate(wrapper.function, observer is not None)
        wrapper.observer = observer
