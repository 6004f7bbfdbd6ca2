"""`modtrace view`: open a trace in the browser."""

import os
import re

import click

from ..options import StepRange, echo, show_status, steps_option, value_option

_ORIGIN = re.compile(r"https?://[A-Za-z0-9.-]+(?::\d{1,5})?")


def _origin(url: str) -> str:
    """Return the origin in a URL, without a trailing slash."""
    if not _ORIGIN.fullmatch(url := url.rstrip("/")):
        raise click.BadParameter(f"{url!r} is not http(s)://host or http(s)://host:port.")
    return url


@click.command("view")
@click.argument("trace", type=click.Path())
@steps_option
@click.option("--offline", is_flag=True, help="Show the modules in modtrace's own page, which needs no network.")
@value_option("--port", click.IntRange(1, 65535), "N", "Serve at this port. [any free port]")
@click.option("--no-browser", is_flag=True, help="Open no browser; only print the address.")
@click.option("--keep", is_flag=True, help="Serve until Ctrl-C, not only while the page is open.")
@value_option("--perfetto-url", _origin, "URL", "Your own Perfetto UI, such as https://host:port.")
def view_command(
    trace: str,
    steps: StepRange | None,
    offline: bool,
    port: int | None,
    no_browser: bool,
    keep: bool,
    perfetto_url: str | None,
) -> None:
    """Open TRACE in ui.perfetto.dev, with the module tracks on top.

    TRACE is any file that modtrace reads. A server on this machine sends it to the browser and nowhere else. The server
    ends when the page is closed. A ring with more than 4 million events is shown from one of its last steps on, unless
    --steps selects others. For a merged trace or a trace of torch.profiler, --steps shows only the modules.
    """
    from ..._errors import ModtraceError
    from ..._files import share_hint, work_folder
    from ...read import load_shown
    from ...view.server import PERFETTO_ORIGIN, WAIT_TIMEOUT_S, Page, TraceServer, open_and_serve

    if offline and perfetto_url:
        raise click.UsageError("--offline and --perfetto-url show different pages; give one of them.")
    with work_folder() as folder:
        with show_status(f"reading {trace}"):
            if offline:
                from ...write.html import render_html

                timeline, notes = load_shown(trace, steps)
                page, path = Page(render_html(timeline)), None
            else:
                from ...view.server import ensure_viewable, handover_page

                path, notes = ensure_viewable(trace, folder, steps)
                page = handover_page("trace", os.path.basename(trace), perfetto_url or PERFETTO_ORIGIN)
        for note in notes:
            echo(note, err=True)
        with TraceServer(page, path, port=port or 0) as server:
            echo(share_hint(trace), err=True)
            delivered = open_and_serve(server, echo, browser=not no_browser, keep=keep)
    if not delivered:
        raise ModtraceError(
            f"no browser fetched the trace within {WAIT_TIMEOUT_S / 60:.0f} minutes; open it in a browser"
        )
