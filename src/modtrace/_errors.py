"""The errors that modtrace raises on purpose.

ModtraceError
├── RecordingError      a recording cannot be started, or is used in the wrong state
├── EngineError         the native engine is asked for and cannot be had
├── RingError           a ring file cannot be made, read or trusted
├── TraceError          an input trace is broken; names the file and the byte offset
└── WriteError          an output cannot be written; names the path
"""

import os

__all__ = ["EngineError", "ModtraceError", "RecordingError", "RingError", "TraceError", "WriteError"]


class ModtraceError(Exception):
    """The base of every error that modtrace raises on purpose."""


class RecordingError(ModtraceError):
    """A recording cannot be started, or is used in the wrong state."""


class EngineError(ModtraceError):
    """The native engine is asked for and cannot be had; the message says what to run."""


class RingError(ModtraceError):
    """A ring file cannot be made, read or trusted; the message names the file."""


class TraceError(ModtraceError):
    """An input trace is broken.

    Args:
        path: the file.
        message: what is wrong, and what to do.
        offset: the byte at which it is wrong, where known.
    """

    def __init__(self, path: str | os.PathLike[str], message: str, offset: int | None = None) -> None:
        self.path = os.fspath(path)
        self.offset, self.message = offset, message
        at = "" if offset is None else f", byte {offset}"
        super().__init__(f"{self.path}{at}: {message}")

    def __reduce__(self) -> "tuple[type[TraceError], tuple[str, str, int | None]]":
        # `Exception` would be made anew of its text alone, as where a process hands it to another.
        return type(self), (self.path, self.message, self.offset)


class WriteError(ModtraceError):
    """An output cannot be written; the message names the path, and an existing file there is intact."""
