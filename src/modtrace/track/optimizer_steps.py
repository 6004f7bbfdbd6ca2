"""Training steps, which end when an optimizer steps, so that no program has to mark them."""

from __future__ import annotations

import gc
import itertools
import sys
import weakref
from collections.abc import Callable, Mapping
from functools import cache, wraps
from types import FrameType
from typing import Any, NamedTuple, TypeGuard, cast

import torch
from torch.optim.optimizer import Optimizer
from torch.utils.weak import TensorWeakRef

from .._interrupts import Exclusive, WeakMap, raised_by_handler, without_errors_of_users
from .compiled_regions import CompiledRegions
from .greenlets import PerGreenlet
from .optimizer_hook import add_step_hook, is_compiled_step, is_of_torch, remove_step_hook, step_frames
from .unseen import class_name, skip_all, unseen_by_modes, weakref_offset

_MIN_MANY = 8
"""Minimum number of optimizers that counts as many: programs with several models have up to 6."""


class OptimizerSteps:
    """Finds the training step of each optimizer step.

    Each thread has its own training steps; their numbers run over all threads, in the order in which steps start. A
    training step lasts until one of its optimizers steps again, or another optimizer of the same parameters does. So
    gradients accumulated over several backward passes are one step, and the two optimizers of a GAN share a step. If
    one optimizer steps five times as often as another, each of its steps is a training step; the other's step belongs
    to the last of the five.

    Two optimizer steps share a training step if nothing was computed between them. Otherwise an optimizer that has not
    stepped yet in this training step belongs to it in three cases:

    - Another optimizer of the previous step has not stepped yet in this step (in the first step: any other optimizer).
    - The optimizer stepped in an earlier training step, and did not start that step.
    - Its loss gave gradients to an optimizer of this step too, or an optimizer of this step is frozen by now. So a
      generator's step after several steps of its critic belongs to the last of those; a second training does not.

    An optimizer that is not torch's counts if torch has none when it first steps: each call of its `step` is a training
    step. An optimizer that another optimizer steps inside its own `step` does not count. Optimizers are identified by
    their first parameters.

    Args:
        on_step: called after each optimizer step that counts, with the number of the training step, from 0, and whether
            that step seems complete. If torch.compile has split an optimizer's step, `on_step` is called after each
            part, with the same number.
        on_first_step: called before `on_step` with `describe_optimizer`, at an optimizer's first step in a thread. At
            the 8th, 16th, 32nd … optimizer it also gets the number of optimizers, see `OPTIMIZERS`.
    """

    def __init__(
        self,
        on_step: Callable[[int, bool], None],
        on_first_step: Callable[[dict[str, object]], None] = lambda _description: None,
    ) -> None:
        self._on_step, self._on_first_step = on_step, on_first_step
        self.regions = CompiledRegions(self._after_region)  # watched as long as this runs
        # Number of training steps that have ended: complete ones, and incomplete ones after which a next step started.
        self.ended = 0
        self._numbers = itertools.count()
        self._counting = Exclusive()
        self._steps = PerGreenlet(_Step)
        # The keys of other optimizers that existed at the first optimizer step, and whether each has stepped since.
        self._present: WeakMap[object, bool] | None = None
        self._seen: WeakMap[object, bool] = WeakMap()  # optimizers that stepped, and their keys
        self._optimizer_count = self._key_count = 0  # numbers of optimizers and of keys in `_seen`
        self._counts_foreign: bool | None = None

    def start(self) -> None:
        """Start to count steps."""
        _watch_optimizers()
        add_step_hook(self._after_step)
        self.regions.start()

    def stop(self) -> None:
        """Stop counting steps; can be called again after an interrupt."""
        self._on_step, self._on_first_step = lambda _step, _complete: None, lambda _description: None
        remove_step_hook(self._after_step)
        self.regions.stop()

    def _after_step(self, optimizer: Any) -> None:
        is_torch = is_of_torch(optimizer)
        if not is_torch and not self._counts(optimizer):
            return
        frames = step_frames(sys._getframe(1))
        # If there are more frames than its own, another optimizer steps this one.
        if len(frames) <= is_torch and not any(type(frame.f_trace) is _Counted for frame in frames):
            self._count(optimizer)

    def _counts(self, optimizer: object) -> bool:
        """Return whether steps of a foreign optimizer count: not if it may wrap one of torch's and step more often."""
        if self._counts_foreign is None:
            self._counts_foreign = self._present is None and not [*_find_others(None)]
        # There are no weak references to objects with slots but without `__weakref__`.
        return self._counts_foreign and weakref_offset(type(optimizer)) != 0

    def _after_region(self, caller: FrameType) -> None:
        """Count the optimizer step that contains a compiled region, which the frame `caller` called."""
        frames = step_frames(caller)
        if not frames or not is_compiled_step(frame := frames[-1]):
            return
        # The step counts after its first part. Each later part moves its end.
        optimizer = next(iter(frame.f_locals.get("args") or ()), None)
        if type(frame.f_trace) is _Counted:
            step = self._steps.get()
            self._on_step(step.number, self._is_complete(step))
        elif frame.f_trace is None and is_of_torch(optimizer):
            # A mark that lives as long as the frame; it is called only while a debugger traces the thread.
            frame.f_trace = _Counted()
            self._count(cast("Optimizer", optimizer))

    def _count(self, optimizer: Optimizer) -> None:
        """Find the training step that this step of an optimizer belongs to, and report it."""
        key, step = _key(optimizer), self._steps.get()
        if self._present is None:
            self._present = _find_others(key)
        if was_present := self._present.get(key) is not None:
            self._present[key] = True
        sequence, step.sequence = step.sequence, torch._C._autograd._get_sequence_nr()
        computed = sequence != step.sequence
        is_last_gone = computed and step.last() is None and step.number >= 0
        starts_step = is_last_gone or key in step or not self._joins(step, key, computed, was_present)
        if starts_step:
            if not computed and (last_key := step.last_key()) is not None:
                # The last optimizer started, one step early, the step that this optimizer continues.
                step.starts[last_key] = True
            step.missing = None if is_last_gone or step.starts.get(key) is None else set(step.members)
            step.members = {}
            self._end(step)
            step.ended = False
            step.number = next(self._numbers)
        if step.starts.get(key) is None:
            self._on_first_step(describe_optimizer(optimizer))
        if self._seen.get(optimizer) is None:
            self._key_count += self._seen.get(key) is None
            self._optimizer_count += 1
            self._seen[key] = self._seen[optimizer] = True
            if self._optimizer_count >= _MIN_MANY and self._optimizer_count & (self._optimizer_count - 1) == 0:
                counts = {"stepped": self._optimizer_count, "first_tensors": self._key_count}
                self._on_first_step(describe_optimizer(optimizer) | counts)
        step.starts[key] = starts_step
        step.members[id(key)] = _Member.of(key)
        step.last, step.last_key = weakref.ref(optimizer), weakref.ref(key)
        if step.missing is not None:
            step.missing.discard(id(key))
        complete = self._is_complete(step)
        if complete:
            self._end(step)
        self._on_step(step.number, complete)

    def _joins(self, step: _Step, key: object, computed: bool, was_present: bool) -> bool:
        """Return whether an optimizer that has not stepped yet in its thread's step belongs to that step."""
        if step.number < 0:
            return False
        if not computed or not self._is_complete(step):
            return True
        started_step = step.starts.get(key)
        if started_step is not None:
            return not started_step
        return (was_present or step.missing is None) and any(map(_Member.is_used, step.members.values()))

    def _is_complete(self, step: _Step) -> bool:
        """Return whether all optimizers of the previous step have stepped; if they are not known, all that existed."""
        if step.missing is not None:
            return not step.missing
        return self._present is None or all(has_stepped for _, has_stepped in self._present.items())

    def _end(self, step: _Step) -> None:
        if not step.ended:
            step.ended = True
            self._counting.run(self._count_end)

    def _count_end(self) -> None:
        self.ended += 1


