"""Ranges: what a thread does outside of modules, by name.

torch names many of them itself, and users do, with `record_function`. The native engine gets these from torch's own
callbacks; the portable one wraps the class. What torch gives no name (clipping, scalers, schedulers, saving, compiling)
is wrapped here. All of this is put in its place once per process and stays; a recording switches it on and off.
"""

import itertools
import sys
import threading
from collections.abc import Callable, Mapping
from functools import cache, partial, wraps
from typing import Any, NamedTuple, TypeVar, cast, overload

import torch
from torch import nn
from torch.autograd.profiler import record_function
from torch.compiler import is_dynamo_compiling
from torch.optim import lr_scheduler

from .._after_import import call_after_import
from ..ring import Kind, NameTable
from ..ring.range_text import EVAL, TRAIN, RangeCategory, range_text
from .event_sink import EventSink, OnError
from .naming.modules import Backoff
from .replaced_code import replace_code
from .unseen import skip_all, skip_frame

_Function = TypeVar("_Function", bound=Callable[..., Any])

_MAX_NAMES = 4096
"""Names that a program makes anew all the time must not fill the name table."""
_OTHERS = "other ranges"
_PREFIXES: Mapping[RangeCategory, tuple[str, ...]] = {
    "data loading": ("enumerate(",),
    "optimizer": ("Optimizer.",),
    "communication": ("gloo:", "nccl:", "mpi:", "ucc:", "xccl:", "FSDP::"),
    "torch": (
        *("FullyShardedDataParallel.", "DistributedDataParallel.", "torch.distributed.", "ProfilerStep#"),
        *("Torch-Compiled Region", "TorchDynamo ", "CompiledFunction", "## Call CompiledFxGraph"),
    ),
}
"""How names begin that torch gives; all others are the user's."""
_PREPARED = ("enumerate(", "Optimizer.")
"""How the names begin of ranges that torch enters as soon as it has made them."""
_COMPILE_MODULE = "torch._dynamo.callback"
_LOADER_MODULE = "torch.utils.data.dataloader"
_GENERATE_MODULE = "transformers.generation.utils"
_ANNOTATING = ("torch.cuda.nvtx", "torch.profiler.itt")  # ranges for the profilers of NVIDIA and Intel

OpenRange = tuple[int, int]
"""The id of a range's name, and its number."""


@cache
def category_of(name: str) -> RangeCategory:
    """Return the category of a range that torch or the user gave this name."""
    return next((category for category, prefixes in _PREFIXES.items() if name.startswith(prefixes)), "user")


class RangeRecorder:
    """Writes ranges into a ring, from `start` to `stop`.

    Args:
        events: takes the events.
        names: takes the names.
        on_error: called with what went wrong inside.
        expect: called when torch prepares a range of its own, by the native engine, which sees each `record_function`
            itself; None: each is noted here.
    """

    def __init__(
        self, events: EventSink, names: NameTable, on_error: OnError, expect: Callable[[], object] | None
    ) -> None:
        self._events = events
        self._names = names
        self._on_error = on_error
        self.expect = expect
        self._ids: dict[tuple[str, RangeCategory], int] = {}
        self._searches = Backoff()
        # Odd, since the native engine counts its own by even numbers.
        self._next_number = itertools.count(1, 2).__next__

    def start(self) -> None:
        """Begin."""
        global _active
        _wrap_methods()
        if self.expect is None:
            _wrap_record_function()
        else:
            _wrap_preparation()
        for functions in _FUNCTIONS:
            call_after_import(functions.module, functions.wrap)
        call_after_import(_COMPILE_MODULE, _watch_compilations)
        call_after_import(_LOADER_MODULE, _wrap_loaders)
        call_after_import(_GENERATE_MODULE, _wrap_generate)
        for module in _ANNOTATING:
            call_after_import(module, partial(_wrap_annotations, module))
        _active = self

    def stop(self) -> None:
        """End; what was wrapped stays and only passes calls on."""
        global _active
        if _active is self:
            _active = None

    def find_classes(self) -> None:
        """Look for classes whose methods to wrap: when a module is first called outside of others, most are there."""
        if self._searches.is_due():
            _wrap_classes()

    def name_id(self, name: str, category: RangeCategory | None = None) -> int:
        """Return the id of a range's name; from the 4,096th name on all share one."""
        key = name, category or category_of(name)
        name_id = self._ids.get(key)
        if name_id is None:
            text = range_text(*key) if len(self._ids) < _MAX_NAMES else range_text(_OTHERS, key[1])
            name_id = self._names.text(text)
            if len(self._ids) < _MAX_NAMES:
                self._ids[key] = name_id
        return name_id

    @skip_all
    def begin(self, name: str, category: RangeCategory | None = None) -> OpenRange | None:
        """Write that this thread begins a range; None if an error came in between.

        Args:
            name: of the range.
            category: its category; None finds it by the name.
        """
        try:
            name_id, number = self.name_id(name, category), self._next_number()
            self._events.write_event(Kind.RANGE_BEGIN, name_id, number)
        except Exception as error:
            self._on_error(error)
            return None
        return name_id, number

    @skip_all
    def end(self, opened: OpenRange | None) -> None:
        """Write that a range ends, which `begin` returned."""
        if opened is not None and _active is self:
            try:
                self._events.write_event(Kind.RANGE_END, *opened)
            except Exception as error:
                self._on_error(error)


