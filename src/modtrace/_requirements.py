"""What has to be there: torch and a Python with the GIL to record, and packages of extras. Files are read without."""

import importlib.util
import platform
import sysconfig

from ._errors import ModtraceError, RecordingError


class TorchMissingError(RecordingError, ImportError):
    """Something that records is asked for, and torch is not installed."""

    def __init__(self) -> None:
        super().__init__("torch is not installed, and without it nothing is recorded: pip install 'modtrace[torch]'")


def check_can_record() -> None:
    """Raise TorchMissingError, without importing torch, if there is none, RecordingError for a free-threaded Python."""
    if is_free_threaded():
        raise RecordingError(
            f"this is a free-threaded build of CPython {platform.python_version()}, which modtrace does not record in; "
            "use the ordinary one, which has the GIL (files can be read with both)"
        )
    if importlib.util.find_spec("torch") is None:
        raise TorchMissingError


def require_extra(extra: str, *modules: str) -> None:
    """Check that the modules that an extra installs are there; else raises ModtraceError, which says what to run."""
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        raise ModtraceError(f"this needs {' and '.join(missing)}; run: pip install 'modtrace[{extra}]'")


def is_free_threaded() -> bool:
    """Return whether this Python was built to run without the GIL, whether or not it does now."""
    return bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
