"""Stackable wrappers of torch functions, of `nn.Module.__call__` and of what runs a backward pass.

They are installed and uninstalled in any order, beside wrappers of others.

A wrapper always wraps the same function, so none ever ends up around itself, in whatever order they are put back. A
wrapper that other code has wrapped since stays and only passes calls on. Nothing shows whether that code still calls
it. So `install` makes a new one around whatever is there, and one wrapper of a patch is active at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .._interrupts import Exclusive

_TORCH_CALL = getattr(nn.Module, "_wrapped_call_impl", None)

_exclusive = Exclusive()


class WrappedFunction:
    """A function that a patch has wrapped.

    Attributes:
        wrapper: the wrapper. While `observer` is None it only calls `wrapped`.
        wrapped: what it wraps, for good: torch's own function, another wrapper of ours, or one of other code.
        wraps_torch: whether `wrapped` is torch's own, and as it was when this was written: it calls
            `_compiled_call_impl`, or `_call_impl` where that is None. A wrapper in Python can then choose itself, and
            be a frame shorter.
        observer: what the calls are told to; None makes it inactive.
        patch: whose wrapper it is.
    """

    __slots__ = ("observer", "patch", "wrapped", "wrapper", "wraps_torch")

    wrapper: Callable[..., Any]

    def __init__(self, patch: Patch, wrapped: Callable[..., Any]) -> None:
        self.patch = patch
        self.wrapped = wrapped
        names = getattr(getattr(wrapped, "__code__", None), "co_names", None)
        self.wraps_torch = wrapped is _TORCH_CALL and names == ("_compiled_call_impl", "_call_impl")
        self.observer: Any = None


def _name_as(wrapper: Callable[..., Any], function: Callable[..., Any]) -> None:
    """Let a wrapper say of itself what `function` says, its signature too; which is still no `__wrapped__`."""
    for name in ("__module__", "__name__", "__qualname__", "__doc__", "__annotations__"):
        with contextlib.suppress(AttributeError):  # of what is written in C
            setattr(wrapper, name, getattr(function, name))


class PatchTarget:
    """A function that patches wrap: what one class or module holds under a name.

    Args:
        owner: the class or module.
        name: the name.
        is_restored: whether what was there is put back when no patch is active; else the wrapper stays for good, and
            only passes calls on.
    """

    def __init__(self, owner: object, name: str, *, is_restored: bool = False) -> None:
        self._owner = owner
        self._name = name
        self.is_restored = is_restored
        self._original = self._function()
        # By id of the wrapper; kept for the next time, since torch.compile guards on the identity of what it traced.
        self._by_wrapper: dict[int, WrappedFunction] = {}

    def _function(self) -> Callable[..., Any]:
        """Return what is under the name now; of a class what it holds itself, which binds where it is put back."""
        function: Callable[..., Any] = vars(self._owner)[self._name]
        return function

    def wrapped_functions(self, patch: Patch) -> list[WrappedFunction]:
        """Return the wrapped functions of `patch`."""
        return [patched for patched in list(self._by_wrapper.values()) if patched.patch is patch]

    def reached(self, patch: Patch) -> WrappedFunction | None:
        """Return the wrapper of `patch` that calls certainly reach: only other wrappers of ours are around it."""
        patched = self._by_wrapper.get(id(self._function()))
        while patched is not None and patched.patch is not patch:
            patched = self._by_wrapper.get(id(patched.wrapped))
        return patched

    def add(self, patch: Patch) -> WrappedFunction:
        """Put an inactive wrapper of `patch` around what is there; around the same, the same as before."""
        wrapped = self._function()
        for patched in self.wrapped_functions(patch):
            if patched.wrapped is wrapped:
                break
        else:
            patched = patch.wrap(wrapped)
            _name_as(patched.wrapper, self._original)
            # Known before it can be called, so that it is found wherever an interrupt comes.
            self._by_wrapper[id(patched.wrapper)] = patched
        setattr(self._owner, self._name, patched.wrapper)
        return patched

    def remove_inactive(self) -> None:
        """Take off the inactive wrappers, but for those that other code has wrapped."""
        below = function = self._function()
        while (patched := self._by_wrapper.get(id(below))) is not None and patched.observer is None:
            below = patched.wrapped
        if below is not function:
            setattr(self._owner, self._name, below)


MODULE_CALL = (PatchTarget(nn.Module, "__call__", is_restored=True),)
RUN_BACKWARD = (
    PatchTarget(torch.autograd.graph, "_engine_run_backward"),
    PatchTarget(torch.autograd, "_engine_run_backward"),
)
"""What `torch.autograd.backward` and `grad` run a backward pass by; others can replace each for itself."""

MAKE_GRADIENTS = (PatchTarget(torch.autograd, "_make_grads"),)
"""What both call first."""


class Patch:
    """A kind of wrapper, and where it is put.

    Args:
        make: given a wrapped function `patched`, returns the wrapper. It looks at `patched.observer` and calls
            `patched.wrapped`.
        targets: what it wraps.
        activate: called with a wrapper, and whether it is active from now on; for those of the native engine.
    """

    def __init__(
        self,
        make: Callable[[WrappedFunction], Callable[..., Any]],
        targets: tuple[PatchTarget, ...] = MODULE_CALL,
        activate: Callable[[Callable[..., Any], bool], object] = lambda _wrapper, _active: None,
    ) -> None:
        self._make = make
        self._targets = targets
        self._activate = activate

    def install(self, observer: object) -> None:
        """Tell `observer` of each call from now on; instead of the one before, where there is one.

        What was interrupted before it was done can be done again, and so can `uninstall`.
        """
        _exclusive.run(lambda: self._install(observer))

    def uninstall(self) -> None:
        """Make all wrappers inactive; if the target is restored, take off those that no other code has wrapped."""
        _exclusive.run(self._uninstall)

    def _install(self, observer: object) -> None:
        for target in self._targets:
            reached = target.reached(self) or target.add(self)
            for patched in target.wrapped_functions(self):
                if patched is not reached:
                    self._set_observer(patched, None)
            self._set_observer(reached, observer)

    def _uninstall(self) -> None:
        for target in self._targets:
            for patched in target.wrapped_functions(self):
                self._set_observer(patched, None)
        for target in self._targets:
            if target.is_restored:
                target.remove_inactive()

    def wrap(self, wrapped: Callable[..., Any]) -> WrappedFunction:
        """Return a new, inactive wrapper around `wrapped`."""
        patched = WrappedFunction(self, wrapped)
        patched.wrapper = self._make(patched)
        return patched

    def _set_observer(self, patched: WrappedFunction, observer: object) -> None:
        """Make a wrapper active, or inactive with None."""
        self._activate(patched.wrapper, observer is not None)
        patched.observer = observer
