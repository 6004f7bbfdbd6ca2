"""The Python engine: pure Python, with hooks on few autograd nodes.

Nodes of one thread's graph run in descending order of their sequence numbers. So only the newest node of each segment
is hooked; a segment is a run of nodes that one call made itself. When that node runs, the backward of its call goes on,
and the backward before is interrupted or over. A segment ends when an inner call is entered, and when its own call
ends: its newest node usually made an input of the inner call, or an output of its own call. Otherwise the node is
searched for in the call's graph at the call's exit, and in a pass's graph at its start. torch reports the pass's end.
"""

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from ...ring import Kind, Ring
from ...ring.slot_format import (
    CALL_INDEX_MASK,
    CALL_KEY_BITS,
    KIND_SHIFT,
    LAP_SHIFT,
    NO_NAME,
    RECOMPUTE_BIT,
    SEQUENCE_BITS,
    SEQUENCE_MASK,
    THREAD_SHIFT,
)
from ..call_patch import Patch, Wrapper
from ..checkpoint_reruns import CheckpointReruns
from ..collectives import PythonCollectives
from ..event_sink import (
    NO_GRAPH_TASK,
    EngineOptions,
    OnError,
    SyncMarks,
    current_graph_task,
    sequence_number,
)
from ..greenlets import ThreadNumbers
from ..line_gaps import INNER_CALL
from ..naming.module_names import ModuleNames
from ..torch_ranges import TorchRanges
from ..unseen import attribute_of, is_backward_compiled, skip_all, skip_frame
from .garbage_collections import PythonCollections
from .operators import OperatorCounts
from .passes import PASS_PATCH, CallFrame, GraphTasks, ThreadState, gives_gradients
from .segment_hooks import SegmentHooks

_profiler_enabled: Callable[[], bool] = torch._C._autograd._profiler_enabled
_is_grad_enabled: Callable[[], bool] = torch.is_grad_enabled

_FORWARD_ENTER, _FORWARD_EXIT = Kind.FORWARD_ENTER << KIND_SHIFT, Kind.FORWARD_EXIT << KIND_SHIFT
_EVAL_ENTER = Kind.EVAL_ENTER << KIND_SHIFT
_RECOMPUTE_ENTER, _RECOMPUTE_EXIT = Kind.RECOMPUTE_ENTER << KIND_SHIFT, Kind.RECOMPUTE_EXIT << KIND_SHIFT
_COLLECTION = Kind.COLLECTION << KIND_SHIFT


class NameCounters(NamedTuple):
    """A name, and the counters of its calls: each returns the next index, from 0."""

    name: int  # id of the name
    next_forward: Callable[[], int]  # counts forward calls
    next_recompute: Callable[[], int]  # counts calls that a checkpoint runs again