_active: RangeRecorder | None = None
"""Those of the recording that runs."""


class NamedRange:
    """A range of the user's own; a block or a function that runs in it. It does nothing if nothing records.

    Args:
        name: its name.
        is_on: returns whether it is noted.
    """

    def __init__(self, name: str, is_on: Callable[[], bool] = lambda: True) -> None:
        if not isinstance(name, str):
            raise TypeError(f"the name of a range is a str, not {type(name).__name__}")
        self._name = name
        self._is_on = is_on
        self._opened: list[tuple[RangeRecorder, OpenRange | None] | None] = []

    def __enter__(self) -> "NamedRange":
        if not is_dynamo_compiling():
            self._opened.append(_begin_named(self._name, self._is_on))
        return self

    def __exit__(self, *exception: object) -> None:
        if not is_dynamo_compiling():
            opened = self._opened.pop()
            if opened is not None:
                opened[0].end(opened[1])

    def __call__(self, function: _Function) -> _Function:
        """Return a function that runs in the range each time."""

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with NamedRange(self._name, self._is_on):
                return function(*args, **kwargs)

        return cast("_Function", call)


@skip_all
def _begin_named(name: str, is_on: Callable[[], bool]) -> tuple[RangeRecorder, OpenRange | None] | None:
    ranges = _active
    return None if ranges is None or not is_on() else (ranges, ranges.begin(name, "user"))


@overload
def named_range(name: str) -> NamedRange: ...
@overload
def named_range(name: _Function) -> _Function: ...
def named_range(name: Any) -> Any:
    """Name what runs in a block or a function: a row of its own in the recording that runs, without a profiler.

    It does nothing if nothing records, or the recording has `ranges=False`. In compiled code it is left out.

    Args:
        name: the name of the range; or a function, whose name is taken.

    Example:
        >>> with modtrace.range("augment"):
        ...     batch = augment(batch)
        >>> @modtrace.range("sample")
        ... def sample(model): ...
    """
    return NamedRange(name) if isinstance(name, str) else NamedRange(name.__qualname__)(name)


