"""What to do with a file that was written."""

import shlex
import shutil
import sys
from pathlib import Path


def next_step_hint(path: str) -> str:
    """Return a line that says how to look at the file in `path`, a trace or a ring."""
    suffix = Path(path).suffix.lower()
    if suffix == ".html":
        return f"Next: open {path} in a browser; it needs no network"
    if suffix in (".folded", ".json") and path.lower().endswith((".folded", ".speedscope.json")):
        return f"Next: drop {path} onto https://www.speedscope.app"
    view = f"Next: {_command()} view {shlex.quote(path)}"
    if path.lower().endswith((".json", ".json.gz", ".pftrace", ".pftrace.gz")):
        return f"{view}, or drop {path} onto https://ui.perfetto.dev"
    return f"{view}, or attach it to a bug report" if suffix == ".zip" else view


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
