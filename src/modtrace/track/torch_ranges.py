"""Ranges of what torch and others do: what torch names, and what it gives no name.

torch names much itself, and users do, with `record_function`. The native engine gets these from torch's own callbacks;
the Python engine wraps the class. What torch gives no name (clipping, scalers, schedulers, saving, compiling) is
wrapped here. All of this is put in its place once per process and stays; a recording switches it on and off.
"""

import inspect
import re
import sys
import threading
from collections.abc import Callable, Mapping
from functools import cache, partial, update_wrapper, wraps
from itertools import chain
from types import FrameType, FunctionType
from typing import Any, NamedTuple, cast
from weakref import ref

import torch
from torch import nn
from torch.autograd.profiler import record_function
from torch.compiler import is_dynamo_compiling
from torch.optim import Optimizer, lr_scheduler

from .._after_import import call_after_import
from ..ring import NameTable
from ..ring.event_text import EVAL, TRAIN, RangeCategory
from .event_sink import EventSink, OnError
from .naming.modules import Backoff
from .optimizer_hook import tell_own_step
from .ranges import OpenRange, RangeRecorder, begin_named
from .unseen import class_bases, class_name, hide_wrapper, skip_all, skip_frame

_PREPARED = ("enumerate(", "Optimizer.")
"""How the names begin of ranges that torch enters as soon as it has made them."""
_COMPILE_MODULE = "torch._dynamo.callback"
_LOADER_MODULE = "torch.utils.data.dataloader"
_GENERATE_MODULE = "transformers.generation.utils"
_ACTOR_MODULE = "ray._private.function_manager"
_ANNOTATING = ("torch.cuda.nvtx", "torch.profiler.itt")  # ranges for the profilers of NVIDIA and Intel
INNER = "_modtrace_inner"
"""A parameter that a function has once a range is put around it."""
_SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
# Past what a metaclass of the user's may do.
_namespace: Callable[[type], Mapping[str, Any]] = type.__dict__["__dict__"].__get__


class TorchRanges(RangeRecorder):
    """Ranges of torch, of what it gives no name, and of the user.

    The native engine sees each `record_function` itself, and has `expect` called when torch prepares a range. Without
    `expect` each range is noted here.
    """

    def __init__(
        self, events: EventSink, names: NameTable, on_error: OnError, expect: Callable[[], object] | None
    ) -> None:
        super().__init__(events, names, on_error)
        self.expect = expect
        self._searches = Backoff()

    def start(self) -> None:
        """Begin; what is wrapped for it stays, and only passes calls on after the end."""
        _wrap_methods()
        if self.expect is None:
            _wrap_record_function()
        else:
            _wrap_preparation()
        for module, wrap in _WRAPPED_MODULES.items():
            call_after_import(module, wrap)
        super().start()

    def find_classes(self) -> None:
        """Look for classes whose methods to wrap: when a module is first called outside of others, most are there."""
        if self._searches.is_due():
            _wrap_classes()


def _call_inner(*args: Any, _modtrace_inner: Callable[..., Any], **kwargs: Any) -> Any:
    __tracebackhide__ = __traceback_hide__ = True
    return _modtrace_inner(*args, **kwargs)


def replace_code(function: Any, call: Callable[..., Any]) -> None:
    """Have a function call `call` with what it did until now, followed by its arguments, once per process.

    It stays as it is if it is not written in Python, or if torch has put its own range around it. So does a coroutine
    or a generator, since what calls it may ask for that.
    """
    if type(function) is not FunctionType or function.__code__.co_flags & _SUSPENDS or "hooked" in vars(function):
        return
    defaults = function.__kwdefaults__ or {}
    if INNER in defaults:
        return
    code, attributes = function.__code__, dict(vars(function))
    inner = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    inner.__kwdefaults__ = function.__kwdefaults__
    update_wrapper(inner, function)
    vars(inner).pop("__wrapped__")
    vars(inner).update(attributes)
    vars(function)["__wrapped__"] = inner  # for its signature

    def _call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = __traceback_hide__ = True
        return call(inner, *args, **kwargs)

    # What pickles the functions of a script by their parts can pickle this too.
    function.__kwdefaults__ = {**defaults, INNER: hide_wrapper(_call, inner)}
    # As many variables of an outer function as it has; where it is says whether torch.compile looks into it.
    place = {name: getattr(code, name) for name in ("co_name", "co_freevars", "co_filename", "co_firstlineno")}
    function.__code__ = _call_inner.__code__.replace(**place)
    # torch.compile keeps the parameters of each function that it has met.
    known_parameters: Any = getattr(sys.modules.get("torch._dynamo.variables.functions"), "_spec_cache", {})
    known_parameters.pop(function, None)
    skip_frame(function)


