"""Ranges of torch and other libraries: ranges that torch names, and functions that it does not name.

torch and users name much code with `record_function`. The native engine gets these ranges from torch's own callbacks;
the Python engine wraps the class. Functions that torch does not name (clipping, scalers, schedulers, saving, compiling)
are wrapped here. All wrappers are installed once per process and stay; a recording switches them on and off.
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
from .optimizer_hook import report_own_step
from .ranges import OpenRange, RangeRecorder, begin_named
from .unseen import class_bases, class_name, hide_wrapper, skip_all, skip_frame

_EARLY_NAMES = ("enumerate(", "Optimizer.")
"""Prefixes of the names of ranges that torch enters as soon as it has made them."""
_COMPILE_MODULE = "torch._dynamo.callback"
_LOADER_MODULE = "torch.utils.data.dataloader"
_GENERATE_MODULE = "transformers.generation.utils"
_ACTOR_MODULE = "ray._private.function_manager"
_ANNOTATION_MODULES = ("torch.cuda.nvtx", "torch.profiler.itt")  # ranges for the profilers of NVIDIA and Intel
INNER = "_modtrace_inner"
"""The parameter that `replace_code` adds to a function: the original function."""
_SUSPEND_FLAGS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
# A class's namespace, without calling its metaclass.
_namespace: Callable[[type], Mapping[str, Any]] = type.__dict__["__dict__"].__get__


class TorchRanges(RangeRecorder):
    """Records ranges of torch, of functions that torch does not name, and of the user.

    The native engine sees each `record_function` itself; `expect` is called when torch prepares a range. Without
    `expect`, each range is written here.
    """

    def __init__(
        self, events: EventSink, names: NameTable, on_error: OnError, expect: Callable[[], object] | None
    ) -> None:
        super().__init__(events, names, on_error)
        self.expect = expect
        self._searches = Backoff()

    def start(self) -> None:
        """Start; the wrappers stay after the end, and then only pass calls on."""
        _wrap_methods()
        if self.expect is None:
            _wrap_record_function()
        else:
            _wrap_preparation()
        for module, wrap in _WRAPPED_MODULES.items():
            call_after_import(module, wrap)
        super().start()

    def find_classes(self) -> None:
        """Wrap methods of new classes: most exist when a module is first called outside other calls."""
        if self._searches.is_due():
            _wrap_classes()


def _call_inner(*args: Any, _modtrace_inner: Callable[..., Any], **kwargs: Any) -> Any:
    __tracebackhide__ = __traceback_hide__ = True
    return _modtrace_inner(*args, **kwargs)


def replace_code(function: Any, call: Callable[..., Any]) -> None:
    """Make a function call `call` with a copy of the original function and the arguments, once per process.

    Nothing changes if the function is not written in Python, or if torch has put its own range around it. Nor do
    coroutines and generators change, since callers may inspect which they are.
    """
    if type(function) is not FunctionType or function.__code__.co_flags & _SUSPEND_FLAGS or "hooked" in vars(function):
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

    # Code that pickles the functions of a script by their parts can pickle this too.
    function.__kwdefaults__ = {**defaults, INNER: hide_wrapper(_call, inner)}
    # The number of free variables must not change; torch.compile decides by the file whether to trace it.
    attributes_of_code = ("co_name", "co_freevars", "co_filename", "co_firstlineno")
    function.__code__ = _call_inner.__code__.replace(**{name: getattr(code, name) for name in attributes_of_code})
    # torch.compile caches the parameters of each function that it has traced.
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
        cls = type(args[0]) if args and "{}" in name else object
        # torch itself puts a range around the step of an optimizer that its `Optimizer` set up.
        if not issubclass(cls, Optimizer) or not getattr(getattr(cls, function.__name__, None), "hooked", False):
            opened = ranges.begin(name.format(class_name(cls)), category)
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
            report_own_step(args[0])
    return result


class _Functions(NamedTuple):
    """Functions of a module around which torch puts no range."""

    module: str  # module that defines the functions
    prefix: str  # prefix of the names of their ranges
    category: RangeCategory  # category of their ranges
    names: tuple[str, ...]  # names of the functions

    def wrap(self) -> None:
        """Put a range around each function."""
        for name in self.names:
            function: Any = vars(sys.modules[self.module]).get(name)
            wrap_function(function, self.prefix + name, self.category)
            if hasattr(function, "__wrapped__"):
                hide_wrapper(function, function.__wrapped__)


_SAFETENSORS_FUNCTIONS = ("save", "save_file", "save_model", "load", "load_file", "load_model")
_CHECKPOINT_PACKAGE = "torch.distributed.checkpoint"
_INDUCTOR_FUNCTIONS = ("aoti_compile_and_package", "aoti_load_package", "aot_compile")
# The first function, and clipping code of other libraries, call the last two.
_CLIPPING_FUNCTIONS = ("clip_grad_norm_", "clip_grad_value_", "_get_total_norm", "_clip_grads_with_norm_")
_FUNCTIONS = (
    _Functions("torch.nn.utils.clip_grad", "", "optimizer", _CLIPPING_FUNCTIONS),
    _Functions("torch.serialization", "torch.", "saving", ("save", "load")),
    _Functions(f"{_CHECKPOINT_PACKAGE}.state_dict_saver", f"{_CHECKPOINT_PACKAGE}.", "saving", ("save", "async_save")),
    _Functions(f"{_CHECKPOINT_PACKAGE}.state_dict_loader", f"{_CHECKPOINT_PACKAGE}.", "saving", ("load",)),
    _Functions("safetensors.torch", "safetensors.torch.", "saving", _SAFETENSORS_FUNCTIONS),
    _Functions("torch.export", "torch.export.", "compile", ("export", "draft_export")),
    _Functions("torch._inductor", "torch._inductor.", "compile", _INDUCTOR_FUNCTIONS),
    _Functions("ray", "ray.", "user", ("get", "wait")),
)


def wrap_function(function: Any, name: str, category: RangeCategory = "optimizer") -> None:
    """Put a range around each call of a function, by new code in it: modules that imported it before have it too."""
    replace_code(function, partial(_call_in_range, name, category))


_OPTIMIZER_METHODS = ("step", "zero_grad")
_SAVING_METHODS = ("save_pretrained", "save_state", "load_state", "save_model", "save_checkpoint", "load_checkpoint")
_METHODS = frozenset(_OPTIMIZER_METHODS + _SAVING_METHODS)
_without_methods: dict[int, ref[type]] = {}
"""Classes without these methods, by the `id()` of Python's own weak reference to each, which no later class has."""


