"""Device times: which calls get events of the device, and the graphs that torch captures and replays."""

from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ...ring import NameTable
from ...ring.slot_format import NO_NAME
from ...timeline.contents import REPLAY_CLASS
from ..call_patch import Patch, PatchTarget, Wrapper
from ..event_sink import DeviceChoice, warn_without
from ..naming.module_names import ModuleNames, OpenCall
from ..unseen import skip_all


class NativeDeviceTimes:
    """Lets the native engine record events of the device around chosen calls, and around replays of graphs."""

    def __init__(self, native: ModuleType, names: ModuleNames, table: NameTable, choice: DeviceChoice) -> None:
        self._native = native
        self._names = names
        self._table = table
        self._choice = choice
        # How deep a name was called first: what runs again in backward is called with nothing around it.
        self._depths: dict[int, int] = {}
        # The type of the device until device times begin.
        self._waits_for: str | None = None

    def resolve(self, module: nn.Module, open_calls: Sequence[OpenCall]) -> int:
        """Return the id of a module's name, as `ModuleNames.resolve`, and choose it where it fits."""
        if isinstance(module, _Replay):
            prefix = f"{self._names.fqn(open_calls[0][1])}." if open_calls else ""
            name_id = self._table.name(REPLAY_CLASS, f"{prefix}{REPLAY_CLASS}", REPLAY_CLASS)
            self._native.choose_for_device(name_id)
            return name_id
        name_id = self._names.resolve(module, open_calls)
        if name_id != NO_NAME:
            depth = self._depths.setdefault(name_id, len(open_calls))
            if self._choice.fits(self._names.fqn(name_id), depth):
                self._native.choose_for_device(name_id)
        return name_id

    def start(self) -> None:
        """Begin once the process uses the device; if there is none, that is logged. The engine's session runs.

        Until then nothing is asked of it: to count devices, CUDA starts its driver, and children that are forked after
        that cannot use CUDA.
        """
        device = torch.accelerator.current_accelerator()
        if device is None:
            warn_without("device_times", f"this torch ({torch.__version__}) has no accelerator")
            return
        # The second question would initialize CUDA.
        begun_before = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]
        for patch in _patches(self._native):
            patch.install(self)
        if begun_before:
            self._native.begin_capture()
        self._waits_for = device.type
        if not self._begin_if_used():
            self._native.await_device(self._begin_if_used)

    def _begin_if_used(self) -> bool:
        """Begin if torch has initialized the device, or does not say so; return False if it has not.

        Between any two lines a signal's handler may end the recording, or start another one.
        """
        device_type = self._waits_for
        if device_type is None:
            return True
        module = torch.get_device_module(device_type)
        if hasattr(module, "is_initialized") and not module.is_initialized():
            return False
        reason = self._native.start_device_times(device_type)
        self._waits_for = None
        if reason is not None:
            warn_without("device_times", reason)
        return True

    def stop(self) -> None:
        """Read what is done within a second, and end; what went wrong meanwhile is logged."""
        device_type, self._waits_for = self._waits_for, None
        for patch in _patches(self._native):
            patch.uninstall()
        failure = self._native.stop_device_times()
        if failure is not None:
            warn_without("device_times", failure)
        elif device_type is not None:
            reason = f"no module was called from outside of all others after torch initialized {device_type}"
            warn_without("device_times", reason)

    def after_fork(self) -> None:
        """End in a forked child; the engine's own `after_fork` has forgotten the device."""
        self._waits_for = None
        for patch in _patches(self._native):
            patch.uninstall()


class _Replay(nn.Module):
    """A module whose calls are the replays of all graphs, for the engine. No hooks of modules run around it."""

    def __init__(self) -> None:
        super().__init__()
        # `nn.Module.__call__` calls this instead of the forward and its hooks.
        object.__setattr__(self, "_compiled_call_impl", lambda replay, graph: replay(graph))


_REPLAY = _Replay()


@cache
def _patches(native: ModuleType) -> tuple[Patch, ...]:
    """Return the patches of the methods by which torch captures and replays graphs."""

    # Not torch 2.14's hooks of graphs: `src/modtrace/README.md` says why.
    def wrap_replay(wrapper: Wrapper) -> Callable[..., Any]:
        def replay(self: Any) -> Any:
            return wrapper.wrapped(self) if wrapper.observer is None else _REPLAY(wrapper.wrapped, self)

        return skip_all(replay)

    def wrap_capture_begin(wrapper: Wrapper) -> Callable[..., Any]:
        def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
            if wrapper.observer is None:
                return wrapper.wrapped(self, *args, **kwargs)
            native.begin_capture()
            try:
                return wrapper.wrapped(self, *args, **kwargs)
            except BaseException:
                native.end_capture()
                raise

        return skip_all(capture_begin)

    def wrap_capture_end(wrapper: Wrapper) -> Callable[..., Any]:
        def capture_end(self: Any) -> Any:
            try:
                return wrapper.wrapped(self)
            finally:
                native.end_capture()

        return skip_all(capture_end)

    graph: Any = torch.cuda.CUDAGraph
    # From torch 2.14 on a capture may end by this alone, as `capture_end` does.
    end = "capture_end_pre" if "capture_end_pre" in vars(graph) else "capture_end"
    return (
        Patch(wrap_replay, (PatchTarget(graph, "replay"),)),
        Patch(wrap_capture_begin, (PatchTarget(graph, "capture_begin"),)),
        Patch(wrap_capture_end, (PatchTarget(graph, end),)),
    )
