"""Names of modules, threads, marks and operations in a report, and the replacement of private parts of texts."""

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
# Two or more names, or one below a home, so that a/b, and/or and // are not paths.
_PATH = (
    r"(?:(?<![\w>)\]])(?:~[\w.-]*|\.{1,2})?(?:/[^\s/\"'<>|*:;,()\[\]]+){2,}/?|(?<!\w)~[\w.-]*/[^\s\"'<>|*:;,()\[\]]*)"
)
_WINDOWS = r"(?:(?<!\w)[A-Za-z]:[\\/]|\\\\[\w.-]+\\)[^\s\"'<>|*:;,()\[\]]*"
_TOKEN = re.compile(
    r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
    r"|sk-[\w-]{20,}|xox[abprs]-[\w-]{10,}|AKIA[A-Z0-9]{12,})"
)
"""Forms of the keys of Hugging Face, GitHub, GitLab, OpenAI and Anthropic, Slack and AWS, from any user."""
_LOCATION = re.compile(f"(?P<url>{_URL})|(?P<address>{_MAIL})|(?P<path>{_PATH}|{_WINDOWS})")

_SECRET_VARIABLE = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY", re.IGNORECASE)
_MIN_SECRET_LENGTH = 8
_MIN_NAME_LENGTH = 3
# Names of accounts and machines that do not identify a person, and are likely names of modules.
_IMPERSONAL_NAMES = frozenset(
    [
        *("root", "user", "users", "home", "admin", "ubuntu", "debian", "docker", "runner", "jovyan", "nobody"),
        *("localhost", "host", "python"),
    ]
)


class Redactor:
    """Replaces the parts of a text that identify a person or a machine: `redact(text)`.

    These are URLs, mail addresses, paths, known forms of access tokens, and, ignoring case, the keys of `literal` and,
    as whole words, of `words`.
    """

    def __init__(self, literal: Mapping[str, str], words: Mapping[str, str]) -> None:
        self._literal = {text.lower(): replacement for text, replacement in literal.items()}
        self._words = {word.lower(): replacement for word, replacement in words.items()}
        self._literal_pattern = _any_of(re.escape(text) for text in _longest_first(literal))
        self._word_pattern = _any_of(rf"(?<![^\W_]){re.escape(word)}(?![^\W_])" for word in _longest_first(words))

    @classmethod
    def of_this_machine(cls, environ: Mapping[str, str] = os.environ) -> "Redactor":
        """Return a redactor of this machine's user, host and home, and of variables whose names suggest secrets."""
        homes = {environ.get("HOME", ""), environ.get("USERPROFILE", ""), os.path.expanduser("~")}
        # A path below the home then starts with ~, and is recognized as a path.
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
        """Return the text with all private parts replaced."""
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
"""Names of ranges that torch and modtrace create. A range named like an operator is not listed: it may be a user's."""
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
    """Makes the names in a report.

    Names of modules, classes, operations and kernels stay as recorded, except for parts that identify a person or a
    machine. Free texts, which a user did not write for a report, are replaced by numbered aliases: marks, and names of
    threads, counters and annotations, unless Python, torch or modtrace chose them.
    """

    def __init__(self, redact: Callable[[str], str]) -> None:
        # All texts that were returned, in order, by kind (`module`, `mark`, `thread`, …).
        self.used_texts: dict[str, dict[str, None]] = {}
        self._aliases: dict[str, dict[str, str]] = {}
        # Cached: a trace repeats a few thousand texts a million times.
        self.text = functools.lru_cache(1 << 16)(redact)

    def name(self, name: Name) -> Name:
        """Return a module's label, fully qualified name and class, or aliases of them for a range."""
        if name.module_class == REGION_CLASS:
            return Name(self.annotation(name.label), self._region_fqn(name.fqn), REGION_CLASS)
        return self._clean_module_name(name) if name.category is None else self._range(name)

    def module(self, fqn: str, module_class: str) -> tuple[str, str]:
        """Return a module's fully qualified name and its class."""
        if module_class == REGION_CLASS:
            return self._region_fqn(fqn), module_class
        return self.fqn(fqn), self.module_class(module_class)

    def fqn(self, fqn: str) -> str:
        """Return a module's fully qualified name."""
        return self._note_used("module", self.text(fqn))

    def module_class(self, module_class: str) -> str:
        """Return the name of a module's class."""
        return self._note_used("class", self.text(module_class))

    def inner_modules(self, modules: str) -> str | None:
        """Return the paths and classes of the modules inside a compiled region; None if `modules` has another form."""
        parts = [part.split(": ") for part in modules.split(", ")]
        if not all(_MODULE.fullmatch(": ".join(part)) for part in parts):
            return None
        return ", ".join(f"{self.path(path)}: {self.module_class(module_class)}" for path, module_class in parts)

    def path(self, path: str) -> str:
        """Return the path of a module below another one."""
        return self.text(path)

    def thread(self, thread: str) -> str:
        """Return a thread's name if Python or torch chose it, otherwise an alias."""
        match = _KNOWN_THREAD.match(thread)
        return self._note_used("thread", match[0] if match else self._alias("thread ", thread))

    def mark(self, text: str) -> str:
        """Return the text of a mark if it is only a word such as `step` and a number, otherwise an alias."""
        return self._note_used("mark", text if _ORDINARY_MARK.fullmatch(text) else self._alias("mark ", text))

    def counter(self, text: str) -> str:
        """Return the name or unit of a counter if modtrace or torch chose it, otherwise an alias."""
        return self._note_used("counter", text if _KNOWN_COUNTER.fullmatch(text) else self._alias("counter ", text))

    def collective(self, operator: str) -> str:
        """Return the operator of a collective if torch has it, otherwise an alias."""
        return self._note_used(
            "collective", operator if operator in COLLECTIVES or not operator else self._alias("collective ", operator)
        )

    def group(self, text: str) -> str:
        """Return the name or description of a process group if torch chose it, otherwise an alias."""
        return self._note_used("group", text if _KNOWN_GROUP.fullmatch(text) else self._alias("group ", text))

    def annotation(self, text: str) -> str:
        """Return the name of an annotation (`record_function`) if torch chose it, otherwise an alias."""
        name = self._optimizer(text) or (text if _LIBRARY_ANNOTATION.fullmatch(text) else None)
        return self._note_used("annotation", name or self._alias("annotation ", text))

    def operation(self, text: str) -> str:
        """Return the name of an operation in a profiler's trace, or an alias if it is not an identifier."""
        name = self._known_operation(text) or (self.text(text) if _IDENTIFIER.fullmatch(text) else None)
        return self._note_used("operation", name or self._alias("operation ", text))

    def kernel(self, text: str) -> str:
        """Return the name of a kernel."""
        return self._note_used("kernel", self.text(text))

    def _clean_module_name(self, name: Name) -> Name:
        return Name(self.text(name.label), self.fqn(name.fqn), self.module_class(name.module_class))

    def _range(self, name: Name) -> Name:
        # The text after the id of a compilation is its reason, which may contain names of the user.
        if library_range := _KNOWN_RANGE.fullmatch(name.label.partition(": ")[0]):
            label = self._note_used("annotation", library_range[0])
        elif scheduler := _SCHEDULER.fullmatch(name.label):
            label = self._note_used("annotation", f"LRScheduler.step#{self.module_class(scheduler[1])}.step")
        else:
            label = self.annotation(name.label)
        return range_name(label, name.category if name.category in CATEGORIES else "user")

    def _region_fqn(self, fqn: str) -> str:
        # The name of an inner range contains the names of all outer ranges, so it is always the user's text.
        return self._note_used("annotation", self._alias("annotation ", fqn))

    def _known_operation(self, text: str) -> str | None:
        """Return the name of an operation if torch chose it, otherwise None."""
        return self._optimizer(text) or (text if _LIBRARY_OPERATION.fullmatch(text) else None)

    def _optimizer(self, text: str) -> str | None:
        """Return the name of a range that torch makes around an optimizer's method; None for other texts."""
        optimizer = _OPTIMIZER.fullmatch(text)
        if optimizer is None:
            return None
        return f"Optimizer.{optimizer[1]}#{self.module_class(optimizer[2])}.{optimizer[1]}"

    def _note_used(self, kind: str, text: str) -> str:
        self.used_texts.setdefault(kind, {})[text] = None
        return text

    def _alias(self, kind: str, text: str) -> str:
        aliases = self._aliases.setdefault(kind, {})
        return aliases.setdefault(text, f"{kind}{len(aliases) + 1}")


