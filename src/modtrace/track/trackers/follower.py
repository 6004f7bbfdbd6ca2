"""Follows the code that runs now: the open calls of each thread, and in backward the call whose nodes run.

Like the Python engine, it uses a patch of `nn.Module.__call__` and hooks on few nodes. But it keeps calls instead of
writing events.
"""

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.autograd import Variable
from torch.compiler import is_dynamo_compiling

from ..._interrupts import WeakMap
from ...ring import NameTable
from ...ring.slot_format import NO_NAME
from ..call_patch import RUN_BACKWARD, Patch, Wrapper
from ..event_sink import NO_GRAPH_TASK, current_graph_task, current_node, sequence_number
from ..naming.module_names import ModuleNames
from ..naming.modules import named_modules
from ..python.passes import backward_nesting_depth, make_pass_wrapper, node_runs
from ..python.segment_hooks import SegmentHooks
from .calls import Call, InputHooks, LiveFrame, LiveGraphTask, LiveThread

Hook = Callable[..., object]


class NamedModule(NamedTuple):
    """A module under one of its names."""

    name: int  # id of the name
    fqn: str  # fully qualified name
    module: weakref.ref[nn.Module]


class Follower(SegmentHooks[LiveThread]):
    """Keeps the open calls of each thread, and calls the user's hooks at their starts and ends.

    Args:
        follow_graphs_after_exit: after `stop`, still follow the backward of graphs that were made before.
    """

    def __init__(self, follow_graphs_after_exit: bool) -> None:
        super().__init__(LiveThread)
        self._thread = self._threads.get
        self._running: dict[int, list[LiveGraphTask]] = {}
        self._follow_graphs_after_exit = follow_graphs_after_exit
        self.on_segment_start = self._on_node
        self._active = False
        # By id(module), then by the name of the call around it.
        self._names_by_module: dict[int, dict[int, NamedModule]] = {}
        self._names = ModuleNames(
            NameTable(),
            None,
            lambda module_id: self._names_by_module.pop(module_id, None),
            strip_wrappers=False,
            distinct=False,
        )
        self._dead = self._names.dead
        self._roots: WeakMap[nn.Module, str] = WeakMap()  # names of the outermost called modules
        self._inputs = InputHooks(self.on_input_gradient)
        self.pre_fw: Hook | None = None  # called with (module, args) after a call is entered
        # Called with (module, args, output) before a call is left; output is None if it raised.
        self.post_fw: Hook | None = None
        # Called with (module or None, gradients of outputs) after the start of a call's backward.
        self.pre_bw: Hook | None = None
        # Called with (module or None, gradients of inputs) when all these gradients are known, or when the call's
        # backward ends.
        self.post_bw: Hook | None = None

    def start(self) -> None:
        """Start following: wrap `nn.Module.__call__`."""
        self._active = True
        _PATCH.add(self)

    def stop(self) -> None:
        """Stop following and restore `nn.Module.__call__`."""
        self._active = False
        _PATCH.remove(self)

    def active_names(self) -> set[str]:
        """Return the names of the calls that run on this thread: forward, backward and recompute."""
        thread = self._thread()
        names = {frame.call_id.name for frame in thread.open_frames() if frame.call_id is not None}
        if thread.graph_tasks:
            names.update(call.name for call in self.backward_calls(thread))
        return names

    def name_of(self, module: nn.Module) -> str | None:
        """Return the name of the innermost open call of `module`, else its last name, else its path below a root."""
        thread = self._thread()
        for frame in reversed(thread.open_frames()):
            if frame.module is module and frame.call_id is not None:
                return frame.call_id.name
        for call in self.backward_calls(thread):
            if call.module() is module:
                return call.name
        name = self._names.last(module)
        if name is not None:
            return name
        for root, root_name in self._roots.items():
            for path, inner in named_modules(root):
                if inner is module:
                    return f"{root_name}.{path}"
        return None

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LiveFrame | None:
        """Follow a call of `module`, and return its frame; None if the call has no name of its own."""
        try:
            thread: LiveThread = self._local.value
        except AttributeError:
            thread = self._thread()
        depth = thread.stack_depth
        outer = thread.frames[depth]
        if self._dead:
            self._names.forget_dead()
        try:
            name, fqn, ref = self._names_by_module[id(module)][outer.name]
        except KeyError:
            name, fqn, ref = self._resolve(module, outer.name, thread)
        if name == NO_NAME:
            return None
        if thread.graph_tasks and current_graph_task() == NO_GRAPH_TASK:
            # They ended by an exception, for which torch has no callback.
            thread.graph_tasks.clear()
        call = Call(fqn, ref, outer.call_id)
        inputs = (args, kwargs) if kwargs else args
        if self.post_bw is not None:
            # Register before the outer call's own hooks on the same nodes, which end the backward of this call.
            self._inputs.wait(call, inputs)
        sequence = sequence_number()
        if sequence != outer.segment_start_seq:
            self.close_segment(thread, outer, inputs, sequence)
        depth += 1
        try:
            frame = thread.frames[depth]
        except IndexError:
            frame = LiveFrame(thread, depth)
            thread.frames.append(frame)
        frame.module = module
        frame.name = name
        frame.call_id = call
        frame.entry_seq = frame.segment_start_seq = sequence
        frame.keywords_id = id(kwargs)
        thread.stack_depth = depth
        if self.pre_fw is not None:
            try:
                self.pre_fw(module, args)
            except BaseException:
                self.pop(frame, None)
                raise
        return frame

    def exit(self, frame: LiveFrame, args: tuple[Any, ...], output: object) -> None:
        """End a call that returned `output`, or None if it raised."""
        try:
            if self.post_fw is not None:
                self.post_fw(frame.module, args, output)
        finally:
            self.pop(frame, output)

    def innermost_called_with(self, kwargs: dict[str, Any]) -> LiveFrame | None:
        """Return the frame of the thread's innermost call if its keyword arguments are this very dictionary."""
        return self._thread().innermost_called_with(kwargs)

    def pop(self, frame: LiveFrame, output: object) -> None:
        """End a call as `exit` does, without the user's hook."""
        thread = frame.thread
        sequence = sequence_number()
        # An interrupt between an inner call's enter and its try can have left inner frames open.
        thread.stack_depth = depth = frame.depth - 1
        if sequence != frame.entry_seq:
            if sequence != frame.segment_start_seq:
                self.close_segment(thread, frame, output, sequence)
            if frame.unhooked_segments:
                self.hook_unfound(thread, frame, output)
        frame.module = frame.call_id = None
        thread.frames[depth].segment_start_seq = sequence

    def _resolve(self, module: nn.Module, outer_name: int, thread: LiveThread) -> NamedModule:
        open_calls = thread.open_calls()
        name = self._names.resolve(module, open_calls)
        fqn = "" if name == NO_NAME else self._names.fqn(name)
        named_module = NamedModule(name, fqn, weakref.ref(module))
        self._names_by_module.setdefault(id(module), {})[outer_name] = named_module
        if not open_calls:
            self._roots[module] = fqn
        return named_module

    def backward_calls(self, thread: LiveThread) -> Iterator[Call]:
        """Yield the calls whose backward runs on this thread, innermost first."""
        if not thread.graph_tasks or current_graph_task() == NO_GRAPH_TASK:
            return
        last = thread.graph_tasks[-1]
        for task in reversed(thread.graph_tasks):
            if (
                task.call is not None
                and not task.has_ended
                and (task is last or task.nesting_depth < last.nesting_depth)
            ):
                yield from task.call.chain()

    def _on_node(self, call: Call | None, gradient: Tensor) -> None:
        if not (self._active or self._follow_graphs_after_exit):
            return
        thread = self._thread()
        graph_task_id = current_graph_task()
        if not thread.graph_tasks or thread.graph_tasks[-1].id != graph_task_id:
            if graph_task_id == NO_GRAPH_TASK:
                return
            self._begin_graph_task(thread, graph_task_id)
        task = thread.graph_tasks[-1]
        if task.call is not call and (not self.ends_early or node_runs(list(self.ends_early.values()))):
            if self.pre_bw is None and self.post_bw is None:
                task.call = call
            else:
                self._switch_call(task, call, gradient)

    def _begin_graph_task(self, thread: LiveThread, graph_task_id: int) -> None:
        """Make this graph task the last task of the thread, and drop the tasks that have ended."""
        tasks, depth = thread.graph_tasks, backward_nesting_depth()
        # torch's own threads alternate between tasks. On other threads, a task runs inside another task or follows it,
        # even if the other task ended by an exception; torch has no callback for that.
        tasks[:] = [
            task
            for task in tasks
            if not task.has_ended and (task.id == graph_task_id or task.nesting_depth < depth or depth == 0)
        ]
        for task in tasks:
            if task.id == graph_task_id:
                tasks.remove(task)
                tasks.append(task)
                return
        task = LiveGraphTask(graph_task_id, depth)
        tasks.append(task)
        running = self._running.get(graph_task_id)
        if running is None:
            self._running[graph_task_id] = [task]
            Variable._execution_engine.queue_callback(partial(self._end_graph_task, graph_task_id))
        else:
            running.append(task)

    def _end_graph_task(self, graph_task_id: int) -> None:
        thread = self._thread()
        for task in self._running.pop(graph_task_id, ()):
            if task not in thread.graph_tasks:
                # The task ran on another thread. The user's hooks run on this thread, and find its calls open.
                thread.graph_tasks.append(task)
            while task.call is not None:
                self._end_backward(task, None)
            task.has_ended = True
        thread.graph_tasks[:] = [task for task in thread.graph_tasks if not task.has_ended]

    def _switch_call(self, task: LiveGraphTask, call: Call | None, gradient: Tensor) -> None:
        """End the backward of other calls than `call` and the calls around it; start the backward of these."""
        chain = set() if call is None else set(call.chain())
        while task.call is not None and task.call not in chain:
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

    def _end_backward(self, task: LiveGraphTask, gradient: Tensor | None) -> None:
        call = task.call
        assert call is not None
        gradients = task.gradients.pop(call, None)
        if call not in task.notified and self.post_bw is not None:
            if gradient is not None and call.inputs and gradients is None:
                # The running node may be the one whose gradient the call waits for.
                running_edge = (current_node()._sequence_nr(), 0)
                gradients = [gradient if edge == running_edge else None for edge in call.inputs]
            self.post_bw(call.module(), () if gradients is None else (gradients,))
        task.notified.discard(call)
        task.call = call.outer

    def on_input_gradient(self, call: Call, index: int, gradient: Tensor) -> None:
        """Store the gradient of `call.inputs[index]`; after the last gradient, call `post_bw`."""
        tasks = self._thread().graph_tasks
        if self.post_bw is None or not tasks or tasks[-1].id != current_graph_task():
            return
        task = tasks[-1]
        if task.call is None or call in task.notified or call not in set(task.call.chain()):
            return
        gradients = task.gradients.setdefault(call, [None] * len(call.inputs))
        gradients[index] = gradient
        if all(value is not None for value in gradients):
            task.notified.add(call)
            del task.gradients[call]
            self.post_bw(call.module(), (gradients,))


