"""Drop-in trackers: which modules run now."""

import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.autograd.graph import register_multi_grad_hook

from .._interrupts import WeakMap
from ..track.naming.modules import class_name, named_modules
from ..track.unseen import tensors_in
from .follower import Follower

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle
    from typing_extensions import Self

ModuleRef = Callable[[], nn.Module | None]


class _TorchHooks:
    """What `CommDebugMode` needs of its base class, which it never enters.

    It registers `_fw_pre_hook` and `_fw_post_hook` as global hooks of modules, and enters and leaves names by what
    `_get_append_fn` and `_get_pop_fn` return. Names entered so are in `parents` on every thread, beside those that the
    tracker follows itself.

    Attributes:
        hooked_names: how often each name is entered.
    """

    _follower: Follower
    _fw_pre_handle: "RemovableHandle | None" = None
    _fw_post_handle: "RemovableHandle | None" = None

    def __init__(self) -> None:
        self.hooked_names: Counter[str] = Counter()
        self._known_modules: WeakMap[nn.Module, str] = WeakMap()  # their names
        self._backward: list[tuple[ModuleRef, str]] = []
        self._graph_tasks: set[int] = set()

    def _remove_handles(self) -> None:
        """Remove the global hooks that a subclass registered."""
        for handle in (self._fw_pre_handle, self._fw_post_handle):
            if handle is not None:
                handle.remove()
        self._fw_pre_handle = self._fw_post_handle = None

    def _get_mod_name(self, mod: nn.Module) -> str:
        """Return the name of `mod`; one that is not known becomes a root, named by its class."""
        name = self._follower.name_of(mod) or self._known_modules.get(mod)
        if name is None:
            name = self._known_modules[mod] = class_name(mod)
            for path, inner in named_modules(mod):
                self._known_modules[inner] = f"{name}.{path}"
        return name

    def _get_append_fn(self, w_mod: ModuleRef, name: str, is_bw: bool) -> Callable[..., None]:
        """Return what enters `name`; in backward it calls the user's hook with the gradients it gets."""

        def enter(*gradients: Any) -> None:
            self.hooked_names[name] += 1
            if is_bw:
                self._backward.append((w_mod, name))
                self._end_with_graph_task()
                if self._follower.pre_bw is not None:
                    self._follower.pre_bw(w_mod(), gradients)

        return enter

    def _get_pop_fn(self, w_mod: ModuleRef, name: str, is_bw: bool) -> Callable[..., None]:
        """Return what leaves `name`; in backward it calls the user's hook with the gradients it gets."""

        def leave(*gradients: Any) -> None:
            if is_bw:
                if self._follower.post_bw is not None:
                    self._follower.post_bw(w_mod(), gradients)
                if (w_mod, name) not in self._backward:
                    return
                self._backward.remove((w_mod, name))
            self.hooked_names[name] -= 1
            if self.hooked_names[name] <= 0:
                del self.hooked_names[name]

        return leave

    def _fw_pre_hook(self, mod: nn.Module, input: Any) -> None:  # noqa: A002  # torch's name
        """Enter a forward; its backward ends when the gradients of its inputs are known, or with the pass."""
        name, w_mod = self._get_mod_name(mod), weakref.ref(mod)
        self._get_append_fn(w_mod, name, False)()
        if self._follower.pre_fw is not None:
            self._follower.pre_fw(mod, input)
        self._on_gradients(input, self._get_pop_fn(w_mod, name, True), "all")

    def _fw_post_hook(self, mod: nn.Module, input: Any, output: Any) -> None:  # noqa: A002  # torch's name
        """Leave a forward; its backward begins with the first gradient of its outputs."""
        name, w_mod = self._get_mod_name(mod), weakref.ref(mod)
        if self._follower.post_fw is not None:
            self._follower.post_fw(mod, input, output)
        self._get_pop_fn(w_mod, name, False)()
        self._on_gradients(output, self._get_append_fn(w_mod, name, True), "any")

    def _on_gradients(self, values: Any, call: Callable[..., None], mode: Any) -> None:
        tensors = [tensor for tensor in tensors_in(values) if tensor.requires_grad]
        if tensors and torch._C._current_graph_task_id() == -1:
            register_multi_grad_hook(tensors, call, mode=mode)

    def _end_with_graph_task(self) -> None:
        """Leave all names of backward when the graph task that runs now has ended."""
        graph_task_id = torch._C._current_graph_task_id()
        if graph_task_id not in self._graph_tasks:
            self._graph_tasks.add(graph_task_id)
            Variable._execution_engine.queue_callback(partial(self._leave_backward, graph_task_id))

    def _leave_backward(self, graph_task_id: int) -> None:
        self._graph_tasks.discard(graph_task_id)
        for w_mod, name in reversed(self._backward[:]):
            self._get_pop_fn(w_mod, name, True)()


