"""The command line: `commands` has one file per subcommand, the other modules are shared by them."""

import errno
import os
import sys
from types import TracebackType

from .group import ScriptError, group

__all__ = ["main"]

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EIO}
"""Error numbers of a failed write to standard output; failed writes of files raise `WriteError`."""


def main() -> None:
    """Run the `modtrace` command.

    An error of modtrace prints one line on stderr and exits with 1; wrong usage exits with 2. An exception of a script
    under `modtrace run` leaves this function unchanged, so that the interpreter ends as it would without modtrace.
    """
    script_error = _run()
    if script_error is None:
        return
    error, traceback = script_error.error, script_error.traceback
    original_hook = sys.excepthook

    def show_script_traceback(kind: type[BaseException], value: BaseException, _: TracebackType | None) -> None:
        original_hook(kind, value.with_traceback(traceback), traceback)

    sys.excepthook = show_script_traceback
    raise error


def _run() -> ScriptError | None:
    # Separate function: if raised in an except block, the script's error would get `ScriptError` as its context.
    try:
        group(prog_name="modtrace")
    except ScriptError as error:
        return error
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        # Buffered output would fail again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(f"modtrace: the output cannot be written: {error.strerror}")
    return None
