"""Finds the module calls inside a backward pass with which a checkpoint runs a part of the forward again.

torch's checkpoints have known functions on the stack then. A user's checkpoint is an `autograd.Function` that calls
modules without a graph, and calls them again in its backward. The first call there has the module and the inputs of the
first call in the forward; in other functions, such as the adjoint of an ODE solver, it has not. So the first call
without a graph is noted after each new node.
"""

import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import CheckpointFunction

from .event_sink import current_graph_task, current_node
from .unseen import skip_all, tensors_in, unseen_by_modes

_MAX_NOTES = 4096
_PLAIN_TENSOR_TYPES = (Tensor, nn.Parameter)
_TORCH_FILE = CheckpointFunction.backward.__code__.co_filename
_RERUN_FUNCTIONS = ("backward", "unpack_hook")
"""Functions of that file that run a forward again: of reentrant checkpoints, and of the others."""
_RUN_BACKWARD = "_engine_run_backward"

_Note = tuple[Any, ...]


class CheckpointReruns:
    """Distinguishes the calls that a checkpoint runs again from other calls inside a backward pass. Thread-safe."""

    def __init__(self) -> None:
        # The references keep the addresses of storages from being reused; they do not keep the memory.
        self._notes: OrderedDict[_Note, list[StorageWeakRef]] = OrderedDict()
        self._local = threading.local()

    @skip_all
    def note(self, module: nn.Module, inputs: Sequence[Any], sequence: int) -> None:
        """Note the first call without a graph after a new node: the node may be a checkpoint."""
        note, storages = _note_of(module, inputs, sequence)
        if storages:
            self._notes[note] = storages
            if len(self._notes) > _MAX_NOTES:
                self._notes.popitem(last=False)

    def called_without_graph(self) -> set[int]:
        """Return the `id()` of each module with a recent noted call."""
        return {note[0] for note in [*self._notes]}

    @skip_all
    def runs_again(self, module: nn.Module, inputs: Sequence[Any]) -> bool:
        """Return whether a checkpoint makes this call, which is an outermost call inside a graph task."""
        if _is_torch_checkpoint(sys._getframe(1)):
            return True
        node = current_node()
        if not isinstance(node, torch._C._FunctionBase):
            return False
        sequence: int = node._sequence_nr()
        run = (current_graph_task(), sequence)
        if getattr(self._local, "run", None) == run:
            return True
        if _note_of(module, inputs, sequence + 1)[0] not in self._notes:
            return False
        # All other calls of this node are reruns too.
        self._local.run = run
        return True


def _is_torch_checkpoint(frame: FrameType | None) -> bool:
    """Return whether torch's checkpoint called `frame`, in the innermost pass that runs on this thread."""
    while frame is not None and frame.f_code.co_name != _RUN_BACKWARD:
        if frame.f_code.co_name in _RERUN_FUNCTIONS and frame.f_code.co_filename == _TORCH_FILE:
            return True
        frame = frame.f_back
    return False


def _note_of(module: nn.Module, inputs: Sequence[Any], sequence: int) -> tuple[_Note, list[StorageWeakRef]]:
    """Return a call's key, equal to its rerun's key (module, node, memory and version of inputs), and the storages.

    The key is empty for tensors without memory, such as torch.func's.
    """
    try:
        with unseen_by_modes():
            tensors = list(tensors_in(inputs))
            storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]  # type: ignore[no-untyped-call]
            views: list[tuple[object, ...]] = [
                # A subclass may compute its shape in Python.
                (tensor._version, tensor.storage_offset(), tensor.shape)
                if type(tensor) in _PLAIN_TENSOR_TYPES
                else (tensor._version,)
                for tensor in tensors
            ]
    except Exception:
        return (), []
    return (id(module), sequence, *((ref.cdata, *view) for ref, view in zip(storages, views, strict=True))), storages
