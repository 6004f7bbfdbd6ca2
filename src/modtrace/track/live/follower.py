"""Following what runs now: the open calls of each thread, and in backward the call whose nodes run.

It finds out as the portable engine does, by a layer around `nn.Module.__call__` and hooks on few nodes, but keeps calls
instead of writing events.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.compiler import is_dynamo_compiling

from ...ring import NameTable
from ...ring.slot_format import NO_NAME
from ..call_patch import Layer
from ..module_names import ModuleNames, OpenCall
from ..portable.backward_hooks import StretchHooks
from ..portable.pass_depth import passes_around
from .input_hooks import InputHooks
from .state import Call, Frame, Task, Thread

__all__ = ["Follower"]

_current_graph_task: Callable[[], int] = torch._C._current_graph_task_id
_current_node: Callable[[], Any] = torch._C._current_autograd_node
_sequence: Callable[[], int] = torch._C._autograd._get_sequence_nr

_NO_TASK = -1

Hook = Callable[..., object]
Place = tuple[int, str, "weakref.ref[nn.Module]"]
"""A name's number, the name, and whose it is."""


class Follower(StretchHooks):
    """Knows which calls are open now, on the thread that asks; calls the user's hooks where they begin and end.

    Args:
        outlives: go on with graphs made while it followed, when it follows no more.

    Attributes:
        pre_fw: called with (module, args) when a call was entered.
        post_fw: called with (module, args, output) before a call is left; output is None where it raised.
        pre_bw: called with (module or None, gradients of outputs) when the backward of a call began.
        post_bw: called with (module or None, gradients of inputs) when all gradients of its inputs are known, at the
            latest when its backward ends.
    """

    def __init__(self, outlives: bool) -> None:
        self._names = ModuleNames(NameTable(), None, self._forget)
        self._places: dict[int, dict[int, Place]] = {}
        self._roots: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._local = threading.local()
        self._running: dict[int, list[Task]] = {}
        self._inputs = InputHooks(self._input_known)
        self._when_reached = self._reached
        self._outlives = outlives
        self._active = False
        self.pre_fw: Hook | None = None
        self.post_fw: Hook | None = None
        self.pre_bw: Hook | None = None
        self.post_bw: Hook | None = None

    def start(self) -> None:
        """Begin to follow."""
        self._active = True
        _LAYER.add(self)

    def stop(self) -> None:
        """End it and restore `nn.Module.__call__`."""
        self._active = False
        _LAYER.remove(self)

    def open_names(self) -> set[str]:
        """Return the names of the calls that run on this thread, forward, backward and again."""
        thread = self._thread()
        names = {frame.code.name for frame in thread.frames[1 : thread.height + 1] if frame.code is not None}
        if thread.tasks:
            names.update(call.name for call in self._backward_calls(thread))
        return names

    def name_of(self, module: nn.Module) -> str | None:
        """Return the name of the innermost open call of `module`, else the last it had, else where it lies."""
        thread = self._thread()
        for frame in reversed(thread.frames[1 : thread.height + 1]):
            if frame.module is module and frame.code is not None:
                return frame.code.name
        for call in self._backward_calls(thread):
            if call.module() is module:
                return call.name
        name = self._names.last(module)
        if name is not None:
            return name
        for root, root_name in list(self._roots.items()):
            for path, inner in root.named_modules():
                if inner is module:
                    return f"{root_name}.{path}"
        return None

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Frame | None:
        """Follow a call of `module`; None where it has no name of its own."""
        try:
            thread: Thread = self._local.thread
        except AttributeError:
            thread = self._thread()
        height = thread.height
        outer = thread.frames[height]
        try:
            number, name, ref = self._places[id(module)][outer.name]
        except KeyError:
            number, name, ref = self._find(module, outer.name, thread)
        if number == NO_NAME:
            return None
        if thread.tasks and _current_graph_task() == _NO_TASK:
            # Those that ended by an exception; for these the engine calls nobody.
            thread.tasks.clear()
        call = Call(name, ref, outer.code)
        inputs = (args, kwargs) if kwargs else args
        if self.post_bw is not None:
            # Before the outer call's own hooks on the same nodes, which end the backward of this call.
            self._inputs.wait(call, inputs)
        sequence = _sequence()
        if sequence != outer.segment:
            self._end_segment(thread, outer, inputs, sequence)
        height += 1
        try:
            frame = thread.frames[height]
        except IndexError:
            frame = Frame(thread, height)
            thread.frames.append(frame)
        frame.module = module
        frame.name = number
        frame.code = call
        frame.first = frame.segment = sequence
        thread.height = height
        if self.pre_fw is not None:
            try:
                self.pre_fw(module, args)
            except BaseException:
                self._pop(frame, None)
                raise
        return frame

    def leave(self, frame: Frame, args: tuple[Any, ...], output: object) -> None:
        """End a call that returned `output`, or None where it raised."""
        try:
            if self.post_fw is not None:
                self.post_fw(frame.module, args, output)
        finally:
            self._pop(frame, output)

    def _pop(self, frame: Frame, output: object) -> None:
        thread = frame.thread
        sequence = _sequence()
        # An interrupt between an inner call's enter and its try can have left inner frames behind.
        thread.height = height = frame.height - 1
        if sequence != frame.first and output is not None:
            if sequence != frame.segment:
                self._end_segment(thread, frame, output, sequence)
            if frame.pending:
                self._walk(thread, frame, output)
        if frame.pending:
            frame.pending.clear()
        frame.module = frame.code = None
        thread.frames[height].segment = sequence

    def _thread(self) -> Thread:
        try:
            thread: Thread = self._local.thread
        except AttributeError:
            thread = self._local.thread = Thread()
        return thread

    def _find(self, module: nn.Module, parent: int, thread: Thread) -> Place:
        frames = thread.frames[1 : thread.height + 1]
        open_calls: Iterable[OpenCall] = ((f.module, f.name) for f in reversed(frames) if f.module is not None)
        number = self._names.resolve(module, open_calls)
        name = "" if number == NO_NAME else self._names.fqn(number)
        place = (number, name, weakref.ref(module))
        self._places.setdefault(id(module), {})[parent] = place
        if not frames:
            self._roots[module] = name
        return place

    def _forget(self, identity: int) -> None:
        self._places.pop(identity, None)

    def _backward_calls(self, thread: Thread) -> Iterator[Call]:
        """Yield the calls whose backward runs on this thread, innermost first."""
        if not thread.tasks or _current_graph_task() == _NO_TASK:
            return
        last = thread.tasks[-1]
        for task in reversed(thread.tasks):
            if task.call is not None and not task.over and (task is last or task.passes < last.passes):
                yield from task.call.chain()

    def _reached(self, call: Call | None, gradient: Tensor) -> None:
        if not (self._active or self._outlives):
            return
        thread = self._thread()
        number = _current_graph_task()
        if not thread.tasks or thread.tasks[-1].number != number:
            if number == _NO_TASK:
                return
            self._begin_task(thread, number)
        task = thread.tasks[-1]
        if task.call is not call:
            if self.pre_bw is None and self.post_bw is None:
                task.call = call
            else:
                self._move(task, call, gradient)

    def _begin_task(self, thread: Thread, number: int) -> None:
        tasks, passes = thread.tasks, passes_around()
        # The engine's own threads run tasks by turns. On others one runs inside of another or follows it, also where
        # the one before ended by an exception; for that the engine calls nobody.
        tasks[:] = [
            task for task in tasks if not task.over and (task.number == number or task.passes < passes or passes == 0)
        ]
        for task in tasks:
            if task.number == number:
                tasks.remove(task)
                tasks.append(task)
                return
        task = Task(number, passes)
        tasks.append(task)
        running = self._running.get(number)
        if running is None:
            self._running[number] = [task]
            Variable._execution_engine.queue_callback(partial(self._over, number))
        else:
            running.append(task)

    def _over(self, number: int) -> None:
        thread = self._thread()
        for task in self._running.pop(number, ()):
            if task not in thread.tasks:
                # It ran on another thread; the user's hooks are called on this one, and find its calls open.
                thread.tasks.append(task)
            while task.call is not None:
                self._end_backward(task, None)
            task.over = True
        thread.tasks[:] = [task for task in thread.tasks if not task.over]

    def _move(self, task: Task, call: Call | None, gradient: Tensor) -> None:
        """End the backward of calls that are not around `call`, and begin that of those that are."""
        around = set() if call is None else set(call.chain())
        while task.call is not None and task.call not in around:
            self._end_backward(task, gradient)
        opening: list[Call] = []
        while call is not task.call:
            assert call is not None
            opening.append(call)
            call = call.outer
        for inner in reversed(opening):
            task.call = inner
            if self.pre_bw is not None:
                self.pre_bw(inner.module(), (gradient,))

    def _end_backward(self, task: Task, gradient: Tensor | None) -> None:
        call = task.call
        assert call is not None
        known = task.gradients.pop(call, None)
        if call not in task.told and self.post_bw is not None:
            if gradient is not None and call.inputs:
                # The node that runs now can be the one whose gradient was waited for.
                here = (_current_node()._sequence_nr(), 0)
                known = [gradient if place == here else None for place in call.inputs] if known is None else known
            self.post_bw(call.module(), () if known is None else (known,))
        task.told.discard(call)
        task.call = call.outer

    def _input_known(self, call: Call, index: int, gradient: Tensor) -> None:
        tasks = self._thread().tasks
        if self.post_bw is None or not tasks or tasks[-1].number != _current_graph_task():
            return
        task = tasks[-1]
        if task.call is None or call in task.told or call not in set(task.call.chain()):
            return
        known = task.gradients.setdefault(call, [None] * len(call.inputs))
        known[index] = gradient
        if all(value is not None for value in known):
            task.told.add(call)
            del task.gradients[call]
            self.post_bw(call.module(), (known,))


def _make_call(layer: Layer) -> Callable[..., Any]:
    assert isinstance(layer, _FollowLayer)

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807  # what it stands for
        if is_dynamo_compiling():
            return layer.inner(self, *args, **kwargs)
        return layer.run(layer.followers, self, args, kwargs)

    return __call__


class _FollowLayer(Layer):
    """One layer for all that follow; each sees a call inside of the one before it."""

    followers: tuple[Follower, ...] = ()

    def add(self, follower: Follower) -> None:
        self.followers = (*self.followers, follower)
        self.put_on()

    def remove(self, follower: Follower) -> None:
        self.followers = tuple(other for other in self.followers if other is not follower)
        if not self.followers:
            self.take_off()

    def run(
        self, followers: tuple[Follower, ...], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not followers:
            return self.inner(module, *args, **kwargs)
        frame = followers[0].enter(module, args, kwargs)
        output = None
        try:
            output = self.run(followers[1:], module, args, kwargs)
            return output
        finally:
            if frame is not None:
                followers[0].leave(frame, args, output)


_LAYER = _FollowLayer(_make_call)
