"""Errors that the handler of a signal raised, by chance while code of ours ran: they are the user's."""

from __future__ import annotations

import signal
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

__all__ = ["raised_by_handler"]


def raised_by_handler(error: BaseException) -> bool:
    """Return whether the handler of a signal raised `error`: it is the user's then, whatever code it interrupted."""
    codes = {_code(signal.getsignal(number)) for number in signal.valid_signals()}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    return False


def _code(handler: Any) -> CodeType | None:
    if not callable(handler):
        return None
    while isinstance(handler, partial):
        handler = handler.func
    function = handler if isinstance(handler, FunctionType | MethodType) else type(handler).__call__
    code = getattr(function, "__code__", None)
    return code if isinstance(code, CodeType) else None
