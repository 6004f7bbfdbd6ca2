"""`modtrace build`: compile the native engine."""

import click

from ..._errors import check_can_record
from ..options import echo, show_status


@click.command("build")
@click.option("--force", is_flag=True, help="Build even if it is already built.")
def build_command(force: bool) -> None:
    """Compile the native engine against the installed torch, into the user's cache folder.

    It needs a C++ compiler, Python's headers, and about 25 seconds. `modtrace run` and `modtrace demo` build the engine
    themselves if they can.
    """
    check_can_record()
    with show_status("importing torch"):
        from ...track.native.build import build
        from ...track.native.library import is_built
    will_build = force or not is_built()
    with show_status("compiling the native engine"):
        path = build(force)
    echo(f"{'built' if will_build else 'already built'}: {path}")
