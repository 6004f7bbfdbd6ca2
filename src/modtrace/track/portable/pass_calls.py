"""What the portable engine puts around torch's function that runs a backward pass: when each pass begins and ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from ..call_patch import RUN_BACKWARD, Layer, Patch
from ..skip_dynamo import skip_all, skip_frame
from ..tensors import unseen_by_modes

__all__ = ["PASS_PATCH", "gives_gradients"]

_functorch_level: Callable[[], int | None] = torch._C._functorch.maybe_current_level
_PROXY = torch._C._TorchDispatchModeKey.PROXY


@skip_all
def _is_tracing() -> bool:
    """Whether torch.compile traces: what it runs then, on fake tensors, is no backward of the user's."""
    return torch._C._get_dispatch_mode(_PROXY) is not None


def _make_wrapper(layer: Layer) -> Callable[..., Any]:
    def _engine_run_backward(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = __traceback_hide__ = True
        engine = layer.observer
        if engine is None or is_dynamo_compiling() or _is_tracing():
            return layer.wrapped(*args, **kwargs)
        number, ended = engine.next_pass(), False
        try:
            try:
                engine.begin_pass(number, args[:1])
                result = layer.wrapped(*args, **kwargs)
            finally:
                engine.end_pass(number)
                ended = True
            engine.note_gradients(args, kwargs)
            return result
        except BaseException:
            if not ended:
                # An interrupt came before it was written; where that was just after it, the first one counts.
                engine.end_pass(number)
            raise

    return skip_frame(_engine_run_backward)


def gives_gradients(args: tuple[Any, ...]) -> bool:
    """Whether a pass gives gradients to leaf tensors and builds no graph, but the one that `torch.func.grad` drops.

    Args:
        args: of the call that runs it, as torch's own callers give them.
    """
    if len(args) < 5:
        return False
    inputs = args[4]
    level = _functorch_level()
    with unseen_by_modes():
        reaches = not inputs or any(isinstance(tensor, torch.Tensor) and tensor.is_leaf for tensor in inputs)
    return reaches and (not args[3] if level is None else level == 1)


PASS_PATCH = Patch(_make_wrapper, RUN_BACKWARD)
"""The patch of both places that hold the function; its observer is a `PortableEngine`."""
