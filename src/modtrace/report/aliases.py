"""What a report calls modules, threads, marks and operations: their own names, redacted, or aliases."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

from ..timeline import Name

__all__ = ["AliasedNames", "ReportNames"]

_KNOWN_THREAD = re.compile(r"MainThread|pt_[a-z]+_\d+|(?:Thread|Dummy)-\d+|thread #?\d+|ThreadPoolExecutor-\d+_\d+")
_ORDINARY_MARK = re.compile(r"(?:step|epoch|iteration|batch) \d+")
_LIBRARIES = (
    *("aten", "c10d", "c10d_functional", "_c10d_functional", "cudnn", "fsdp", "inductor", "mkldnn", "nccl", "prim"),
    *("prims", "profiler", "quantized", "rngprims", "torch", "torchvision", "triton"),
)
_LIBRARY_OPERATION = re.compile(
    rf"(?:{'|'.join(_LIBRARIES)})::[\w.:]+|\w+Backward\d+|torch::autograd::\w+|record_param_comms|ProfilerStep\#\d+"
    r"|nccl:\w+|gloo:\w+|modtrace\.sync\#[\w.:-]*|DistributedDataParallel\.\w+|\[memory\]"
)
_LIBRARY_KERNEL = re.compile(
    r"(?:void )?(?:at::|at_cuda_detail::|cub::|thrust::|cutlass|cudnn|cublas|ampere_|volta_|turing_|sm\d+_|hopper_|nccl"
    r"|flash_|splitKreduce|gemm|gemv|epilogue::|internal::)[\w:]*"
)
_ENGINE_PREFIX = "autograd::engine::evaluate_function: "
_OPTIMIZER = re.compile(r"Optimizer\.(step|zero_grad)\#(.*)\.\1")
_NUMBERED_CLASS = re.compile(r"(.*)_(\d+)", re.DOTALL)


class ReportNames:
    """Names as recorded, with what identifies a person or a machine replaced.

    Args:
        redact: replaces that in any text.
    """

    def __init__(self, redact: Callable[[str], str]) -> None:
        # Cached: a trace repeats the same few thousand texts a million times.
        self.text = functools.lru_cache(1 << 16)(redact)

    def name(self, name: Name) -> Name:
        """Return a module's label, fully qualified name and class."""
        return Name(*map(self.text, name))

    def fqn(self, fqn: str) -> str:
        """Return a fully qualified name."""
        return self.text(fqn)

    def module_class(self, module_class: str) -> str:
        """Return the name of a module's class."""
        return self.text(module_class)

    def thread(self, thread: str) -> str:
        """Return a thread's name."""
        return self.text(thread)

    def mark(self, text: str) -> str:
        """Return the text of a mark."""
        return self.text(text)

    def counter(self, text: str) -> str:
        """Return the name or the unit of a counter."""
        return self.text(text)

    def operation(self, text: str) -> str:
        """Return the name of an operation or annotation in a profiler's trace."""
        return self.text(text)

    def kernel(self, text: str) -> str:
        """Return the name of a kernel."""
        return self.text(text)


class AliasedNames(ReportNames):
    """Aliases: `Net.blocks.0.attn` becomes `Class1.m1.0.m2`.

    They are numbered in the order in which names appear, so the same model always gets the same aliases. Numbers in
    paths stay, and so do the names that torch and its libraries give their own operations and kernels: they say nothing
    about the model's source.
    """

    def __init__(self, redact: Callable[[str], str]) -> None:
        super().__init__(redact)
        self._aliases: dict[str, dict[str, str]] = {}

    def name(self, name: Name) -> Name:
        """Return aliases of a module's label, fully qualified name and class."""
        module_class = self.module_class(name.module_class)
        fqn = self.fqn(name.fqn)
        path = name.label.removesuffix(f": {name.module_class}")
        if name.label == name.module_class:
            return Name(module_class, fqn, module_class)
        return Name(f"{self._path(path)}: {module_class}", fqn, module_class)

    def fqn(self, fqn: str) -> str:
        """Return a fully qualified name aliased part by part; its first part is a class."""
        first, dot, rest = fqn.partition(".")
        return f"{self._part(first, first=True)}{dot}{self._path(rest) if dot else ''}"

    def module_class(self, module_class: str) -> str:
        """Return the alias of a class."""
        return self._alias("Class", module_class)

    def thread(self, thread: str) -> str:
        """Return a thread's name if Python or torch chose it, else an alias."""
        known = _KNOWN_THREAD.match(thread)
        return known[0] if known else self._alias("thread ", thread)

    def mark(self, text: str) -> str:
        """Return the text of a mark if it is no more than a number, else an alias."""
        return text if _ORDINARY_MARK.fullmatch(text) else self._alias("mark ", text)

    def counter(self, text: str) -> str:
        """Return the name or unit of a counter if modtrace chose it, else an alias."""
        return (
            text
            if re.fullmatch(r"process RSS|cuda:\d+ (?:allocated|reserved)|bytes", text)
            else self._alias("counter ", text)
        )

    def operation(self, text: str) -> str:
        """Return the name of an operation if it is torch's, else an alias."""
        if text.startswith(_ENGINE_PREFIX):
            return _ENGINE_PREFIX + self.operation(text.removeprefix(_ENGINE_PREFIX))
        optimizer = _OPTIMIZER.fullmatch(text)
        if optimizer:
            return f"Optimizer.{optimizer[1]}#{self.module_class(optimizer[2])}.{optimizer[1]}"
        return text if _LIBRARY_OPERATION.fullmatch(text) else self._alias("operation ", text)

    def kernel(self, text: str) -> str:
        """Return the name of a kernel, without its types, if it is a library's, else an alias."""
        if re.fullmatch(r"(?:Memcpy|Memset) [\w (>-]+\)", text):
            return text
        known = _LIBRARY_KERNEL.match(text)
        return known[0] if known else self._alias("kernel ", text)

    def _path(self, path: str) -> str:
        return ".".join(self._part(part) for part in path.split("."))

    def _part(self, part: str, *, first: bool = False) -> str:
        if part.isascii() and part.isdecimal():
            return part
        # The profiler names modules by class and number (`Linear_3`).
        numbered = _NUMBERED_CLASS.fullmatch(part)
        if numbered and numbered[1] in self._aliases.get("Class", ()):
            return f"{self.module_class(numbered[1])}_{numbered[2]}"
        return self.module_class(part) if first else self._alias("m", part)

    def _alias(self, kind: str, text: str) -> str:
        of_kind = self._aliases.setdefault(kind, {})
        return of_kind.setdefault(text, f"{kind}{len(of_kind) + 1}")
