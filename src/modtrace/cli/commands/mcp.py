"""`modtrace mcp`: answers for agents, over the Model Context Protocol."""

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
    help="Serve at 127.0.0.1, for requests with the printed token; without it over standard input and output.",
)
@click.option("--guide", is_flag=True, help="Print a guide to modtrace for agents.")
def mcp_command(folder: str, port: int | None, guide: bool) -> None:
    """Answer an agent's questions about the recordings below DIR.

    A client of the Model Context Protocol starts it. Its tools are files, findings, modules, steps, ranges, compare,
    where and top. They read only files below DIR, write none, and answer in up to 4 kB unless `limit` asks for more.
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
        say("this is an MCP server: a client talks to it through standard input and output; --guide prints a guide")
    server.run()