def _wrap_classes() -> None:
    """Wrap methods of classes that are not torch's, by their names.

    Saving methods of transformers, accelerate and others spend about half of their time in their own code. Optimizers
    that torch's `Optimizer` did not set up (opacus' `DPOptimizer`, DeepSpeed's and users' optimizers) have `step` and
    `zero_grad`, and are not modules.
    """
    classes, class_refs = list[type]([object]), dict[int, ref[type]]()
    for cls in classes:
        cls_ref = ref(cls)
        if id(cls_ref) in class_refs:
            continue
        class_refs[id(cls_ref)] = cls_ref
        classes += type.__subclasses__(cls)
        if id(cls_ref) in _without_methods:
            continue
        attributes = _namespace(cls)
        if _METHODS.isdisjoint(attributes):  # most of the thousands of classes
            _without_methods[id(cls_ref)] = cls_ref
            continue
        if str(attributes.get("__module__")).startswith("torch."):
            continue
        for name in _SAVING_METHODS:
            wrap_function(attributes.get(name), f"{{}}.{name}", "saving")
        bases = class_bases(cls)
        # Not a generator: an interrupt that comes while one is closed is lost.
        if nn.Module not in bases and {*_OPTIMIZER_METHODS}.issubset(chain.from_iterable(map(_namespace, bases))):
            wrap_function(attributes.get("zero_grad"), "{}.zero_grad", "optimizer")
            replace_code(attributes.get("step"), _call_own_step)
    for ref_id in _without_methods.keys() - class_refs.keys():  # classes that are gone
        _without_methods.pop(ref_id, None)  # another thread may search too


@cache
def _wrap_methods() -> None:
    """Wrap methods around which torch puts no range, once per process."""
    scaler = torch.amp.grad_scaler.GradScaler
    for name in ("step", "unscale_", "update"):
        wrap_function(vars(scaler)[name], f"GradScaler.{name}")
    for cls in list(vars(lr_scheduler).values()):
        if isinstance(cls, type) and issubclass(cls, lr_scheduler.LRScheduler) and "step" in vars(cls):
            wrap_function(vars(cls)["step"], "LRScheduler.step#{}.step")
    wrap_function(nn.Module.zero_grad, "Module.zero_grad#{}.zero_grad")
    _wrap_train()


@cache
def _wrap_loaders() -> None:
    """Wrap the method in which a loader starts an epoch and its workers: torch names only the fetches."""
    loader = sys.modules[_LOADER_MODULE].DataLoader
    wrap_function(loader.__iter__, "enumerate(DataLoader)#{}.__iter__", "data loading")


@cache
def _wrap_generate() -> None:
    """Wrap the method of transformers that calls a model once per token."""
    mixin = getattr(sys.modules[_GENERATE_MODULE], "GenerationMixin", None)
    if mixin is not None:  # else another thread is importing the module: then `generate` has no range
        wrap_function(mixin.generate, "generate", "generate")


@cache
def _wrap_actors() -> None:
    """Wrap the function in which Ray makes the executors of an actor's methods."""
    manager = getattr(sys.modules[_ACTOR_MODULE], "FunctionActorManager", None)
    replace_code(getattr(manager, "_make_actor_method_executor", None), _actor_method)