class _Tracker:
    def __init__(self, follow_graphs_after_exit: bool) -> None:
        self._follower = Follower(follow_graphs_after_exit)
        self._entered = 0

    def __enter__(self) -> "Self":
        self._entered += 1
        if self._entered == 1:
            self._follower.start()
        return self

    def __exit__(self, *exception: object) -> None:
        # Torch's own users call it without arguments.
        self._entered -= 1
        if self._entered == 0:
            self._follower.stop()

    @property
    def parents(self) -> set[str]:
        """The fully qualified names of the modules that run on this thread now, forward or backward, and "Global".

        A new set each time it is read.
        """
        names = self._follower.active_names()
        names.add("Global")
        return names

    @property
    def is_bw(self) -> bool:
        """Whether this thread runs a backward pass now."""
        return torch._C._current_graph_task_id() != -1


class ModuleTracker(_Tracker):
    """Says which modules run now; a drop-in for `torch.utils.module_tracker.ModuleTracker`.

    Names start at each outermost called module's class (`GPT.transformer.h.0`). All of it holds for the thread
    that asks. It may be entered again while it is entered; the last exit ends it.

    Example:
        >>> with modtrace.ModuleTracker() as tracker:
        ...     model(x).sum().backward()  # anything called in here may read tracker.parents and tracker.is_bw
    """

    def __init__(self) -> None:
        super().__init__(follow_graphs_after_exit=False)


class ModTracker(_Tracker, _TorchHooks):
    """Says which modules run now, and calls hooks; a drop-in for `torch.distributed._tools.mod_tracker.ModTracker`.

    As `ModuleTracker`; a graph made inside the block is followed as long as it lives.
    """

    def __init__(self) -> None:
        _Tracker.__init__(self, follow_graphs_after_exit=True)
        _TorchHooks.__init__(self)

    def __exit__(self, *exception: object) -> None:
        self._remove_handles()
        if self._entered:  # a subclass can have entered without us
            super().__exit__(*exception)

    @property
    def parents(self) -> set[str]:
        """As of `ModuleTracker`, and what a subclass entered by torch's hooks."""
        return super().parents.union(self.hooked_names)

    def get_known_fqn(self, mod: nn.Module) -> str | None:
        """Return the fully qualified name of `mod`, None if it is not known.

        Known is what was called, and what lies below an outermost called module. A module that runs under two names
        has the one of its innermost open call.
        """
        return self._follower.name_of(mod)

    def register_user_hooks(
        self,
        pre_fw_hook: Callable[..., Any] | None = None,
        post_fw_hook: Callable[..., Any] | None = None,
        pre_bw_hook: Callable[..., Any] | None = None,
        post_bw_hook: Callable[..., Any] | None = None,
    ) -> None:
        """Register hooks that are called around forward and backward of each call; they must not change anything.

        `parents` holds the module's name while a hook runs. A module that is not alive in backward is passed as None.

        Args:
            pre_fw_hook: called with (module, positional inputs) at the begin of a forward.
            post_fw_hook: called with (module, positional inputs, output) at its end; output is None if it raised.
            pre_bw_hook: called with (module, (gradient,)) when the module's backward begins.
            post_bw_hook: called with (module, (gradients of its inputs,)) when all of these are known, at the latest
                when its backward ends; then gradients that are not known are None, and where none is, it is ().

        Raises:
            AssertionError: a hook of that kind is registered already; `clear_user_hooks` removes all.
        """
        hooks = {"pre_fw": pre_fw_hook, "post_fw": post_fw_hook, "pre_bw": pre_bw_hook, "post_bw": post_bw_hook}
        for kind, hook in hooks.items():
            if hook is not None and getattr(self._follower, kind) is not None:
                raise AssertionError(f"a {kind}_hook is registered already; call clear_user_hooks() first")
        for kind, hook in hooks.items():
            if hook is not None:
                setattr(self._follower, kind, hook)

    def clear_user_hooks(self) -> None:
        """Remove the hooks that `register_user_hooks` registered."""
        follower = self._follower
        follower.pre_fw = follower.post_fw = follower.pre_bw = follower.post_bw = None