def describe_optimizer(optimizer: Optimizer) -> dict[str, object]:
    """Return `class`, number of `tensors`, `how` (`fused`, `foreach`, `one by one`), `hooks` and `groups`.

    Values that an optimizer of another library lacks are left out, and `groups` if there is only one group.
    """
    description: dict[str, object] = {"class": class_name(type(optimizer))}
    with without_errors_of_users(), unseen_by_modes():
        groups = optimizer.param_groups
        description["tensors"] = sum(len(group["params"]) for group in groups)
        if len(groups) > 1:
            description["groups"] = len(groups)
        description["hooks"] = len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)
        fused, foreach = (any(group[option] for group in groups) for option in ("fused", "foreach"))
        by_default = all(group["foreach"] is None for group in groups)
        # torch's default if neither option is given: foreach on a GPU.
        on_gpu = by_default and next(iter(groups[0]["params"])).device.type != "cpu"
        one_by_one = "one by one" if by_default else "one by one (foreach=False)"
        description["how"] = "fused" if fused else "foreach" if foreach or on_gpu else one_by_one
    return description


def ids_of_parameters() -> set[int]:
    """Return the `id()` of each parameter that a living optimizer of torch updates."""
    ids = set[int]()
    for optimizer in _alive:
        with without_errors_of_users():  # a class of the user may hold anything
            ids.update(id(parameter) for group in optimizer.param_groups for parameter in group["params"])
    return ids