@skip_frame
def _call_in_range(
    name: str, category: RangeCategory, function: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Call a function in a range; a `{}` in its name is the class of the first argument."""
    __tracebackhide__ = __traceback_hide__ = True
    if is_dynamo_compiling() or (ranges := _active) is None:
        return function(*args, **kwargs)
    opened = None
    try:
        kind = type(args[0]) if args and "{}" in name else object
        # The step of an optimizer that torch's `Optimizer` set up has a range of torch's.
        if not getattr(getattr(kind, function.__name__, None), "hooked", False):
            opened = ranges.begin(name.format(kind.__name__), category)
        return function(*args, **kwargs)
    finally:
        ranges.end(opened)


class _Functions(NamedTuple):
    """Functions of a module that torch gives no range.

    Attributes:
        module: it defines them.
        prefix: the names of their ranges begin with it.
        category: of the ranges.
        names: of the functions.
    """

    module: str
    prefix: str
    category: RangeCategory
    names: tuple[str, ...]

    def wrap(self) -> None:
        """Have each call be a range."""
        for name in self.names:
            wrap_function(vars(sys.modules[self.module]).get(name), self.prefix + name, self.category)


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
)


def wrap_function(function: Any, name: str, category: RangeCategory = "optimizer") -> None:
    """Have each call of a function be a range, for those who imported it before too: its code is replaced.

    Args:
        function: it; what is not written in Python has no range.
        name: of the range; a `{}` in it is the class of the first argument.
        category: of the range.
    """
    if not getattr(function, "hooked", False):
        replace_code(function, partial(_call_in_range, name, category))


_OPTIMIZING = ("step", "zero_grad")
_SAVING = ("save_pretrained", "save_state", "load_state", "save_model", "save_checkpoint", "load_checkpoint")
_METHODS = frozenset(_OPTIMIZING + _SAVING)
_namespace: Callable[[type], Mapping[str, Any]] = type.__dict__["__dict__"].__get__


def _wrap_classes() -> None:
    """Wrap methods of classes that are not torch's, by their names.

    These are the ones that save, of transformers, accelerate and others, whose own work is as long as that of what they
    call. Optimizers that torch's `Optimizer` did not set up have `step` and `zero_grad`, and are no modules: opacus'
    `DPOptimizer`, DeepSpeed's, and those of users.
    """
    kinds, met = [object], set[int]()
    while kinds:
        kind = kinds.pop()
        if id(kind) in met:
            continue
        met.add(id(kind))
        kinds += type.__subclasses__(kind)
        own = _namespace(kind)
        if _METHODS.isdisjoint(own):  # as most: there are thousands
            continue
        if str(own.get("__module__")).startswith("torch."):
            continue
        for name in _SAVING:
            wrap_function(own.get(name), f"{{}}.{name}", "saving")
        bases = kind.__mro__
        if nn.Module not in bases and all(any(name in _namespace(base) for base in bases) for name in _OPTIMIZING):
            for name in _OPTIMIZING:
                wrap_function(own.get(name), f"{{}}.{name}", "optimizer")


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


class _Annotations(threading.local):
    """The ranges that this thread has pushed, the last one last; None for one that is not recorded."""

    def __init__(self) -> None:
        self.pushed: list[tuple[RangeRecorder, OpenRange | None] | None] = []


_annotations = _Annotations()
_started: dict[object, tuple[RangeRecorder, OpenRange | None] | None] = {}
"""The ranges that one thread starts and perhaps another one ends, by what NVTX calls them."""


def _wrap_annotations(module: str) -> None:
    """Record what a program names for another profiler, which is still told."""
    calls: dict[str, Callable[..., Any]] = {"push": _push, "pop": _pop, "start": _open, "end": _close}
    for name, call in calls.items():
        replace_code(vars(sys.modules[module]).get(f"range_{name}"), call)


@skip_frame
def _push(function: Callable[[str], Any], /, msg: str) -> Any:
    pushed = function(msg)
    _annotations.pushed.append(_begin_named(msg, lambda: isinstance(msg, str)))
    return pushed


@skip_frame
def _pop(function: Callable[[], Any], /) -> Any:
    if opened := _annotations.pushed.pop() if _annotations.pushed else None:
        opened[0].end(opened[1])
    return function()


@skip_frame
def _open(function: Callable[[str], Any], /, msg: str) -> Any:
    handle = function(msg)
    if _active is not None:
        _started[handle] = _begin_named(msg, lambda: isinstance(msg, str))
    return handle


@skip_frame
def _close(function: Callable[[Any], Any], /, range_id: Any) -> Any:
    if opened := _started.pop(range_id, None):
        opened[0].end(opened[1])
    return function(range_id)


_switching = threading.local()
"""Whether this thread is in `Module.train`, which calls itself for each module inside: `now`."""


def _wrap_train() -> None:
    """Wrap what switches a module between training and evaluation; `Module.eval` calls it too."""
    train = nn.Module.train
    to_train, to_eval = (partial(_call_in_range, prefix + "{}", "torch", train) for prefix in (TRAIN, EVAL))

    @wraps(train)
    def switch(self: nn.Module, mode: bool = True) -> nn.Module:
        if is_dynamo_compiling() or _active is None or getattr(_switching, "now", False):
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
        ranges = _active
        if ranges is not None and ranges.expect is None and isinstance(self.name, str):
            self._modtrace_range = ranges, ranges.begin(self.name)
        return enter(self)

    @wraps(leave)
    def __exit__(self: Any, *exception: Any) -> Any:  # noqa: N807  # its name in torch
        try:
            return leave(self, *exception)
        finally:
            ranges, opened = vars(self).pop("_modtrace_range", (None, None))
            if ranges is not None:
                ranges.end(opened)

    record_function.__enter__ = skip_all(__enter__)  # type: ignore[method-assign]
    record_function.__exit__ = skip_all(__exit__)  # type: ignore[method-assign]


@cache
def _wrap_preparation() -> None:
    """Let ranges of optimizers and fetches begin where torch prepares them: on cold caches that takes 50 µs."""
    prepare: Any = record_function.__init__

    @wraps(prepare)
    def __init__(self: Any, name: str, args: str | None = None) -> None:  # noqa: N807  # its name in torch
        ranges = _active
        if ranges is not None and ranges.expect is not None and isinstance(name, str) and name.startswith(_PREPARED):
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


_compilation: tuple[RangeRecorder, OpenRange | None] | None = None
"""The one that runs: torch calls us for the outermost only."""


@skip_all
def _compilation_begins(args: Any) -> None:
    global _compilation
    ranges = _active
    if ranges is not None:
        _compilation = ranges, ranges.begin(_compilation_name(args), "compile")


@skip_all
def _compilation_ends(_args: Any) -> None:
    global _compilation
    running, _compilation = _compilation, None
    if running is not None:
        running[0].end(running[1])


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
    # Without the id of the compilation that did not fit.
    return f"{name}: {reason.partition(': ')[2] or reason}"
