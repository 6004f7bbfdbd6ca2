"""A stand-in for the C++ compiler that takes no time."""

from __future__ import annotations

from pathlib import Path

__all__ = ["write_compiler"]

_COMPILER = """#!/bin/sh
# Compiles nothing: what it "links" is the engine that is built already.
case "$*" in *--version*) exit 0 ;; esac
echo run >> "{log}"
while [ "$1" != -o ]; do [ "$1" = -shared ] && linking=yes; shift; done
{fails}
if [ -n "$linking" ]; then cp "{built}" "$2"; else touch "$2"; fi
"""


def write_compiler(path: Path, log: Path, built: Path, *, error: str | None = None) -> None:
    """Write a script that acts as the compiler.

    Args:
        path: the script.
        log: gets a line each time something is compiled or linked.
        built: the library that it gives.
        error: what it says instead, and fails.
    """
    path.write_text(_COMPILER.format(log=log, built=built, fails="" if error is None else f"echo '{error}'; exit 1"))
    path.chmod(0o755)
