"""Training steps, told by the optimizers that step."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import NamedTuple

import torch
from torch.optim.optimizer import Optimizer
from torch.utils.weak import TensorWeakRef

from ..._weak_map import WeakMap
from ..compiled_regions import CompiledRegions
from ..naming.module_paths import Backoff
from ..tensors import unseen_by_modes
from .optimizer_hook import OptimizerRef, add_step_hook, is_compiled, remove_step_hook, step_frames

__all__ = ["OptimizerSteps"]


class OptimizerSteps:
    """Tells which training step each optimizer step belongs to.

    A training step lasts until one of its optimizers steps again, and ends with the last optimizer step before that. So
    gradients accumulated over several backward passes are one step, the two optimizers of a GAN share one, and where
    one optimizer steps five times as often as another, each of its steps is one, and the other's belongs to the last.
    A step is over, too, where one of its optimizers is gone, and where all have stepped that did in the step before
    and one comes that may begin another training: it has not stepped beside them so far, and either is new, or since
    they stepped, something was computed that gave them no gradients though they are not frozen. That one's first step
    is a training step of its own; where those before go on, they begin the next one, unless nothing was computed in
    between: then it is the first of a step whenever it comes. An optimizer that another one steps inside its own
    `step` does not count.

    Args:
        on_step: called after each optimizer step that counts, with the number of the training step it belongs to, from
            0, and whether that is complete, as far as can be told now: all optimizers have stepped that did in the step
            before; in the first step, all that there are. Where torch.compile has made several parts of an optimizer's
            step, it is called after each, with the same.

    Attributes:
        regions: what torch.compile made, watched as long as this runs.
    """

    def __init__(self, on_step: Callable[[int, bool], None]) -> None:
        self._on_step = on_step
        self.regions = CompiledRegions(self._after_region)
        self._step = 0
        self._stepped: dict[int, weakref.ref[Optimizer]] = {}
        self._usual: set[int] | None = None
        # All that stepped in this training so far.
        self._training: dict[int, weakref.ref[Optimizer]] = {}
        # Those of the training before, where another one began this step.
        self._before: dict[int, weakref.ref[Optimizer]] = {}
        # Of those that stepped in this step, how a gradient was then.
        self._gradients: list[_Gradient] = []
        # Those that another one stepped right behind, with nothing computed in between: they begin steps.
        self._leading: dict[int, weakref.ref[Optimizer]] = {}
        self._last: weakref.ref[Optimizer] | None = None
        self._sequence = 0
        self._complete = False
        # Those that had not stepped yet when all were looked for.
        self._awaited: list[weakref.ref[Optimizer]] = []
        self._searches = Backoff()
        self._seen: WeakMap[Optimizer, None] = WeakMap()

    def start(self) -> None:
        """Begin."""
        add_step_hook(self._after_step)
        self.regions.start()

    def stop(self) -> None:
        """End. What an interrupt came into can be done again."""
        self._on_step = _ignore
        remove_step_hook(self._after_step)
        self.regions.stop()

    def _after_step(self, optimizer: Optimizer) -> None:
        frames = step_frames(sys._getframe(1))
        # More than one: another optimizer steps this one.
        if len(frames) <= 1 and not any(type(frame.f_trace) is _Counted for frame in frames):
            self._count(optimizer)

    def _after_region(self, caller: FrameType, optimizers: tuple[OptimizerRef, ...]) -> None:
        """Count what has stepped in a compiled region.

        Args:
            caller: the frame that called it.
            optimizers: those whose whole step is inside.
        """
        frames = step_frames(caller)
        if not frames:
            for ref in optimizers:
                optimizer = ref()
                if optimizer is not None:
                    self._count(optimizer)
        elif is_compiled(frames[-1]):
            self._after_part(frames[-1])

    def _after_part(self, frame: FrameType) -> None:
        """Count the step that `frame` runs, of which a part has run, once; the last part is where it ends."""
        optimizer = next(iter(frame.f_locals.get("args") or ()), None)
        if type(frame.f_trace) is _Counted:
            self._on_step(self._step, self._complete)
        elif frame.f_trace is None and isinstance(optimizer, Optimizer):
            # What can be kept in a frame, and goes with it; called only while a debugger traces the thread.
            frame.f_trace = _Counted()
            self._count(optimizer)

    def _count(self, optimizer: Optimizer) -> None:
        key, stepped = id(optimizer), self._stepped
        sequence, self._sequence = self._sequence, _get_sequence_number()
        computed = sequence != self._sequence
        last, self._last = self._last, weakref.ref(optimizer)
        if last is not None and not computed and (other := last()) is not None and other is not optimizer:
            self._leading[id(other)] = last
        foreign, gone = self._is_foreign(optimizer, computed), any(other() is None for other in stepped.values())
        goes_on = self._goes_on(optimizer)
        back = goes_on and computed
        if goes_on:
            self._training |= self._before
        if foreign or gone or back or key in stepped:
            # Where others come, nothing is known of which step together.
            self._usual = None if foreign or gone or back else set(stepped)
            self._before = self._training if foreign and not gone else {}
            if foreign or gone:
                self._training = {}
            self._stepped = stepped = {}
            self._gradients = []
            self._step += 1
        stepped[key] = self._training[key] = weakref.ref(optimizer)
        self._seen[optimizer] = None
        if gradient := _find_gradient(optimizer):
            self._gradients.append(gradient)
        complete = self._all_have_stepped(optimizer) if self._usual is None else stepped.keys() >= self._usual
        self._complete = complete
        self._on_step(self._step, complete)

    def _all_have_stepped(self, optimizer: Optimizer) -> bool:
        """Whether all optimizers there are have stepped in this step, of which this one is the last so far."""
        # To look for them is to look at every object there is: not again while one is still awaited, and more and more
        # rarely where optimizers are made anew again and again. In between, those are known that have stepped once.
        for ref in self._awaited:
            other = ref()
            if other is not None and id(other) not in self._stepped and _is_another(other, optimizer):
                return False
        others = _all_optimizers() if self._searches.is_due() else list(self._seen)
        self._awaited = [
            weakref.ref(other) for other in others if id(other) not in self._stepped and _is_another(other, optimizer)
        ]
        return not self._awaited

    def _goes_on(self, optimizer: Optimizer) -> bool:
        """Whether another one has begun this step, before which this one stepped."""
        return _holds(self._before, optimizer) and id(optimizer) not in self._stepped

    def _is_foreign(self, optimizer: Optimizer, computed: bool) -> bool:
        """Whether the step is complete, and this optimizer, as far as can be told, is of another training.

        Args:
            optimizer: it has just stepped.
            computed: whether anything was since the optimizer step before.
        """
        if not self._complete or id(optimizer) in self._stepped:
            return False
        if _holds(self._training, optimizer):
            return computed and _holds(self._leading, optimizer)
        # The critic of a GAN gets gradients from what its generator is trained by, or is frozen meanwhile; what was
        # trained before gets none.
        gradients = [gradient for gradient in self._gradients if gradient.is_apart_from(optimizer)]
        was_there = any(ref() is optimizer for ref in self._awaited)
        return not any(
            not computed or (was_there and (gradient.has_changed() or gradient.is_frozen())) for gradient in gradients
        )


class _Counted:
    """Marks the frame of an optimizer's step that is counted."""

    def __call__(self, *_: object) -> None:
        """Trace nothing."""


