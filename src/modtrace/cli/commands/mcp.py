"""`modtrace mcp`: answers for agents, by the Model Context Protocol."""

import sys
from importlib.resources import files

import click

from ..._errors import require_extra
from ..._tables import is_terminal
from ..options import say


@click.command("mcp")
@click.argument("folder", type=click.Path(), metavar="[DIR]", default=".")
@click.option(
    "--http",
    "port",
    type=click.IntRange(0, 65535),
    metavar="[PORT]",
    is_flag=False,
    flag_value=0,
    help="Serve at 127.0.0.1, to those who have the token that is printed; else over standard input and output.",
)
@click.option("--guide", is_flag=True, help="Print a page that tells an agent how to work with modtrace.")
def mcp_command(folder: str, port: int | None, guide: bool) -> None:
    """Answer an agent's questions about the recordings below DIR.

    A client of the Model Context Protocol starts it. Its tools are files, findings, modules, steps, ranges, compare,
    where and top. They read files below DIR alone, write none, and answer in at most 4 kB unless more is asked for.
    """
    if guide:
        click.echo((files("modtrace.cli") / "guide.md").read_text(encoding="utf-8"), nl=False)
        return
    require_extra("mcp", "mcp")
    from ..mcp_server import make_server, serve_http

    server = make_server(folder)
    if port is not None:
        serve_http(server, port, say)
        return
    if is_terminal(sys.stdin):
        say("a client speaks to this by standard input; modtrace mcp --guide says how an agent works with modtrace")
    server.run()
