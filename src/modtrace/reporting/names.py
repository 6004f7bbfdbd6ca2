"""The names of modules, threads, marks and operations in a report, and the private parts of texts that it replaces."""

import contextlib
import functools
import getpass
import os
import re
import socket
from collections.abc import Callable, Iterable, Mapping

from ..profiler.event_collector import NODE
from ..ring.event_text import CATEGORIES, COLLECTIVES
from ..timeline import Name
from ..timeline.contents import REGION_CLASS, range_name

_URL = r"[A-Za-z][A-Za-z0-9+.-]*://[^\s\"'<>]+"
_MAIL = r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+"
# Two names at least, or one below a home; so that a/b, and/or and // remain.
_PATH = (
    r"(?:(?<![\w>)\]])(?:~[\w.-]*|\.{1,2})?(?:/[^\s/\"'<>|*:;,()\[\]]+){2,}/?|(?<!\w)~[\w.-]*/[^\s\"'<>|*:;,()\[\]]*)"
)
_WINDOWS = r"(?:(?<!\w)[A-Za-z]:[\\/]|\\\\[\w.-]+\\)[^\s\"'<>|*:;,()\[\]]*"
_TOKEN = re.compile(
    r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
    r"|sk-[\w-]{20,}|xox[abprs]-[\w-]{10,}|AKIA[A-Z0-9]{12,})"
)
"""Keys of Hugging Face, GitHub, GitLab, OpenAI and Anthropic, Slack, AWS: by their form, whoever's they are."""
_LOCATION = re.compile(f"(?P<url>{_URL})|(?P<address>{_MAIL})|(?P<path>{_PATH}|{_WINDOWS})")

_SECRET_VARIABLE = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY", re.IGNORECASE)
_MIN_SECRET_LENGTH = 8
_MIN_NAME_LENGTH = 3
# Names of accounts and machines that identify no person, and may well be those of a module.
_IMPERSONAL_NAMES = frozenset(
    [
        *("root", "user", "users", "home", "admin", "ubuntu", "debian", "docker", "runner", "jovyan", "nobody"),
        *("localhost", "host", "python"),
    ]
)


class Redactor:
    """Replaces what identifies a person or a machine: `redact(text)`.

    That is URLs, mail addresses, paths, access tokens of known forms, and, ignoring case, `literal` wherever it occurs
    and `words` that are whole. The same text always gives the same result.
    """

    def __init__(self, literal: Mapping[str, str], words: Mapping[str, str]) -> None:
        self._literal = {text.lower(): replacement for text, replacement in literal.items()}
        self._words = {word.lower(): replacement for word, replacement in words.items()}
        self._literal_pattern = _any_of(re.escape(text) for text in _longest_first(literal))
        self._word_pattern = _any_of(rf"(?<![^\W_]){re.escape(word)}(?![^\W_])" for word in _longest_first(words))

    @classmethod
    def of_this_machine(cls, environ: Mapping[str, str] = os.environ) -> "Redactor":
        """Return one for this machine: its user, host and home, and values of variables that are named like secrets."""
        homes = {environ.get("HOME", ""), environ.get("USERPROFILE", ""), os.path.expanduser("~")}
        # A path below it is then found as one that starts with ~.
        literal = {home: "~" for home in homes if len(home) > _MIN_NAME_LENGTH and home != "/root"}
        for name, value in environ.items():
            if _SECRET_VARIABLE.search(name) and len(value) >= _MIN_SECRET_LENGTH:
                literal[value] = "<secret>"
        users = {environ.get(name, "") for name in ("USER", "LOGNAME", "USERNAME", "SUDO_USER")}
        users |= {os.path.basename(home) for home in homes}
        with contextlib.suppress(KeyError, OSError, ImportError):  # Windows has no pwd, some containers no name
            users.add(getpass.getuser())
        hosts = {socket.gethostname(), environ.get("HOSTNAME", ""), environ.get("COMPUTERNAME", "")}
        hosts |= {host.split(".")[0] for host in hosts}
        words = dict.fromkeys(_identifying(hosts), "<host>") | dict.fromkeys(_identifying(users), "<user>")
        return cls(literal, words)

    def __call__(self, text: str) -> str:
        """Return the text with all of it replaced."""
        if self._literal_pattern is not None:
            text = self._literal_pattern.sub(lambda match: self._literal[match[0].lower()], text)
        text = _TOKEN.sub("<secret>", text)
        # Before words: a path with a replaced word in it would no longer look like a path.
        if "/" in text or "\\" in text or "@" in text:
            text = _LOCATION.sub(lambda match: f"<{match.lastgroup}>", text)
        if self._word_pattern is not None:
            text = self._word_pattern.sub(lambda match: self._words[match[0].lower()], text)
        return text


