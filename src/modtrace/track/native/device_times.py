"""Device times: the calls that get device events, and the graphs that torch captures and replays."""

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
    """Lets the native engine record device events around chosen calls, and around replays of graphs."""

    def __init__(self, native: ModuleType, names: ModuleNames, table: NameTable, choice: DeviceChoice) -> None:
        self._native = native
        self._names = names
        self._table = table
        self._choice = choice
        # Number of calls around the first call of each name: a recompute has no calls around it.
        self._depths: dict[int, int] = {}
        # The type of the device until device times start, then None.
        self._awaited_type: str | None = None

    def resolve(self, module: nn.Module, open_calls: Sequence[OpenCall]) -> int:
        """Return the id of a module's name, as `ModuleNames.resolve` does; choose it for device times if it fits."""
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
        """Start once the process uses the device; log if there is no device. The engine's session must run.

        Until then the device is not queried: CUDA would start its driver, and children that are forked after that
        cannot use CUDA.
        """
        device = torch.accelerator.current_accelerator()
        if device is None:
            warn_without("device_times", f"this torch ({torch.__version__}) has no accelerator")
            return
        # `is_current_stream_capturing` alone would initialize CUDA.
        is_capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]
        for patch in _patches(self._native):
            patch.install(self)
        if is_capturing:
            self._native.begin_capture()
        self._awaited_type = device.type
        if not self._start_if_used():
            self._native.await_device(self._start_if_used)

    def _start_if_used(self) -> bool:
        """Start, unless torch reports that it has not initialized the device: then return False.

        Between any two lines a signal's handler may end the recording, or start another one.
        """
        device_type = self._awaited_type
        if device_type is None:
            return True
        module = torch.get_device_module(device_type)
        if hasattr(module, "is_initialized") and not module.is_initialized():
            return False
        reason = self._native.start_device_times(device_type)
        self._awaited_type = None
        if reason is not None:
            warn_without("device_times", reason)
        return True

    def stop(self) -> None:
        """Read the device events that complete within a second, and stop; log a failure."""
        device_type, self._awaited_type = self._awaited_type, None
        for patch in _patches(self._native):
            patch.uninstall()
        failure = self._native.stop_device_times()
        if failure is not None:
            warn_without("device_times", failure)
        elif device_type is not None:
            reason = f"no module was called outside all other calls after torch initialized {device_type}"
            warn_without("device_times", reason)

    def after_fork(self) -> None:
        """Stop in a forked child; the engine's own `after_fork` has forgotten the device."""
        self._awaited_type = None
        for patch in _patches(self._native):
            patch.uninstall()


class _Replay(nn.Module):
    """A module whose calls are the replays of all graphs, for the engine. No module hooks run around it."""

    def __init__(self) -> None:
        super().__init__()
        # `nn.Module.__call__` calls this instead of the forward and its hooks.
        object.__setattr__(self, "_compiled_call_impl", lambda replay, graph: replay(graph))


_REPLAY = _Replay()


@cache
def _patches(native: ModuleType) -> tuple[Patch, ...]:
    """Return the patches of the methods by which torch captures and replays graphs."""

    # torch 2.14's hooks of graphs are not used: see `src/modtrace/README.md` for the reasons.
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
    # From torch 2.14 on a capture may end by `capture_end_pre` only; `capture_end` calls it too.
    end_method = "capture_end_pre" if "capture_end_pre" in vars(graph) else "capture_end"
    return (
        Patch(wrap_replay, (PatchTarget(graph, "replay"),)),
        Patch(wrap_capture_begin, (PatchTarget(graph, "capture_begin"),)),
        Patch(wrap_capture_end, (PatchTarget(graph, end_method),)),
    )
