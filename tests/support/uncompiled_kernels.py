"""Inductor without a C++ compiler, which takes 2 s for each kernel: its kernels are called, but compute nothing."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

from torch._C._profiler import _RecordFunctionFast as RecordFunction
from torch._inductor.async_compile import AsyncCompile

__all__ = ["uncompiled_kernels"]

# What a kernel in C++ writes if `cpp.enable_kernel_profile` is set.
_NAME = re.compile(r'(?:AtenRecordFunctionHandle \w+|RECORD_FUNCTION)\("([^"]+)"')


def _kernel(_: AsyncCompile, argument_types: object, source: str, *__: object) -> Callable[..., None]:
    named = _NAME.search(source)

    def run(*_: Any) -> None:
        with RecordFunction(named[1]) if named else contextlib.nullcontext():
            pass

    return run


@contextlib.contextmanager
def uncompiled_kernels() -> Iterator[None]:
    """Let kernels that Inductor writes in C++ do nothing, but be in a profile by their names where they would be."""
    with patch.object(AsyncCompile, "cpp_pybinding", _kernel):
        yield
