"""The errors that modtrace raises on purpose, and checks for required packages such as torch.

ModtraceError
├── ArgumentError       an argument has a value that makes no sense; also a ValueError
├── RecordingError      a recording cannot be started, or is used in the wrong state
│   └── TorchMissingError   torch is not installed; also an ImportError
├── EngineError         the native engine is requested and not available
├── RingError           a ring file cannot be made, read or trusted
├── TraceError          an input trace is broken; names the file and the byte offset
└── WriteError          an output cannot be written; names the path
"""

import importlib.util
import os
import platform
import sysconfig

__all__ = [
    "ArgumentError",
    "EngineError",
    "ModtraceError",
    "RecordingError",
    "RingError",
    "TorchMissingError",
    "TraceError",
    "WriteError",
]


class ModtraceError(Exception):
    """The base of every error that modtrace raises on purpose."""


class ArgumentError(ModtraceError, ValueError):
    """An argument has a value that makes no sense; the message names the values that do."""


class RecordingError(ModtraceError):
    """A recording cannot be started, or is used in the wrong state."""


class EngineError(ModtraceError):
    """The native engine is requested and not available; the message gives the command that builds it."""


class RingError(ModtraceError):
    """A ring file cannot be made, read or trusted; the message names the file."""


class TraceError(ModtraceError):
    """An input trace is broken.

    Args:
        path: the file.
        message: the fault, and advice for the user.
        offset: the position of the fault in bytes, if it is known.
    """

    def __init__(self, path: str | os.PathLike[str], message: str, offset: int | None = None) -> None:
        self.path = os.fspath(path)
        self.offset, self.message = offset, message
        position = "" if offset is None else f", byte {offset}"
        super().__init__(f"{self.path}{position}: {message}")

    def __reduce__(self) -> "tuple[type[TraceError], tuple[str, str, int | None]]":
        # Without this, unpickling in another process would call the class with the text as its only argument.
        return type(self), (self.path, self.message, self.offset)


class WriteError(ModtraceError):
    """An output cannot be written; the message names the path. An existing file at that path is intact."""


class TorchMissingError(RecordingError, ImportError):
    """A name that records is requested, and torch is not installed.

    It is an ImportError, not an AttributeError: Python replaces the message of an AttributeError by its own in
    `from modtrace import record`.
    """

    def __init__(self) -> None:
        super().__init__("torch is not installed, and without it nothing is recorded: pip install 'modtrace[torch]'")


def check_can_record() -> None:
    """Raise TorchMissingError if torch, which is not imported, is missing, RecordingError on a free-threaded Python."""
    if is_free_threaded():
        raise RecordingError(
            f"this is a free-threaded build of CPython {platform.python_version()}, which modtrace does not record in; "
            "use the ordinary one, which has the GIL (files can be read with both)"
        )
    if importlib.util.find_spec("torch") is None:
        raise TorchMissingError


def require_extra(extra: str, *modules: str) -> None:
    """Raise ModtraceError, whose message names the extra to install, if one of the extra's modules is missing."""
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        raise ModtraceError(f"this needs {' and '.join(missing)}; run: pip install 'modtrace[{extra}]'")


def is_free_threaded() -> bool:
    """Return whether this Python was built to run without the GIL, even if the GIL is enabled now."""
    return bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