class PythonEngine(SegmentHooks[ThreadState]):
    """Records forward by a patch of `nn.Module.__call__` and backward by hooks on few nodes."""

    kind: Final = "python"

    def __init__(self, ring: Ring, on_error: OnError, options: EngineOptions) -> None:
        self._write = ring.make_writer()
        self._ring, self._on_error = ring, on_error
        self.on_boundary: Callable[..., object] | None = None
        self.on_end: Callable[[int, str], object] | None = None
        self.operators = OperatorCounts(self)
        self._next_call = itertools.count(1).__next__
        # By id(module), then by the name of the call around it.
        self._names_by_module: dict[int, dict[int, NameCounters]] = {}
        self._counters_by_name: dict[int, NameCounters] = {}
        self._ranges = TorchRanges(self, ring.names, on_error, expect=None) if options.ranges else None
        self.module_names = ModuleNames(
            ring.names,
            options.model,
            lambda module_id: self._names_by_module.pop(module_id, None),
            strip_wrappers=options.strip_wrappers,
            on_outermost=None if self._ranges is None else self._ranges.find_classes,
        )
        self._dead = self.module_names.dead
        self._numbers = ThreadNumbers(ring.names)
        super().__init__(self._make_thread)
        self._graph_tasks = GraphTasks(self._write, self._threads.get, on_error)
        self.on_segment_start = self._graph_tasks.make_segment_hook(self._local, self.ends_early)
        self._write_sync_mark = SyncMarks(self, ring.names)
        # Returns the number of the next backward pass, from 1.
        self.next_pass: Callable[[], int] = itertools.count(1).__next__
        self.reruns = CheckpointReruns()
        self._collectives = PythonCollectives(self, ring.names, on_error)
        self._collections = PythonCollections() if options.ranges else None
        self._bits_by_tid: dict[int, int] = {}
        self._next_gradients = itertools.count().__next__, itertools.count().__next__
        self._active = self._has_steps = False
        self._gradient_passes = 0

    def start(self) -> None:
        """Start recording: wrap `nn.Module.__call__` and `_engine_run_backward`; one Python engine at a time."""
        self._active = self._graph_tasks.active = True
        _PATCH.install(self)
        PASS_PATCH.install(self)
        for part in (self.operators, self._collectives, self._ranges, self._collections):
            if part is not None:
                part.start()

    def stop(self) -> None:
        """Stop recording and restore torch's functions; hooks that living graphs still hold become no-ops."""
        self.finish_notes()
        self._active = self._graph_tasks.active = False
        _PATCH.uninstall()
        PASS_PATCH.uninstall()
        for part in (self.operators, self._collectives, self._ranges):
            if part is not None:
                part.stop()

    def finish_notes(self) -> None:
        """Write the garbage collections that have ended, on threads with a number, before the ring is read."""
        if self._active and self._collections is not None:
            for collection in self._collections.read():
                if (bits := self._bits_by_tid.get(collection.tid)) is not None:
                    self._write(_COLLECTION | bits | NO_NAME, collection.value, collection.end_ns)

    def after_fork(self) -> None:
        """Stop in a forked child, whose ring is its parent's."""
        self._active = False
        self.stop()

    def write_event(self, kind: Kind, name: int, value: int) -> None:
        """Write one event of this thread, and before it the garbage collections since the last one."""
        self.finish_notes()
        self._has_steps = self._has_steps or kind in (Kind.STEP, Kind.OPTIMIZER_STEP)
        self._write(kind << KIND_SHIFT | self._threads.get().bits | name, value)

    @skip_all
    def begin_pass(self, number: int, outputs: object, inputs: Sequence[Any]) -> None:
        """Write the start of a backward pass from `outputs` on this thread."""
        if self._active:
            try:
                if (on_boundary := self.on_boundary) is not None:
                    on_boundary("backward")
                self.write_event(Kind.PASS_BEGIN, NO_NAME, number)
                super().begin_pass(number, outputs, inputs)
            except Exception as error:
                self._on_error(error)

    @skip_all
    def end_pass(self, number: int) -> None:
        """Write the end of the pass of this number, which returned or raised."""
        super().end_pass(number)
        self.operators.end_late()
        if self._active:
            try:
                self.write_event(Kind.PASS_END, NO_NAME, number)
                self._graph_tasks.end_failed(self._threads.get(), is_alone=not self.passes)
                if (on_boundary := self.on_boundary) is not None:
                    on_boundary(None)
            except Exception as error:
                self._on_error(error)

    def _report_end(self, number: int, kind: str) -> None:
        is_due = number & (number - 1) == 0 or (number - 1) & (number - 2) == 0
        if is_due and not self._has_steps and (on_end := self.on_end) is not None:
            on_end(number, kind)

    @skip_all
    def note_gradients(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Write that a pass has given gradients to leaf tensors, if that may end a training step."""
        if self._active and not self._has_steps:
            try:
                if current_graph_task() == NO_GRAPH_TASK and gives_gradients(args):
                    returned = int(not kwargs.get("accumulate_grad"))
                    self.write_event(Kind.GRADIENTS, returned, self._next_gradients[returned]())
                    self._gradient_passes += 1
                    self._report_end(self._gradient_passes, "backward")
            except Exception as error:
                self._on_error(error)

    @skip_all
    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallFrame | None:
        """Write the start of a call of `module`, and return its frame; None if the call is not recorded."""
        if not self._active:
            return None
        try:
            try:
                thread: ThreadState = self._local.value
            except AttributeError:
                thread = self._threads.get()
            depth = thread.stack_depth
            outer = thread.frames[depth]
            if depth == 0:
                self._begin_outermost()
            sequence = sequence_number()
            if sequence != outer.segment_start_seq and not is_backward_compiled():
                self.close_segment(thread, outer, (args, kwargs) if kwargs else args, sequence)
            if self._dead:
                self.module_names.forget_dead()
            try:
                name, next_forward, next_recompute = self._names_by_module[id(module)][outer.name]
            except KeyError:
                name, next_forward, next_recompute = self._resolve(module, outer.name, thread)
            if name == NO_NAME:
                return None
            if sequence != thread.noted_sequence and not _is_grad_enabled():
                thread.noted_sequence = sequence
                self.reruns.note(module, (*args, *kwargs.values()), sequence)
            graph_task = current_graph_task()
            if graph_task == NO_GRAPH_TASK and thread.graph_tasks:
                self._graph_tasks.abandon_all(thread)
            if graph_task == NO_GRAPH_TASK or not self._runs_again(module, args, kwargs, outer, graph_task):
                call_index = next_forward() & CALL_INDEX_MASK
                call_key, enter_kind, exit_kind = call_index, _FORWARD_ENTER, _FORWARD_EXIT
                if depth == 0 and attribute_of(module, "__dict__").get("training") is False:
                    enter_kind = _EVAL_ENTER
            else:
                call_index = next_recompute() & CALL_INDEX_MASK
                call_key, enter_kind, exit_kind = call_index | RECOMPUTE_BIT, _RECOMPUTE_ENTER, _RECOMPUTE_EXIT
            depth += 1
            try:
                frame = thread.frames[depth]
            except IndexError:
                frame = CallFrame(thread, depth)
                thread.frames.append(frame)
            bits = thread.bits | name
            frame.module = module
            frame.name = name
            frame.call_id = name << CALL_KEY_BITS | call_key
            frame.graph_task = graph_task
            frame.exit_meta = exit_kind | bits
            frame.index_bits = call_index << SEQUENCE_BITS
            frame.entry_seq = frame.segment_start_seq = sequence
            frame.keywords_id = id(kwargs)
            if (on_boundary := self.on_boundary) is not None:
                if depth == 1:
                    on_boundary("forward", module, (*args, *kwargs.values()))
                elif graph_task == NO_GRAPH_TASK:
                    on_boundary(INNER_CALL, module, (*args, *kwargs.values()))
                self.operators.enter(name)
            meta, value = enter_kind | bits, frame.index_bits | sequence & SEQUENCE_MASK
            try:
                thread.stack_depth = depth
                self._write(meta, value)
            except BaseException:
                self._undo_enter(frame, meta, value)
                raise
        except Exception as error:
            self._on_error(error)
            return None
        return frame

    def _begin_outermost(self) -> None:
        self.finish_notes()
        if _profiler_enabled() and not self.operators.is_running:
            self._write_sync_mark()

    def _runs_again(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outer: CallFrame, graph_task: int
    ) -> bool:
        """Return whether a checkpoint makes this call, which is inside a graph task."""
        if outer.graph_task == graph_task:
            return outer.call_id & RECOMPUTE_BIT != 0
        return self.reruns.runs_again(module, (*args, *kwargs.values()))

    @skip_all
    def innermost_called_with(self, kwargs: dict[str, Any]) -> CallFrame | None:
        """Return the frame of the thread's innermost call if its keyword arguments are this very dictionary."""
        thread: ThreadState | None = getattr(self._local, "value", None)
        return None if thread is None else thread.innermost_called_with(kwargs)

    @skip_all
    def exit(self, frame: CallFrame, output: object) -> None:
        """Write the end of a call, which returned `output`, or None if it raised."""
        if not self._active:
            return
        try:
            sequence = sequence_number()
            self._write(frame.exit_meta, frame.index_bits | sequence & SEQUENCE_MASK)
            thread = frame.thread
            depth = frame.depth - 1
            if self.on_boundary is not None:
                self.operators.leave()
            # After an interrupt between an inner call's enter and its `try`, inner frames are still open. After an
            # interrupt by another greenlet, this frame may be closed already.
            if thread.stack_depth > depth:
                thread.stack_depth = depth
            made_nodes = sequence != frame.segment_start_seq
            if (made_nodes or frame.unhooked_segments) and not is_backward_compiled():
                if made_nodes:
                    self.close_segment(thread, frame, output, sequence)
                if frame.unhooked_segments:
                    self.hook_unfound(thread, frame, output)
            if frame.unhooked_segments:
                frame.unhooked_segments.clear()
            frame.module = None
            thread.frames[depth].segment_start_seq = sequence
            if depth == 0:
                if (on_boundary := self.on_boundary) is not None:
                    on_boundary(None)
                if not self._has_steps and frame.graph_task == NO_GRAPH_TASK:
                    self._report_end(self._next_call(), "forward")
        except Exception as error:
            self._on_error(error)

    def _undo_enter(self, frame: CallFrame, meta: int, value: int) -> None:
        """Exit a call that an interrupt prevented; its exit event is written only if its enter event was."""
        frame.thread.stack_depth = frame.depth - 1
        slots = self._ring.slots()
        if ((slots[:, 0] & (1 << LAP_SHIFT) - 1 == meta) & (slots[:, 2] == value)).any():
            self.exit(frame, None)

    def _make_thread(self) -> ThreadState:
        self.finish_notes()  # collections on threads without a number are left out
        thread = ThreadState(self._numbers.number() << THREAD_SHIFT)
        self._bits_by_tid.setdefault(
            threading.get_native_id(), thread.bits
        )  # a greenlet's collections go to its thread
        return thread

    def _resolve(self, module: nn.Module, outer_name: int, thread: ThreadState) -> NameCounters:
        name = self.module_names.resolve(module, thread.open_calls())
        counters = self._counters_by_name.get(name)
        if counters is None:
            counters = self._counters_by_name.setdefault(
                name, NameCounters(name, itertools.count().__next__, itertools.count().__next__)
            )
        self._names_by_module.setdefault(id(module), {})[outer_name] = counters
        return counters


def _make_wrapper(wrapper: Wrapper) -> Callable[..., Any]:
    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807  # its name in torch
        __tracebackhide__ = __traceback_hide__ = True  # hides the frame in pytest and IPython, Sentry and Werkzeug
        engine = wrapper.observer
        if is_dynamo_compiling() or engine is None:
            return wrapper.wrapped(self, *args, **kwargs)
        frame = None
        # `try` starts before the call is entered: an interrupt between the two would lose the exit.
        try:
            frame = engine.enter(self, args, kwargs)
            # torch.profiler (with_stack) needs the frame that this branch skips to recognize a module's call.
            if wrapper.wraps_torch and self._compiled_call_impl is None and not _profiler_enabled():
                output = self._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
            else:
                output = wrapper.wrapped(self, *args, **kwargs)
            if frame is not None:
                engine.exit(frame, output)
            return output
        except BaseException:
            # An interrupt can come just after the call was entered, or during its exit.
            if frame is None:
                frame = engine.innermost_called_with(kwargs)
            if frame is not None and frame.module is not None:
                engine.exit(frame, None)
            raise

    return skip_frame(__call__)


_PATCH = Patch(_make_wrapper)