@skip_frame
def _call_in_range(
    name: str, category: RangeCategory, function: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Call a function in a range; a `{}` in its name is the class of the first argument."""
    __tracebackhide__ = __traceback_hide__ = True
    if (ranges := RangeRecorder.active) is None:
        return function(*args, **kwargs)
    opened = None
    try:
        kind = type(args[0]) if args and "{}" in name else object
        # The step of an optimizer that torch's `Optimizer` set up has a range of torch's.
        if not issubclass(kind, Optimizer) or not getattr(getattr(kind, function.__name__, None), "hooked", False):
            opened = ranges.begin(name.format(class_name(kind)), category)
        return function(*args, **kwargs)
    finally:
        RangeRecorder.end(opened)


@skip_frame
def _call_own_step(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call the `step` of an optimizer that is not torch's, in a range; a training step ends with the outermost one."""
    __tracebackhide__ = __traceback_hide__ = True
    result = _call_in_range("{}.step", "optimizer", function, *args, **kwargs)
    if args:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code is not _call_own_step.__code__:
            frame = frame.f_back
        if frame is None:
            tell_own_step(args[0])
    return result


class _Functions(NamedTuple):
    """Functions of a module that torch gives no range."""

    module: str  # it defines them
    prefix: str  # the names of their ranges begin with it
    category: RangeCategory  # of the ranges
    names: tuple[str, ...]  # of the functions

    def wrap(self) -> None:
        """Have each call be a range."""
        for name in self.names:
            function: Any = vars(sys.modules[self.module]).get(name)
            wrap_function(function, self.prefix + name, self.category)
            if hasattr(function, "__wrapped__"):
                hide_wrapper(function, function.__wrapped__)


_TENSORS = ("save", "save_file", "save_model", "load", "load_file", "load_model")
_CHECKPOINTS = "torch.distributed.checkpoint"
_PACKAGES = ("aoti_compile_and_package", "aoti_load_package", "aot_compile")
# The last two are parts of the first, and of clipping that others write.
_CLIPPING = ("clip_grad_norm_", "clip_grad_value_", "_get_total_norm", "_clip_grads_with_norm_")
_FUNCTIONS = (
    _Functions("torch.nn.utils.clip_grad", "", "optimizer", _CLIPPING),
    _Functions("torch.serialization", "torch.", "saving", ("save", "load")),
    _Functions(f"{_CHECKPOINTS}.state_dict_saver", f"{_CHECKPOINTS}.", "saving", ("save", "async_save")),
    _Functions(f"{_CHECKPOINTS}.state_dict_loader", f"{_CHECKPOINTS}.", "saving", ("load",)),
    _Functions("safetensors.torch", "safetensors.torch.", "saving", _TENSORS),
    _Functions("torch.export", "torch.export.", "compile", ("export", "draft_export")),
    _Functions("torch._inductor", "torch._inductor.", "compile", _PACKAGES),
    _Functions("ray", "ray.", "user", ("get", "wait")),
)


def wrap_function(function: Any, name: str, category: RangeCategory = "optimizer") -> None:
    """Have each call of a function be a range, for those who imported it before too: its code is replaced."""
    replace_code(function, partial(_call_in_range, name, category))


_OPTIMIZING = ("step", "zero_grad")
_SAVING = ("save_pretrained", "save_state", "load_state", "save_model", "save_checkpoint", "load_checkpoint")
_METHODS = frozenset(_OPTIMIZING + _SAVING)
_without_methods: dict[int, ref[type]] = {}
"""Classes that have none of these, by the `id()` of Python's own weak reference to each, which no later class has."""


def _wrap_classes() -> None:
    """Wrap methods of classes that are not torch's, by their names.

    Methods of transformers, accelerate and others that save take about as long themselves as what they call. Optimizers
    that torch's `Optimizer` did not set up have `step` and `zero_grad`, and are no modules: opacus' `DPOptimizer`,
    DeepSpeed's, and those of users.
    """
    kinds, met = list[type]([object]), dict[int, ref[type]]()
    for kind in kinds:
        kind_ref = ref(kind)
        if id(kind_ref) in met:
            continue
        met[id(kind_ref)] = kind_ref
        kinds += type.__subclasses__(kind)
        if id(kind_ref) in _without_methods:
            continue
        attributes = _namespace(kind)
        if _METHODS.isdisjoint(attributes):  # as most: there are thousands
            _without_methods[id(kind_ref)] = kind_ref
            continue
        if str(attributes.get("__module__")).startswith("torch."):
            continue
        for name in _SAVING:
            wrap_function(attributes.get(name), f"{{}}.{name}", "saving")
        bases = class_bases(kind)
        # No generator: what interrupts one as it is closed is lost.
        if nn.Module not in bases and {*_OPTIMIZING}.issubset(chain.from_iterable(map(_namespace, bases))):
            wrap_function(attributes.get("zero_grad"), "{}.zero_grad", "optimizer")
            replace_code(attributes.get("step"), _call_own_step)
    for gone in _without_methods.keys() - met.keys():
        _without_methods.pop(gone, None)  # another thread may look too


@cache
def _wrap_methods() -> None:
    """Wrap methods that torch gives no range, once per process."""
    scaler = torch.amp.grad_scaler.GradScaler
    for name in ("step", "unscale_", "update"):
        wrap_function(vars(scaler)[name], f"GradScaler.{name}")
    for kind in list(vars(lr_scheduler).values()):
        if isinstance(kind, type) and issubclass(kind, lr_scheduler.LRScheduler) and "step" in vars(kind):
            wrap_function(vars(kind)["step"], "LRScheduler.step#{}.step")
    wrap_function(nn.Module.zero_grad, "Module.zero_grad#{}.zero_grad")
    _wrap_train()


@cache
def _wrap_loaders() -> None:
    """Wrap where loaders begin an epoch and start their workers: torch names the fetches only."""
    loader = sys.modules[_LOADER_MODULE].DataLoader
    wrap_function(loader.__iter__, "enumerate(DataLoader)#{}.__iter__", "data loading")


@cache
def _wrap_generate() -> None:
    """Wrap what calls a model of transformers once per token."""
    mixin = getattr(sys.modules[_GENERATE_MODULE], "GenerationMixin", None)
    if mixin is not None:  # else another thread is importing it: without a range, as for a `generate` of one's own
        wrap_function(mixin.generate, "generate", "generate")


@cache
def _wrap_actors() -> None:
    """Wrap where Ray prepares what calls a method of an actor for others."""
    manager = getattr(sys.modules[_ACTOR_MODULE], "FunctionActorManager", None)
    replace_code(getattr(manager, "_make_actor_method_executor", None), _actor_method)


def _actor_method(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Return what calls an actor's method, in a range named as the method is: `Rollout.generate`."""
    executor = function(*args, **kwargs)
    method = getattr(executor, "method", None)
    # A coroutine or a generator has done nothing yet when the call returns.
    if isinstance(method, FunctionType) and not method.__code__.co_flags & _SUSPENDS:
        wrap_function(executor, method.__qualname__.rpartition("<locals>.")[2], "user")
    return executor


class _Annotations(threading.local):
    """The ranges that this thread has pushed, in order; None for one that is not recorded."""

    def __init__(self) -> None:
        self.pushed: list[OpenRange | None] = []


_annotations = _Annotations()
_started: dict[object, OpenRange | None] = {}
"""Ranges that one thread starts and perhaps another one ends, by NVTX's handle of each."""


def _wrap_annotations(module: str) -> None:
    """Record what a program names for another profiler, which is still told."""
    calls: dict[str, Callable[..., Any]] = {"push": _push, "pop": _pop, "start": _open, "end": _close}
    for name, call in calls.items():
        replace_code(vars(sys.modules[module]).get(f"range_{name}"), call)


@skip_frame
def _push(function: Callable[[str], Any], /, msg: str) -> Any:
    pushed = function(msg)
    _annotations.pushed.append(begin_named(msg, lambda: isinstance(msg, str)))
    return pushed


@skip_frame
def _pop(function: Callable[[], Any], /) -> Any:
    if _annotations.pushed:
        RangeRecorder.end(_annotations.pushed.pop())
    return function()


@skip_frame
def _open(function: Callable[[str], Any], /, msg: str) -> Any:
    handle = function(msg)
    if RangeRecorder.active is not None:
        _started[handle] = begin_named(msg, lambda: isinstance(msg, str))
    return handle


@skip_frame
def _close(function: Callable[[Any], Any], /, range_id: Any) -> Any:
    RangeRecorder.end(_started.pop(range_id, None))
    return function(range_id)


_switching = threading.local()
"""Whether this thread is in `Module.train`, which calls itself for each module inside: `now`."""


def _wrap_train() -> None:
    """Wrap what switches a module between training and evaluation; `Module.eval` calls it too."""
    train = nn.Module.train
    to_train, to_eval = (partial(_call_in_range, prefix + "{}", "torch", train) for prefix in (TRAIN, EVAL))

    @wraps(train)
    def switch(self: nn.Module, mode: bool = True) -> nn.Module:
        if is_dynamo_compiling() or RangeRecorder.active is None or getattr(_switching, "now", False):
            return train(self, mode)
        try:
            _switching.now = True
            return cast("nn.Module", (to_eval if mode is False else to_train)(self, mode))
        finally:
            _switching.now = False

    nn.Module.train = skip_frame(switch)  # type: ignore[method-assign,assignment]


@cache
def _wrap_record_function() -> None:
    """Wrap the two methods of `record_function`, once per process."""
    enter: Any = record_function.__enter__
    leave: Any = record_function.__exit__

    @wraps(enter)
    def __enter__(self: Any) -> Any:  # noqa: N807  # its name in torch
        ranges = RangeRecorder.active
        if isinstance(ranges, TorchRanges) and ranges.expect is None and isinstance(self.name, str):
            self._modtrace_range = ranges.begin(self.name)
        return enter(self)

    @wraps(leave)
    def __exit__(self: Any, *exception: Any) -> Any:  # noqa: N807  # its name in torch
        try:
            return leave(self, *exception)
        finally:
            RangeRecorder.end(vars(self).pop("_modtrace_range", None))

    record_function.__enter__ = skip_all(__enter__)  # type: ignore[method-assign]
    record_function.__exit__ = skip_all(__exit__)  # type: ignore[method-assign]


@cache
def _wrap_preparation() -> None:
    """Let ranges of optimizers and fetches begin where torch prepares them: on cold caches that takes 50 µs."""
    prepare: Any = record_function.__init__

    @wraps(prepare)
    def __init__(self: Any, name: str, args: str | None = None) -> None:  # noqa: N807  # its name in torch
        ranges = RangeRecorder.active
        if isinstance(ranges, TorchRanges) and ranges.expect and isinstance(name, str) and name.startswith(_PREPARED):
            ranges.expect()
        prepare(self, name, args)

    record_function.__init__ = skip_all(__init__)  # type: ignore[method-assign]


class _Callbacks(list[Callable[[Any], None]]):
    """Callbacks of torch.compile; `torch._dynamo.reset` removes all but ours."""

    def clear(self) -> None:
        self[:] = [callback for callback in self if callback in (_compilation_begins, _compilation_ends)]


def _watch_compilations() -> None:
    """Have torch.compile call us when it begins and ends to compile, once per process."""
    handler: Any = sys.modules[_COMPILE_MODULE].callback_handler
    if not isinstance(handler.start_callbacks, _Callbacks):
        handler.start_callbacks = _Callbacks([*handler.start_callbacks, _compilation_begins])
        handler.end_callbacks = _Callbacks([*handler.end_callbacks, _compilation_ends])


_compilation: OpenRange | None = None
"""The one that runs: torch calls us for the outermost only."""


@skip_all
def _compilation_begins(args: Any) -> None:
    global _compilation
    ranges = RangeRecorder.active
    if ranges is not None:
        _compilation = ranges.begin(_compilation_name(args), "compile")


@skip_all
def _compilation_ends(_args: Any) -> None:
    global _compilation
    running, _compilation = _compilation, None
    RangeRecorder.end(running)


_BEHIND_REASON = re.compile(r"\s+#\s|\n")


def _compilation_name(args: Any) -> str:
    """Return what is compiled, and why again: `torch.compile 0/1: tensor 'x' size mismatch at index 0. …`."""
    trigger = getattr(getattr(args, "callback_trigger", None), "name", "DYNAMO")
    name = f"torch.compile {getattr(args, 'compile_id', '')}"
    if trigger != "DYNAMO":
        return f"{name}: {trigger.lower().replace('_', ' ')}"
    utils: Any = sys.modules.get("torch._dynamo.utils")
    try:
        reason = utils.get_metrics_context()._metrics.get("recompile_reason")
    except AttributeError:  # private, and of later versions of torch
        reason = None
    if not isinstance(reason, str):
        return name
    # Without the id of the compilation that did not fit, nor the source and the paths that torch puts behind it.
    return f"{name}: {re.split(_BEHIND_REASON, reason.partition(': ')[2] or reason)[0]}"


_WRAPPED_MODULES: Mapping[str, Callable[[], None]] = {
    **{functions.module: functions.wrap for functions in _FUNCTIONS},
    **{module: partial(_wrap_annotations, module) for module in _ANNOTATING},
    _COMPILE_MODULE: _watch_compilations,
    _LOADER_MODULE: _wrap_loaders,
    _GENERATE_MODULE: _wrap_generate,
    _ACTOR_MODULE: _wrap_actors,
}
"""Modules, and what wraps their functions once they are imported."""