def _identifying(names: Iterable[str]) -> list[str]:
    return [name for name in names if len(name) >= _MIN_NAME_LENGTH and name.lower() not in _IMPERSONAL_NAMES]


def _longest_first(texts: Iterable[str]) -> list[str]:
    return sorted(texts, key=lambda text: (-len(text), text))


def _any_of(parts: Iterable[str]) -> re.Pattern[str] | None:
    pattern = "|".join(parts)
    return re.compile(pattern, re.IGNORECASE) if pattern else None


_KNOWN_THREAD = re.compile(r"MainThread|pt_[a-z]+_\d+|(?:Thread|Dummy)-\d+|thread #?\d+|ThreadPoolExecutor-\d+_\d+")
_MODULE = re.compile(r"\w+(?:\.\w+)*: \w+")
_ORDINARY_MARK = re.compile(r"(?:step|epoch|iteration|batch) \d+")
_LIBRARIES = (
    *("aten", "c10d", "c10d_functional", "_c10d_functional", "cudnn", "fsdp", "inductor", "mkldnn", "nccl", "prim"),
    *("prims", "profiler", "quantized", "rngprims", "torch", "torchvision", "triton"),
)
_LIBRARY_ANNOTATION = re.compile(
    r"record_param_comms|ProfilerStep\#\d+|nccl:\w+|gloo:\w+|modtrace\.sync\#[\w.:-]*|DistributedDataParallel\.\w+"
    r"|\[memory\]"
)
"""Ranges that torch and modtrace name. Users name ranges too, and one that looks like an operator may be theirs."""
_LIBRARY_OPERATION = re.compile(
    rf"(?:{'|'.join(_LIBRARIES)})::[\w.:]+|\w+Backward\d+|torch::autograd::\w+|{_LIBRARY_ANNOTATION.pattern}"
)
_LIBRARY_KERNEL = re.compile(
    r"(?:void )?(?:at::|at_cuda_detail::|cub::|thrust::|cutlass|cudnn|cublas|ampere_|volta_|turing_|sm\d+_|hopper_|nccl"
    r"|flash_|splitKreduce|gemm|gemv|epilogue::|internal::)[\w:]*"
)
_KNOWN_RANGE = re.compile(
    r"clip_grad_(?:norm|value)_|GradScaler\.(?:step|unscale_|update)|torch\.compile \d+/\d+"
    r"|(?:torch|safetensors\.torch|torch\.distributed\.checkpoint)\.(?:async_save|(?:save|load)(?:_file|_model)?)"
    r"|torch\.export\.(?:draft_)?export|torch\._inductor\.(?:aot_compile|aoti_compile_and_package|aoti_load_package)"
    r"|enumerate\(DataLoader\)\#_(?:SingleProcess|MultiProcessing)DataLoaderIter\.__next__|other ranges"
    r"|garbage collection|generate"
    r"|enumerate\(DataLoader\)\#DataLoader\.__iter__"
)
_SCHEDULER = re.compile(r"LRScheduler\.step\#(.*)\.step")
_OPTIMIZER = re.compile(r"Optimizer\.(step|zero_grad)\#(.*)\.\1")
_KNOWN_COUNTER = re.compile(
    r"process RSS|allocated|could not be allocated|cuda:\d+ (?:allocated|reserved)|bytes|Total (?:Allocated|Reserved)"
)
_KNOWN_GROUP = re.compile(r"\d{1,6}|default_pg|undefined|", re.ASCII)
_IDENTIFIER = re.compile(r"(?:autograd::engine::evaluate_function: )?[\w:.~<>,*&#\[\]]{1,200}")
_MEMORY_COPY = re.compile(r"(?:Memcpy|Memset) [\w (>-]+\)")
_NUMBERED_CLASS = re.compile(r"(.*)_(\d+)", re.DOTALL)


