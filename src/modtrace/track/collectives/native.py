"""Collectives for the native engine: the tap on the operators of c10d, and the patch of `Work.wait`."""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any

import torch

from ...ring import NameTable
from ..call_patch import Layer, Patch, PatchTarget
from .names import CollectiveNames
from .notice import say_inference_mode_unseen, say_unavailable

__all__ = ["NativeCollectives"]


class NativeCollectives:
    """Notes the collectives of the session that the native engine runs.

    Args:
        native: the engine's extension module.
        names: the ring's name table.
    """

    def __init__(self, native: ModuleType, names: NameTable) -> None:
        self._native = native
        self._names = names

    def start(self) -> None:
        """Begin, once the session runs; a torch without torch.distributed has nothing to note."""
        if not torch.distributed.is_available():
            return
        try:
            seen = self._native.start_collectives(CollectiveNames(self._names), say_inference_mode_unseen)
        except RuntimeError as error:
            say_unavailable(f"torch {torch.__version__} does not take the tap ({error})")
            return
        if seen:
            _patch(self._native).install(self)

    def stop(self) -> None:
        """End, and restore `Work.wait`; the tap stays and only passes calls on."""
        if torch.distributed.is_available():
            self._native.stop_collectives()
            _patch(self._native).uninstall()


class _WaitPatch(Patch):
    def __init__(self, native: ModuleType) -> None:
        work: Any = torch._C._distributed_c10d.Work
        super().__init__(lambda layer: native.wrap_wait(layer.wrapped), (PatchTarget(work, "wait"),))
        self._native = native

    def set_observer(self, layer: Layer, observer: object) -> None:
        self._native.set_wait_active(layer.wrapper, observer is not None)
        super().set_observer(layer, observer)


@cache
def _patch(native: ModuleType) -> Patch:
    return _WaitPatch(native)
