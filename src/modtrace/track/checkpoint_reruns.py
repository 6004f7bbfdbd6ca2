"""Which module calls inside a backward pass are a checkpoint's, which runs a part of the forward again.

Torch's own checkpoints are known by their functions, which are on the stack then. One that a user wrote is an
`autograd.Function` that calls modules without a graph, and in its backward calls them again: it is told from others, as
the adjoint of an ODE solver, by the first of these calls, which is of the same module with the same inputs. So the
first call is noted that follows the making of a node, where no graph is made.
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
_PLAIN = (Tensor, nn.Parameter)
_TORCH_FILE = CheckpointFunction.backward.__code__.co_filename
_RUNS_AGAIN = ("backward", "unpack_hook")
"""The functions of that file that run a forward again: of the reentrant kind, and of the other."""
_ENGINE_RUNS = "_engine_run_backward"

_Note = tuple[Any, ...]


class CheckpointReruns:
    """Tells the calls that a checkpoint runs again from other forward calls inside a backward pass. Thread-safe."""

    def __init__(self) -> None:
        # The references keep the addresses of storages from being given to others; they do not keep the memory.
        self._notes: OrderedDict[_Note, list[StorageWeakRef]] = OrderedDict()
        self._local = threading.local()

    @skip_all
    def note(self, module: nn.Module, inputs: Sequence[Any], sequence: int) -> None:
        """Note the first call after the making of a node, where no graph is made: the node may be a checkpoint."""
        note, storages = _note_of(module, inputs, sequence)
        if storages:
            self._notes[note] = storages
            if len(self._notes) > _MAX_NOTES:
                self._notes.popitem(last=False)

    def called_without_graph(self) -> set[int]:
        """Return the ids of the modules of which such a call was noted of late."""
        return {note[0] for note in [*self._notes]}

    @skip_all
    def runs_again(self, module: nn.Module, inputs: Sequence[Any]) -> bool:
        """Whether a checkpoint makes this call, which is inside a graph task and in no other call there."""
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
        # What else this node calls is run again too.
        self._local.run = run
        return True


def _is_torch_checkpoint(frame: FrameType | None) -> bool:
    """Whether torch's checkpoint is what calls `frame`, in the innermost pass that runs on this thread."""
    while frame is not None and frame.f_code.co_name != _ENGINE_RUNS:
        if frame.f_code.co_name in _RUNS_AGAIN and frame.f_code.co_filename == _TORCH_FILE:
            return True
        frame = frame.f_back
    return False


def _note_of(module: nn.Module, inputs: Sequence[Any], sequence: int) -> tuple[_Note, list[StorageWeakRef]]:
    """Return a key of a call: module, node, and memory and version of the inputs; a rerun of the call has the same one.

    It is empty for tensors that have no memory, as those of torch.func.
    """
    try:
        with unseen_by_modes():
            tensors = list(tensors_in(inputs))
            storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]  # type: ignore[no-untyped-call]
            views: list[tuple[object, ...]] = [
                # What has a shape of its own making runs Python to tell it.
                (tensor._version, tensor.storage_offset(), tensor.shape)
                if type(tensor) in _PLAIN
                else (tensor._version,)
                for tensor in tensors
            ]
    except Exception:
        return (), []
    return (id(module), sequence, *((ref.cdata, *view) for ref, view in zip(storages, views, strict=True))), storages