class AliasedNames(ReportNames):
    """Aliases for names of modules and classes too: `Net.blocks.0.attn` becomes `Class1.m1.0.m2`.

    Aliases are numbered in order of appearance, so the same model always gets the same aliases. Numbers in paths stay,
    and so do names of operations and kernels of libraries such as torch: they reveal nothing about the model's source.
    """

    def _clean_module_name(self, name: Name) -> Name:
        module_class = self.module_class(name.module_class)
        fqn = self.fqn(name.fqn)
        path = name.label.removesuffix(f": {name.module_class}")
        if name.label == name.module_class:
            return Name(module_class, fqn, module_class)
        return Name(f"{self.path(path)}: {module_class}", fqn, module_class)

    def fqn(self, fqn: str) -> str:
        """Return a fully qualified name aliased part by part; its first part is a class."""
        root, dot, path = fqn.partition(".")
        return self._note_used("module", f"{self._part(root, is_class=True)}{dot}{self.path(path) if dot else ''}")

    def module_class(self, module_class: str) -> str:
        """Return the alias of a class."""
        return self._note_used("class", self._alias("Class", module_class))

    def operation(self, text: str) -> str:
        """Return the name of an operation if torch chose it, otherwise an alias."""
        if text.startswith(NODE):
            return NODE + self.operation(text.removeprefix(NODE))
        return self._note_used("operation", self._known_operation(text) or self._alias("operation ", text))

    def kernel(self, text: str) -> str:
        """Return the name of a library's kernel, without its types; an alias of other kernels."""
        match = _MEMORY_COPY.fullmatch(text) or _LIBRARY_KERNEL.match(text)
        return self._note_used("kernel", match[0] if match else self._alias("kernel ", text))

    def path(self, path: str) -> str:
        """Return a path aliased part by part."""
        return ".".join(self._part(part) for part in path.split("."))

    def _part(self, part: str, *, is_class: bool = False) -> str:
        if part.isascii() and part.isdecimal():
            return part
        # The profiler names modules by class and number (`Linear_3`).
        match = _NUMBERED_CLASS.fullmatch(part)
        if match and match[1] in self._aliases.get("Class", ()):
            return f"{self.module_class(match[1])}_{match[2]}"
        return self.module_class(part) if is_class else self._alias("m", part)
