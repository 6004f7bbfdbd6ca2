"""`modtrace doctor`: installed versions, the engine that records and the reason, for a bug report."""

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import click

import modtrace

from ..._errors import EngineError, is_free_threaded
from ..._tables import counted, json_text
from ..._version import __version__
from ..options import TextFormat, echo, show_status, text_or_json_option


def installed(distribution: str) -> str | None:
    """Return the installed version of a distribution; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


_PACKAGE = Path(modtrace.__file__).parent
_LIBRARIES = ("numpy", "orjson", "perfetto", "protobuf", "click", "rich")
_LABEL_WIDTH = 12


@click.command("doctor")
@text_or_json_option
def doctor_command(output_format: TextFormat) -> None:
    """Print one screen on installed versions, the engine that records and the reason, and the machine.

    Made to be pasted into a bug report: the home folder is written ~, and no host, user or script is named. Exits with
    1 if modtrace cannot record here.
    """
    with show_status("checking"):
        home = os.path.expanduser("~")
        engine = [*_engine()]  # first, because it imports torch, whose version is read next
        facts = (*_versions(), *engine, *_machine())
        lines = {label: text.replace(home, "~") if len(home) > 1 else text for label, text in facts}
    if output_format == "json":
        click.echo(json_text(lines), nl=False)
    else:
        for label, text in lines.items():
            echo(f"{label:{_LABEL_WIDTH}} {text}")
    if installed("torch") is None or is_free_threaded() or sys.modules.get("torch") is None:
        raise click.exceptions.Exit(1)


def _versions() -> Iterator[tuple[str, str]]:
    yield "modtrace", f"{__version__} in {_PACKAGE}"
    kind = platform.python_implementation()
    if is_free_threaded():
        kind += ", free-threaded: nothing can be recorded"
    yield "python", f"{platform.python_version()} ({kind}), {sys.executable}"
    yield "system", f"{platform.system()} {platform.release()}, {platform.machine()}, {' '.join(platform.libc_ver())}"
    # pip's version is 2.13.0 and torch's own 2.13.0+cu130; an engine is built for the latter.
    torch = installed("torch") and getattr(sys.modules.get("torch"), "__version__", installed("torch"))
    yield "torch", torch or "not installed: nothing can be recorded; pip install 'modtrace[torch]'"
    yield "libraries", ", ".join(f"{name} {installed(name) or 'missing'}" for name in _LIBRARIES)
    set_variables = [name for name in ("MODTRACE", "MODTRACE_BUILD", "MODTRACE_CACHE", "CXX") if os.environ.get(name)]
    yield "environment", ", ".join(f"{name}={os.environ[name]}" for name in set_variables) or "no variable of modtrace"


def _engine() -> Iterator[tuple[str, str]]:
    is_writable, cache = _cache()
    if installed("torch") is not None:
        try:
            from ...track.native.build import missing_compiler
            from ...track.native.library import find_library, why_unavailable

            try:
                # First the library on disk: this process may have loaded one that is gone since.
                library, reason = str(find_library()), why_unavailable()
            except EngineError as error:
                library, reason = "no", str(error)
            no_compiler = missing_compiler()
            if reason is not None and (no_compiler is not None or not is_writable):
                reason = _without_build(reason)
            yield "engine", "native" if reason is None else f"python; the native one: {reason}"
            yield "built", library if reason is None else "no"
            yield "compiler", no_compiler or os.environ.get("CXX") or shutil.which("c++") or "c++"
        except Exception as error:  # a broken torch can raise anything
            yield "engine", f"none: torch cannot be imported: {' '.join(str(error).split())}"
    yield "cache", cache


def _cache() -> tuple[bool, str]:
    """Return whether engines can be built into the cache, and a description of the cache."""
    from ..._files import cache_home

    try:
        home = folder = cache_home()
    except EngineError as error:
        return False, str(error)
    while not folder.exists():
        folder = folder.parent
    engines = counted(len(list(home.glob("*/*.so"))), "engine")
    if os.access(folder, os.W_OK | os.X_OK):
        return True, f"{home}, can be written, {engines}"
    return False, f"{home}, cannot be written; set MODTRACE_CACHE, {engines}"


def _without_build(reason: str) -> str:
    """Return the reason for a missing native engine, without the advice to build it, which would fail."""
    cause, _, advice = reason.rpartition("; ")
    return cause if "`modtrace build" in advice else reason


def _machine() -> Iterator[tuple[str, str]]:
    from ...view.server import has_browser

    page = _PACKAGE / "view" / "viewer.html"
    yield "viewer", f"{page.stat().st_size:,} bytes" if page.is_file() else f"missing: {page}"
    yield "browser", "opens here" if has_browser() else "none here; `modtrace view` says how to open the page elsewhere"
    yield "py-spy", shutil.which("py-spy") or "missing; `modtrace where --stacks` needs it: pip install py-spy"
    yield "shm", _free("/dev/shm")  # noqa: S108 (where a ring may be put)
    yield "folder", f"{_free('.')}, {'can' if os.access('.', os.W_OK) else 'cannot'} be written"


def _free(folder: str) -> str:
    try:
        return f"{shutil.disk_usage(folder).free / 1e9:,.1f} GB free"
    except OSError:
        return "not there"
