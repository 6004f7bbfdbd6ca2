"""What things are called in a report: as they are, without what is private, or by aliases."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

from ..timeline import Name

__all__ = ["Aliases", "Names"]

_KNOWN_THREAD = re.compile(r"MainThread|pt_[a-z]+_\d+|(?:Thread|Dummy)-\d+|thread #?\d+|ThreadPoolExecutor-\d+_\d+")
_ORDINARY_MARK = re.compile(r"(?:step|epoch|iteration|batch) \d+")
_LIBRARIES = (
    *("aten", "c10d", "c10d_functional", "_c10d_functional", "cudnn", "fsdp", "inductor", "mkldnn", "nccl", "prim"),
    *("prims", "profiler", "quantized", "rngprims", "torch", "torchvision", "triton"),
)
_KNOWN_OPERATION = re.compile(
    rf"(?:{'|'.join(_LIBRARIES)})::[\w.:]+|\w+Backward\d+|torch::autograd::\w+|record_param_comms|ProfilerStep\#\d+"
    r"|nccl:\w+|gloo:\w+|modtrace\.sync\#[\w.:-]*|DistributedDataParallel\.\w+|\[memory\]"
)
_KNOWN_KERNEL = re.compile(
    r"(?:void )?(?:at::|at_cuda_detail::|cub::|thrust::|cutlass|cudnn|cublas|ampere_|volta_|turing_|sm\d+_|hopper_|nccl"
    r"|flash_|splitKreduce|gemm|gemv|epilogue::|internal::)[\w:]*"
)
_ENGINE = "autograd::engine::evaluate_function: "
_OPTIMIZER = re.compile(r"Optimizer\.(step|zero_grad)\#(.*)\.\1")
_NUMBERED = re.compile(r"(.*)_(\d+)", re.DOTALL)


class Names:
    """Names as they are, without what is private in them."""

    def __init__(self, redact: Callable[[str], str]) -> None:
        # A trace says the same few thousand texts a million times.
        self.text = functools.lru_cache(1 << 16)(redact)

    def name(self, name: Name) -> Name:
        """Return what a module is called."""
        return Name(*map(self.text, name))

    def fqn(self, fqn: str) -> str:
        """Return a qualified name."""
        return self.text(fqn)

    def module_class(self, module_class: str) -> str:
        """Return the name of a module's class."""
        return self.text(module_class)

    def thread(self, thread: str) -> str:
        """Return what a thread is called."""
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


class Aliases(Names):
    """Aliases in the order in which names come, so that the same model always gets the same; numbers remain.

    `Net.blocks.0.attn` becomes `Class1.m1.0.m2`. What torch and its libraries call their own operations and kernels
    remains, as it says nothing about the model's source.
    """

    def __init__(self, redact: Callable[[str], str]) -> None:
        super().__init__(redact)
        self._aliases: dict[str, dict[str, str]] = {}

    def name(self, name: Name) -> Name:
        """Return the aliases of a module's names."""
        module_class = self.module_class(name.module_class)
        fqn = self.fqn(name.fqn)
        path = name.label.removesuffix(f": {name.module_class}")
        if name.label == name.module_class:
            return Name(module_class, fqn, module_class)
        return Name(f"{self._path(path)}: {module_class}", fqn, module_class)

    def fqn(self, fqn: str) -> str:
        """Return a qualified name, part by part; its first part is a class."""
        first, dot, rest = fqn.partition(".")
        return f"{self._part(first, first=True)}{dot}{self._path(rest) if dot else ''}"

    def module_class(self, module_class: str) -> str:
        """Return the alias of a class."""
        return self._alias("Class", module_class)

    def thread(self, thread: str) -> str:
        """Return what a thread is called, where that is not the user's to say."""
        known = _KNOWN_THREAD.match(thread)
        return known[0] if known else self._alias("thread ", thread)

    def mark(self, text: str) -> str:
        """Return the text of a mark, where it is but a number."""
        return text if _ORDINARY_MARK.fullmatch(text) else self._alias("mark ", text)

    def counter(self, text: str) -> str:
        """Return the name or unit of a counter, where it is ours."""
        return (
            text
            if re.fullmatch(r"process RSS|cuda:\d+ (?:allocated|reserved)|bytes", text)
            else self._alias("counter ", text)
        )

    def operation(self, text: str) -> str:
        """Return the name of an operation, where it is torch's."""
        if text.startswith(_ENGINE):
            return _ENGINE + self.operation(text.removeprefix(_ENGINE))
        optimizer = _OPTIMIZER.fullmatch(text)
        if optimizer:
            return f"Optimizer.{optimizer[1]}#{self.module_class(optimizer[2])}.{optimizer[1]}"
        return text if _KNOWN_OPERATION.fullmatch(text) else self._alias("operation ", text)

    def kernel(self, text: str) -> str:
        """Return the name of a kernel up to its types, where it is a library's."""
        if re.fullmatch(r"(?:Memcpy|Memset) [\w (>-]+\)", text):
            return text
        known = _KNOWN_KERNEL.match(text)
        return known[0] if known else self._alias("kernel ", text)

    def _path(self, path: str) -> str:
        return ".".join(self._part(part) for part in path.split("."))

    def _part(self, part: str, *, first: bool = False) -> str:
        if part.isascii() and part.isdecimal():
            return part
        # Without a recording a module is called by its class and a number.
        numbered = _NUMBERED.fullmatch(part)
        if numbered and numbered[1] in self._aliases.get("Class", ()):
            return f"{self.module_class(numbered[1])}_{numbered[2]}"
        return self.module_class(part) if first else self._alias("m", part)

    def _alias(self, kind: str, text: str) -> str:
        known = self._aliases.setdefault(kind, {})
        return known.setdefault(text, f"{kind}{len(known) + 1}")