def _make_wrapper(wrapper: Wrapper) -> Callable[..., Any]:
    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807  # its name in torch
        __tracebackhide__ = __traceback_hide__ = True
        if is_dynamo_compiling():
            return wrapper.wrapped(self, *args, **kwargs)
        return _follow(wrapper.observer or (), wrapper, self, args, kwargs)

    return __call__


def _follow(
    followers: tuple[Follower, ...], wrapper: Wrapper, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    __tracebackhide__ = __traceback_hide__ = True
    if not followers:
        return wrapper.wrapped(module, *args, **kwargs)
    frame = None
    # `try` starts before the call is entered: an interrupt between the two would lose the exit.
    try:
        frame = followers[0].enter(module, args, kwargs)
        output = _follow(followers[1:], wrapper, module, args, kwargs)
        if frame is not None:
            followers[0].exit(frame, args, output)
        return output
    except BaseException:
        # An interrupt can come just after the call was entered, or during its exit.
        if frame is None:
            frame = followers[0].innermost_called_with(kwargs)
        if frame is not None and frame.module is not None:
            followers[0].exit(frame, args, None)
        raise


class _Passes:
    """Reports the backward passes of a thread to followers; it is the observer of the pass wrapper."""

    def __init__(self, followers: tuple[Follower, ...]) -> None:
        self._followers = followers
        self.next_pass = _next_pass

    def begin_pass(self, number: int, outputs: object, inputs: Sequence[Any]) -> None:
        for follower in self._followers:
            follower.begin_pass(number, outputs, inputs)

    def end_pass(self, number: int) -> None:
        for follower in self._followers:
            follower.end_pass(number)

    def note_gradients(self, *_: object) -> None:
        """Do nothing: a tracker has no training steps."""


_next_pass: Callable[[], int] = itertools.count(1).__next__


class _FollowPatch(Patch):
    """One patch for all followers; in a call, each follower enters after the previous follower, and exits before it."""

    followers: tuple[Follower, ...] = ()

    def add(self, follower: Follower) -> None:
        self._set((*self.followers, follower))

    def remove(self, follower: Follower) -> None:
        self._set(tuple(other for other in self.followers if other is not follower))

    def _set(self, followers: tuple[Follower, ...]) -> None:
        self.followers = followers
        if followers:
            _PASS_PATCH.install(_Passes(followers))
            self.install(followers)
        else:
            self.uninstall()
            _PASS_PATCH.uninstall()


_PATCH = _FollowPatch(_make_wrapper)
_PASS_PATCH = Patch(make_pass_wrapper, RUN_BACKWARD)
