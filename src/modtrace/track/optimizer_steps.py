"""Training steps: one ends where an optimizer steps, so that no program has to mark them."""

from __future__ import annotations

import contextlib
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

from .._interrupts import Exclusive, WeakMap, raised_by_handler
from .compiled_regions import CompiledRegions
from .greenlets import PerGreenlet
from .optimizer_hook import add_step_hook, is_compiled_step, is_of_torch, remove_step_hook, step_frames
from .unseen import class_name, skip_all, unseen_by_modes, weakref_offset

_MANY = 8
"""How many optimizers are many: programs with several models have up to 6."""


class OptimizerSteps:
    """Finds which training step each optimizer step belongs to.

    Each thread has training steps of its own; their numbers run over all threads, in the order in which steps begin. A
    training step lasts until one of its optimizers steps again, or another one does for the same parameters. So
    gradients accumulated over several backward passes are one step, and the two optimizers of a GAN share one. If one
    optimizer steps five times as often as another, each of its steps is one, and the other's belongs to the last.

    Two optimizer steps share a training step if nothing was computed between them. Otherwise an optimizer that has not
    stepped yet in this training step belongs to it in three cases:

    - Another optimizer that stepped in the step before is still missing (in the first step: any other optimizer).
    - It stepped before, and did not begin that step.
    - Its loss gave gradients to an optimizer of this step too, or that one is frozen meanwhile. So a generator that
      steps after several steps of its critic belongs to the last, and a second training that follows does not.

    An optimizer that is not torch's counts if torch has none when it first steps: each call of its `step` is a training
    step. An optimizer that another one steps inside its own `step` does not count. Optimizers are told apart by their
    first parameters.

    Args:
        on_step: called after each optimizer step that counts. It gets the number of the training step, from 0, and
            whether that is complete, as far as can be told now. Where torch.compile has made several parts of an
            optimizer's step, it is called after each, with the same.
        on_first_step: called before that when an optimizer steps first in a thread, with its `describe_optimizer`. It
            is called again with the 8th, 16th, 32nd … optimizer that steps, also of how many, see `OPTIMIZERS`.
    """

    def __init__(
        self,
        on_step: Callable[[int, bool], None],
        on_first_step: Callable[[dict[str, object]], None] = lambda _description: None,
    ) -> None:
        self._on_step, self._on_first_step = on_step, on_first_step
        self.regions = CompiledRegions(self._after_region)  # what torch.compile made, watched as long as this runs
        # How many training steps have ended so far, as far as can be told: one that was not known to be complete ends
        # when its thread begins the next one.
        self.ended = 0
        self._numbers = itertools.count()
        self._counting = Exclusive()
        self._steps = PerGreenlet(_Step)
        # The keys of other optimizers that were there at the first optimizer step, and whether each has stepped since.
        self._present: WeakMap[object, bool] | None = None
        self._seen: WeakMap[object, bool] = WeakMap()  # optimizers that stepped, and their keys
        self._stepped = self._keys = 0  # how many there were of each
        self._counts_own: bool | None = None

    def start(self) -> None:
        """Begin to count steps."""
        _watch_optimizers()
        add_step_hook(self._after_step)
        self.regions.start()

    def stop(self) -> None:
        """Stop counting steps; can be called again after an interrupt."""
        self._on_step, self._on_first_step = lambda _step, _complete: None, lambda _description: None
        remove_step_hook(self._after_step)
        self.regions.stop()

    def _after_step(self, optimizer: Any) -> None:
        of_torch = is_of_torch(optimizer)
        if not of_torch and not self._counts(optimizer):
            return
        frames = step_frames(sys._getframe(1))
        # More frames than its own: another optimizer steps this one.
        if len(frames) <= of_torch and not any(type(frame.f_trace) is _Counted for frame in frames):
            self._count(optimizer)

    def _counts(self, optimizer: object) -> bool:
        """Whether steps of optimizers that are not torch's count: not where they may wrap one, and step more often."""
        if self._counts_own is None:
            self._counts_own = self._present is None and not [*_find_others(None)]
        # Slots without `__weakref__` let nothing follow an object.
        return self._counts_own and weakref_offset(type(optimizer)) != 0

    def _after_region(self, caller: FrameType) -> None:
        """Count a step of which a compiled region, which this frame called, is a part."""
        frames = step_frames(caller)
        if not frames or not is_compiled_step(frame := frames[-1]):
            return
        # It counts after its first part. After each later part, its end moves there.
        first = next(iter(frame.f_locals.get("args") or ()), None)
        if type(frame.f_trace) is _Counted:
            step = self._steps.get()
            self._on_step(step.number, self._is_complete(step))
        elif frame.f_trace is None and is_of_torch(first):
            # What can be kept in a frame, and goes with it; called only while a debugger traces the thread.
            frame.f_trace = _Counted()
            self._count(cast("Optimizer", first))

    def _count(self, optimizer: Optimizer) -> None:
        """Find the training step that this step of an optimizer belongs to, and report it."""
        key, step = _key(optimizer), self._steps.get()
        if self._present is None:
            self._present = _find_others(key)
        if was_present := self._present.get(key) is not None:
            self._present[key] = True
        sequence, step.sequence = step.sequence, torch._C._autograd._get_sequence_nr()
        computed = sequence != step.sequence
        gone = computed and step.last() is None and step.number >= 0
        begins = gone or key in step or not self._joins(step, key, computed, was_present)
        if begins:
            if not computed and (last_key := step.last_key()) is not None:
                # That one has begun, one step early, what this one goes on with.
                step.begins[last_key] = True
            step.missing = None if gone or step.begins.get(key) is None else set(step.members)
            step.members = {}
            self._end(step)
            step.ended = False
            step.number = next(self._numbers)
        if step.begins.get(key) is None:
            self._on_first_step(describe_optimizer(optimizer))
        if self._seen.get(optimizer) is None:
            self._keys += self._seen.get(key) is None
            self._stepped += 1
            self._seen[key] = self._seen[optimizer] = True
            if self._stepped >= _MANY and self._stepped & (self._stepped - 1) == 0:
                of_many = {"stepped": self._stepped, "first_tensors": self._keys}
                self._on_first_step(describe_optimizer(optimizer) | of_many)
        step.begins[key] = begins
        step.members[id(key)] = _Member.of(key)
        step.last, step.last_key = weakref.ref(optimizer), weakref.ref(key)
        if step.missing is not None:
            step.missing.discard(id(key))
        complete = self._is_complete(step)
        if complete:
            self._end(step)
        self._on_step(step.number, complete)

    def _joins(self, step: _Step, key: object, computed: bool, was_present: bool) -> bool:
        """Whether an optimizer that has not stepped yet in its thread's step belongs to it."""
        if step.number < 0:
            return False
        if not computed or not self._is_complete(step):
            return True
        begins = step.begins.get(key)
        if begins is not None:
            return not begins
        return (was_present or step.missing is None) and any(map(_Member.is_used, step.members.values()))

    def _is_complete(self, step: _Step) -> bool:
        """Whether all have stepped that did in the step before; if that is not known, all that there were."""
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
    """Return its `class`, how many `tensors` it updates, `how` (`fused`, `foreach`, `one by one`), `hooks`, `groups`.

    What an optimizer of another kind does not have is left out, and that it has one group.
    """
    description: dict[str, object] = {"class": class_name(type(optimizer))}
    with contextlib.suppress(AttributeError, KeyError, TypeError, StopIteration), unseen_by_modes():
        groups = optimizer.param_groups
        description["tensors"] = sum(len(group["params"]) for group in groups)
        if len(groups) > 1:
            description["groups"] = len(groups)
        description["hooks"] = len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)
        fused, foreach = (any(group[option] for group in groups) for option in ("fused", "foreach"))
        by_default = all(group["foreach"] is None for group in groups)
        # What torch chooses if nothing is description: foreach on a GPU.
        on_gpu = by_default and next(iter(groups[0]["params"])).device.type != "cpu"
        one_by_one = "one by one" if by_default else "one by one (foreach=False)"
        description["how"] = "fused" if fused else "foreach" if foreach or on_gpu else one_by_one
    return description