class _Step:
    """The training step that a thread is in. Optimizers are compared by their keys."""

    def __init__(self) -> None:
        self.number = -1  # -1 before the first
        self.ended = True  # whether the step is counted in `OptimizerSteps.ended`
        self.members: dict[int, _Member] = {}  # the optimizers that stepped in it, by `id()` of their keys
        # Members of the previous step that have not stepped in this one, by `id()`; None if they are not known.
        self.missing: set[int] | None = None
        self.starts: WeakMap[object, bool] = WeakMap()  # whether each optimizer started its last training step
        # The optimizer that stepped last (None if it is gone), its key, and the sequence number of the next node then.
        self.last: Callable[[], Optimizer | None] = lambda: None
        self.last_key: Callable[[], object] = lambda: None
        self.sequence = -1

    def __contains__(self, key: object) -> bool:
        member = self.members.get(id(key))
        return member is not None and member.key() is key


class _Member(NamedTuple):
    """An optimizer that stepped in a step."""

    key: weakref.ref[object]  # the object that identifies the optimizer, see `_key`
    gradient: TensorWeakRef | None = None  # gradient of the key, if the key is a parameter with a gradient
    version: int = 0  # number of in-place writes to that gradient so far

    @classmethod
    def of(cls, key: object) -> _Member:
        """Return the optimizer of `key`, with the gradient that the key has now."""
        with unseen_by_modes():
            gradient = key.grad if _is_tensor(key) else None
            if gradient is None or gradient.is_inference():
                return cls(weakref.ref(key))
            return cls(weakref.ref(key), TensorWeakRef(gradient), gradient._version)

    def is_used(self) -> bool:
        """Return whether its parameter got gradients, or zeros for them, after its step, or is frozen."""
        parameter = self.key()
        if not _is_tensor(parameter):
            return False
        with unseen_by_modes():
            gradient: torch.Tensor | None = parameter.grad
            if gradient is None or gradient.is_inference() or not parameter.requires_grad:
                return not parameter.requires_grad
            return self.gradient is None or gradient is not self.gradient() or gradient._version != self.version


class _Counted:
    """Marks the frame of an optimizer step that is counted."""

    def __call__(self, *_: object) -> None:
        """Trace nothing."""


_alive: WeakMap[Optimizer, bool] = WeakMap()
"""All instances of torch's `Optimizer`."""


@cache
def _watch_optimizers() -> None:
    """Add all optimizers to `_alive`, also those made later: torch prepares each that is made, copied or loaded."""
    prepare: Any = Optimizer._patch_step_function

    @wraps(prepare)
    def _patch_step_function(self: Optimizer) -> None:
        _alive[self] = True
        prepare(self)

    Optimizer._patch_step_function = skip_all(_patch_step_function)  # type: ignore[method-assign]
    classes: list[type[Optimizer]] = [Optimizer]
    for cls in classes:
        classes += type.__subclasses__(cls)
    # An object refers to its class. `get_referrers` is twice as fast as a loop over all objects.
    for optimizer in gc.get_referrers(*classes):
        if is_of_torch(optimizer):
            _alive[optimizer] = True


def _find_others(key: object) -> WeakMap[object, bool]:
    """Return a map from the keys of all other living optimizers to False."""
    keys: WeakMap[object, bool] = WeakMap()
    for optimizer in _alive:
        # If torch does not wrap `step`, such as in accelerate's wrapper, it calls no hook.
        if getattr(type(optimizer).step, "hooked", False) and (other_key := _key(optimizer)) is not key:
            keys[other_key] = False
    return keys


def _key(optimizer: Optimizer) -> object:
    """Return the key of an optimizer: its first parameter, or else the optimizer."""
    try:
        # A user's class may hold anything.
        groups = getattr(optimizer, "param_groups", None)
        for group in groups if isinstance(groups, list | tuple) else ():
            parameters = group.get("params") if isinstance(group, Mapping) else None
            if isinstance(parameters, list | tuple) and parameters and _is_tensor(parameters[0]):
                return parameters[0]
    except Exception as error:
        if raised_by_handler(error):
            raise
    return optimizer


def _is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    """Return whether a value is a tensor, without calling its class."""
    return issubclass(type(value), torch.Tensor)