class ReportNames:
    """The names of things in a report.

    Names of modules, classes, operations and kernels stay as recorded, but for the parts that identify a person or a
    machine. Free texts, which a user wrote for no report, are replaced by numbered aliases: marks, names of threads,
    counters and annotations that neither Python nor torch nor modtrace chose.
    """

    def __init__(self, redact: Callable[[str], str]) -> None:
        # By kind (`module`, `mark`, `thread`, …) all texts that were returned, in order.
        self.used: dict[str, dict[str, None]] = {}
        self._aliases: dict[str, dict[str, str]] = {}
        # Cached: a trace repeats the same few thousand texts a million times.
        self.text = functools.lru_cache(1 << 16)(redact)

    def name(self, name: Name) -> Name:
        """Return a module's label, fully qualified name and class; of a range of `record_function` an alias of each."""
        if name.module_class == REGION_CLASS:
            return Name(self.annotation(name.label), self._region_fqn(name.fqn), REGION_CLASS)
        return self._of_module(name) if name.category is None else self._range(name)

    def module(self, fqn: str, module_class: str) -> tuple[str, str]:
        """Return a module's fully qualified name and its class."""
        if module_class == REGION_CLASS:
            return self._region_fqn(fqn), module_class
        return self.fqn(fqn), self.module_class(module_class)

    def fqn(self, fqn: str) -> str:
        """Return a module's fully qualified name."""
        return self._use("module", self.text(fqn))

    def module_class(self, module_class: str) -> str:
        """Return the name of a module's class."""
        return self._use("class", self.text(module_class))

    def inner_modules(self, modules: str) -> str | None:
        """Return the paths and classes of the modules inside of what was compiled; None if there is anything else."""
        parts = [part.split(": ") for part in modules.split(", ")]
        if not all(_MODULE.fullmatch(": ".join(part)) for part in parts):
            return None
        return ", ".join(f"{self.path(path)}: {self.module_class(module_class)}" for path, module_class in parts)

    def path(self, path: str) -> str:
        """Return the path of a module below another one."""
        return self.text(path)

    def thread(self, thread: str) -> str:
        """Return a thread's name if Python or torch chose it, else an alias."""
        match = _KNOWN_THREAD.match(thread)
        return self._use("thread", match[0] if match else self._alias("thread ", thread))

    def mark(self, text: str) -> str:
        """Return the text of a mark if it is only a number, else an alias."""
        return self._use("mark", text if _ORDINARY_MARK.fullmatch(text) else self._alias("mark ", text))

    def counter(self, text: str) -> str:
        """Return the name or unit of a counter if modtrace or torch chose it, else an alias."""
        return self._use("counter", text if _KNOWN_COUNTER.fullmatch(text) else self._alias("counter ", text))

    def collective(self, operator: str) -> str:
        """Return the operator of a collective if torch has it, else an alias."""
        return self._use(
            "collective", operator if operator in COLLECTIVES or not operator else self._alias("collective ", operator)
        )

    def group(self, text: str) -> str:
        """Return the name or description of a process group if torch chose it, else an alias."""
        return self._use("group", text if _KNOWN_GROUP.fullmatch(text) else self._alias("group ", text))

    def annotation(self, text: str) -> str:
        """Return the name of a user's annotation (`record_function`) if torch chose it, else an alias."""
        name = self._optimizer(text) or (text if _LIBRARY_ANNOTATION.fullmatch(text) else None)
        return self._use("annotation", name or self._alias("annotation ", text))

    def operation(self, text: str) -> str:
        """Return the name of an operation in a profiler's trace, an alias if it is not an identifier."""
        name = self._known_operation(text) or (self.text(text) if _IDENTIFIER.fullmatch(text) else None)
        return self._use("operation", name or self._alias("operation ", text))

    def kernel(self, text: str) -> str:
        """Return the name of a kernel."""
        return self._use("kernel", self.text(text))

    def _of_module(self, name: Name) -> Name:
        return Name(self.text(name.label), self.fqn(name.fqn), self.module_class(name.module_class))

    def _range(self, name: Name) -> Name:
        # What follows the id of a compilation is its reason, with names of the user's.
        if library_range := _KNOWN_RANGE.fullmatch(name.label.partition(": ")[0]):
            label = self._use("annotation", library_range[0])
        elif scheduler := _SCHEDULER.fullmatch(name.label):
            label = self._use("annotation", f"LRScheduler.step#{self.module_class(scheduler[1])}.step")
        else:
            label = self.annotation(name.label)
        return range_name(label, name.category if name.category in CATEGORIES else "user")

    def _region_fqn(self, fqn: str) -> str:
        # The name of a range inside others holds the names of all of them: it is the user's text, however it looks.
        return self._use("annotation", self._alias("annotation ", fqn))

    def _known_operation(self, text: str) -> str | None:
        """Return the name of an operation if torch chose it."""
        return self._optimizer(text) or (text if _LIBRARY_OPERATION.fullmatch(text) else None)

    def _optimizer(self, text: str) -> str | None:
        """Return the name of the range that torch makes around an optimizer's method."""
        optimizer = _OPTIMIZER.fullmatch(text)
        if optimizer is None:
            return None
        return f"Optimizer.{optimizer[1]}#{self.module_class(optimizer[2])}.{optimizer[1]}"

    def _use(self, kind: str, text: str) -> str:
        self.used.setdefault(kind, {})[text] = None
        return text

    def _alias(self, kind: str, text: str) -> str:
        of_kind = self._aliases.setdefault(kind, {})
        return of_kind.setdefault(text, f"{kind}{len(of_kind) + 1}")