def _actor_method(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Return the executor of an actor's method, in a range with the method's name: `Rollout.generate`."""
    executor = function(*args, **kwargs)
    method = getattr(executor, "method", None)
    # A coroutine or a generator has not run when the call returns.
    if isinstance(method, FunctionType) and not method.__code__.co_flags & _SUSPEND_FLAGS:
        wrap_function(executor, method.__qualname__.rpartition("<locals>.")[2], "user")
    return executor


class _Annotations(threading.local):
    """The ranges that this thread has pushed, in order; None for a range that is not recorded."""

    def __init__(self) -> None:
        self.pushed: list[OpenRange | None] = []


_annotations = _Annotations()
_started_ranges: dict[object, OpenRange | None] = {}
"""Ranges that any thread may end, by NVTX's handle of each."""


def _wrap_annotations(module: str) -> None:
    """Record the ranges that a program names for another profiler, which gets them too."""
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
        _started_ranges[handle] = begin_named(msg, lambda: isinstance(msg, str))
    return handle


@skip_frame
def _close(function: Callable[[Any], Any], /, range_id: Any) -> Any:
    RangeRecorder.end(_started_ranges.pop(range_id, None))
    return function(range_id)


_switching = threading.local()
"""Its attribute `now`: whether this thread is in `Module.train`, which calls itself for each module inside."""


def _wrap_train() -> None:
    """Wrap `Module.train`, which switches a module between training and evaluation; `Module.eval` calls it too."""
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
    """Let ranges of optimizers and fetches start where torch prepares them: with cold caches, that lasts 50 µs."""
    prepare: Any = record_function.__init__

    @wraps(prepare)
    def __init__(self: Any, name: str, args: str | None = None) -> None:  # noqa: N807  # its name in torch
        ranges = RangeRecorder.active
        if (
            isinstance(ranges, TorchRanges)
            and ranges.expect
            and isinstance(name, str)
            and name.startswith(_EARLY_NAMES)
        ):
            ranges.expect()
        prepare(self, name, args)

    record_function.__init__ = skip_all(__init__)  # type: ignore[method-assign]


class _Callbacks(list[Callable[[Any], None]]):
    """Callbacks of torch.compile; `torch._dynamo.reset` removes all but modtrace's."""

    def clear(self) -> None:
        self[:] = [callback for callback in self if callback in (_start_compilation, _end_compilation)]


def _watch_compilations() -> None:
    """Make torch.compile call modtrace when it starts and ends a compilation, once per process."""
    handler: Any = sys.modules[_COMPILE_MODULE].callback_handler
    if not isinstance(handler.start_callbacks, _Callbacks):
        handler.start_callbacks = _Callbacks([*handler.start_callbacks, _start_compilation])
        handler.end_callbacks = _Callbacks([*handler.end_callbacks, _end_compilation])


_compilation: OpenRange | None = None
"""The running compilation: torch calls modtrace only for the outermost."""


@skip_all
def _start_compilation(args: Any) -> None:
    global _compilation
    ranges = RangeRecorder.active
    if ranges is not None:
        _compilation = ranges.begin(_compilation_name(args), "compile")


@skip_all
def _end_compilation(_args: Any) -> None:
    global _compilation
    running, _compilation = _compilation, None
    RangeRecorder.end(running)


_REASON_END = re.compile(r"\s+#\s|\n")


def _compilation_name(args: Any) -> str:
    """Return a name with the reason of a recompilation: `torch.compile 0/1: tensor 'x' size mismatch at index 0. …`."""
    trigger = getattr(getattr(args, "callback_trigger", None), "name", "DYNAMO")
    name = f"torch.compile {getattr(args, 'compile_id', '')}"
    if trigger != "DYNAMO":
        return f"{name}: {trigger.lower().replace('_', ' ')}"
    utils: Any = sys.modules.get("torch._dynamo.utils")
    try:
        reason = utils.get_metrics_context()._metrics.get("recompile_reason")
    except AttributeError:  # private, and only in later versions of torch
        reason = None
    if not isinstance(reason, str):
        return name
    # Without the id of the compilation that did not fit, and without the source and the paths after the reason.
    return f"{name}: {re.split(_REASON_END, reason.partition(': ')[2] or reason)[0]}"


_WRAPPED_MODULES: Mapping[str, Callable[[], None]] = {
    **{functions.module: functions.wrap for functions in _FUNCTIONS},
    **{module: partial(_wrap_annotations, module) for module in _ANNOTATION_MODULES},
    _COMPILE_MODULE: _watch_compilations,
    _LOADER_MODULE: _wrap_loaders,
    _GENERATE_MODULE: _wrap_generate,
    _ACTOR_MODULE: _wrap_actors,
}
"""The functions that wrap a module once it is imported, by the module's name."""
