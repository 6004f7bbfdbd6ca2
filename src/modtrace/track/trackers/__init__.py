"""`ModuleTracker` and `ModTracker`: the modules that run now, with the interface of torch's trackers."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .follower import Follower

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle
    from typing_extensions import Self

__all__ = ["ModTracker", "ModuleTracker"]


class _Tracker:
    def __init__(self, follow_graphs_after_exit: bool) -> None:
        self._follower = Follower(follow_graphs_after_exit)
        self._enter_count = 0

    def __enter__(self) -> "Self":
        self._enter_count += 1
        if self._enter_count == 1:
            self._follower.start()
        return self

    def __exit__(self, *exception: object) -> None:
        # torch calls it without arguments.
        self._enter_count -= 1
        if self._enter_count == 0:
            self._follower.stop()

    @property
    def parents(self) -> set[str]:
        """A new set of the names of all modules that run on this thread now, forward or backward, and "Global"."""
        names = self._follower.active_names()
        names.add("Global")
        return names

    @property
    def is_bw(self) -> bool:
        """Whether this thread runs a backward pass now."""
        return torch._C._current_graph_task_id() != -1


class ModuleTracker(_Tracker):
    """A drop-in for `torch.utils.module_tracker.ModuleTracker`: reports the modules that run now.

    Names start at the class of each outermost called module (`GPT.transformer.h.0`). Each thread sees the modules that
    it runs itself. The tracker may be entered several times; the last exit ends it.

    Example:
        >>> with modtrace.ModuleTracker() as tracker:
        ...     model(x).sum().backward()  # code called in here may read tracker.parents and tracker.is_bw
    """

    def __init__(self) -> None:
        super().__init__(follow_graphs_after_exit=False)


class _BaseOfCommMode(_Tracker):
    """The attributes that the tracker of torch's `CommDebugMode` needs in its base class.

    That tracker registers `_fw_pre_hook` and `_fw_post_hook` as global hooks, and exits its base without entering it.
    So storing the first hook enters. The follower does not need the calls that the hooks make to the base.
    """

    _pre_handle: "RemovableHandle | None" = None
    _fw_post_handle: "RemovableHandle | None" = None

    def _enter_by_hook(self, handle: "RemovableHandle") -> None:
        self._pre_handle = handle
        super().__enter__()

    _fw_pre_handle = property(fset=_enter_by_hook)

    def __exit__(self, *exception: object) -> None:
        for handle in (self._pre_handle, self._fw_post_handle):
            if handle is not None:
                handle.remove()
        super().__exit__(*exception)

    def _do_nothing(self, *_: object) -> None:
        pass

    def _get_append_fn(self, *_: object) -> Callable[..., None]:
        return self._do_nothing

    _get_pop_fn, _fw_post_hook = _get_append_fn, _do_nothing


class ModTracker(_BaseOfCommMode):
    """A drop-in for `torch.distributed._tools.mod_tracker.ModTracker`: reports the modules that run, and calls hooks.

    Unlike `ModuleTracker`, it follows a graph that was made inside the block as long as the graph lives. It can be the
    base class of the tracker of torch's `CommDebugMode`.
    """

    def __init__(self) -> None:
        super().__init__(follow_graphs_after_exit=True)

    def get_known_fqn(self, mod: nn.Module) -> str | None:
        """Return the fully qualified name of `mod`; None if it is not known.

        Names are known of modules that were called, and of modules inside an outermost called module. A module that
        runs under two names has the name of its innermost open call.
        """
        return self._follower.name_of(mod)

    def _get_mod_name(self, mod: nn.Module) -> str:
        """Return the name of the module of a hook; torch's `DebugMode` calls this."""
        return self._follower.name_of(mod) or type(mod).__name__

    def register_user_hooks(
        self,
        pre_fw_hook: Callable[..., Any] | None = None,
        post_fw_hook: Callable[..., Any] | None = None,
        pre_bw_hook: Callable[..., Any] | None = None,
        post_bw_hook: Callable[..., Any] | None = None,
    ) -> None:
        """Register hooks that are called around forward and backward of each call; they must not change anything.

        `parents` contains the module's name while a hook runs. A module that is dead in backward is passed as None.

        Args:
            pre_fw_hook: called with (module, positional inputs) at the start of a forward.
            post_fw_hook: called with (module, positional inputs, output) at its end; output is None if it raised.
            pre_bw_hook: called with (module, (gradient,)) at the start of the module's backward.
            post_bw_hook: called with (module, (gradients of its inputs,)) when all these gradients are known, or at the
                end of its backward. Then unknown gradients are None; if none is known, () is passed.

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
