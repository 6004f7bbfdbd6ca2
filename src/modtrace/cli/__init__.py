"""The command line: `commands` has a file per subcommand, the modules beside it what they share."""

import errno
import os
import sys
from types import TracebackType

from .group import ScriptError, group

__all__ = ["main"]

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EIO}
"""Errors of standard output alone: those of files that we write are `WriteError`."""


def main() -> None:
    """Run the `modtrace` command.

    Our own errors are one line on stderr and exit code 1; wrong usage is exit code 2. What a script under
    `modtrace run` raises leaves this function unchanged, so that the interpreter ends as it would have without us.
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
    # A function of its own: raised in an except block, the script's error would get ours as its context.
    try:
        group(prog_name="modtrace")
    except ScriptError as error:
        return error
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        # Buffered output would fail once more when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(f"modtrace: the output cannot be written: {error.strerror}")
    return None
