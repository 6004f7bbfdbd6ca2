"""Hostile names in the page are text, its policy refuses the network, and its file is small and alone."""

from __future__ import annotations

import re
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from modtrace.timeline import Mark, Name, Process
from modtrace.write.html import write_html
from tests.support.browser import visit
from tests.support.gpt_timeline import BASE
from tests.support.timelines import with_args
from tests.support.viewer_page import (
    FORWARD,
    US,
    Open,
    click,
    details,
    one_step,
    position_of,
    table,
)

if TYPE_CHECKING:
    from playwright.sync_api import Browser


ROOT = Path(__file__).parents[3]
PAGE = ROOT / "src/modtrace/view/viewer.html"


HOSTILE = {
    "end of the script": "</script><img src=x onerror=\"document.title='ran'\">",
    "comment": "<!--<script>document.title='ran'</script>",
    "separators": "a\u2028b\u2029c",
    "quotes": "'\"`${document.title='ran'}`&quot;\\",
    "control characters": "nul\0 bell\7 newline\n",
    "direction": "\u202egnp.exe",
    "lone surrogate": "half\ud800",
}
SHOWN = {
    "separators": r"a\u2028b\u2029c",
    "control characters": "nul␀ bell␇ newline␊",
    "direction": r"\u202egnp.exe",
    "lone surrogate": "half\ufffd",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_names_everywhere_are_shown_as_text(open_page: Open, kind: str) -> None:
    name, shown = HOSTILE[kind], SHOWN.get(kind, HOSTILE[kind])
    plain = one_step()
    process = Process(1, 0, name)
    timeline = with_args(
        replace(
            plain,
            names=[Name(name, f"{name}.{i}", name) for i in range(4)],
            tracks=[track._replace(thread=name, process=process) for track in plain.tracks],
            marks=[Mark(BASE + 2000 * US, "step", name)],
            counters=[replace(plain.counters[0], name=name, unit=name, process=process)],
            metadata={name: name, "list": [name]},
        ),
        {1: {name: name}},
    )
    page = open_page(timeline).page

    page.get_by_role("searchbox").fill(shown)
    assert page.locator(".match-count").inner_text() == "8 found"
    click(page, FORWARD, 1, 250 * US)
    assert page.locator("#details h2").inner_text() == shown
    assert page.locator("#details nav span").inner_text() == f"{shown}.1"
    assert details(page)[shown] == shown
    page.mouse.move(*position_of(page, FORWARD, 1, 260 * US))
    assert shown in page.locator(".tooltip").inner_text()
    page.get_by_role("tab", name="Modules").click()
    assert f"{shown}.0" in table(page)
    page.get_by_role("tab", name="Flame graph").click()
    assert page.locator(".graph button").count() > 4
    page.get_by_role("tab", name="Recording").click()
    assert details(page)[shown] == shown
    assert shown in page.locator("[data-kind=process]").inner_text()

    assert page.title() == f"rank 0 · {shown} – modtrace"
    assert page.locator("img, iframe, object, link").count() == 0
    assert page.locator("script:not([type='application/octet-stream'])").count() == 1
    assert page.locator("script").count() == 2  # the second one holds the timeline's table


@pytest.fixture
def listener() -> Iterator[tuple[str, list[str]]]:
    """A server on this machine: its address, and the paths of its requests."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()
        thread.join()


def test_page_policy_refuses_the_network_and_other_scripts(
    browser: Browser, tmp_path: Path, listener: tuple[str, list[str]]
) -> None:
    address, asked = listener
    write_html(one_step(), tmp_path / "t.html")
    with visit(browser) as seen:
        page = seen.page
        # A page without the policy reaches the server, so that the refusals below mean something.
        page.evaluate("address => fetch(address + '/control', { mode: 'no-cors' })", address)
        page.goto((tmp_path / "t.html").as_uri())
        page.wait_for_selector("html[data-ready]", state="attached")
        refused = page.evaluate(
            """async address => {
                const refused = [];
                const attempt = async act => {
                    const violation = new Promise(done => {
                        document.addEventListener("securitypolicyviolation", done, { once: true });
                    });
                    act();
                    refused.push((await violation).effectiveDirective);
                };
                const added = (tag, text) => {
                    const element = document.createElement(tag);
                    element.append(text);
                    document.body.append(element);
                };
                await attempt(() => fetch(address + "/fetch").catch(() => {}));
                await attempt(() => { new Image().src = address + "/image"; });
                await attempt(() => added("style", "body { color: red }"));
                await attempt(() => { try { document.body.innerHTML = "<img>"; } catch { /* as it must */ } });
                return refused;
            }""",
            address,
        )

    assert refused == ["connect-src", "img-src", "style-src-elem", "require-trusted-types-for"]
    assert asked == ["/control"]


def test_page_file_is_small_and_refers_to_nothing() -> None:
    page = PAGE.read_text(encoding="utf-8")

    assert len(page.encode()) < 150_000
    assert page.count('id="modtrace-data"></script>') == 1
    assert re.findall(r"""(?:src|href)=["'][^"']*["']""", page) == []


def test_npm_tests_of_the_viewer_pass(packages: Path) -> None:
    done = subprocess.run(
        ["npm", "test"], cwd=ROOT / "viewer", capture_output=True, text=True, check=False, timeout=240
    )

    assert done.returncode == 0, done.stdout + done.stderr