def ids_of_parameters() -> set[int]:
    """Return the `id()` of what the optimizers of torch that are alive update."""
    ids = set[int]()
    for optimizer in _alive:
        with contextlib.suppress(AttributeError, KeyError, TypeError):  # of a class of the user's
            ids.update(id(parameter) for group in optimizer.param_groups for parameter in group["params"])
    return ids


class _Step:
    """The training step that a thread is in. Optimizers are compared by their keys."""

    def __init__(self) -> None:
        self.number = -1  # -1 before the first
        self.ended = True  # whether it is counted
        self.members: dict[int, _Member] = {}  # the optimizers that stepped in it, by `id()` of their keys
        # Those that stepped in the step before and not in this one; None if nothing is known of that.
        self.missing: set[int] | None = None
        self.begins: WeakMap[object, bool] = WeakMap()  # whether each began the step that it stepped in last
        # The optimizer that stepped last, None if it is gone, its key, and the number of the next autograd node then.
        self.last: Callable[[], Optimizer | None] = lambda: None
        self.last_key: Callable[[], object] = lambda: None
        self.sequence = -1

    def __contains__(self, key: object) -> bool:
        member = self.members.get(id(key))
        return member is not None and member.key() is key


class _Member(NamedTuple):
    """An optimizer that stepped in a step."""

    key: weakref.ref[object]  # what it is told by
    gradient: TensorWeakRef | None = None  # of that, if it is a parameter and had one
    version: int = 0  # how often that gradient had been written in place

    @classmethod
    def of(cls, key: object) -> _Member:
        """Return the optimizer that has `key`, with its gradient as it is now."""
        with unseen_by_modes():
            gradient = key.grad if _is_tensor(key) else None
            if gradient is None or gradient.is_inference():
                return cls(weakref.ref(key))
            return cls(weakref.ref(key), TensorWeakRef(gradient), gradient._version)

    def is_used(self) -> bool:
        """Whether its parameter got gradients after its step (setting them to zero looks the same), or is frozen."""
        parameter = self.key()
        if not _is_tensor(parameter):
            return False
        with unseen_by_modes():
            gradient: torch.Tensor | None = parameter.grad
            if gradient is None or gradient.is_inference() or not parameter.requires_grad:
                return not parameter.requires_grad
            return self.gradient is None or gradient is not self.gradient() or gradient._version != self.version


