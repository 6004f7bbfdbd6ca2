"""`modtrace view`: open a trace in the browser."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import click

__all__ = ["command"]


@click.command("view", short_help="Open a trace in the browser.")
@click.argument("trace", type=click.Path())
@click.option("--offline", is_flag=True, help="Show the modules in modtrace's own page, which needs no network.")
def command(trace: str, offline: bool) -> None:
    """Open TRACE in ui.perfetto.dev, with the module tracks on top.

    TRACE is any file that modtrace reads. It goes from a server on this machine to the browser and nowhere else; the
    server ends when the browser has it.
    """
    from .._errors import ModtraceError
    from ..read import load
    from ..view.browser import WAIT_TIMEOUT_S, open_and_serve
    from ..view.server import PERFETTO_ORIGIN, Page, TraceServer

    with tempfile.TemporaryDirectory(prefix="modtrace-") as folder:
        if offline:
            from ..write.html import render_html

            server = TraceServer(Page(render_html(load(trace))))
        else:
            from ..view.perfetto_page import handover_page
            from ..view.viewable import ensure_viewable

            path, notes = ensure_viewable(trace, Path(folder))
            for note in notes:
                click.echo(note, err=True)
            server = TraceServer(handover_page("trace", os.path.basename(trace), PERFETTO_ORIGIN), path)
        with server:
            delivered = open_and_serve(server, click.echo)
    if not delivered:
        raise ModtraceError(f"no browser fetched the trace within {WAIT_TIMEOUT_S / 60:.0f} minutes")
