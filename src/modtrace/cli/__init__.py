"""The command line: every module here is the subcommand of its name, and has it as `command`."""

from __future__ import annotations

import sys
from types import TracebackType

from ._group import ScriptEnded, group

__all__ = ["main"]


def main() -> None:
    """Run the `modtrace` command.

    A broken rule of ours is one line on stderr and exit code 1, wrong usage is 2. What a script under `modtrace run`
    raises leaves this function as it is, so that the interpreter ends as it would have without us.
    """
    ended = _run()
    if ended is None:
        return
    error, traceback = ended.error, ended.traceback
    show = sys.excepthook

    def show_the_scripts_own(kind: type[BaseException], value: BaseException, _: TracebackType | None) -> None:
        show(kind, value.with_traceback(traceback), traceback)

    sys.excepthook = show_the_scripts_own
    raise error


def _run() -> ScriptEnded | None:
    # A function of its own: raised in an except block, the script's error would get ours as its context.
    try:
        group(prog_name="modtrace")
    except ScriptEnded as ended:
        return ended
    return None