class _Gradient(NamedTuple):
    """How a gradient was when its optimizer stepped.

    Attributes:
        parameter: whose it is.
        gradient: it.
        version: how often it had been written in place.
        optimizer: which stepped.
    """

    parameter: TensorWeakRef
    gradient: TensorWeakRef
    version: int
    optimizer: weakref.ref[Optimizer]

    def is_apart_from(self, optimizer: Optimizer) -> bool:
        """Whether its optimizer is still there, and shares no parameters with this one."""
        own = self.optimizer()
        return own is not None and _is_another(own, optimizer)

    def has_changed(self) -> bool:
        """Whether a backward pass has come to its parameter since; setting it to zero in place looks the same."""
        parameter = self.parameter()
        with unseen_by_modes():
            gradient = None if parameter is None else parameter.grad
            return gradient is not None and (gradient is not self.gradient() or gradient._version != self.version)

    def is_frozen(self) -> bool:
        """Whether its parameter gets no gradients now."""
        parameter = self.parameter()
        with unseen_by_modes():
            return parameter is not None and not parameter.requires_grad


def _find_gradient(optimizer: Optimizer) -> _Gradient | None:
    """Return how the first gradient of an optimizer is; None where it has none that counts its writes."""
    with unseen_by_modes():
        for parameter in _parameters(optimizer):
            gradient = parameter.grad
            if gradient is not None and not gradient.is_inference():
                return _Gradient(
                    TensorWeakRef(parameter), TensorWeakRef(gradient), gradient._version, weakref.ref(optimizer)
                )
    return None


def _holds(optimizers: dict[int, weakref.ref[Optimizer]], optimizer: Optimizer) -> bool:
    ref = optimizers.get(id(optimizer))
    return ref is not None and ref() is optimizer


def _get_sequence_number() -> int:
    """Return the number of the next autograd node that this thread makes."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def _ignore(_step: int, _complete: bool) -> None:
    """Stand in for the callback of one that was stopped, and whose hook an interrupt has left behind."""


def _all_optimizers() -> list[Optimizer]:
    """Return the optimizers that are alive."""
    kinds: list[type[Optimizer]] = [Optimizer]
    for kind in kinds:
        kinds += type.__subclasses__(kind)
    # An object refers to its class. To ask the collector for those that do is twice as quick as to look at each.
    referrers = gc.get_referrers(*filter(_is_hooked, kinds))
    return [other for other in referrers if issubclass(type(other), Optimizer)]


def _is_another(other: Optimizer, optimizer: Optimizer) -> bool:
    """Whether `other` is another optimizer, has parameters of its own, and torch tells of its steps."""
    if other is optimizer or not _is_hooked(type(other)):
        return False
    own = {id(parameter) for parameter in _parameters(optimizer)}
    return not any(id(parameter) in own for parameter in _parameters(other))


def _is_hooked(kind: type[Optimizer]) -> bool:
    return getattr(kind.step, "hooked", False)


def _parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    # A class of the user's may hold anything.
    groups = getattr(optimizer, "param_groups", None)
    for group in groups if isinstance(groups, list | tuple) else ():
        parameters = group.get("params") if isinstance(group, Mapping) else None
        if isinstance(parameters, list | tuple):
            yield from (parameter for parameter in parameters if isinstance(parameter, torch.Tensor))