class AliasedNames(ReportNames):
    """Aliases for names of modules and classes too: `Net.blocks.0.attn` becomes `Class1.m1.0.m2`.

    They are numbered in the order in which names appear, so the same model always gets the same aliases. Numbers in
    paths stay, and so do the names that torch and its libraries give their own operations and kernels: they say nothing
    about the model's source.
    """

    def _of_module(self, name: Name) -> Name:
        module_class = self.module_class(name.module_class)
        fqn = self.fqn(name.fqn)
        path = name.label.removesuffix(f": {name.module_class}")
        if name.label == name.module_class:
            return Name(module_class, fqn, module_class)
        return Name(f"{self.path(path)}: {module_class}", fqn, module_class)

    def fqn(self, fqn: str) -> str:
        """Return a fully qualified name aliased part by part; its first part is a class."""
        first, dot, rest = fqn.partition(".")
        return self._use("module", f"{self._part(first, first=True)}{dot}{self.path(rest) if dot else ''}")

    def module_class(self, module_class: str) -> str:
        """Return the alias of a class."""
        return self._use("class", self._alias("Class", module_class))

    def operation(self, text: str) -> str:
        """Return the name of an operation if it is torch's, else an alias."""
        if text.startswith(NODE):
            return NODE + self.operation(text.removeprefix(NODE))
        return self._use("operation", self._known_operation(text) or self._alias("operation ", text))

    def kernel(self, text: str) -> str:
        """Return the name of a kernel, without its types, if it is a library's, else an alias."""
        match = _MEMORY_COPY.fullmatch(text) or _LIBRARY_KERNEL.match(text)
        return self._use("kernel", match[0] if match else self._alias("kernel ", text))

    def path(self, path: str) -> str:
        """Return a path aliased part by part."""
        return ".".join(self._part(part) for part in path.split("."))

    def _part(self, part: str, *, first: bool = False) -> str:
        if part.isascii() and part.isdecimal():
            return part
        # The profiler names modules by class and number (`Linear_3`).
        numbered = _NUMBERED_CLASS.fullmatch(part)
        if numbered and numbered[1] in self._aliases.get("Class", ()):
            return f"{self.module_class(numbered[1])}_{numbered[2]}"
        return self.module_class(part) if first else self._alias("m", part)
