"""What the portable engine puts around torch's function that runs a backward pass: when each pass begins and ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.compiler import is_dynamo_compiling

from ...ring import Kind
from ..call_patch import RUN_BACKWARD, Layer, Patch

__all__ = ["PASS_PATCH"]


def _make_wrapper(layer: Layer) -> Callable[..., Any]:
    def _engine_run_backward(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        engine = layer.observer
        if engine is None or is_dynamo_compiling():
            return layer.wrapped(*args, **kwargs)
        number, ended = engine.next_pass(), False
        try:
            try:
                engine.write_pass(Kind.PASS_BEGIN, number)
                return layer.wrapped(*args, **kwargs)
            finally:
                engine.write_pass(Kind.PASS_END, number)
                ended = True
        except BaseException:
            if not ended:
                # An interrupt came before it was written; where that was just after it, the first one counts.
                engine.write_pass(Kind.PASS_END, number)
            raise

    return _engine_run_backward


PASS_PATCH = Patch(_make_wrapper, RUN_BACKWARD)
"""The patch of both places that hold the function; its observer has `next_pass` and `write_pass`."""
