"""What people read: text that is safe to print, numbers of things, and what to do with a written file."""

import shlex
import shutil
import sys
import textwrap
from pathlib import Path


def is_terminal(stream: object) -> bool:
    """Tell whether a standard stream is a terminal.

    It is none where it is None, as one that was closed before Python began, where it is closed since, and where the
    program has put an object of its own there that does not say.
    """
    try:
        return bool(stream.isatty())  # type: ignore[attr-defined]
    except (AttributeError, ValueError, OSError):
        return False


def counted(number: int, noun: str) -> str:
    """Return `1 span`, `1,200 spans`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def ratio_text(ratio: float, form: str = "{:+.1%}", measure: str = "long") -> str:
    """Return by how much something grew, as a percentage; above 1000 % as a multiple, `243 times as long`."""
    return f"{ratio + 1:,.0f} times as {measure}" if ratio > 10 else form.format(ratio)


def wrapped(text: str, width: int | None) -> list[str]:
    """Return a text as lines of at most so many characters; as one line if there is no limit."""
    return textwrap.wrap(text, width) if width else [text] if text else []


def printable(text: str) -> str:
    """Return text with control, format and lone surrogate characters as escapes.

    So a name can neither move the cursor, nor turn the line around, nor begin a new one.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def cell_width(text: str) -> int:
    """Return how many cells of a terminal a printable text takes: 2 for a wide character, 0 for a combining one."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len  # most texts do without

    return cell_len(text)


def padded(text: str, width: int) -> str:
    """Return a printable text with blanks after it, `width` cells wide at least."""
    return text + " " * (width - cell_width(text))


def next_step_hint(path: str) -> str:
    """Return a line that says how to read and see the file in `path`, a trace or a ring."""
    suffix = Path(path).suffix.lower()
    if suffix == ".html":
        return f"Next: open {path} in a browser; it needs no network"
    if suffix in (".folded", ".json") and path.lower().endswith((".folded", ".speedscope.json")):
        return f"Next: drop {path} onto https://www.speedscope.app"
    command, quoted = _command(), shlex.quote(path)
    if suffix == ".zip":
        return f"Next: {command} view {quoted}, or attach it to a bug report"
    hint = f"Next: {command} summary {quoted}; to see it, {command} view {quoted}"
    is_perfetto = path.lower().endswith((".json", ".json.gz", ".pftrace", ".pftrace.gz"))
    return f"{hint}, or drop {path} onto https://ui.perfetto.dev" if is_perfetto else hint


def share_hint(path: str) -> str:
    """Return a line that says how to give the recording in `path` to others."""
    if path.lower().endswith(".zip"):
        return f"To show it to others, give them {path}: they open the viewer.html in it, or run modtrace view"
    archive = f"{Path(path.removesuffix('.gz')).stem}.zip"
    return f"To give it to others: {_command()} report {shlex.quote(path)} -o {shlex.quote(archive)}"


def _command() -> str:
    """Return how to run modtrace, also where the virtual environment is not activated."""
    if shutil.which("modtrace"):
        return "modtrace"
    script = Path(sys.executable).with_name("modtrace")
    return shlex.quote(str(script)) if script.exists() else f"{shlex.quote(sys.executable)} -m modtrace"