class _Counted:
    """Marks the frame of an optimizer's step that is counted."""

    def __call__(self, *_: object) -> None:
        """Trace nothing."""


_alive: WeakMap[Optimizer, bool] = WeakMap()
"""All optimizers of torch's, and those that derive from them."""


@cache
def _watch_optimizers() -> None:
    """Know all optimizers from now on: torch prepares each when it is made, copied or loaded."""
    prepare: Any = Optimizer._patch_step_function

    @wraps(prepare)
    def _patch_step_function(self: Optimizer) -> None:
        _alive[self] = True
        prepare(self)

    Optimizer._patch_step_function = skip_all(_patch_step_function)  # type: ignore[method-assign]
    kinds: list[type[Optimizer]] = [Optimizer]
    for kind in kinds:
        kinds += type.__subclasses__(kind)
    # An object refers to its class. To ask the collector for those that do is twice as quick as to look at each.
    for optimizer in gc.get_referrers(*kinds):
        if is_of_torch(optimizer):
            _alive[optimizer] = True


def _find_others(key: object) -> WeakMap[object, bool]:
    """Return the keys of all other optimizers that are alive, with False each."""
    keys: WeakMap[object, bool] = WeakMap()
    for optimizer in _alive:
        # If torch does not wrap `step`, as in accelerate's wrapper of an optimizer, no hook is called.
        if getattr(type(optimizer).step, "hooked", False) and (own_key := _key(optimizer)) is not key:
            keys[own_key] = False
    return keys


def _key(optimizer: Optimizer) -> object:
    """Return the key of an optimizer: its first parameter, else itself."""
    try:
        # A class of the user's may hold anything.
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
    """Whether it is a tensor; its class is not asked."""
    return issubclass(type(value), torch.Tensor)
